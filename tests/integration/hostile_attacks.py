"""Attacks by a worker with a valid credential of its own, each with a name: `ATTACKS`, and `run_attacks`.

What such a worker can say to the sender's node and to other workers, and what it can serve as their parent.
Leases and groups are the data plane's. Freezing is in `hostile_relay.FREEZES`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs, to_builtins

from echo_planes.weights.chain.events import Accusation, PeerJoined, Report
from echo_planes.weights.node.door import MAX_PER_NODE
from echo_planes.weights.node.transport import MAX_JSON_BYTES
from echo_planes.weights.wire.credentials import bearer, credential
from echo_planes.weights.wire.frames import (
    CancelFrame,
    ChunkFrame,
    ManifestFrame,
    PingFrame,
    SegmentFrame,
    encode_frame,
)
from echo_planes.weights.wire.manifest import (
    PublicationKey,
    SignedManifest,
    SignedSegment,
    key_text,
)
from echo_planes.weights.wire.signing import Signer
from tests.integration.hostile_field import (
    CHUNK_BYTES,
    ELSEWHERE,
    LINEAGE,
    MALLORY,
    MAX_BYTES,
    SIZE_BYTES,
    Field,
)
from tests.integration.hostile_relay import frames_of
from tests.integration.weight_nodes import TOKEN, Signed, as_node, publication

DIGITS = "9" * 5000
PING = encode_frame(PingFrame())


@dataclass(frozen=True)
class Attack:
    """One attack: what it does, and what the answer must say."""

    act: Callable[[Field], Awaitable[str]]  # returns what the attacker, or its child, was told
    reason: str  # a regular expression for it


@dataclass(frozen=True)
class Verdict:
    """Outcome of an attack."""

    told: str
    is_refused: bool  # with the reason that was to be expected
    is_unchanged: bool  # what honest nodes hold, and what is believed of them
    is_served: bool  # honest workers, afterwards

    @property
    def held(self) -> bool:
        """Whether all is well."""
        return self.is_refused and self.is_unchanged and self.is_served


async def run_attacks(field: Field, names: list[str] | None = None) -> dict[str, Verdict]:
    """All attacks, or these, one after the other on the same nodes."""
    verdicts = {}
    for name in names or list(ATTACKS):
        attack, before = ATTACKS[name], field.state()
        told = await asyncio.wait_for(attack.act(field), 30)
        refused = re.search(attack.reason, told) is not None
        verdicts[name] = Verdict(told[:200], refused, field.state() == before, await field.serves())
    return verdicts


# --- what can be said to nodes -------------------------------------------------------------------


def asks(
    reason: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    at: str = "",
) -> Attack:
    """One request."""
    return Attack(lambda field: field.asks(method, path, body, headers, at), reason)


def says(reason: str, *events: Any, what: str = "report") -> Attack:
    """One message to the tracker."""
    message = {"events": [event if isinstance(event, dict) else to_builtins(event) for event in events]}
    return Attack(lambda field: field.says(what, message), reason)


def shown(key: str, name: str) -> dict[str, str]:
    """Headers with a credential and a name."""
    return {"Authorization": bearer(key), "X-Node": name}


OWN = credential(TOKEN, MALLORY)
STATUS = ("GET", "/v1/status")

IDENTITY = {
    "no credential": asks("^401", *STATUS, headers={}),
    "a wrong credential": asks("^401", *STATUS, headers=shown("0" * 64, MALLORY)),
    "another worker's name": asks("^401", *STATUS, headers=shown(OWN, "w0")),
    "the sender's name": asks("^401", *STATUS, headers=shown(OWN, "sender")),
    "no name": asks("^401", *STATUS, headers={"Authorization": bearer(OWN)}),
    "a name with path parts": asks("^401", *STATUS, headers=shown(OWN, "../w0")),
    "a name of 300 characters": asks("^401", *STATUS, headers=shown(credential(TOKEN, "m" * 300), "m" * 300)),
    "the credential of an earlier run": asks(
        "^401", *STATUS, headers=shown(credential("a secret before", MALLORY), MALLORY)
    ),
    "its own credential at another worker": asks("^401", *STATUS, headers=shown(OWN, MALLORY), at="w0"),
    "what it shows to one parent, at another": asks("^401", *STATUS, headers=as_node(MALLORY, "w1"), at="w0"),
    "what its child shows to it, at the sender": asks(
        "^401", *STATUS, headers=shown(credential(OWN, "w0"), "w0")
    ),
    "its own credential as the run's secret": asks(
        "^401", *STATUS, headers=shown(credential(OWN, MALLORY), MALLORY)
    ),
    "the owner's hand-over": asks("^404", "POST", "/control/segment", b"x"),
    "the owner's commit": asks("^404", "POST", "/control/commit", b"x"),
    "the owner's settled": asks("^404", "POST", "/control/settled", b"{}", at="w0"),
}

REPORT = to_builtins(Report(MALLORY, "sender", None, 0, 0, 0.0, 0, 0.0, False, False, -1, -1, False))
JOINED = to_builtins(PeerJoined(MALLORY, "http://127.0.0.1:9", ""))
ACCUSED = to_builtins(Accusation("w0", MALLORY))
ABSURD: dict[str, Any] = {
    "peer_id": 7,
    "by": None,
    "address": "x" * 300,
    "region": ["x"],
    "parent_id": {"x": 1},
    "key": {"lineage": "L", "version": -5, "codec": "full", "base_version": -1},
    "chunks_have": 2**63,
    "bytes_received": -2,
    "rate_bytes_per_s": -1.0,
    "damaged_chunks": 1.5,
    "parent_silent_s": "long",
    "parent_closed": "yes",
    "complete": 1,
    "installed_version": -2,
    "staged_version": True,
    "made": "no",
}

FIELDS = {
    f"{event['kind']}.{name} {how}": says(reason, changed, what="join" if event is JOINED else "report")
    for event in (REPORT, JOINED, ACCUSED)
    for name in event
    if name != "kind"
    for how, reason, changed in (
        ("missing", f"^422 .*missing required field `{name}`", {n: v for n, v in event.items() if n != name}),
        ("absurd", f"^422 .*Expected .*{name}", {**event, name: ABSURD[name]}),
    )
}


async def accuse_another(field: Field) -> str:
    """An honest worker from which it does not receive."""
    own = field.dispatch.peers().get(MALLORY)
    another = next(name for name in field.workers if name != own)
    return await field.says("report", {"events": [to_builtins(Accusation(another, by=MALLORY))]})


async def flood(field: Field) -> str:
    """Thousands of reports as fast as they go, on as many connections as it may have."""

    async def speak() -> set[str]:
        return {(await field.says("report", {"events": [REPORT] * 20}))[:3] for _ in range(5)}

    answers = set[str]().union(*await asyncio.gather(*(speak() for _ in range(50))))
    return "answered" if answers <= {"200"} else str(answers)


async def many_connections(field: Field) -> str:
    """Feeds without end, more than a node may have."""
    opened = []
    try:
        for number in range(MAX_PER_NODE + 8):
            url = f"{field.sender.address}/v1/feed?stream={number % 16}&of=16"
            opened.append(await field.session.post(url, json={}, headers=as_node(MALLORY)))
        return f"{opened[-1].status} {await opened[-1].text()}"
    finally:
        for feed in opened:
            feed.close()
        while not (await field.asks(*STATUS)).startswith("200"):
            await asyncio.sleep(0.05)


async def bomb(field: Field) -> str:
    """Four gigabytes of spaces would be four megabytes; a sixteenth of them is enough to be refused."""
    body = gzip.compress(b'{"events": []}' + b" " * (64 * 1024**2))
    headers = {**as_node(MALLORY), "Content-Encoding": "gzip"}
    return await field.says("report", body, headers)


ORDERS = {
    "joins in another's name": says("^422 .*for w0", PeerJoined("w0", "http://m:1", ""), what="join"),
    "reports for another": says("^422 .*for w0", {**REPORT, "peer_id": "w0"}),
    "accuses in another's name": says("^422 .*for w1", Accusation("w0", by="w1")),
    "accuses one that is not its parent": Attack(accuse_another, "^200"),
    "accuses itself": says("^200", Accusation(MALLORY, by=MALLORY)),
    "accuses the sender": says("^200", Accusation("sender", by=MALLORY)),
    "commits a publication": says(
        "^422 .*Invalid value 'PublicationCommitted'",
        {
            "kind": "PublicationCommitted",
            "key": to_builtins(PublicationKey(LINEAGE, 99, "full", -1)),
            "payload_bytes": 1,
            "num_chunks": 1,
        },
    ),
    "lets time pass": says("^422 .*Invalid value 'Tick'", {"kind": "Tick"}),
    "an unknown event": says("^422 .*Invalid value 'Shutdown'", {"kind": "Shutdown"}),
    "an event of two kinds": says("^422 .*Expected `str`.*kind", {"kind": ["Report", "Tick"]}),
    "an extra field": says("^422 .*unknown field `admin`", {**REPORT, "admin": True}),
    "65 events at once": says("^422 .*length <= 64", *[REPORT] * 65),
    "an address that is no address": says(
        "^422 .*not http", {**JOINED, "address": "javascript:alert(1)"}, what="join"
    ),
    "an address with a path": says(
        "^422 .*not http", {**JOINED, "address": "http://169.254.169.254:80/latest"}, what="join"
    ),
    "an address with a login": says("^422 .*not http", {**JOINED, "address": "http://a:b@c:1"}, what="join"),
    "absurd statistics": says(
        "^200",
        {**REPORT, "rate_bytes_per_s": 1e18, "damaged_chunks": 2**61, "installed_version": 2**61},
        {**REPORT, "chunks_have": 2**61, "bytes_received": 2**61, "parent_silent_s": 1e18},
    ),
    "no list of events": Attack(lambda f: f.says("report", {"events": {"0": REPORT}}), "^422 .*events"),
    "no object": Attack(lambda f: f.says("report", [REPORT]), "^422 .*Expected `object`, got `array`"),
    "no JSON": Attack(lambda f: f.says("report", b"\xff{"), "^422 .*JSON is malformed"),
    "NaN": Attack(
        lambda f: f.says("report", {"events": [{**REPORT, "rate_bytes_per_s": float("nan")}]}), "^422"
    ),
    "a number of 5,000 digits": Attack(
        lambda f: f.says("report", f'{{"events": [{DIGITS}]}}'.encode()), "^422 .*out of range"
    ),
    "brackets 100,000 deep": Attack(
        lambda f: f.says("report", b"[" * 100_000), "^422 .*Expected `object`, got `array`"
    ),
    "a lone surrogate": says("^422", {**REPORT, "peer_id": "\ud800"}),
    "a message that is too large": Attack(lambda f: f.says("report", b" " * (MAX_JSON_BYTES + 1)), "^413"),
    "a message that is large when unpacked": Attack(bomb, "^413"),
    "a flood of reports": Attack(flood, "^answered$"),  # nobody else suffers
    "connections without end": Attack(many_connections, "^429 .*at most"),
}

FEEDS = {
    "a stream that does not exist": asks("^422 .*stream", "POST", "/v1/feed?stream=99&of=1", b"{}"),
    "no streams": asks("^422 .*stream", "POST", "/v1/feed?stream=0&of=0", b"{}"),
    "a stream of 5,000 digits": asks("^4", "POST", f"/v1/feed?stream={DIGITS}&of=1", b"{}", at="w0"),
    "chunks in no order": asks(
        "^422 .*disordered", "POST", "/v1/feed?stream=0&of=1", b'{"have": {"L.1.full.-1": [[5, 2]]}}', at="w0"
    ),
    "300 publications": asks(
        "^422 .*at most 256",
        "POST",
        "/v1/feed?stream=0&of=1",
        json.dumps({"done": [f"L.{n}.full.-1" for n in range(300)]}).encode(),
    ),
    "a publication's name with path parts": asks(
        "^422 .*no name of a publication",
        "POST",
        "/v1/feed?stream=0&of=1",
        b'{"done": ["../../etc/passwd"]}',
    ),
    "a path out of the publications": asks(
        "^4", "GET", "/v1/publications/..%2f..%2fetc%2fpasswd/payload", at="w0"
    ),
    "a publication that is not there": asks("^404", "GET", "/v1/publications/L.7.full.-1/payload"),
    "a range beyond the end": Attack(
        lambda f: f.asks(
            "GET",
            f"/v1/publications/{key_text(f.versions[-1].key)}/payload",
            headers={**as_node(MALLORY), "Range": f"bytes={SIZE_BYTES}-"},
        ),
        "^416",
    ),
    "unwanted: what is no key": asks("^422 .*Expected `str`.*key", "POST", "/v1/unwanted", b'{"key": [1]}'),
    "unwanted: for others": Attack(
        lambda f: f.asks("POST", "/v1/unwanted", json.dumps({"key": key_text(f.versions[-1].key)}).encode()),
        "^200",  # of its own feeds alone
    ),
}

RAW = {
    "bytes that are no text as credential": Attack(
        lambda f: f.raw(
            b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Node: m\r\nAuthorization: \xff\xfe\r\n\r\n"
        ),
        "^401",
    ),
    "a header that is too large": Attack(
        lambda f: f.raw(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", at="w0"), "^400"
    ),
    "a length of 5,000 digits": Attack(
        lambda f: f.raw(f"POST /v1/feed HTTP/1.1\r\nContent-Length: {DIGITS}\r\n\r\n".encode()), "^400"
    ),
    "two requests smuggled as one": Attack(
        lambda f: f.raw(
            b"POST /v1/feed HTTP/1.1\r\nHost: x\r\n"
            b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        "^400",
    ),
}


# --- what can be served to a child ---------------------------------------------------------------


def made(field: Field, version: int, **options: Any) -> Signed:
    """A publication by the learner's key."""
    return publication(
        field.signer, version, SIZE_BYTES, chunk_bytes=CHUNK_BYTES, **{"lineage": LINEAGE, **options}
    )


