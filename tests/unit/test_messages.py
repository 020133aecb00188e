"""Received JSON is a typed message or one line that says why not: `wire/messages.py`, `node/settings.py`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from echo_planes.errors import ConfigError, WeightsError
from echo_planes.types import TensorSpec
from echo_planes.weights.chain.events import MAX_EVENTS, Greeting, Heard, PeerJoined
from echo_planes.weights.node.control import Failure, failure
from echo_planes.weights.node.settings import NodeSettings
from echo_planes.weights.wire.messages import decode
from tests.unit.wire import SIGNER

JOINED = {"kind": "PeerJoined", "peer_id": "a", "address": "http://a:1", "region": ""}
SETTINGS = NodeSettings(
    "sender",
    "sender",
    "secret",
    SIGNER.public_bytes().hex(),
    specs=(TensorSpec("a.weight", "bfloat16", (2, 3)), TensorSpec("a.scale", "float32", ())),
    uplink_mbit=800,
)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff{",
        b"[" * 100_000,
        b'{"events": ' * 20_000,
        b'{"events": []} {}',
        b'{"events": NaN}',
        b'{"events": [{"kind": "PeerJoined\\n\\u001b[31m", "peer_id": "a"}]}',
        b'{"events": [], "' + b"x\\n" * 10**6 + b'": 1}',
        b'{"events": [{"kind": "PeerJoined", "peer_id": "\\ud800", "address": "", "region": ""}]}',
        b'{"events": [{"kind": "PeerJoined", "address": "", "peer_id": "' + b"x" * 257 + b'"}]}',
        b'{"events": [{"kind": "Tick"}]}',
        json.dumps({"events": [JOINED] * (MAX_EVENTS + 1)}).encode(),
    ],
    ids=range(13),
)
def test_what_is_no_message_is_refused_in_one_line(text: bytes) -> None:
    with pytest.raises(WeightsError) as caught:
        decode(text, Greeting, "a greeting")
    said = str(caught.value)
    assert said.startswith("a greeting is not well formed: ")
    assert said.isprintable()
    assert len(said) < 400


def test_an_answer_that_is_nested_deeply_is_refused_too() -> None:
    with pytest.raises(WeightsError, match="recursion"):
        decode(b'{"a":' * 100_000, dict, "an answer")


@pytest.mark.parametrize("number", ["1e400", "-0.5", "1e30", "true", '"1"', "null", "Infinity"])
def test_rates_are_finite_and_no_smaller_than_nothing(number: str) -> None:
    report = {
        "kind": "Report",
        "peer_id": "a",
        "parent_id": "",
        "key": None,
        "chunks_have": 0,
        "bytes_received": 0,
        "rate_bytes_per_s": 77,
        "damaged_chunks": 0,
        "parent_silent_s": 0,
        "parent_closed": False,
        "complete": False,
        "installed_version": -1,
        "staged_version": -1,
        "made": False,
    }
    text = json.dumps({"events": [report]})
    decode(text, Heard, "a report")
    with pytest.raises(WeightsError):
        decode(text.replace("77", number), Heard, "a report")


def test_a_greeting_is_no_report() -> None:
    text = json.dumps({"events": [JOINED]})
    assert decode(text, Greeting, "a greeting") == Greeting((PeerJoined("a", "http://a:1", ""),))
    with pytest.raises(WeightsError, match="PeerJoined"):
        decode(text, Heard, "a report")


def test_an_answer_without_json_is_told_with_its_status() -> None:
    assert failure(500, b'{"error": "WeightsError", "message": "no"}') == Failure("WeightsError", "no")
    assert failure(404, b"404: Not Found").message == "status 404, b'404: Not Found'"


def test_settings_of_a_node_come_back() -> None:
    text = SETTINGS.to_json()
    assert "\n" not in text
    assert NodeSettings.from_json(text) == SETTINGS


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"port":0', '"port":"0"', "port"),
        ('"port":0', '"port":true', "port"),
        ('"port":0', '"port":65536', "port 65536 does not exist"),
        ('"port":0', '"port":0,"ports":0', "ports"),
        ('"role":"sender",', "", "role"),
        ('"role":"sender"', '"role":"boss"', "role"),
        ('"shape":[2,3]', '"shape":[2,"3"]', "shape"),
        ('"starved_s":4.0', '"starved_s":null', "starved_s"),
        ("}", "", "NodeSettings"),
    ],
)
def test_other_settings_are_refused_with_a_reason(old: str, new: str, why: str) -> None:
    text = SETTINGS.to_json()
    assert old in text
    with pytest.raises(ConfigError, match=why):
        NodeSettings.from_json(text.replace(old, new))


def test_a_file_whose_name_is_no_text_is_said_before_the_node_starts() -> None:
    with pytest.raises(ConfigError, match="tls_cert is not UTF-8 text"):
        replace(SETTINGS, tls_cert="cert\udcff.pem", tls_key="key.pem")


FIRST_TOGETHER = """
import json
import sys
import threading
from msgspec import defstruct
from echo_planes.weights.wire.messages import Message, check, decode

sys.setswitchinterval(1e-6)
parts = [[defstruct(f"Part{k}_{i}", [("x", int)], frozen=True) for i in range(8)] for k in range(20)]
kinds = [
    defstruct(f"Kind{k}", [(f"part_{i}", part) for i, part in enumerate(own)], bases=(Message,), frozen=True)
    for k, own in enumerate(parts)
]
sent = {f"part_{i}": {"x": 1} for i in range(8)}
text = json.dumps(sent)
start = threading.Barrier(8)

def first(index):
    for kind in kinds:
        start.wait()
        if index % 2:
            decode(text, kind, "a message")
        else:
            check(sent, kind, "a message")

threads = [threading.Thread(target=first, args=(index,)) for index in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_decode_a_type_for_the_first_time_together_live() -> None:
    """msgspec alone dies of it: the store's first index reads manifests by several threads."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOGETHER], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
