"""Attacks of a hostile worker on the ledger, by name: mounted on a whole data plane in one process.

`LEDGER_ATTACKS` is a table for tests and benchmarks: `mount` plays one of them and says what came of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from echo_planes.cluster.clock import ManualClock
from echo_planes.data.replay.dispatch import policy_named
from echo_planes.data.service import DataService
from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.errors import LeaseError
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import (
    Episode,
    Group,
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Reward,
    Sample,
    Span,
    TrainBatch,
    Trajectory,
    WorkerStats,
)

ATTACKER, HONEST = "evil", "good"
VERSIONS = (0, 2)  # published, each under d<version>
VOCABULARY = 259  # of the embedded model
# Counters that may change where a message is refused: how often that happened, and leases that ran out.
COUNTERS = ("refused", "malformed", "failed", "expired", "discarded_tokens", "continued", "continued_tokens")


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack, and the named reason it must be refused with."""

    name: str
    reason: str  # of the receipt, or a part of the error
    play: Callable[[Arena], Awaitable[str]]  # returns the reason, or "accepted"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of an attack."""

    name: str
    reason: str
    is_refused: bool  # with the reason that it must be refused with
    is_unchanged: bool  # the store's bytes, and the cut that a checkpoint would hold, but for `COUNTERS`
    is_served: bool  # an honest worker is served afterwards, and its batch is whole

    @property
    def is_resisted(self) -> bool:
        return self.is_refused and self.is_unchanged and self.is_served


