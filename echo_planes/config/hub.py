"""Models of the Hugging Face hub: ORG/NAME or ORG/NAME@REVISION in place of a model folder, and its upload.

`pinned` decides once, where a command begins, whether a text names a folder, a GGUF file or a model of the
hub, and replaces the file by its converted folder, the revision by its commit. Every machine then fetches
that commit, unless it is there, into the cache that all programs of its user share (`HF_HOME`). `HF_TOKEN`
opens private and gated models.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from echo_planes.config.files import user_path
from echo_planes.config.gguf_model import converted, is_gguf
from echo_planes.errors import ModelError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_PINNED = re.compile(r"[^@]+/[^@]+@[0-9a-f]{40}")
# Weights in other formats can run code when they are read.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def is_hub_name(text: str) -> bool:
    """Return whether a text names a model of the hub, and no folder of this machine."""
    return _NAME.fullmatch(text) is not None and not is_gguf(text) and not os.path.isdir(user_path(text))


def is_pinned(text: str) -> bool:
    """Return whether a text is ORG/NAME@COMMIT."""
    return _PINNED.fullmatch(text) is not None


def pinned(name: str) -> str:
    """Return the name of a model with the commit that its revision is now, and the folder of a GGUF file;
    others as they are.

    Raises:
        ModelError: as `fetch` and `gguf_model.converted`.
        ClusterError: as `gguf_model.converted`.
    """
    if is_gguf(name):
        return str(converted(name))
    if is_pinned(name) or not is_hub_name(name):
        return name
    return f"{name.partition('@')[0]}@{fetch(name).name}"  # the cache names a folder by its commit


@cache
def fetch(name: str) -> Path:
    """Return the folder with a model of the hub. What is missing of it is downloaded.

    Args:
        name: ORG/NAME, or ORG/NAME@REVISION (branch, tag or commit).

    Raises:
        ModelError: there is no such model or revision, it may not be read, or the hub cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download  # a second, which runs with a folder save

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(FILES)))
    except errors.GatedRepoError:
        why = "it is gated: accept its terms on the hub, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "no such folder here, and no such model on the Hugging Face hub; a private one needs HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = f"the model has no revision {revision!r}; leave it out for the newest"
    except Exception as error:  # noqa: BLE001  the library lets errors of three HTTP stacks through
        why = (
            f"no such folder here, and the Hugging Face hub does not give it ({_line(error)}); give a folder"
        )
    raise ModelError(f"model.path={name}: {why}")


def cached_folder(name: str) -> Path | None:
    """Return the folder of ORG/NAME@COMMIT in this machine's cache, complete or not; None: there is none."""
    from huggingface_hub import errors, snapshot_download

    repository, _, commit = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=commit, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


def cached_file(name: str, file: str) -> Path | None:
    """Return a file of a model ORG/NAME@COMMIT from this machine's cache; None: it is not there."""
    from huggingface_hub import try_to_load_from_cache

    repository, _, commit = name.partition("@")
    found = try_to_load_from_cache(repository, file, revision=commit)
    return Path(found) if isinstance(found, str) else None


def create_repository(name: str) -> None:
    """Make the private model ORG/NAME on the hub, unless it is there. A token that may not write is told.

    Raises:
        ModelError: it cannot be made, or the hub cannot be reached.
    """
    from huggingface_hub import create_repo

    if _NAME.fullmatch(name) is None or "@" in name:
        raise ModelError(f"--push {name}: no name of a model on the hub; give ORG/NAME")
    try:
        create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # of any HTTP stack, as in `fetch`
        raise _refused(name, error) from error


def push(folder: Path, name: str, message: str) -> str:
    """Upload a model folder to ORG/NAME as one commit; return the commit's address.

    Files that are there under other names stay.

    Raises:
        ModelError: the token may not write there, or the hub cannot be reached.
    """
    from huggingface_hub import upload_folder

    try:
        return upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url
    except Exception as error:  # of any HTTP stack, as in `fetch`
        refused = _refused(name, error)
        raise ModelError(f"{refused}; once it does, `hf upload {name} {folder}` goes on") from error


def _refused(name: str, error: Exception) -> ModelError:
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    if isinstance(error, errors.LocalTokenNotFoundError) or getattr(response, "status_code", 0) in (401, 403):
        return ModelError(f"--push {name}: refused; set HF_TOKEN to a token that may write there")
    return ModelError(f"--push {name}: the Hugging Face hub does not take it ({_line(error)})")


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
