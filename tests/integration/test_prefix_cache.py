"""The prefix cache under installs: vLLM's own scheduler and block manager, driven without a model.

A hostile schedule of requests, aborts, preemptions and pauses. Of every slot of the KV cache the test keeps
which tokens it stands for, and how many pauses had been when the request that wrote it started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.rollout.vllm.scheduler import AheadScheduler, SyncScheduler

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PAGE, BLOCKS, STEPS = 16, 60, 10_000
Slot = tuple[int, int]  # pauses when its request started, and the hash of the tokens up to it


@dataclass
class Scheduled:
    """A step that is yet to be computed."""

    output: Any
    computed: dict[str, int]  # tokens of each request before it
    starts: dict[str, int]  # of those that start with it, tokens that the cache has
    blocks: dict[str, list[int]]


@dataclass
class Machine:
    """A scheduler, and the KV cache that its decisions fill."""

    scheduler: Any
    random: random.Random
    ahead: int  # steps that are scheduled before the one before them has ended
    scheduled: list[Scheduled] = field(default_factory=list)
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)  # by block and place in it
    blocks: dict[str, list[int]] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)  # pauses when a request started
    pauses: int = 0
    hits: int = 0
    stale: int = 0  # tokens of older weights that a new request was given
    wrong: int = 0  # slots that stand for other tokens than the request's
    recomputed: int = 0  # tokens of running requests that were computed twice
    preempted: int = 0

    def step(self) -> None:
        before = {one.request_id: one.num_computed_tokens for one in self.scheduler.running}
        output = self.scheduler.schedule()
        computed: dict[str, int] = {}
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = starts[new.req_id] = new.num_computed_tokens
        old = output.scheduled_cached_reqs
        self.preempted += len(output.preempted_req_ids or ())
        for name, block_ids, at in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True):
            if name in old.resumed_req_ids:
                self.blocks[name], starts[name] = list(block_ids[0]), at
            else:
                self.blocks[name] += block_ids[0] if block_ids else []
                self.recomputed += max(before[name] - at, 0)
            computed[name] = at
        self.started |= dict.fromkeys(starts, self.pauses)
        blocks = {name: list(self.blocks[name]) for name in computed}
        self.scheduled.append(Scheduled(output, computed, starts, blocks))
        while len(self.scheduled) > self.ahead:
            self.execute(self.scheduled.pop(0))

    def execute(self, step: Scheduled) -> None:
        names = list(step.output.num_scheduled_tokens)
        alive = [name for name in names if name in self.scheduler.requests]
        for name in alive:
            tokens = self.scheduler.requests[name].all_token_ids
            first = step.computed[name]
            for position in range(first, first + step.output.num_scheduled_tokens[name]):
                place = step.blocks[name][position // PAGE], position % PAGE
                self.slots[place] = (self.started[name], hash(tuple(tokens[: position + 1])))
        # A layer writes the keys and values of all tokens of a step before it reads any.
        for name in alive:
            tokens = self.scheduler.requests[name].all_token_ids
            for position in range(step.starts.get(name, 0)):
                pauses, meaning = self.slots[step.blocks[name][position // PAGE], position % PAGE]
                self.stale += pauses != self.pauses
                self.wrong += meaning != hash(tuple(tokens[: position + 1]))
            self.hits += step.starts.get(name, 0)
        sampled: list[list[int]] = []
        for name in names:
            request, done = self.scheduler.requests.get(name), step.computed[name]
            ends = request is None or done + step.output.num_scheduled_tokens[name] >= request.num_tokens
            sampled.append([self.random.randrange(2)] if ends else [])
        index = {name: i for i, name in enumerate(names)}
        self.scheduler.update_from_output(step.output, ModelRunnerOutput(names, index, sampled))

    def pause(self) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.scheduled:
            self.execute(self.scheduled.pop(0))
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.pauses += 1


def machine(kind: type[Scheduler], seed: int) -> tuple[Machine, Any]:
    config = EngineArgs(
        model=str(BUILTIN_MODELS["builtin:tiny-math"]),
        max_model_len=160,
        max_num_seqs=12,
        max_num_batched_tokens=96,
        enable_prefix_caching=True,
        block_size=PAGE,
    ).create_engine_config()
    ahead = int(issubclass(kind, AsyncScheduler))
    config.scheduler_config.async_scheduling = bool(ahead)
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256)
    scheduler = kind(config, cache, StructuredOutputManager(config), block_size=PAGE)
    return Machine(scheduler, random.Random(seed), ahead), get_request_block_hasher(PAGE, sha256)


def run(kind: type[Scheduler], seed: int, steps: int) -> Machine:
    """Drive a scheduler through a hostile schedule."""
    driven, hasher = machine(kind, seed)
    draw, scheduler = driven.random, driven.scheduler
    prompts = [[draw.randrange(2) for _ in range(draw.randint(20, 90))] for _ in range(3)]
    number = 0
    for _ in range(steps):
        event = draw.random()
        if event < 0.12 and len(scheduler.waiting) < 20:
            prompt = draw.choice(prompts)
            if draw.random() < 0.3 and scheduler.running:  # a turn that continues an answer
                prompt = list(draw.choice(scheduler.running).all_token_ids)
            most = 160 - len(prompt)
            for _ in range(draw.choice((1, 4))):
                params = SamplingParams(max_tokens=draw.randint(1, max(most, 1)), ignore_eos=True)
                if most > 0:
                    name = str(number := number + 1)
                    scheduler.add_request(Request(name, list(prompt), params, None, block_hasher=hasher))
        elif event < 0.15 and scheduler.requests:
            scheduler.finish_requests(draw.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        elif event < 0.19:
            driven.pause()
        else:
            driven.step()
    return driven


@pytest.mark.parametrize("kind", [SyncScheduler, AheadScheduler])
def test_no_block_of_older_weights_is_served_and_nothing_is_computed_twice(kind: type[Scheduler]) -> None:
    driven = run(kind, seed=0, steps=STEPS)
    assert (driven.stale, driven.wrong, driven.recomputed) == (0, 0, 0)
    assert driven.pauses > 200
    assert driven.hits > 10_000
    assert driven.preempted > 20


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_vllms_own_scheduler_would_serve_blocks_of_older_weights(kind: type[Scheduler]) -> None:
    """The control: a cache that installs do not reach."""
    driven = run(kind, seed=0, steps=1_000)
    assert driven.stale > 100
    assert driven.wrong == 0