class Arena:
    """A data plane with an attacker and an honest worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        config = tiny_config()
        config = config.model_copy(update={"sampling": replace_section(config.sampling, router="jsq")})
        self.data = DataService(
            config,
            "L0",
            folder / "replay",
            adapter=FakeTask(TaskOptions(), FakeTokenizer(), 0),
            clock=self.clock,
            wall_s=lambda: 1000.0,
            dispatch=policy_named("jsq", 2),
        )
        self._num_saved = 0
        self.before = ""

    async def open(self) -> None:
        await self.data.ready()
        for version in VERSIONS:
            await self.data.publish(version, f"d{version}")
        for worker in (ATTACKER, HONEST):
            await self.data.register(worker, 0)
            await self.data.installed(worker, VERSIONS[-1])

    async def lease(self, worker: str = ATTACKER) -> Lease:
        """A lease of a worker; what is as it is now must be so when the attack is over."""
        await self.data.tell(0, WorkerStats(worker, 2, "d2", 0, 0, 0, 0.0, slots=4))
        (lease,) = await self.data.pull(worker, 0, 1, 0.0)
        self.before = await self.state()
        return lease

    async def submit(self, lease: Lease, group: Any, *, worker: str = ATTACKER, epoch: int = 0) -> str:
        (receipt,) = await self.data.submit(worker, epoch, [(lease.lease_id, group)])
        return "accepted" if receipt.accepted else receipt.reason

    async def state(self) -> str:
        """Hash of all that is durable, or would be if a checkpoint were made now."""
        folder = self.folder / f"saved-{self._num_saved}"
        self._num_saved += 1
        await self.data.save(folder)
        total = hashlib.sha256()
        for path in sorted([*folder.iterdir(), *(self.folder / "replay").rglob("*")]):
            if not path.is_file() or path.name == "lock":
                continue
            data = path.read_bytes()
            if path.name == "state.json":
                cut = json.loads(data)
                for counter in COUNTERS:
                    cut["counts"].pop(counter, None)
                data = json.dumps(cut, sort_keys=True).encode()
            total.update(path.name.encode() + hashlib.sha256(data).digest())
        return total.hexdigest()

    async def serves(self) -> bool:
        """Whether an honest worker fills a batch now."""
        groups: list[tuple[str, Group]] = []
        while len(groups) < 4:
            await self.data.tell(0, WorkerStats(HONEST, 2, "d2", 0, 0, 0, 0.0, slots=4))
            self.clock.advance(5.0)
            leases = await self.data.pull(HONEST, 0, 4, 0.0)
            if not leases:
                return False
            groups += [(lease.lease_id, honest(lease)) for lease in leases]
            receipts = await self.data.submit(HONEST, 0, groups[-len(leases) :])
            if not all(receipt.accepted for receipt in receipts):
                return False
        batch = await self.data.next_batch(0, 0.0)
        return isinstance(batch, TrainBatch) and bool(np.isfinite(batch.sampler_logprobs).all())


async def mount(attack: Attack, folder: Path) -> Verdict:
    """Play one attack on a data plane in `folder`, which must not be there yet."""
    folder.mkdir(parents=True)
    arena = Arena(folder)
    await arena.open()
    try:
        try:
            reason = await attack.play(arena)
        except LeaseError as why:
            reason = str(why)
        except Exception as why:  # noqa: BLE001  whatever else is raised is no named reason
            reason = f"{type(why).__name__}: {why}"
        try:
            is_unchanged = await arena.state() == arena.before
            is_served = await arena.serves()
        except Exception:  # noqa: BLE001  the data plane is broken: the attack has come through
            is_unchanged = is_served = False
        return Verdict(attack.name, reason[:200], attack.reason in reason, is_unchanged, is_served)
    finally:
        await arena.data.close()


def mount_all(folder: Path) -> list[Verdict]:
    """All of `LEDGER_ATTACKS`, each on a data plane of its own."""
    return [asyncio.run(mount(attack, folder / f"{i}")) for i, attack in enumerate(LEDGER_ATTACKS)]


def honest(lease: Lease) -> Group:
    """A good answer: an environment's token between two turns, of two versions."""
    episode = Episode(
        response_ids=(10, 11, 12, 13),
        response_mask=(True, False, True, True),
        logprobs=(-0.5, 0.0, -0.25, -3.0),
        spans=(Span(0, 1, 0, "d0"), Span(1, 4, 2, "d2")),
        finish_reason="stop",
        text="né 7",
        top_logprobs=(((10, -0.5), (9, -1.5)), (), ((12, -0.25), (9, -math.inf)), ((13, -3.0),)),
        num_turns=2,
        turn_rewards=(0.25, -1.0),
        notes='{"seat": 1}',
    )
    samples = [
        Trajectory(
            f"{lease.group_id}/{i}",
            lease.group_id,
            lease.prompt,
            episode,
            Reward(float(i), i == 1, {"exact": 0.5}),
            lease.worker_id,
            "L0",
        )
        for i in range(lease.num_samples)
    ]
    return Group(lease.group_id, tuple(samples))


def with_decimals(prompt: Prompt) -> Prompt:
    """The same prompt to whoever asks whether they are equal."""
    return replace(prompt, token_ids=tuple(map(float, prompt.token_ids)))  # type: ignore[arg-type]


# --- forgeries -----------------------------------------------------------------------------------

Forge = Callable[[Trajectory], Trajectory]


def forged(group: Group, forge: Forge) -> Group:
    """A group whose last sample is forged."""
    *others, last = group.trajectories
    return replace(group, trajectories=(*others, forge(last)))


def sample(name: str, reason: str, forge: Forge) -> Attack:
    """One sample of an otherwise good group is forged."""

    async def play(arena: Arena) -> str:
        lease = await arena.lease()
        return await arena.submit(lease, forged(honest(lease), forge))

    return Attack(name, reason, play)


def episode(name: str, reason: str, **changes: Any) -> Attack:
    return sample(name, reason, lambda t: replace(t, episode=replace(t.episode, **changes)))


def reward(name: str, reason: str, **changes: Any) -> Attack:
    return sample(name, reason, lambda t: replace(t, reward=replace(t.reward, **changes)))


