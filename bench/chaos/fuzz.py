"""`fuzz`: millions of damaged inputs to everything that reads bytes or messages from somebody else.

Inputs are honest ones, changed: bytes flipped, cut, doubled, spliced, overwritten with numbers that are often
wrong, and JSON with a value anywhere in it exchanged. A decoder may give its own result or its own error;
anything else is a finding, as is memory beyond the cap. Blocks of inputs are numbered and follow from their
number alone; what was run is kept in the folder and not run again. Fuzzing that is guided by coverage is
`bench.fuzz_wire`, whose decoders are used here.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import struct
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import fuzz_wire
from bench.chaos.lives import read_lines
from echo_planes.data.claims import Rules, group_fault, stats_fault, tokens_fault
from echo_planes.data.store.message import Kind, Place, encode
from echo_planes.data.store.schema import to_batch
from echo_planes.data.store.segment import GROUP_ENTRY, scan
from echo_planes.errors import EchoPlanesError, LeaseError
from echo_planes.types import (
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Sample,
    Span,
    Trajectory,
    WorkerStats,
)
from echo_planes.weights.chain.events import Event
from echo_planes.weights.wire.manifest import PublicationKey
from echo_planes.weights.wire.messages import Message, decode
from tests.unit.ledger_attacks import honest
from tests.unit.test_replay_store import batch_of

BLOCK = 50_000  # inputs
MOST_BYTES = 16 * 1024  # of one input
CAP_BYTES = 96 * 2**20  # a process may grow so much beyond what it held once all seeds had been read
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**70,
        -(2**70),
        0.5,
        -0.0,
        1e308,
        1e-308,
        "",
        "x",
        "/",
        "..",
    ),
    *(
        "x" * 300,
        "\ud800",
        "\0",
        [],
        [[]],
        {},
        {"kind": "Report"},
        float("inf"),
        float("nan"),
        "1e999",
        [1] * 300,
    ),
)

Decoder = Callable[[bytes], None]


def _groups() -> tuple[Decoder, list[bytes]]:
    """Messages of a replay store: what is found whole must be what was written."""
    pieces: list[bytes] = []
    for number in range(3):
        place = Place(b"s" * 16, Kind.ROWS, 1, 0, sum(map(len, pieces)))
        entries = np.zeros(1, GROUP_ENTRY)
        arrow = batch_of(number).serialize()
        pieces.append(
            b"".join(map(bytes, encode(arrow, place, sequence=number, entries=entries, texts=b"g")))
        )
    start = Place(b"s" * 16, Kind.ROWS, 1, 0, 0)
    whole = set(pieces)

    def find(data: bytes) -> None:
        messages, _ = scan(memoryview(data), Path("fuzzed"), start, GROUP_ENTRY.itemsize, 0)
        for one in messages:
            if data[one.offset : one.offset + one.size_bytes] not in whole:
                raise RuntimeError("a message that was never written was found whole")

    return find, [b"".join(pieces), *pieces]


class _Said(Message, frozen=True):
    event: Event


def _reports() -> tuple[Decoder, list[bytes]]:
    """Decoder of reports to the tracker, and samples: what is read must survive being written."""
    samples: dict[Any, Any] = {int: 7, float: 1.5, str: "w1", bool: True}
    samples[PublicationKey] = samples[PublicationKey | None] = PublicationKey("run", 3, "fast", 1)
    kinds = typing.get_args(Event)
    events = [kind(*(samples[form] for form in typing.get_type_hints(kind).values())) for kind in kinds]

    def take(data: bytes) -> None:
        said = decode(data, _Said, "an event")
        if decode(msgspec.json.encode(said), _Said, "an event") != said:
            raise RuntimeError("a report that does not survive being written")

    return take, [msgspec.json.encode(_Said(event)) for event in events]


def _leases() -> tuple[Decoder, list[bytes]]:
    """Decoder of a worker's groups, tokens and counters, and samples: what passes must fit the ledger.

    These come as objects, by Ray; the input says which field of which is exchanged for what.
    """
    lease = Lease("L0.3", "L0.3", 0, "w0", Prompt(7, (1, 2), "9", "4 + 5"), 2, 0, 60.0)
    rules = Rules(vocabulary=100, max_tokens=64)
    group, published = honest(lease), ((0, "d0"), (2, "d2"))
    sample = Sample((10, 11), (-0.5, -0.25), (Span(0, 2, 0, "d0"),), "stop")
    tokens = LeaseTokens("L0.3", ((0, PartialRollout((1, 2), sample)),))
    stats = WorkerStats("w0", 2, "d2", 1, 4, 100, 2.5)

    def has_made(one: Trajectory) -> bool:
        spans = one.episode.spans
        return one.lineage == "L0" and all((span.version, span.digest) in published for span in spans)

    def take(data: bytes) -> None:
        rng = random.Random(data)
        damaged = data not in (b"group", b"tokens", b"stats")
        if data[:1] == b"g":
            message = _exchanged(group, rng) if damaged else group
            fault = group_fault(lease, message, has_made, rules)
            if fault is None:
                to_batch([message], created_s=1.0)
        elif data[:1] == b"t":
            fault = tokens_fault(_exchanged(tokens, rng) if damaged else tokens, rules)
        else:
            fault = stats_fault(_exchanged(stats, rng) if damaged else stats, "w0")
        if fault is not None and not damaged:
            raise RuntimeError(f"an honest message is refused: {fault}")
        if fault is not None:
            raise LeaseError(str(fault))

    return take, [b"group", b"tokens", b"stats"]


def _exchanged(message: Any, rng: random.Random) -> Any:
    """A message with one field, at any depth, exchanged, left out or doubled."""
    if dataclasses.is_dataclass(message) and not isinstance(message, type):
        name = rng.choice(dataclasses.fields(message)).name
        changed = _exchanged(getattr(message, name), rng)
        return dataclasses.replace(message, **{name: changed})
    if isinstance(message, tuple) and message and rng.random() < 0.8:
        at = rng.randrange(len(message))
        match rng.randrange(4):
            case 0:
                return (*message[:at], *message[at + 1 :])
            case 1:
                return (*message[:at], message[at], *message[at:])
            case _:
                return (*message[:at], _exchanged(message[at], rng), *message[at + 1 :])
    return rng.choice(VALUES)


DECODERS: Mapping[str, Callable[[], tuple[Decoder, list[bytes]]]] = {
    "patch": fuzz_wire.TARGETS["codec"],
    "frame": fuzz_wire.TARGETS["frames"],
    "manifest": fuzz_wire.TARGETS["messages"],
    "Arrow group": _groups,
    "lease message": _leases,
    "tracker report": _reports,
}


def fuzz(folder: Path, decoders: Sequence[str], inputs: int, processes: int) -> dict[str, Any]:
    """Figures by decoder."""
    log = folder / "fuzz.jsonl"
    done = {(line["decoder"], line["block"]): line for line in read_lines(log)}
    blocks = -(-inputs // BLOCK)
    wanted = [(name, block) for name in decoders for block in range(blocks) if (name, block) not in done]
    # Not an executor: with a limit of tasks per process it may hang when two processes reach it at once.
    with (
        get_context("spawn").Pool(processes, maxtasksperchild=20) as pool,
        log.open("a", buffering=1) as out,
    ):
        for line in pool.imap(_block, wanted):
            done[line["decoder"], line["block"]] = line
            out.write(json.dumps(line) + "\n")
            print(f"[fuzz] {line}", flush=True)
    figures = {}
    for name in decoders:
        lines = [line for (of, block), line in done.items() if of == name and block < blocks]
        figures[name] = {
            "inputs": sum(line["inputs"] for line in lines),
            "refused": sum(line["refused"] for line in lines),
            "grown_bytes": max((line["grown_bytes"] for line in lines), default=0),
            "findings": [finding for line in lines for finding in line["findings"]],
        }
    return figures


def verdicts(figures: dict[str, Any], inputs: int) -> dict[str, bool]:
    """Claims of the section, by their words."""
    return {
        f"{len(DECODERS)} decoders, {inputs:,} inputs each": set(figures) == set(DECODERS)
        and all(one["inputs"] >= inputs for one in figures.values()),
        "every input ends in a result or the decoder's own error": not any(
            one["findings"] for one in figures.values()
        ),
        f"no process grows by more than {CAP_BYTES >> 20} MiB": all(
            one["grown_bytes"] <= CAP_BYTES for one in figures.values()
        ),
    }


def _block(which: tuple[str, int]) -> dict[str, Any]:
    name, block = which
    decode, seeds = DECODERS[name]()
    if not any(_is_taken(decode, seed) for seed in seeds):
        raise RuntimeError(f"{name}: no honest input is taken, so fuzzing would only ever see refusals")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, findings = 0, []
    for data in mutants(seeds, random.Random(f"{name}/{block}")):
        try:
            decode(data)
        except EchoPlanesError:
            refused += 1
        except Exception:  # noqa: BLE001  every other error is what is looked for
            findings.append({"input": data.hex()[:4000], "error": traceback.format_exc()[-800:]})
            if len(findings) > 5:
                break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "decoder": name,
        "block": block,
        "inputs": BLOCK,
        "refused": refused,
        "grown_bytes": grown,
        "findings": findings,
    }


def _is_taken(decode: Decoder, data: bytes) -> bool:
    try:
        decode(data)
    except EchoPlanesError:
        return False
    return True


def mutants(seeds: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """A block of inputs: each a seed with one to four changes."""
    texts = [seed for seed in seeds if seed[:1] in (b"{", b"[")]
    for _ in range(BLOCK):
        if texts and rng.random() < 0.5:
            yield _changed_json(rng.choice(texts), rng)
            continue
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            _change(data, seeds, rng)
        yield bytes(data[:MOST_BYTES])


def _change(data: bytearray, seeds: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        case 2:
            del data[at : at + rng.randint(1, 64)]
        case 3:
            data[at:at] = rng.randbytes(rng.randint(1, 32))
        case 4:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at:] = other[start:]
        case 5:
            form = rng.choice(["<B", "<H", "<I", "<Q", ">I"])
            number = rng.choice(NUMBERS) & (256 ** struct.calcsize(form) - 1)
            data[at : at + struct.calcsize(form)] = struct.pack(form, number)
        case 6:
            data[at:at] = data[at : at + rng.randint(1, 256)] * rng.randint(1, 4)


def _changed_json(seed: bytes, rng: random.Random) -> bytes:
    """A JSON text with a value anywhere in it exchanged, left out or doubled."""
    root = {"": json.loads(seed)}
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo:
        holder = todo.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])
    holder, key = rng.choice(places)
    if isinstance(holder, dict) and rng.random() < 0.2 and key:
        holder[rng.choice(("", "kind", key + "x"))] = holder.pop(key)
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(root[""]).encode("utf-8", "surrogatepass")
