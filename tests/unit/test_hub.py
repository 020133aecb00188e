"""Models of the hub, by a stand-in server on loopback: fetched once, pinned to a commit, uploaded."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from echo_planes.config.hub import is_hub_name, pinned
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.weights.tensor_files import load_tensors
from tests.unit.stored_states import store_state, writer_at

MODEL = BUILTIN_MODELS["builtin:tiny-math"]
OLD, NEW = "a" * 40, "b" * 40
REVISIONS = {"main": NEW, NEW: NEW, "v1": OLD, OLD: OLD}
FILES = {path.name: path.read_bytes() for path in MODEL.iterdir()} | {"weights.bin": b"\x80pickle"}


class Hub(BaseHTTPRequestHandler):
    """One model, org/tiny, one that is gated, org/gated, and uploads for who has the token "writes"."""

    asked: list[str] = []  # noqa: RUF012  of all requests
    uploaded: dict[str, bytes] = {}  # noqa: RUF012  files of the last commit by name
    made: dict[str, object] = {}  # noqa: RUF012  the last request to make a model

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.asked.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer writes":
            return self._send(403, b"", {})
        if self.path == "/api/repos/create":
            self.made.update(json.loads(body))
            return self._json({"url": f"http://{self.headers['Host']}/org/new"})
        if self.path == "/api/models/org/new/preupload/main":
            told = [
                {"uploadMode": "regular", "shouldIgnore": False, **one} for one in json.loads(body)["files"]
            ]
            return self._json({"files": told})
        if self.path == "/api/models/org/new/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"http://{self.headers['Host']}/org/new/commit/{NEW}"
            return self._json({"commitUrl": address, "commitOid": NEW})
        return self._send(400, b"", {})  # after 500 the library would try again for 25 s

    def _answer(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path, _, _ = self.path.partition("?")
        if "org/gated" in path:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if "org/tiny" not in path:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/org/tiny/revision/"):
            revision = REVISIONS.get(path.rpartition("/")[2])
            if revision is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in FILES]
            return self._json({"id": "org/tiny", "sha": revision, "siblings": siblings})
        if path == "/api/models/org/tiny":
            return self._json({"id": "org/tiny", "sha": NEW})
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            return self._json(tree)
        _, _, place = path.partition("/resolve/")
        revision, _, name = place.partition("/")
        headers = {"X-Repo-Commit": REVISIONS[revision], "ETag": f'"{hashlib.sha1(FILES[name]).hexdigest()}"'}
        return self._send(200, FILES[name], headers)

    def _json(self, tree: object) -> None:
        self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    for kept in (Hub.asked, Hub.uploaded, Hub.made):
        kept.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def said(code: str, endpoint: str, home: Path, token: str | None = None) -> str:
    """Output of a program that looks for models there; the library reads its environment once."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    if token is not None:
        environment["HF_TOKEN"] = token
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PIN = "from echo_planes.config.hub import *\nfrom echo_planes.errors import ModelError\n" \
    "try: print(pinned({0!r}), fetch(pinned({0!r})))\nexcept ModelError as error: print(error)"  # fmt: skip


@pytest.mark.parametrize(
    ("name", "commit"), [("org/tiny", NEW), ("org/tiny@v1", OLD), (f"org/tiny@{OLD}", OLD)]
)
def test_a_model_is_fetched_and_pinned_to_its_commit(
    name: str, commit: str, hub: str, tmp_path: Path
) -> None:
    pin, folder = said(PIN.format(name), hub, tmp_path).split()
    assert pin == f"org/tiny@{commit}"
    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert found == {name: data for name, data in FILES.items() if name != "weights.bin"}
    first = len(Hub.asked)
    assert said(PIN.format(pin), hub, tmp_path).split() == [pin, folder]
    assert not [one for one in Hub.asked[first:] if one.startswith("GET /org/")]  # nothing is fetched again
    assert said(PIN.format(pin), "http://127.0.0.1:9", tmp_path).split() == [
        pin,
        folder,
    ]  # nor is a hub needed


