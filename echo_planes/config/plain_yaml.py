"""Reading and writing of settings as YAML, with numbers as in JSON, and with limits on size and depth.

YAML 1.1 reads 010 as 8, 12:30 as 750, 2026-02-03 as a date and 1e-5 as a text. Here 1e-5 is a number, and the
others are texts. Size and depth are limited, since aliases can write a tree of billions of values in one
line, or a tree that contains itself.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from echo_planes.config.files import SETTINGS_BYTES, read_text
from echo_planes.errors import ConfigError, shown

MAX_TEXT = 64 << 10  # characters of one text value
MAX_VALUES = 100_000
MAX_DEPTH = 32
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_INT64 = 2**63
_INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_WHOLE = r"[-+]?(?:0|[1-9][0-9_]*)"
_NUMBER = rf"(?:{_WHOLE}(?:\.[0-9_]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NO_NUMBER = r"[-+]?\.?(?:inf|Inf|INF)|\.?(?:nan|NaN|NAN)"
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")
_COMMENT = re.compile(r"(?:\A|\s)#")
NONE = ("null", "Null", "NULL", "~")
QUOTE, QUOTED = "'", "'\"[{&!|>"  # YAML syntax at the start of a value: `parse_word` leaves it to YAML
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Safe loader that reads numbers as JSON does, and refuses repeated keys and nesting beyond MAX_DEPTH."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"{shown(twice[0])} stands in it twice")
        return node


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes every text that YAML 1.1 or `_Loader` would read as another type."""


def _resolve() -> None:
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT, _TIME)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for kind in (_Loader, _Dumper):
        kind.add_implicit_resolver(_INT, re.compile(rf"(?:{_WHOLE})\Z"), list("-+0123456789"))
        kind.add_implicit_resolver(
            _FLOAT, re.compile(rf"(?:{_NUMBER}|{_NO_NUMBER})\Z"), list("-+0123456789.iInN")
        )


_resolve()


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text.

    Args:
        text: a file of settings, or the value of one setting.
        where: origin of the text, for messages ("run.steps=x", a file).

    Raises:
        ConfigError: the text is not YAML, too long or too deep, has invisible characters, or a whole number
            of more than 64 bits.
    """
    if len(text) > SETTINGS_BYTES:
        raise ConfigError(f"{where} is longer than {SETTINGS_BYTES} characters; shorten it")
    try:
        value = yaml.load(text, _Loader)
        _check(value)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        why = str(error).splitlines()[0].partition(";")[0]
        raise ConfigError(f"{where} is not YAML: {why}; correct it, or put quotes around it") from error
    return value


def parse_word(key: str, text: str) -> Any:
    """Parse the value in `key=text` of a command line.

    Raises:
        ConfigError: as `parse_yaml`, or the value is empty, as when a variable of the shell is not set.
    """
    where = f"{key}={shown(text)}"
    plain = text.strip()
    if not plain:
        raise ConfigError(f"{key}=: no value, as of a variable that is not set; write {key}=null for none")
    if plain[0] not in QUOTED and _COMMENT.search(plain):  # YAML would drop the text from " #" on
        plain = f"'{plain.replace(QUOTE, 2 * QUOTE)}'"
    value = parse_yaml(plain, where)
    if isinstance(value, str) and plain[0] not in QUOTED:
        return plain  # the user's text, with line ends that YAML would fold
    if value is None and plain not in NONE:
        raise ConfigError(f"{where}: no value; put quotes around it, or write {key}=null for none")
    return value


def plain_number(text: str) -> float:
    """Return the number of at least 0 in a field of a table; NaN if it is none.

    Unlike `float`, it takes no digits of other scripts and no 1_200.5: separators differ between countries.
    """
    return float(text) if _DECIMAL.match(text) else math.nan


def read_yaml(path: Path, advice: str = "give another file") -> dict[str, Any]:
    """Return the settings in a file.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    tree = parse_yaml(read_text(path, SETTINGS_BYTES, error=ConfigError, advice=advice), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; {advice}")
    return tree


def dump_yaml(value: Any) -> str:
    """Return the YAML of a value that JSON can hold; `parse_yaml` reads it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def _check(tree: Any) -> None:
    """Check the number of values, their depth, and the texts and whole numbers among them.

    Raises:
        ValueError: a value exceeds a limit, or holds an invisible character.
    """
    todo, seen = [(tree, 0)], 0
    while todo:
        value, depth = todo.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values, those of aliases counted")
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, dict):
            todo += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            todo += [(part, depth + 1) for part in value]
        elif isinstance(value, str):
            _check_text(value)
        elif isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise ValueError("a number in it has more than 64 bits")


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ValueError(f"a text in it has more than {MAX_TEXT:,} characters")
    if hidden := _HIDDEN.search(text):
        raise ValueError(f"a text in it holds the character {hidden[0]!a}")