def serves(reason: str, pieces: Callable[[Field], list[bytes]], **answer: Any) -> Attack:
    """A parent that sends this on every feed; the child's state must be what it was."""

    async def act(field: Field) -> str:
        async with field.child_of(pieces(field), **answer) as child:
            told = await child.suffers()
            if child.state() != child.before:
                return f"the child's weights are others: {told}"
            if child.num_elsewhere:
                return f"asked elsewhere {child.num_elsewhere} times"
            opened = [key_text(holding.key) for holding in child.shelf.incomplete()]
            refused = [key_text(key) for key in child.shelf.unwanted]
            damaged = child.num_damaged()
            return f"{told} opened={opened} refused={refused} damaged={damaged}"

    return Attack(act, reason)


def frame(kind: int, length: int, version: int = 2, magic: bytes = b"EP") -> bytes:
    """The head of a frame."""
    return struct.pack("<2sBBI", magic, version, kind, length)


def segment_of(signed: Signed, **changes: Any) -> bytes:
    """The first header with a changed field, and the signature that it had."""
    one = signed.segments[0][0]
    return encode_frame(SegmentFrame(SignedSegment(structs.replace(one.header, **changes), one.signature)))


def chunk(signed: Signed, index: int, data: bytes | None = None, segment: int = 0) -> bytes:
    """One chunk of it, or other bytes in its place."""
    payload = signed.segments[0][1]
    own = payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].tobytes()
    return encode_frame(ChunkFrame(signed.key, segment, index, own if data is None else data))


