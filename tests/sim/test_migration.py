"""Workers die in the middle of their answers; others go on from the last token that was streamed.

The whole loop in virtual time. Every token that any engine samples has a number of its own and is logged with
what it was sampled after, so an answer shows which workers made it, and whether it is what was sampled.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.loop.runner import Outcome
from echo_planes.testing.simulation import FakeEngine, Faults, Simulation, Trace, replace_section, tiny_config
from echo_planes.types import Draw, Sample, Span, joined
from tests.thorough import examples

FIRST = 0x10000  # number of the first token: above every character of the prompts
SECONDS_PER_TOKEN = (0.04, 0.05, 0.08)
SEEDS = examples(12)
STEPS = 15


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token."""

    after: int  # hash of all tokens before it
    incarnation: tuple[str, int]  # worker, epoch
    request: int
    member: int  # of the request's samples
    prompt: tuple[int, ...]
    version: int


def long_engine(log: list[Sampled]) -> type[FakeEngine]:
    """An engine whose answers have 30 to 80 tokens, at a steady rate. Tokens are numbered by the log."""

    class LongEngine(FakeEngine):
        def __init__(self, worker_id: str, epoch: int, seconds_per_token: float, *others: Any) -> None:
            super().__init__(worker_id, epoch, seconds_per_token, *others)
            self._me = (worker_id, epoch)
            self._num_requests = 0

        async def generate(
            self,
            prompt_ids: Sequence[int],
            *,
            num_samples: int,
            max_new_tokens: int,
            on_tokens: Callable[[int, Sample], None],
            draw: Draw | None = None,
        ) -> list[Sample]:
            request, self._num_requests = self._num_requests, self._num_requests + 1
            context = tuple(prompt_ids)
            prompt = tuple(token for token in context if token < FIRST)
            members = [list(context) for _ in range(num_samples)]
            pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
            while any(not sample or not sample[-1].finish_reason for sample in pieces):
                await asyncio.sleep(self._seconds_per_token)
                self._check_alive()
                for member, tokens in enumerate(members):
                    if pieces[member] and pieces[member][-1].finish_reason:
                        continue
                    token = FIRST + len(log)
                    log.append(Sampled(hash(tuple(tokens)), self._me, request, member, prompt, self.version))
                    tokens.append(token)
                    # Its first token says how long an answer is, whoever goes on with it.
                    ends = len(tokens) - len(prompt) == 30 + tokens[len(prompt)] * 7919 % 51
                    span = Span(0, 1, self.version, self.digest)
                    piece = Sample((token,), (-0.5,), (span,), "stop" if ends else "")
                    pieces[member].append(piece)
                    on_tokens(member, piece)
            return [joined(sample) for sample in pieces]

    return LongEngine


def simulate(
    folder: Path, seed: int, stream_s: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, Trace, list[Sampled], Faults]:
    """A run in which three workers die three times each."""
    rng = random.Random(seed)
    log: list[Sampled] = []
    monkeypatch.setattr("echo_planes.testing.simulation.FakeEngine", long_engine(log))
    faults = Faults()
    for index in range(len(SECONDS_PER_TOKEN)):
        dies_at_s = 3.0
        for epoch in range(3):
            dies_at_s += rng.uniform(2.0, 10.0)
            faults.die_at_s[(f"w{index}", epoch)] = dies_at_s
    config = tiny_config(steps=STEPS, max_staleness=6)
    sampling = replace_section(config.sampling, stream_s=stream_s, max_new_tokens=100)
    simulation = Simulation(
        replace_section(config, sampling=sampling.model_dump()),
        folder,
        seconds_per_token=SECONDS_PER_TOKEN,
        faults=faults,
        seed=seed,
    )
    outcome, trace = simulation.run()
    return outcome, trace, log, faults


@pytest.mark.parametrize("stream_s", [0.25, 1.0, 2.0])
def test_killed_workers_cost_one_streaming_interval(
    tmp_path: Path, stream_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    continued = deaths = 0
    again: list[int] = []
    for seed in range(SEEDS):
        outcome, trace, log, faults = simulate(tmp_path / str(seed), seed, stream_s, monkeypatch)
        rows = StoreSnapshot(tmp_path / str(seed) / REPLAY_FOLDER).table().to_pylist()
        counts = outcome.counts
        assert (outcome.status, counts.lost, len(trace.batches)) == ("done", 0, STEPS), f"seed {seed}"
        assert (counts.dropped_stale, counts.discarded_tokens) == (0, 0), f"seed {seed}"
        assert len(rows) == counts.accepted
        assert set(Counter(row["prompt_index"] for row in rows).values()) == {2}, "accepted twice"
        accepted = check_answers(rows, log)
        deaths += sum(
            f"worker {worker}.{epoch} alive=False" in trace.lines for worker, epoch in faults.die_at_s
        )
        finished = {tuple(row["prompt_ids"]) for row in rows}
        wasted = Counter(
            (one.incarnation, one.request, one.member)
            for number, one in enumerate(log)
            if number + FIRST not in accepted and one.prompt in finished
        )
        for (incarnation, _, _), tokens in wasted.items():
            assert incarnation in faults.die_at_s, f"seed {seed}: {incarnation} lives, and its work was lost"
            rate = 1.0 / SECONDS_PER_TOKEN[int(incarnation[0].removeprefix("w"))]
            assert tokens <= stream_s * rate + 1, f"seed {seed}: {incarnation}"
        again += wasted.values()
        continued += counts.continued
    assert deaths > 8 * SEEDS
    assert continued > 2 * SEEDS
    assert again  # what was not streamed yet was sampled again


def check_answers(rows: list[dict[str, Any]], log: list[Sampled]) -> set[int]:
    """Every token stands where it was sampled, and is of the version that it was sampled under.

    Returns:
        The tokens' numbers.
    """
    accepted: set[int] = set()
    for row in rows:
        tokens = tuple(row["response_ids"])
        assert len(tokens) == 30 + tokens[0] * 7919 % 51
        versions: list[int] = []
        for stop, version in zip(row["span_stops"], row["span_versions"], strict=True):
            versions += [version] * (stop - len(versions))
        for place, (token, version) in enumerate(zip(tokens, versions, strict=True)):
            one = log[token - FIRST]
            assert one.after == hash((*row["prompt_ids"], *tokens[:place]))
            assert one.version == version
        assert accepted.isdisjoint(tokens)
        accepted.update(tokens)
    return accepted


def test_answers_of_many_workers_are_no_longer_than_those_of_one_and_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trace, log, _ = simulate(tmp_path, 0, 0.25, monkeypatch)
    rows = StoreSnapshot(tmp_path / REPLAY_FOLDER).table().to_pylist()
    made_by = [{log[token - FIRST].incarnation for token in row["response_ids"]} for row in rows]
    assert max(map(len, made_by)) >= 2
    trained = {name for batch in trace.batches for name in batch.trajectory_ids}
    migrated = [row["trajectory_id"] for row, workers in zip(rows, made_by, strict=True) if len(workers) > 1]
    assert trained.intersection(migrated)
