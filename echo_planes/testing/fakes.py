"""Public fakes: a task, an engine, weights and a learner, with virtual time and planned faults."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.data.tasks.reward_child import outcomes
from echo_planes.errors import RunError, WeightsError, WorkerGoneError
from echo_planes.types import (
    Adjustment,
    BroadcastStats,
    Draw,
    Episode,
    Manifest,
    Prompt,
    Publication,
    Reward,
    RewardFailure,
    Sample,
    Span,
    StepStats,
    TrainBatch,
    Trajectory,
    Uploads,
    joined,
)


class FakeTokenizer:
    """Tokenizer with one token per character."""

    eos_token_id: int | None = 0

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in token_ids if i)

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        return self.encode("".join(turn["content"] for turn in conversation))


class FakeTask(TaskAdapter):
    """Task that asks for the last digit of the prompt's number."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, tuple(self.tokenizer.encode(f"{index}?")), answer=str(index % 10))

    def eval_prompt(self, index: int) -> Prompt:
        return self.prompt(1_000_000 + index)

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        correct = episode.text == prompt.answer
        return Reward(float(correct), correct)


class InlineScorer:
    """Scorer that computes rewards in the calling process, for tasks that do not hang."""

    def __init__(self, task: TaskAdapter) -> None:
        self._task = task

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Reward | RewardFailure]:
        return list(outcomes(self._task, prompt, episodes))

    def longest(self) -> str:
        return ""

    async def close(self) -> None:
        """Do nothing: the scorer has started nothing."""


def fake_digest(version: int) -> str:
    """Return the fakes' digest of version `version`."""
    return f"fake:{version:08x}"


@dataclass
class Faults:
    """Planned faults of a simulation. Times are virtual seconds."""

    die_at_s: dict[tuple[str, int], float] = field(default_factory=dict)  # (worker, epoch) -> time
    lose_installs: set[tuple[str, int]] = field(default_factory=set)  # (worker, version): lost once
    refuse_installs: set[tuple[str, int]] = field(
        default_factory=set
    )  # (worker, version): wrong digest, once
    broken_workers: set[str] = field(default_factory=set)  # refuse all weights
    learner_dies_at_step: int | None = None
    learner_dies_after: int = 0  # parts of that step
    learner_stands_still_at_step: int | None = None
    k3: Callable[[int, Adjustment], float] | None = None  # k3 of a step under the guard's adjustment, nats
    store_s: float = 0.0  # that the store takes for a version; 0: it is quick
    store_hangs_at_s: float = math.inf
    # Chance of a right answer, by version and prompt.
    skill: Callable[[int, str], float] = lambda version, _: min(0.95, 0.3 + 0.02 * version)
    mismatch: float = 0.0  # between learner and sampler on the same version, nats


class FakeEngine:
    """Engine that answers right with a probability that grows with the version, in virtual time."""

    def __init__(
        self, worker_id: str, epoch: int, seconds_per_token: float, faults: Faults, seed: int
    ) -> None:
        self._id = worker_id
        self._seconds_per_token = seconds_per_token
        self._faults = faults
        self._dies_at_s = faults.die_at_s.get((worker_id, epoch))
        self._rng = random.Random(f"{seed}/{worker_id}/{epoch}")
        self.version = -1
        self.digest = ""
        self.digest_mismatches = 0
        self.last_pause_s = 0.0
        self.progress = ""  # its prompts take no time
        self.about = "simulated"

    def _check_alive(self) -> None:
        if self._dies_at_s is not None and asyncio.get_running_loop().time() >= self._dies_at_s:
            raise WorkerGoneError(f"{self._id} was killed")

    async def start(self) -> None:
        await asyncio.sleep(1.0)
        self._check_alive()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
        asked = list(prompt_ids)
        done = len(asked) - 1 - max(i for i, token in enumerate(asked) if token == ord("?"))
        for position in range(done, 2):  # one digit and the end token
            await asyncio.sleep(self._seconds_per_token * self._rng.uniform(0.5, 1.5))
            self._check_alive()
            skill = self._faults.skill(self.version, "".join(map(chr, asked[: asked.index(ord("?"))])))
            for i in range(num_samples):
                right = asked[asked.index(ord("?")) - 1]
                token = 0 if position else right if self._rng.random() < skill else ord("x")
                piece = Sample(
                    (token,),
                    (-0.5 if position == 0 else -0.1,),
                    (Span(0, 1, self.version, self.digest),),
                    "stop" if position == 1 else "",
                )
                pieces[i].append(piece)
                on_tokens(i, piece)
        return [joined(sample) for sample in pieces]

    async def install(self, publication: Publication) -> None:
        await asyncio.sleep(0.05)
        self._check_alive()
        manifest = publication.manifest
        key = (self._id, manifest.version)
        if self._id in self._faults.broken_workers:
            raise WeightsError("these weights do not fit this engine")
        if key in self._faults.refuse_installs:
            self._faults.refuse_installs.discard(key)
            self.digest_mismatches += 1
            raise WeightsError("live digest differs from the manifest's")
        self.version, self.digest = manifest.version, manifest.digest

    async def live_digest(self) -> str:
        return self.digest

    async def close(self) -> None:
        return None