def whole(name: str, reason: str, forge: Callable[[Group, Lease], Any]) -> Attack:
    async def play(arena: Arena) -> str:
        lease = await arena.lease()
        return await arena.submit(lease, forge(honest(lease), lease))

    return Attack(name, reason, play)


def streamed(name: str, **changes: Any) -> Attack:
    """A piece of an answer is forged: the worker is told to give its lease up, nothing kept changes."""

    async def play(arena: Arena) -> str:
        lease = await arena.lease()
        partial = {"context": lease.prompt.token_ids, "first": 0}
        piece = {"token_ids": (10, 11), "logprobs": (-0.5, -0.5), "spans": (Span(0, 2, 2, "d2"),)}
        call = changes.get("call", 0)
        partial |= {key: value for key, value in changes.items() if key in partial}
        piece |= {key: value for key, value in changes.items() if key in piece}
        sample = Sample(**piece, finish_reason="")  # type: ignore[arg-type]
        message = LeaseTokens(lease.lease_id, ((call, PartialRollout(**partial, sample=sample)),))  # type: ignore[arg-type]
        told = await arena.data.stream(ATTACKER, 0, [message])
        return "given up" if told == (lease.lease_id,) else "accepted"

    return Attack(name, "given up", play)


def counters(name: str, **changes: Any) -> Attack:
    """Counters that nobody can believe: they are not looked at, and complained of."""

    async def play(arena: Arena) -> str:
        await arena.lease()
        stats = replace(WorkerStats(ATTACKER, 2, "d2", 0, 0, 0, 0.0, slots=4), **changes)
        before = (await arena.data.counts()).malformed
        await arena.data.tell(0, stats)
        return "complained of" if (await arena.data.counts()).malformed > before else "accepted"

    return Attack(name, "complained of", play)


# --- attacks on leases ---------------------------------------------------------------------------


async def _expired(arena: Arena) -> str:
    lease = await arena.lease()
    arena.clock.advance(100_000.0)
    return await arena.submit(lease, honest(lease))


async def _foreign(arena: Arena) -> str:
    lease = await arena.lease(HONEST)
    stolen = replace(honest(lease), trajectories=tuple(_as(t, ATTACKER) for t in honest(lease).trajectories))
    return await arena.submit(lease, stolen)


async def _replayed(arena: Arena) -> str:
    lease = await arena.lease()
    assert await arena.submit(lease, honest(lease)) == "accepted"
    arena.before = await arena.state()
    return await arena.submit(lease, honest(lease))


async def _invented(arena: Arena) -> str:
    lease = await arena.lease()
    return await arena.submit(replace(lease, lease_id="L0.999"), honest(lease))


async def _older_incarnation(arena: Arena) -> str:
    lease = await arena.lease()
    return await arena.submit(lease, honest(lease), epoch=-1)


async def _nameless_lease(arena: Arena) -> str:
    lease = await arena.lease()
    first: Any = [(lease.lease_id, honest(lease)), ([], honest(lease))]  # the first alone would be good
    (receipt, *_) = await arena.data.submit(ATTACKER, 0, first)
    return "accepted" if receipt.accepted else receipt.reason


async def _handed_over_twice(arena: Arena) -> str:
    """Of two hand-overs in one message the second would find no lease, and the prompt be forgotten."""
    lease = await arena.lease()
    given = await arena.data.hand_over(ATTACKER, 0, [LeaseTokens(lease.lease_id, ())] * 2)
    return f"given up {given}"


async def _absurd_room(arena: Arena) -> str:
    await arena.lease()
    room: Any = "a lot"
    await arena.data.pull(ATTACKER, 0, room, 0.0)
    return "accepted"


async def _again_and_again(arena: Arena) -> str:
    """Malformed groups one after the other: the worker is fenced before it has worn out a second prompt."""
    for _ in range(4):
        lease = await arena.lease()
        await arena.submit(lease, forged(honest(lease), lambda t: replace(t, trajectory_id="x")))
        arena.clock.advance(1.0)
    await arena.data.pull(ATTACKER, 0, 1, 0.0)
    return "accepted"


