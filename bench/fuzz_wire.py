"""Long fuzzing of everything that reads bytes from peers or disks: `python -m bench.fuzz_wire [TARGET]`.

Guided by coverage (atheris, which is not among this project's dependencies: `pip install atheris`). Each
target may end in its own result or in WeightsError; any other exception, a result that breaks its promise,
or memory above the limit is a finding, and the input that did it is written to the working folder.
The short form, by hypothesis, is in tests/unit/test_frames.py and test_transfer.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import Codec
from echo_planes.weights.codec.entry import decode, encode
from echo_planes.weights.codec.table import CODECS
from echo_planes.weights.digest import BIT_DTYPES, BitTensor
from echo_planes.weights.wire import frames, manifest, messages
from echo_planes.weights.wire.frames import ChunkFrame, FrameParser, ManifestFrame, SegmentFrame, encode_frame
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.signing import Verifier
from echo_planes.weights.wire.transfer import ChunkSet, Transfer
from tests.unit.wire import FULL, PATCH, SIGNER, signed

SECONDS = 300
MAX_INPUT_BYTES = 16 * 1024
RSS_LIMIT_MB = 1500  # imports and the instrumented code take some 300
MALLOC_LIMIT_MB = 64  # of one allocation; no target's model or limit needs a tenth of it

Target = Callable[[bytes], None]


def _frames() -> tuple[Target, list[bytes]]:
    """A stream of frames into a node's transfer; what is accepted must be the true bytes."""
    source = signed(bytes(range(250)) * 2, [300, 200], chunk_bytes=64)
    limits = relay_limits(2**20, min_chunk_bytes=16, max_chunk_bytes=4096)
    verifier = Verifier(SIGNER.public_bytes())
    stream = [
        *(encode_frame(SegmentFrame(segment)) for segment in source.segments),
        *(encode_frame(ChunkFrame(FULL, *at, source.chunk(*at))) for at in source.chunks),
        encode_frame(ManifestFrame(source.manifest)),
    ]

    def feed(data: bytes) -> None:
        parser, transfer = FrameParser(limits), Transfer(FULL, verifier, limits)
        cut = data[0] if data else 0
        for piece in (data[1:cut], data[max(1, cut) :]):
            for frame in parser.feed(piece):
                if isinstance(frame, SegmentFrame):
                    transfer.add_segment(frame.signed)
                elif isinstance(frame, ManifestFrame):
                    transfer.commit(frame.signed)
                elif isinstance(frame, ChunkFrame):
                    at = (frame.segment_index, frame.chunk_index)
                    if transfer.add_chunk(*at, frame.data) == "accepted":
                        _promise(bytes(frame.data) == source.chunk(*at), "a chunk that was not signed")

    return feed, [b"\0" + b"".join(stream), *(b"\x64" + frame for frame in stream)]


def _messages() -> tuple[Target, list[bytes]]:
    """Keys, headers, manifests and their JSON: what parses must write the same bytes again."""
    source = signed(b"x" * 500, key=PATCH)
    segment = source.segments[0]

    def parse(data: bytes) -> None:
        for read, write in (
            (manifest.parse_header, manifest.header_bytes),
            (manifest.parse_manifest, manifest.manifest_bytes),
        ):
            _round_trip(data, read, write)
        _round_trip(data.decode("latin-1"), manifest.parse_key_text, manifest.key_text)
        _survives(data, lambda text: frames.segments_from_json(text, "fuzzed"), frames.segments_to_json)
        _survives(data, lambda text: frames.manifest_from_json(text, "fuzzed"), frames.manifest_to_json)
        _survives(data, _chunk_set, lambda chunks: msgspec.json.encode(chunks.ranges()))

    return parse, [
        manifest.header_bytes(segment.header),
        manifest.manifest_bytes(source.manifest.manifest),
        manifest.key_text(PATCH).encode(),
        frames.segments_to_json(source.segments),
        frames.manifest_to_json(source.manifest),
        b"[[0, 5], [7, 9]]",
    ]