def forged(field: Field) -> list[bytes]:
    """A whole publication by another key."""
    return frames_of(publication(Signer.generate(), 6, SIZE_BYTES, chunk_bytes=CHUNK_BYTES, lineage=LINEAGE))


def mixed(field: Field) -> list[bytes]:
    """The header of version 6, the chunks of version 7."""
    six, seven = made(field, 6), made(field, 7)
    taken = [
        chunk(six, index, seven.segments[0][1][index * CHUNK_BYTES :][:CHUNK_BYTES].tobytes())
        for index in (0, 1)
    ]
    return [frames_of(six)[0], *taken]


def manifest_of_another(field: Field) -> list[bytes]:
    """The segments of version 6, a manifest for version 6 of other contents, both by the learner's key."""
    six = made(field, 6)
    other = replace(six.manifest.manifest, num_segments=2, payload_bytes=2 * SIZE_BYTES)
    return [*frames_of(six)[:-1], encode_frame(ManifestFrame(field.signer.manifest(other)))]


def unsigned(field: Field) -> list[bytes]:
    """A header with a signature of zeros."""
    one = made(field, 6).segments[0][0]
    return [encode_frame(SegmentFrame(SignedSegment(one.header, bytes(64))))]


def altered_manifest(field: Field) -> list[bytes]:
    """A manifest in which the digest of the weights was changed."""
    six = made(field, 6)
    changed = replace(six.manifest.manifest, digest=f"xxh3:{0:032x}")
    return [
        *frames_of(six)[:-1],
        encode_frame(ManifestFrame(SignedManifest(changed, six.manifest.signature))),
    ]


