"""Random lives of the data plane, cut off at random: after every resume the accounting is whole.

Each life pulls, streams, submits, trains, saves and publishes at random, then dies without a word. The next
one goes on from the newest checkpoint, and with every prompt from the last token that was streamed of it
before that. Every draw comes from one seed, which a failure names.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from echo_planes.cluster.clock import ManualClock
from echo_planes.config.schema import Config
from echo_planes.data.replay.checkpoint_state import load_checkpoint_state
from echo_planes.data.service import DataService
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.index import Fate
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import Lease, LeaseTokens, PartialRollout, Sample, Span, TrainBatch
from tests.unit.test_buffer import answer
from tests.unit.test_checkpoint import of_lineage

LIVES = 4
MOVES = 30

Tokens = list[tuple[int, float, int]]  # token, logprob, version
Saved = dict[str, dict[int, Tokens]]  # of every checkpoint: what was streamed of unfinished prompts


class Life:
    """One incarnation of a data plane, from the newest checkpoint or from nothing."""

    def __init__(self, folder: Path, number: int, rng: random.Random, config: Config, known: Saved) -> None:
        self.folder, self.number, self.rng, self.config, self.known = folder, number, rng, config, known
        saved = sorted(folder.glob("saved-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        self.lineage = f"L{number}"
        self.data = DataService(
            config,
            self.lineage,
            folder / REPLAY_FOLDER,
            saved[-1] if saved else None,
            adapter=FakeTask(TaskOptions(), FakeTokenizer(), 0),
            clock=ManualClock(),
            wall_s=lambda: 1000.0,
        )
        self.waiting = dict(known[saved[-1].name]) if saved else {}
        self.tokens: dict[str, Tokens] = {}  # of each lease in hand
        self.continued = self.discarded = 0
        self.leases: list[Lease] = []
        self.step = self.newest = 0

    async def live(self) -> None:
        self.step = self.newest = await self.data.ready()
        counts = await self.data.counts()
        self.continued, self.discarded = counts.continued_tokens, counts.discarded_tokens
        await self.check()
        await self.check_prompts()
        await self.publish()
        await self.data.register("w", 0)
        await self.data.installed("w", self.newest)
        for _ in range(MOVES):
            await self.rng.choice(
                [self.pull, self.stream, self.stream, self.submit, self.submit, self.train, self.save]
            )()
            await self.check()
        # Dies: nothing is saved, only the system takes the lock away.
        await self.data.close()

    async def check(self) -> None:
        counts = await self.data.counts()
        assert counts.lost == 0
        assert (counts.continued_tokens, counts.discarded_tokens) == (self.continued, self.discarded)
        assert counts.trained == self.step * self.config.sampling.trajectories_per_step - counts.reused

    async def check_prompts(self) -> None:
        """Every prompt handed out so far was trained, is buffered, or goes out again: in one place, once."""
        await self.data.save(self.folder / f"look-{self.number}")
        cut, _ = load_checkpoint_state(self.folder / f"look-{self.number}" / "state.json")
        # Groups finished after the checkpoint are not gone on with.
        self.waiting = {index: tokens for index, tokens in self.waiting.items() if index in cut.returned}
        assert {index: tokens_of(partials) for index, partials in cut.partials.items()} == self.waiting
        store = StoreSnapshot(self.folder / REPLAY_FOLDER)
        ended = np.isin(store.index.groups["fate"], (Fate.TRAINED, Fate.UNINFORMATIVE))
        rows = store.gather(np.flatnonzero(ended))
        trained = rows.column("prompt_index").to_pylist()[:: self.config.sampling.samples_per_prompt]
        if self.config.replay.max_versions is not None:  # the rows of some are gone
            assert set(trained).isdisjoint(cut.returned)
            return
        places = [*trained, *cut.returned, *(group.prompt_index for group in cut.groups)]
        assert sorted(places) == list(range(cut.next_index))

    async def publish(self) -> None:
        self.newest = self.step
        await self.data.publish(self.newest, f"d{self.newest}")

    async def pull(self) -> None:
        leases = await self.data.pull("w", 0, self.rng.randint(1, 6), 0.0)
        for lease in leases:
            expected = self.waiting.pop(lease.prompt.index, [])
            found = self.tokens[lease.lease_id] = tokens_of(lease.partials)
            assert found in (expected, [])  # nothing where it is too old to be begun
            self.continued += len(found)
            self.discarded += len(expected) - len(found)
        self.leases += leases

    async def stream(self) -> None:
        if self.leases:
            lease = self.rng.choice(self.leases)
            mine = self.tokens[lease.lease_id]
            new = [(self.rng.randrange(99), -self.rng.random(), self.newest) for _ in range(3)]
            ids, logprobs, _ = zip(*new, strict=True)
            piece = Sample(ids, logprobs, (Span(0, 3, self.newest, f"d{self.newest}"),), "")
            sent = PartialRollout(() if mine else lease.prompt.token_ids, piece, len(mine))
            assert await self.data.stream("w", 0, [LeaseTokens(lease.lease_id, ((0, sent),))]) == ()
            mine += new

    async def submit(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            spans = [(lease.version, f"d{lease.version}")]
            if self.newest != lease.version and self.rng.random() < 0.5:
                spans.append((self.newest, f"d{self.newest}"))
            group = of_lineage(
                self.lineage, answer(lease, *spans, rewards=self.rng.choice([(1.0,), (1.0, 0.0)]))
            )
            await self.data.submit("w", 0, [(lease.lease_id, group)])

    async def train(self) -> None:
        if isinstance(await self.data.next_batch(self.step, 0.0), TrainBatch):
            self.step += 1
            await self.publish()
            if self.rng.random() < 0.7:
                await self.data.installed("w", self.newest)

    async def save(self) -> None:
        target = self.folder / f"saved-{self.step}"
        shutil.rmtree(target, ignore_errors=True)
        await self.data.save(target)
        open_ = {one.prompt.index: list(self.tokens[one.lease_id]) for one in self.leases} | self.waiting
        oldest = self.step - self.config.staleness.max_staleness
        self.known[target.name] = {
            index: tokens
            for index, tokens in open_.items()
            if tokens and min(version for _, _, version in tokens) >= oldest
        }


def tokens_of(partials: tuple[PartialRollout, ...]) -> Tokens:
    """Tokens that were streamed, of one call at most."""
    samples = [partial.sample for partial in partials]
    assert len(samples) <= 1
    return [
        (sample.token_ids[i], sample.logprobs[i], span.version)
        for sample in samples
        for span in sample.spans
        for i in range(span.start, span.stop)
    ]


@pytest.mark.parametrize("policy", ["drop", "wait"])
@pytest.mark.parametrize(("reuse", "refill"), [(1, "off"), (2, "off"), (1, "reward"), (2, "correct")])
def test_no_prompt_is_skipped_or_trained_twice_however_often_a_run_dies(
    tmp_path: Path, policy: str, reuse: int, refill: str
) -> None:
    went_on: list[int] = []
    uninformative = 0
    for seed in range(12):
        config = tiny_config(max_staleness=2, policy=policy, publish_every=1, reuse=reuse)
        sampling = replace_section(config.sampling, refill=refill, refill_limit=1.0)
        config = replace_section(config, sampling=sampling.model_dump())
        if seed % 2:
            config = replace_section(config, replay={"trim_every": 1, "max_versions": 4})
        folder = tmp_path / str(seed)
        rng = random.Random(seed)

        async def main(folder: Path = folder, rng: random.Random = rng, config: Config = config) -> Life:
            known: Saved = {}
            for number in range(LIVES):
                life = Life(folder, number, rng, config, known)
                await life.live()
                went_on.append(life.continued)
            return life

        life = asyncio.run(main())
        store = StoreSnapshot(folder / REPLAY_FOLDER).index.groups
        fates = Counter(store["fate"].tolist())
        uninformative += fates[Fate.UNINFORMATIVE]
        assert sum(fates.values()) == store.length, f"seed {seed}"
        steps = store["step"][store["fate"] == Fate.TRAINED]
        # Every step of the living lineage was trained on once, on whole batches, and none beyond it.
        groups_per_step = config.sampling.prompts_per_step
        trained = np.bincount(steps, minlength=life.step)
        assert len(trained) == life.step, f"seed {seed}"
        if reuse == 1:
            assert (trained == groups_per_step).all(), f"seed {seed}"
        else:
            assert (trained * reuse >= groups_per_step).all(), f"seed {seed}"
    assert (uninformative > 50) == (refill != "off")
    assert sum(went_on) > 50, f"{went_on}: hardly anything was gone on with"
