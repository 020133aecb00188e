"""`python -m echo_planes.weights inspect|verify|diff|sparsity|export`: commands on stored weights."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from echo_planes.config.files import KIB, SETTINGS_BYTES, in_units, read_text, user_path
from echo_planes.config.hub import create_repository, pinned, push
from echo_planes.config.schema import ModelConfig
from echo_planes.errors import DataError, EchoPlanesError, UserError, WeightsError
from echo_planes.reporting.formats import count
from echo_planes.reporting.metrics import EVENTS_FILE, PUBLICATION, read_events
from echo_planes.reporting.report import parse_config
from echo_planes.reporting.weights import tables
from echo_planes.reporting.weights.differences import tensor_differences
from echo_planes.reporting.weights.export import export_state
from echo_planes.reporting.weights.run_sparsity import learning_rate_of
from echo_planes.reporting.weights.sparsity import sparsity_table
from echo_planes.types import Manifest
from echo_planes.weights.codec.table import take_codec
from echo_planes.weights.digest import state_digest
from echo_planes.weights.store.objects import Objects, check_store, open_objects
from echo_planes.weights.store.paths import Entry
from echo_planes.weights.store.reading import PUBLIC_KEY, PUBLICATIONS, Store, read_public_key
from echo_planes.weights.store.replay import State, rebuild, replay
from echo_planes.weights.tensor_files import SUFFIX, load_tensors
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment
from echo_planes.weights.wire.signing import KEY_BYTES, Verifier
from echo_planes.weights.wire.transfer import Verifies

DIFFERENT = PROBLEM = 1  # exit statuses, besides 0 for success and 2 for a user's mistake
_LIMITS = relay_limits(2**42)
_VERSION = re.compile(r"([^:@/]+:)?[0-9]+")
_PLACES = "a store (folder, s3://bucket/prefix, or a run's folder) or a safetensors file or model folder"
_EPILOG = """STORE is a store's folder, s3://bucket/prefix or a run's folder; FILE a safetensors file or a
model folder. STORE@7 is version 7 of a store, STORE@L0:7 that of lineage L0. Exit status: 0 all well, 1 a
problem or a difference was found, 2 it could not be tried."""


class _Unchecked:
    """Verifier that accepts every signature, to show a store that has no public key."""

    def check_segment(self, signed: SignedSegment) -> None:
        pass

    def check_manifest(self, signed: SignedManifest) -> None:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. A mistake is one line on stderr, never a traceback."""
    parser = argparse.ArgumentParser(prog="python -m echo_planes.weights", epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("inspect", "what is there: publications of a STORE, or tensors of a FILE"),
        ("verify", "check signatures and hashes, and rebuild every version of a STORE"),
        ("sparsity", "how many weights change in 1, 2, 4 and 8 versions, per layer"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("path", metavar="PATH", help=_PLACES)
        if name == "verify":
            command.add_argument("--key", help=f"public key: {2 * KEY_BYTES} hex digits, or a file with them")
        if name == "sparsity":
            command.add_argument("--lr", type=float, help="learning rate, for the share to be expected")
    command = commands.add_parser("diff", help="compare two states", description="compare two states")
    command.add_argument("a", metavar="A", help="FILE, or STORE@VERSION")
    command.add_argument("b", metavar="B", help="FILE, or STORE@VERSION")
    what = "write a version as a model folder, for transformers, vLLM and model.path"
    command = commands.add_parser("export", help=what, description=what)
    command.add_argument("version", metavar="STORE[@VERSION]", help="default: the newest version")
    command.add_argument("folder", metavar="FOLDER", help="a new folder")
    command.add_argument("--model", help="model folder that the run began with; default: of its config.yaml")
    command.add_argument(
        "--push", metavar="ORG/NAME", help="upload FOLDER to the hub too, by HF_TOKEN; what is new is private"
    )
    for command in commands.choices.values():
        command.add_argument("--codec", default="auto", help="weights.codec of the run, where it is its own")
    options = parser.parse_args(arguments)
    try:
        take_codec(options.codec)
        status = _run(options)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except EchoPlanesError as error:
        print(f"error: {error}", file=sys.stderr)
        return PROBLEM
    except BrokenPipeError:  # `... | head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    if options.command == "diff":
        return _diff(options.a, options.b)
    if options.command == "export":
        return _export(options.version, options.folder, options.model, options.push)
    if options.command == "verify":
        return _verify(options.path, options.key)
    if options.command == "sparsity":
        return _sparsity(options.path, options.lr)
    return _inspect(options.path)


# --- commands ------------------------------------------------------------------------------------


def _inspect(path: str) -> int:
    found = _find_store(path)
    if found is None:
        tensors = load_tensors(_existing(path))
        print(tables.of_tensors(tensors))
        print(f"state digest {state_digest(tensors)}")
        return 0
    place, only = found
    store = Store(open_objects(place), _own_verifier(open_objects(place)), _LIMITS)
    entries = _chosen(store, only)
    print(tables.of_publications(entries))
    for name, reason in sorted(store.bad.items()):
        print(f"unusable: {name}: {reason}")
    return PROBLEM if store.bad else 0


def _verify(path: str, key: str | None) -> int:
    found = _find_store(path)
    if found is None and not user_path(path).exists():
        raise DataError(f"{path}: no such file or folder; give a run's folder, or that of a store")
    if found is None:
        raise DataError(f"{path} is no store: only stores are signed; `inspect` shows a file's digest")
    place, only = found
    objects = open_objects(place)
    if key is None and not objects.exists(PUBLIC_KEY):
        raise DataError(f"{place} has no {PUBLIC_KEY}: give the learner's with --key")
    public = _read_key(key) if key is not None else read_public_key(objects)
    print(f"key {public.hex()}" + ("" if key is not None else " (the store's own: --key checks whose it is)"))
    store = Store(objects, Verifier(public), _LIMITS)
    entries = _chosen(store, None)
    num_bad = num_good = 0
    for replayed in replay(store, entries):
        if only is None or replayed.entry.name == only:
            verdict = "FAILED" if replayed.problem else "ok    "
            print(f"{verdict} {replayed.entry.name} {replayed.problem}".rstrip())
            num_bad += bool(replayed.problem)
            num_good += not replayed.problem
    seen = {entry.name for entry in entries}
    for name, reason in sorted(store.bad.items()):
        if name not in seen and only in (None, name):
            print(f"FAILED {name} {reason}")
            num_bad += 1
    print(f"{num_good} publications verified: signatures, hashes and state digests; {num_bad} failed")
    return PROBLEM if num_bad else 0


def _diff(a: str, b: str) -> int:
    rows = tensor_differences(_state(a), _state(b))
    print(tables.of_differences(rows))
    return DIFFERENT if any(row.num_changed for row in rows) else 0


def _export(text: str, folder: str, model: str | None, target: str | None) -> int:
    place, version = _split(text)
    store, manifest = _version(place, version)
    if target is not None:
        create_repository(target)  # before the weights are rebuilt, which takes minutes for large ones
    base = ModelConfig(path=pinned(model)).folder if model is not None else _trained_model(place)
    state = rebuild(store, manifest.lineage, manifest.version)
    done = export_state(state, manifest.digest, base, user_path(folder))
    print(
        f"version {manifest.version} of lineage {manifest.lineage}: {done.num_tensors} tensors, "
        f"{in_units(done.num_bytes)} in {count(done.num_files, 'file')}, digest {manifest.digest}: {folder}"
    )
    run = user_path(place)
    run = run if (run / EVENTS_FILE).exists() else run.parent  # also of RUN/weights
    last = None if version else _last_published(run)
    if last is not None and last != (manifest.lineage, manifest.version):
        print(
            f"note: the run's last version, {last[1]} of lineage {last[0]}, is not in the store: what was "
            f"exported is older; run.resume={run} publishes the weights of the newest checkpoint again",
            file=sys.stderr,
        )
    if target is not None:
        message = f"Version {manifest.version} of lineage {manifest.lineage}, digest {manifest.digest}"
        print(f"pushed: {push(user_path(folder), target, message)}")
    return 0


def _last_published(run: Path) -> tuple[str, int] | None:
    """Return lineage and version of a run's last publication; None if the folder tells of none."""
    for event in reversed(read_events(run)):
        lineage, version = event.get("lineage"), event.get("version")
        if event.get("kind") == PUBLICATION and isinstance(lineage, str) and isinstance(version, int):
            return lineage, version
    return None


def _trained_model(place: str) -> Path:
    """Return the model folder that a run's config.yaml names."""
    name = _setting(user_path(place), "model", "path")
    if name is None:
        raise DataError(f"{place} has no config.yaml that names the model; give its folder with --model")
    folder = ModelConfig(path=str(name)).folder
    if not (folder / "config.json").exists():
        raise DataError(f"the model of the run, {name}, is not here; give its folder with --model")
    return folder


def _sparsity(path: str, learning_rate: float | None) -> int:
    found = _find_store(path)
    if found is None:
        raise DataError(f"{path} is no store; sparsity compares the versions of one")
    if learning_rate is None:
        learning_rate = learning_rate_of(Path(path))
    objects = open_objects(found[0])
    rows = sparsity_table(Store(objects, _own_verifier(objects), _LIMITS), learning_rate)
    print(tables.of_sparsity(rows, learning_rate))
    return 0


# --- arguments -----------------------------------------------------------------------------------


def _find_store(path: str) -> tuple[str, str | None] | None:
    """Return the store's place and the one publication that `path` names, if any; None: it is no store."""
    if "://" in path:
        check_store(path, writes=False)
        return path, None
    folder = user_path(path)
    if folder.parent.name == PUBLICATIONS and folder.is_dir():
        return str(folder.parent.parent), folder.name
    for place in (folder, folder / "weights"):
        if (place / PUBLICATIONS).is_dir():
            return str(place), None
    elsewhere = _setting(folder, "weights", "store")
    return None if elsewhere is None else _find_store(elsewhere)


def _setting(run: Path, group: str, key: str) -> str | None:
    """Return a text in the config.yaml of a run's folder; None if that is not there."""
    path = run / "config.yaml"
    section = parse_config(read_text(path, SETTINGS_BYTES)).get(group) if path.exists() else None
    value = section.get(key) if isinstance(section, dict) else None
    return value if isinstance(value, str) else None


def _existing(path: str) -> Path:
    found = user_path(path)
    if not found.exists():
        raise DataError(f"{path} does not exist; give {_PLACES}")
    if found.is_file() and found.suffix != SUFFIX:
        raise DataError(f"{path} is neither a store nor a {SUFFIX} file; give {_PLACES}")
    return found


def _chosen(store: Store, only: str | None) -> list[Entry]:
    entries = [entry for entry in store.index() if only in (None, entry.name)]
    if not entries and not store.bad:
        raise DataError("the store has no publication that is complete")
    return entries


def _state(text: str) -> State:
    """Return the state that FILE or STORE@VERSION names."""
    place, version = _split(text)
    if version:
        store, manifest = _version(place, version)
        return rebuild(store, manifest.lineage, manifest.version)
    if _find_store(text):
        raise DataError(f"{text} is a store: say which version, as {text}@7")
    return load_tensors(_existing(text))


def _split(text: str) -> tuple[str, str]:
    """Return STORE and VERSION of STORE@VERSION; "" for the version where there is none."""
    place, mark, version = text.rpartition("@")
    if not mark or ("://" in text and not _VERSION.fullmatch(version)):
        return text, ""
    return (text, "") if "://" not in text and user_path(text).exists() else (place, version)


def _version(place: str, version: str) -> tuple[Store, Manifest]:
    """Return the store at a place, and the manifest of one version there, the newest if it is ""."""
    text = f"{place}@{version}" if version else place
    found = _find_store(place)
    if found is None:
        raise DataError(f"{place} is no store; give FILE or STORE@VERSION")
    if version and not _VERSION.fullmatch(version):
        raise DataError(f"{text}: {version!r} is no version; write STORE@7 or STORE@L0:7")
    objects = open_objects(found[0])
    store = Store(objects, _own_verifier(objects), _LIMITS)
    entries = _chosen(store, found[1])
    if not entries:
        raise WeightsError(f"{place}: no publication is whole; `verify` says what is wrong with each")
    newest = max(entries, key=lambda entry: entry.sequence).manifest
    if not version:
        return store, newest
    lineage, _, digits = version.rpartition(":")
    wanted = (lineage or newest.lineage, int(digits))
    for entry in store.index():
        if (entry.manifest.lineage, entry.manifest.version) == wanted:
            return store, entry.manifest
    raise WeightsError(f"{text}: no way leads to version {wanted[1]} of lineage {wanted[0]}; see `inspect`")


def _own_verifier(objects: Objects) -> Verifies:
    """Return a verifier with the store's own public key; without a key, one that accepts everything."""
    return Verifier(read_public_key(objects)) if objects.exists(PUBLIC_KEY) else _Unchecked()


def _read_key(text: str) -> bytes:
    """Read a public key given as hex digits, or as a file with them."""
    file = user_path(text)
    try:
        digits = read_text(file, KIB).strip() if os.path.exists(file) else text
        public = bytes.fromhex(digits)
    except ValueError:
        public = b""
    if len(public) != KEY_BYTES:
        raise DataError(f"--key {text}: neither {2 * KEY_BYTES} hex digits nor a file with them")
    return public