def cross_signed(field: Field) -> list[bytes]:
    """A manifest with the signature of a segment's header."""
    six = made(field, 6)
    signature = six.segments[0][0].signature
    return [
        *frames_of(six)[:-1],
        encode_frame(ManifestFrame(SignedManifest(six.manifest.manifest, signature))),
    ]


def other_base(field: Field) -> list[bytes]:
    """A patch, signed in another history, upon a version 5 that is not the one here."""
    header = structs.replace(
        made(field, 6, codec="compact").segments[0][0].header, base_digest=f"xxh3:{77:032x}"
    )
    return [encode_frame(SegmentFrame(field.signer.segment(header)))]


def too_large(field: Field) -> list[bytes]:
    """Signed by the key, for a larger model."""
    signed = publication(
        field.signer, 6, MAX_BYTES + 4096, chunk_bytes=CHUNK_BYTES, lineage=LINEAGE, segment_bytes=2**23
    )
    return frames_of(signed)[:1]


def whole(field: Field) -> Signed:
    """Publication that the child has."""
    return made(field, 5)


# What a child tells that took nothing, and one to which the rest of a publication may still come.
IGNORED = r"^ opened=\[\] refused=\[\] damaged=0$"
STILL_OPEN = r"^ opened=\['test\.6\.full\.-1'\] refused=\[\] damaged=0$"
SERVED = {
    "a publication by another key": serves("is forged", forged),
    "a header without a signature": serves("is forged", unsigned),
    "a header with another offset": serves(
        "is forged", lambda f: [segment_of(made(f, 6), size_bytes=SIZE_BYTES - 1)]
    ),
    "a header of another version": serves(
        "is forged", lambda f: [segment_of(made(f, 6), key=PublicationKey(LINEAGE, 7, "full", -1))]
    ),
    "a manifest with another digest": serves("is forged", altered_manifest),
    "a header's signature on a manifest": serves("is forged", cross_signed),
    "a manifest for more than there is": serves(STILL_OPEN, manifest_of_another),
    "an old version": serves("opened=\\[\\] refused=\\['test.4", lambda f: frames_of(made(f, 4))),
    "a version of another lineage": serves(
        "opened=\\[\\] refused=\\['before.9", lambda f: frames_of(made(f, 9, lineage="before"))
    ),
    "a patch on another base": serves("opened=\\[\\] refused=\\['test.6.compact", other_base),
    "a publication for a larger model": serves("needs at most", too_large),
    "chunks of another version": serves("damaged=[1-9]", mixed),
    "altered chunks": serves(
        "damaged=[1-9]", lambda f: [frames_of(made(f, 6))[0], chunk(made(f, 6), 0, b"x" * CHUNK_BYTES)]
    ),
    "a short chunk": serves(
        "damaged=[1-9]", lambda f: [frames_of(made(f, 6))[0], chunk(made(f, 6), 0, b"x")]
    ),
    "a chunk beyond the end": serves(
        "damaged=[1-9]", lambda f: [frames_of(made(f, 6))[0], chunk(made(f, 6), 2**31, b"x" * CHUNK_BYTES)]
    ),
    "a chunk of no segment": serves(
        STILL_OPEN, lambda f: [frames_of(made(f, 6))[0], chunk(made(f, 6), 0, segment=77)]
    ),
    "chunks of what nobody opened": serves(IGNORED, lambda f: frames_of(made(f, 6), segments=False)),
    "the same version again": serves(IGNORED, lambda f: frames_of(whole(f)) * 3),
    "a cancel of what is whole": serves(IGNORED, lambda f: [encode_frame(CancelFrame(whole(f).key))]),
    "no frame": serves("begins no frame", lambda f: [frame(1, 10, magic=b"XX") + bytes(10)]),
    "an older format": serves("version 1", lambda f: [frame(5, 0, version=1)]),
    "an unknown kind of frame": serves("unknown kind", lambda f: [frame(99, 10) + bytes(10)]),
    "a frame of four gigabytes": serves("at most", lambda f: [frame(2, 2**32 - 1)]),
    "a ping with contents": serves("padded with zeros", lambda f: [frame(5, 100) + b"x" * 100]),
    "half of a frame": serves(IGNORED, lambda f: [frame(2, 1000) + bytes(10)]),
    "endless pings": serves(IGNORED, lambda f: [PING * 2000]),
    "a packed answer": serves(
        "begins no frame", lambda f: [gzip.compress(bytes(2**26))], headers={"Content-Encoding": "gzip"}
    ),
    "a way to somewhere else": serves(IGNORED, lambda f: [], status=307, headers={"Location": ELSEWHERE}),
    "an error": serves(IGNORED, lambda f: [b"x" * 100_000], status=500),
}

ATTACKS: dict[str, Attack] = {
    f"{group}: {name}": attack
    for group, attacks in (
        ("identity", IDENTITY),
        ("field", FIELDS),
        ("tracker", ORDERS),
        ("feed", FEEDS),
        ("request", RAW),
        ("parent", SERVED),
    )
    for name, attack in attacks.items()
}
