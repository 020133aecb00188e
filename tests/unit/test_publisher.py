"""The learner's end of the wire: segments first, the manifest last, and versions that never change."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from blake3 import blake3

from echo_planes.cluster.clock import ManualClock
from echo_planes.errors import WeightsError
from echo_planes.learning.device_scan import DeviceMirror
from echo_planes.types import ByteArray
from echo_planes.weights.codec.choice import CodecChoice
from echo_planes.weights.codec.entry import Patcher
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, state_digest
from echo_planes.weights.publisher import Publisher
from echo_planes.weights.wire.manifest import SignedManifest, SignedSegment
from echo_planes.weights.wire.signing import Signer, Verifier

State = dict[str, BitTensor]
SHAPES = {"embed.weight": (96, 32), "layers.0.weight": (64, 32), "norm.weight": (32,)}
SIGNER = Signer.generate()


class Wire:
    """Keeps what is sent, in order."""

    def __init__(self) -> None:
        self.sent: list[SignedSegment | SignedManifest] = []
        self.payloads: list[ByteArray] = []
        self.broken = False

    def add_segment(self, signed: SignedSegment, payload: ByteArray) -> None:
        if self.broken:
            raise WeightsError("the node is gone")
        self.sent.append(signed)
        self.payloads.append(payload.copy())

    def commit(self, signed: SignedManifest) -> None:
        self.sent.append(signed)


def state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in SHAPES.items():
        floats = rng.normal(0.0, 0.02, shape).astype(np.float32).reshape(-1)
        made[name] = BitTensor(
            (floats.view(np.uint32) >> 16).astype(BIT_DTYPES["bfloat16"]), "bfloat16", shape
        )
    return made


def moved(old: Mapping[str, BitTensor], *positions: int) -> State:
    """One ulp up at these flat positions of every tensor."""
    new = {name: BitTensor(t.bits.copy(), t.dtype, t.shape) for name, t in old.items()}
    for tensor in new.values():
        tensor.bits[list(positions)] += 1
    return new


def publisher(wire: Wire, *, patches: bool = True, chunk_bytes: int = 4096) -> Publisher:
    choice = CodecChoice("compact", ManualClock()) if patches else None
    return Publisher("L0", SIGNER, wire, choice=choice, chunk_bytes=chunk_bytes)


def test_segments_leave_signed_and_the_manifest_only_on_commit() -> None:
    wire = Wire()
    sender = publisher(wire)
    manifest = sender.publish(0, 0, state())
    assert all(isinstance(sent, SignedSegment) for sent in wire.sent)
    sender.commit()
    verifier = Verifier(SIGNER.public_bytes())
    *segments, last = wire.sent
    assert isinstance(last, SignedManifest)
    assert last.manifest == manifest
    verifier.check_manifest(last)
    offset_bytes = 0
    for index, (signed, payload) in enumerate(zip(segments, wire.payloads, strict=True)):
        assert isinstance(signed, SignedSegment)
        verifier.check_segment(signed)
        header = signed.header
        assert (header.index, header.offset_bytes, header.size_bytes) == (index, offset_bytes, payload.size)
        chunks = [payload[i : i + 4096].tobytes() for i in range(0, payload.size, 4096)]
        assert header.chunk_hashes == b"".join(blake3(chunk).digest() for chunk in chunks)
        offset_bytes += payload.size
    whole = b"".join(payload.tobytes() for payload in wire.payloads)
    assert (manifest.num_segments, manifest.payload_bytes) == (len(segments), len(whole))
    assert manifest.payload_digest == f"b3:{blake3(whole).hexdigest()}"
    assert manifest.digest == state_digest(state())


def test_the_next_version_is_a_patch_that_leads_to_exactly_its_bits() -> None:
    wire = Wire()
    sender = publisher(wire)
    first = sender.publish(0, 0, state())
    new = moved(state(), 0, 7, 31)
    wire.payloads.clear()
    manifest = sender.publish(2, 5, new)
    assert (manifest.codec, manifest.base_version, manifest.base_digest) == ("compact", 0, first.digest)
    assert (manifest.version, manifest.num_updates) == (2, 5)
    assert manifest.changed_elements == 9
    assert manifest.total_elements == sum(t.bits.size for t in new.values())
    assert manifest.payload_bytes < manifest.dense_bytes / 10
    shadow = state()
    patcher = Patcher("compact", shadow)
    for payload in wire.payloads:
        patcher.apply(payload)
    assert state_digest(shadow) == manifest.digest == state_digest(new)


def test_the_same_version_again_is_full() -> None:
    wire = Wire()
    sender = publisher(wire)
    sender.publish(0, 0, state())
    new = moved(state(), 5)
    patch, again = sender.publish(1, 1, new), sender.publish(1, 1, new)
    assert (patch.codec, again.codec) == ("compact", "full")
    assert (again.version, again.digest, again.base_version) == (1, patch.digest, -1)
    assert sender.publish(2, 2, moved(new, 6)).base_digest == patch.digest


def test_without_patches_everything_is_full() -> None:
    sender = publisher(Wire(), patches=False)
    sender.publish(0, 0, state())
    assert sender.publish(1, 1, moved(state(), 5)).codec == "full"


def test_a_version_is_immutable_and_versions_only_rise() -> None:
    sender = publisher(Wire())
    sender.publish(3, 0, state())
    with pytest.raises(WeightsError, match="published with other weights"):
        sender.publish(3, 0, moved(state(), 1))
    with pytest.raises(WeightsError, match="version 2 cannot follow version 3"):
        sender.publish(2, 0, state())
    with pytest.raises(WeightsError, match="version -1 cannot follow"):
        publisher(Wire()).publish(-1, 0, state())


def test_a_state_keeps_its_names_and_shapes() -> None:
    sender = publisher(Wire())
    sender.publish(0, 0, state())
    less = {name: tensor for name, tensor in state().items() if name != "norm.weight"}
    with pytest.raises(WeightsError, match=r"norm\.weight"):
        sender.publish(1, 0, less)
    bits = state()["norm.weight"].bits
    with pytest.raises(WeightsError, match="changed from"):
        sender.publish(1, 0, {**state(), "norm.weight": BitTensor(bits, "bfloat16", (4, 8))})


def test_what_was_published_is_kept_by_itself() -> None:
    sender, live = publisher(Wire()), state()
    sender.publish(0, 0, live)
    live["norm.weight"].bits[3] += 1  # the optimizer goes on in the same memory
    assert sender.publish(1, 1, live).changed_elements == 1


def test_bits_patched_in_place_are_published_like_whole_copies() -> None:
    """Also after a publication that failed, whose bits the mirror has and no receiver."""
    wires = Wire(), Wire()
    copied, patched = publisher(wires[0]), publisher(wires[1])
    mirror, new = DeviceMirror(), state()
    live = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    for version in range(5):
        for name, tensor in new.items():
            live[name].view(torch.int16).copy_(torch.from_numpy(tensor.bits.view("i2")).view(tensor.shape))
        bits = {name: mirror.bits(name, tensor) for name, tensor in live.items()}
        if version == 2:
            for wire, sender, tensors in ((wires[0], copied, new), (wires[1], patched, bits)):
                wire.broken = True
                with pytest.raises(WeightsError, match="the node is gone"):
                    sender.publish(version, version, tensors)
                wire.broken = False
        else:
            assert patched.publish(version, version, bits) == copied.publish(version, version, new)
        new = moved(new, version, 7, 31)
    payloads = [[payload.tobytes() for payload in wire.payloads] for wire in wires]
    assert payloads[0] == payloads[1]


def test_nothing_can_be_committed_before_it_was_published() -> None:
    with pytest.raises(WeightsError, match="nothing was published"):
        publisher(Wire()).commit()


def test_equal_states_make_equal_publications() -> None:
    """The same state published again is the same bytes: peers need not care which of them they have."""
    wires = Wire(), Wire()
    made = [publisher(wire).publish(0, 0, state()) for wire in wires]
    assert made[0] == made[1]
    assert all(np.array_equal(a, b) for a, b in zip(*(wire.payloads for wire in wires), strict=True))