class FakeWeights:
    """`rollout.sources.WeightSource` that has every version at once, without bytes."""

    async def staged(self, manifest: Manifest, fresh: bool) -> Publication:
        return Publication(manifest, np.zeros(0, np.uint8))

    async def settled(self, version: int, ok: bool) -> str:
        return ""


class FakeLearner:
    """Learner that counts steps and takes virtual time."""

    def __init__(self, t_train_s: float, faults: Faults, lineage: str) -> None:
        self._lineage = lineage
        self._t_train_s = t_train_s
        self._faults = faults
        self._last = -1
        self._all: set[int] = set()  # versions published
        self._adjustment = Adjustment()
        self._stands_still = False
        self.step = 0
        self.parts = 0  # of the present step, begun

    def _published(self, version: int, base: int) -> Manifest:
        return Manifest(
            lineage=self._lineage,
            version=version,
            num_updates=version,
            codec="full" if base < 0 else "overwrite",
            base_version=base,
            base_digest=fake_digest(base) if base >= 0 else "",
            digest=fake_digest(version),
            payload_digest="",
            payload_bytes=0,
            dense_bytes=0,
            changed_elements=0,
            total_elements=0,
        )

    async def start(self, resume_dir: Path | None) -> tuple[int, str]:
        await asyncio.sleep(0.5)
        if resume_dir:
            self.step = int((resume_dir / "learner" / "step").read_text())
        return self.step, "simulated"

    async def train_part(self, batch: TrainBatch) -> None:
        await self._train(batch)

    async def progress(self) -> dict[str, str]:
        """Return a text that changes with time, unless the learner stands still."""
        now_s = asyncio.get_running_loop().time()
        return {"": "micro-batch 1 of 2" if self._stands_still else f"micro-batch {now_s:.0f}"}

    async def _train(self, batch: TrainBatch) -> None:
        """Die if that is due, else take the time of a step, or of this part of one."""
        self.parts += 1
        if self._faults.learner_dies_at_step == batch.step and self.parts > self._faults.learner_dies_after:
            raise RunError(f"the learner was killed at step {batch.step}")
        if self._faults.learner_stands_still_at_step == batch.step:
            self._stands_still = True
            await asyncio.get_running_loop().create_future()  # never answers
        share = batch.num_trajectories / batch.step_trajectories if batch.step_trajectories else 1.0
        await asyncio.sleep(self._t_train_s * share)

    async def train_step(self, batch: TrainBatch) -> StepStats:
        await self._train(batch)
        self.step += 1
        self.parts = 0
        zero = 0.0
        return StepStats(
            step=batch.step,
            loss=-float(batch.rewards.mean()),
            grad_norm=1.0,
            learning_rate=zero,
            t_train_s=self._t_train_s,
            tokens=batch.num_tokens,
            tokens_forward=len(batch.token_ids),
            mismatch_mean=self._faults.mismatch if batch.step == 0 else zero,
            mismatch_p99=zero,
            clip_fraction=zero,
            tis_mean=1.0,
            entropy=zero,
            kl_reference=zero,
            groups_skipped=0,
            num_updates=self.step,
            k3=self._faults.k3(batch.step, self._adjustment) if self._faults.k3 else None,
        )

    async def adjust(self, adjustment: Adjustment) -> None:
        self._adjustment = adjustment

    async def publish(self, version: int) -> Manifest:
        base = -1 if version == self._last else self._last
        self._last = version
        self._all.add(version)
        return self._published(version, base)

    async def distil(self, schedule: object, version: int) -> None:
        return None

    async def commit(self, version: int) -> None:
        return None

    async def broadcasts(self) -> list[BroadcastStats]:
        return []

    async def uploads(self) -> Uploads:
        """Return the state of a store that takes a version every `store_s` seconds, until it hangs."""
        store_s, hangs_at_s = self._faults.store_s, self._faults.store_hangs_at_s
        done = (
            int(min(asyncio.get_running_loop().time(), hangs_at_s) / store_s) if store_s else len(self._all)
        )
        unstored = tuple(sorted(self._all)[done:])
        return Uploads(unstored, not unstored, f"{len(unstored)} to come", "")

    async def mismatch(self, trajectories: Sequence[Trajectory]) -> float:
        return self._faults.mismatch

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "step").write_text(str(self.step))

    async def close(self) -> None:
        return None