def _codec() -> tuple[Target, list[bytes]]:
    """A segment of any codec: its changes must lie within the model."""
    rng = np.random.default_rng(0)
    shapes = {
        "a": ("bfloat16", (40, 50)),
        "b": ("float32", (300,)),
        "c": ("float16", ()),
        "d": ("bfloat16", (0,)),
    }
    base, tensors = {}, {}
    for name, (dtype, shape) in shapes.items():
        bits = rng.integers(0, 2**16, int(np.prod(shape)), dtype=np.uint16).astype(BIT_DTYPES[dtype])
        base[name] = BitTensor(bits, dtype, shape)
        changed = bits + (rng.random(bits.size) < 0.1).astype(bits.dtype)
        tensors[name] = BitTensor(changed, dtype, shape)
    specs = {name: tensor.spec(name) for name, tensor in base.items()}
    codecs: tuple[Codec, ...] = (*CODECS, "full")

    def take(data: bytes) -> None:
        if len(data) < 2:
            return
        segment = np.frombuffer(data, dtype=np.uint8)[2:].copy()
        offset_bytes = data[1] * 16  # of no matter but for full
        codec = codecs[data[0] % len(codecs)]
        for change in decode(codec, segment, offset_bytes, specs, lambda name: base[name].bits):
            bits = base[change.name].bits
            _promise(change.values.dtype == bits.dtype, "values of another type")
            if change.indices is None:
                _promise(0 <= change.start <= bits.size - change.values.size, "a run outside its tensor")
            elif change.indices.size:
                _promise(change.indices.size == change.values.size, "other many indices than values")
                _promise(change.indices[0] >= 0 and change.indices[-1] < bits.size, "an index outside")
                _promise(bool((np.diff(change.indices) > 0).all()), "indices that do not increase")

    seeds = []
    for number, codec in enumerate(codecs):
        start = None if codec == "full" else base
        for segment in encode(codec, start, tensors, segment_bytes=2048):
            seeds.append(bytes((number, 0)) + segment.payload.tobytes())
    return take, seeds


TARGETS: Mapping[str, Callable[[], tuple[Target, list[bytes]]]] = {
    "frames": _frames,
    "messages": _messages,
    "codec": _codec,
}


def _promise(kept: bool, what: str) -> None:
    if not kept:
        raise RuntimeError(f"broken promise: {what}")


def _chunk_set(text: bytes) -> ChunkSet:
    return ChunkSet.of(messages.decode(text, list[tuple[int, int]], "fuzzed"), 4096)


def _survives(data: bytes, read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> None:
    """JSON has many texts for one message; what was read must be the same once written."""
    try:
        text = write(read(data))
    except WeightsError:
        return
    _round_trip(text, read, write)


def _round_trip(data: Any, read: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
    try:
        value = read(data)
    except WeightsError:
        return
    _promise(write(value) == data, f"{write.__name__} writes something else")


def _tolerant(target: Target) -> Target:
    def once(data: bytes) -> None:
        with contextlib.suppress(WeightsError):
            target(data)

    return once


def _instrument(atheris: Any) -> None:
    """Let the fuzzer see every branch taken in this package's Python functions."""
    modules = {
        name: module for name, module in sys.modules.items() if name.startswith("echo_planes.weights.")
    }
    for name, module in modules.items():
        for value in list(vars(module).values()):
            for member in list(vars(value).values()) if isinstance(value, type) else [value]:
                function = getattr(member, "__func__", member)  # of a class or static method
                if isinstance(function, types.FunctionType) and function.__module__ == name:
                    atheris.instrument_func(function)


def _fuzz(name: str, seconds: int) -> None:
    """Fuzz one target; libFuzzer ends the process when the time is up or something was found."""
    atheris = importlib.import_module("atheris")
    target, seeds = TARGETS[name]()
    once = _tolerant(target)
    for seed in seeds:
        once(seed)  # what is compiled is compiled now: instrumented functions cannot be
    _instrument(atheris)
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            Path(folder, str(number)).write_bytes(seed)
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-rss_limit_mb={RSS_LIMIT_MB}",
            f"-malloc_limit_mb={MALLOC_LIMIT_MB}",
            "-timeout=10",
            "-print_final_stats=1",
            f"-artifact_prefix=fuzz_{name}_",
        ]
        atheris.Setup([sys.argv[0], *options, folder], once)
        atheris.Fuzz()


def main() -> None:
    """Fuzz one target in this process, or all in turn."""
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz_wire", description=__doc__)
    parser.add_argument("target", nargs="?", choices=list(TARGETS), help="all of them, if left out")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each target")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        sys.exit("bench.fuzz_wire needs atheris, which is not installed: pip install atheris")
    if options.target is not None:
        _fuzz(options.target, options.seconds)
        return
    failed = []
    for name in TARGETS:
        command = [sys.executable, "-m", "bench.fuzz_wire", name, "--seconds", str(options.seconds)]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    print(f"found something in {', '.join(failed)}" if failed else f"nothing found in {', '.join(TARGETS)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