def _as(trajectory: Trajectory, worker_id: str) -> Trajectory:
    return replace(trajectory, worker_id=worker_id)


def _spans(*spans: tuple[int, int, int]) -> tuple[Span, ...]:
    return tuple(Span(start, stop, version, f"d{version}") for start, stop, version in spans)


HUGE = 2**70
LEDGER_ATTACKS: tuple[Attack, ...] = (
    # the lease
    Attack("an expired lease", "expired", _expired),
    Attack("a lease of another worker", "fenced", _foreign),
    Attack("a lease that was settled before", "duplicate", _replayed),
    Attack("a lease that nobody issued", "unknown", _invented),
    Attack("an older incarnation", "fenced", _older_incarnation),
    Attack("a lease without a name, beside a good one", "pairs of a lease's name", _nameless_lease),
    Attack("a lease that is handed over twice at once", "given up 1", _handed_over_twice),
    Attack("a request for no number of leases", "asked for str", _absurd_room),
    # whose it is, and what made it
    sample("of another run", "unpublished", lambda t: replace(t, lineage="L9")),
    sample("of another worker", "mismatched", lambda t: _as(t, HONEST)),
    sample("to another prompt", "mismatched", lambda t: replace(t, prompt=Prompt(0, (1, 2, 3)))),
    whole("another group's name", "incomplete", lambda g, _: replace(g, group_id="L0.77")),
    episode("a version that is yet to come", "unpublished", spans=_spans((0, 4, 99))),
    episode("a negative version", "unpublished", spans=_spans((0, 4, -5))),
    episode("a version under another digest", "unpublished", spans=(Span(0, 4, 2, "forged"),)),
    episode("spans out of order", "unspanned", spans=_spans((2, 4, 2), (0, 2, 0))),
    episode("spans that overlap", "unspanned", spans=_spans((0, 3, 0), (2, 4, 2))),
    episode("spans that leave tokens out", "unspanned", spans=_spans((0, 3, 2))),
    episode("more spans than tokens", "unspanned", spans=_spans((0, 1, 0)) * 100_000),
    # how many, and how long
    whole("no samples", "incomplete", lambda g, _: replace(g, trajectories=())),
    whole("too few samples", "incomplete", lambda g, _: replace(g, trajectories=g.trajectories[:1])),
    whole("too many samples", "incomplete", lambda g, _: replace(g, trajectories=g.trajectories * 2)),
    sample("a sample's name twice", "wrong_name", lambda t: replace(t, trajectory_id=f"{t.group_id}/0")),
    sample("a sample's name of another group", "wrong_name", lambda t: replace(t, trajectory_id="L0.9/1")),
    episode(
        "an empty answer",
        "unspanned",
        response_ids=(),
        response_mask=(),
        logprobs=(),
        spans=(),
        top_logprobs=(),
    ),
    episode(
        "an endless answer",
        "too_long",
        response_ids=(10,) * 100_000,
        response_mask=(True,) * 100_000,
        logprobs=(-0.5,) * 100_000,
        spans=_spans((0, 100_000, 2)),
        top_logprobs=(),
    ),
    episode("too long a text", "too_long", text="x" * (2**22 + 1)),
    episode("half a character", "bad_text", text="\ud800"),
    episode("half a character in the notes", "bad_text", notes='{"a": "\udfff"}'),
    episode("half a character in the finish reason", "bad_text", finish_reason="\ud800"),
    # tokens
    episode("an id beyond the vocabulary", "bad_tokens", response_ids=(10, 11, 12, VOCABULARY)),
    episode("a negative id", "bad_tokens", response_ids=(10, 11, 12, -1)),
    episode("a huge id", "bad_tokens", response_ids=(10, 11, 12, HUGE)),
    episode("an id that is no whole number", "bad_tokens", response_ids=(10, 11, 12, 1.5)),
    episode("an alternative beyond the vocabulary", "bad_tokens", top_logprobs=(((HUGE, -1.0),),)),
    episode("a mask that is too short", "bad_mask", response_mask=(True,) * 3),
    episode("a mask that is too long", "bad_mask", response_mask=(True,) * 5),
    episode("a mask of numbers", "bad_mask", response_mask=(1, 0, 1, 7)),
    episode("a mask of nothing", "bad_mask", response_mask=(False,) * 4),
    # log-probabilities
    episode("an alternative's huge whole logprob", "bad_logprobs", top_logprobs=(((10, -(2**70)),),)),
    episode("a logprob of NaN", "bad_logprobs", logprobs=(-0.5, 0.0, -0.25, math.nan)),
    episode("a positive logprob", "bad_logprobs", logprobs=(-0.5, 0.0, -0.25, 0.7)),
    episode("an infinite logprob", "bad_logprobs", logprobs=(-0.5, 0.0, -0.25, math.inf)),
    episode("a logprob of minus infinity", "bad_logprobs", logprobs=(-0.5, 0.0, -0.25, -math.inf)),
    episode("a logprob that nothing was drawn with", "bad_logprobs", logprobs=(-0.5, 0.0, -0.25, -1e30)),
    episode("too few logprobs", "bad_logprobs", logprobs=(-0.5,) * 3),
    episode("too many logprobs", "bad_logprobs", logprobs=(-0.5,) * 5),
    episode("logprobs of text", "bad_logprobs", logprobs=("-0.5",) * 4),
    episode("alternatives of NaN", "bad_logprobs", top_logprobs=(((10, math.nan),),)),
    # rewards and counters
    reward("a reward of NaN", "bad_number", value=math.nan),
    reward("an infinite reward", "bad_number", value=math.inf),
    reward("a reward of 1e300", "bad_number", value=1e300),
    reward("a reward of text", "wrong_type", value="1"),
    reward("a part of NaN", "bad_number", parts={"exact": math.nan}),
    reward("a million parts", "too_long", parts={str(i): 0.0 for i in range(2_000)}),
    episode("a turn's reward of NaN", "bad_number", turn_rewards=(math.nan,)),
    episode("a huge number of turns", "too_long", num_turns=HUGE),
    counters("negative seconds", busy_s=-1.0),
    counters("seconds of NaN", full_s=math.nan),
    counters("1e300 tokens a second", full_tokens=10**300, full_s=1.0),
    counters("a negative number of places", slots=-(2**40)),
    # other types
    sample(
        "decimals for the prompt's tokens", "bad_tokens", lambda t: replace(t, prompt=with_decimals(t.prompt))
    ),
    whole("no group at all", "wrong_type", lambda *_: None),
    whole("a group without samples", "wrong_type", lambda g, _: replace(g, trajectories=None)),  # type: ignore[arg-type]
    sample("a sample without an answer", "wrong_type", lambda t: replace(t, episode=None)),  # type: ignore[arg-type]
    sample("a status that is a column of the ledger", "wrong_name", lambda t: replace(t, status="accepted")),  # type: ignore[arg-type]
    episode("bytes for a text", "wrong_type", text=b"7"),
    # what is streamed, and what happens again
    streamed("streamed: a logprob of NaN", logprobs=(-0.5, math.nan)),
    streamed("streamed: a positive logprob", logprobs=(-0.5, 0.7)),
    streamed("streamed: too few logprobs", logprobs=(-0.5,)),
    streamed("streamed: a huge id", token_ids=(10, HUGE)),
    streamed("streamed: a question of foreign ids", context=(VOCABULARY, 1)),
    streamed("streamed: an endless question", context=(1,) * 100_000),
    streamed("streamed: a negative call", call=-1),
    streamed("streamed: spans that leave tokens out", spans=_spans((0, 1, 2))),
    Attack("malformed groups again and again", "is fenced", _again_and_again),
)
