"""Rewards in processes of their own: whatever a reward does, there is an outcome with a reason."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from echo_planes.errors import RunError
from echo_planes.rollout.scoring import ProcessScorer
from echo_planes.types import Episode, Prompt, Reward, RewardFailure, Span

PROMPT = Prompt(3, (1, 2), "gold", "1+1=")
FINE = Reward(0.25, True, {"a": 1.0})


def scorer(limit_s: float = 60.0, seed: int = 0, name: str = "BadlyRewarded") -> ProcessScorer:
    task = {"name": "bad", "adapter": f"tests.integration.badly_rewarded:{name}"}
    setup = json.dumps({"task": task, "model_folder": "/nowhere", "seed": seed})
    return ProcessScorer("echo_planes.data.reward_child", setup, limit_s)


def answer(text: str) -> Episode:
    spans = (Span(0, 1, 1, "d1"), Span(1, 2, 2, "d2"))
    return Episode((5, 6), (True, False), (-0.5, 0.0), spans, "stop", text, top_logprobs=(((5, -0.5),), ()))


@asynccontextmanager
async def started(limit_s: float = 60.0) -> AsyncIterator[ProcessScorer]:
    pool = scorer(limit_s)
    try:
        yield pool
    finally:
        await pool.close()


def outcomes(texts: Sequence[str], limit_s: float = 60.0) -> list[Reward | RewardFailure]:
    async def main() -> list[Reward | RewardFailure]:
        async with started(limit_s) as pool:
            return await pool.score(PROMPT, [answer(text) for text in texts])

    return asyncio.run(main())


def test_every_answer_gets_its_own_outcome() -> None:
    raised, fine, numpy, print_, *lies = outcomes(
        [
            "raise",
            "fine",
            "numpy",
            "print",
            "nan",
            "infinity",
            "text",
            "bool",
            "correct",
            "parts",
            "none",
            "number",
        ]
    )
    assert isinstance(raised, RewardFailure)
    assert raised.status == "reward_error"
    assert "ZeroDivisionError at badly_rewarded.py" in raised.error
    assert "no samples to divide by" in raised.error
    assert fine == FINE
    assert numpy == Reward(0.5, True, {"half": 2.0})
    assert isinstance(print_, RewardFailure)  # there is nothing to read
    assert "EOFError" in print_.error
    told = ["nan", "inf", "'1'", "True", "'yes'", "length", "None", "0.5"]
    for lie, word in zip(lies, told, strict=True):
        assert isinstance(lie, RewardFailure)
        assert lie.status == "reward_invalid"
        assert word in lie.error


def test_a_hanging_reward_meets_its_deadline_and_the_next_group_is_scored() -> None:
    async def main() -> list[list[Reward | RewardFailure]]:
        async with started(limit_s=2.0) as pool:
            hung = await pool.score(PROMPT, [answer("fine"), answer("hang"), answer("fine")])
            return [hung, await pool.score(PROMPT, [answer("fine")])]

    hung, after = asyncio.run(main())
    assert hung[0] == FINE
    assert hung[1] == RewardFailure("reward_timeout", "took longer than 2 s")
    assert isinstance(hung[2], RewardFailure)
    assert hung[2].status == "failed"
    assert after == [FINE]


def test_a_hanging_reward_does_not_hold_up_other_groups() -> None:
    async def main() -> bool:
        async with started() as pool:
            hanging = asyncio.ensure_future(pool.score(PROMPT, [answer("hang")]))
            while not pool._children:
                await asyncio.sleep(0.01)
            results = await asyncio.gather(*(pool.score(PROMPT, [answer("fine")]) for _ in range(5)))
            still = not hanging.done()
            hanging.cancel()
            return still and results == [[FINE]] * 5

    assert asyncio.run(main())


def test_a_reward_that_ends_its_process_is_a_failure() -> None:
    ended, _ = outcomes(["exit", "fine"])
    assert ended == RewardFailure("reward_error", "its process ended (exit status 7)")


def test_what_a_reward_sees_is_whole_and_in_another_process() -> None:
    (outcome,) = outcomes(["whole"])
    assert isinstance(outcome, Reward)
    assert outcome.correct
    assert outcome.value != os.getpid()


def test_closing_leaves_no_process_behind() -> None:
    async def main() -> int:
        async with started() as pool:
            (outcome,) = await pool.score(PROMPT, [answer("whole")])
            assert isinstance(outcome, Reward)
            pid = int(outcome.value)
            assert Path(f"/proc/{pid}").exists()
        return pid

    assert not Path(f"/proc/{asyncio.run(main())}").exists()


@pytest.mark.parametrize(
    ("seed", "name", "why"), [(-1, "BadlyRewarded", "no such seed"), (0, "Missing", "Missing")]
)
def test_an_adapter_that_cannot_be_built_is_told_at_once(seed: int, name: str, why: str) -> None:
    with pytest.raises(RunError, match=why):
        asyncio.run(scorer(seed=seed, name=name).start())