def test_what_is_missing_of_a_pinned_model_is_fetched(hub: str, tmp_path: Path) -> None:
    """As where another program took only the tokenizer."""
    pin = f"org/tiny@{OLD}"
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / OLD
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
    assert said(PIN.format(pin), hub, tmp_path).split() == [pin, str(folder)]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_server_that_breaks_off_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        text = said(PIN.format("org/tiny"), f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
    assert "the Hugging Face hub does not give it" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("org/gated", "it is gated: accept its terms on the hub, and set HF_TOKEN"),
        ("org/none", "no such folder here, and no such model on the Hugging Face hub"),
        ("org/tiny@v9", "the model has no revision 'v9'"),
    ],
)
def test_what_cannot_be_had_is_one_line(name: str, why: str, hub: str, tmp_path: Path) -> None:
    text = said(PIN.format(name), hub, tmp_path)
    assert text.startswith(f"model.path={name}: {why}")
    assert "\n" not in text


def test_without_a_network_it_says_so_in_one_line(tmp_path: Path) -> None:
    text = said(PIN.format("org/tiny"), "http://127.0.0.1:9", tmp_path)
    assert text.startswith(
        "model.path=org/tiny: no such folder here, and the Hugging Face hub does not give it"
    )
    assert "\n" not in text


def test_a_run_names_the_mistake_before_anything_starts(hub: str, tmp_path: Path) -> None:
    code = "import sys; from echo_planes.run import main; sys.stderr = sys.stdout; " \
        f"main(['model.path=org/none', 'run.dir={tmp_path / 'run'}'])"  # fmt: skip
    text = said(code, hub, tmp_path)
    assert text.startswith("error: model.path=org/none: no such folder here")
    assert "\n" not in text
    assert not (tmp_path / "run").exists()


def test_folders_and_builtin_models_are_no_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    for text in ("builtin:tiny-math", "org/tiny", "/models/tiny", "./org/new", "a/b/c", "tiny", "../org/x"):
        assert not is_hub_name(text)
        assert pinned(text) == text
    for text in ("org/other", "Qwen/Qwen2.5-0.5B", "org/other@v1.0", "org/other@refs/pr/3"):
        assert is_hub_name(text)


EXPORT = "import sys; from echo_planes.reporting.weights.cli import main; sys.stderr = sys.stdout; " \
    "main(['export', {0!r}, {1!r}, '--model', {2!r}, '--push', {3!r}])"  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder whose store holds one version."""
    store_state(writer_at(tmp_path / "run" / "weights"), 0, load_tensors(MODEL))
    return tmp_path / "run"


def test_an_exported_version_is_uploaded_as_a_private_model(hub: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = said(EXPORT.format(str(run), str(out), str(MODEL), "org/new"), hub, tmp_path, "writes")
    assert text.splitlines()[-1] == f"pushed: {hub}/org/new/commit/{NEW}"
    assert Hub.made["visibility"] == "private"
    assert Hub.uploaded == {path.name: path.read_bytes() for path in out.iterdir()}
    assert "model.safetensors" in Hub.uploaded


@pytest.mark.parametrize(
    ("name", "token", "why"),
    [
        ("new", "writes", "no name of a model on the hub; give ORG/NAME"),
        ("org/new@main", "writes", "no name of a model on the hub; give ORG/NAME"),
        ("org/new", "reads", "refused; set HF_TOKEN to a token that may write there"),
        ("org/new", None, "refused; set HF_TOKEN to a token that may write there"),
    ],
)
def test_what_may_not_be_uploaded_is_said_before_anything_is_written(
    name: str, token: str | None, why: str, hub: str, run: Path, tmp_path: Path
) -> None:
    text = said(EXPORT.format(str(run), str(tmp_path / "out"), str(MODEL), name), hub, tmp_path, token)
    assert text == f"error: --push {name}: {why}"
    assert not (tmp_path / "out").exists()


def test_an_upload_that_breaks_off_says_how_to_go_on(hub: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = said(EXPORT.format(str(run), str(out), str(MODEL), "org/broken"), hub, tmp_path, "writes")
    line = text.splitlines()[-1]
    assert line.startswith("error: --push org/broken: the Hugging Face hub does not take it (")
    assert line.endswith(f"); once it does, `hf upload org/broken {out}` goes on")
    assert (out / "model.safetensors").exists()


def test_a_hub_that_is_not_there_takes_nothing(run: Path, tmp_path: Path) -> None:
    words = EXPORT.format(str(run), str(tmp_path / "out"), str(MODEL), "org/new")
    text = said(words, "http://127.0.0.1:9", tmp_path, "writes")
    assert text.startswith("error: --push org/new: the Hugging Face hub does not take it (")
    assert "\n" not in text
