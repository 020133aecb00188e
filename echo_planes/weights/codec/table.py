"""Table of the codecs of patches: the bundled ones, and the one that the run's settings name.

A new bundled codec needs a file, an entry here, a number in `wire/manifest.py` and a name in `weights.codec`.
"""

from __future__ import annotations

import re

from echo_planes.config.extensions import extension
from echo_planes.errors import ConfigError, WeightsError
from echo_planes.weights.codec.codec import PatchCodec
from echo_planes.weights.codec.coded import Coded, Overwrite
from echo_planes.weights.wire.manifest import admit_codec

CODECS: dict[str, PatchCodec] = {
    codec.name: codec
    for codec in (
        Coded("compact", 1, by_class=True),
        Coded("fast", 2, by_class=False),
        Overwrite(),
    )
}
BUNDLED = tuple(CODECS)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)


def take_codec(setting: str) -> str:
    """Add the codec of the setting `weights.codec` to this process's table. Return its name, or "auto".

    Each process that writes or reads publications calls this once, with the setting of its own run. Only this
    call imports a codec: a manifest or a peer can name a codec, but no place to import it from. Parsers of
    keys refuse names that are not in the table.

    Raises:
        ConfigError: no codec at that place, an invalid or reserved name, or a second codec of the run's own.
    """
    if ":" not in setting:
        return setting
    where = f"weights.codec='{setting}'"
    codec = extension("weights.codec", setting, {}, PatchCodec)
    name = getattr(codec, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (*BUNDLED, "full", "auto"):
        raise ConfigError(
            f"{where}: its name {str(name)[:40]!r} cannot be used; give it 1 to 32 of a-z, 0-9 and _, a "
            f"letter first, other than {', '.join((*BUNDLED, 'full', 'auto'))}"
        )
    own = [taken for taken in CODECS if taken not in BUNDLED]
    if own and own != [name]:
        raise ConfigError(f"{where}: this process has the codec {own[0]} already; a run has one of its own")
    CODECS[name] = codec
    admit_codec(name)
    return name


def codec_named(name: str) -> PatchCodec:
    """Return the patch codec of that name.

    Raises:
        WeightsError: the table has no such codec.
    """
    if name not in CODECS:
        raise WeightsError(f"unknown codec {name!r}; known here are {', '.join(CODECS)}")
    return CODECS[name]
