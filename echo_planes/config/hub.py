"""Models of the Hugging Face hub: ORG/NAME or ORG/NAME@REVISION in the place of a model folder.

A machine that needs such a model fetches it into the cache that all programs of its user share
(`HF_HOME`), unless it is there. `HF_TOKEN` opens private and gated models.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from echo_planes.config.files import user_path
from echo_planes.errors import ModelError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile("[0-9a-f]{40}")
# Weights in other formats can run code when they are read.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def is_hub_name(text: str) -> bool:
    """Return whether a text names a model of the hub, and no folder of this machine."""
    return _NAME.fullmatch(text) is not None and not os.path.isdir(user_path(text))


@cache
def fetch(name: str) -> Path:
    """Return the folder with a model of the hub, which is downloaded if it is not there.

    Args:
        name: ORG/NAME, or ORG/NAME@REVISION (branch, tag or commit).

    Raises:
        ModelError: there is no such model or revision, it may not be read, or the hub cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download  # a second, which runs with a folder save

    repository, _, revision = name.partition("@")
    get = partial(snapshot_download, repository, revision=revision or None, allow_patterns=list(FILES))
    if _COMMIT.fullmatch(revision):
        with suppress(errors.LocalEntryNotFoundError):  # not here, or not all of it
            return Path(get(local_files_only=True))
    try:
        return Path(get())
    except errors.GatedRepoError:
        why = "it is gated: accept its terms on the hub, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "no such folder here, and no such model on the Hugging Face hub; a private one needs HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = f"the model has no revision {revision!r}; leave it out for the newest"
    except (
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        errors.HFValidationError,
        OSError,
    ) as error:
        reason = str(error).strip().partition("\n")[0]
        why = f"no such folder here, and the Hugging Face hub does not give it ({reason}); give a folder"
    raise ModelError(f"model.path={name}: {why}")


def pinned(name: str) -> str:
    """Return the name of a model with the commit that its revision is now; others as they are.

    Raises:
        ModelError: as `fetch`.
    """
    if not is_hub_name(name):
        return name
    return f"{name.partition('@')[0]}@{fetch(name).name}"  # the cache names a folder by its commit
