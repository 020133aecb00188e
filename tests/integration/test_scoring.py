"""Rewards in processes of their own: whatever a reward does, there is an outcome with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from echo_planes.errors import RunError
from echo_planes.rollout.scoring import ProcessScorer
from echo_planes.types import Episode, Prompt, Reward, RewardFailure, Span

MARK = "ECHO_PLANES_TEST_SCORING"
PROMPT = Prompt(3, (1, 2), "gold", "1+1=")
FINE = Reward(0.25, True, {"a": 1.0})


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells the processes of these tests from others of the machine."""
    monkeypatch.setenv(MARK, str(os.getpid()))


def scorer(limit_s: float = 60.0, seed: int = 0, name: str = "BadlyRewarded") -> ProcessScorer:
    task = {"name": "bad", "adapter": f"tests.integration.badly_rewarded:{name}"}
    setup = json.dumps({"task": task, "model_folder": "/nowhere", "seed": seed})
    return ProcessScorer("echo_planes.data.tasks.reward_child", setup, limit_s)


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
            "half",
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
    seen: set[str] = set()

    async def main() -> list[list[Reward | RewardFailure]]:
        async with started(limit_s=2.0) as pool:
            scoring = asyncio.ensure_future(
                pool.score(PROMPT, [answer("fine"), answer("hang"), answer("fine")])
            )
            while not scoring.done():
                seen.add(pool.longest())
                await asyncio.sleep(0.05)
            others = [await scoring, await pool.score(PROMPT, [answer("fine")])]
            assert pool.longest() == ""
            return others

    hung, after = asyncio.run(main())
    assert f"answer 2 of 3 to prompt {PROMPT.index}" in seen
    assert f"answer 3 of 3 to prompt {PROMPT.index}" not in seen
    assert hung[0] == FINE
    assert hung[1] == RewardFailure("reward_timeout", "took longer than 2 s")
    assert isinstance(hung[2], RewardFailure)
    assert hung[2].status == "failed"
    assert after == [FINE]


def numbered(*numbers: int) -> list[Episode]:
    return [replace(answer("number"), response_ids=(number, 6)) for number in numbers]


def test_an_answer_that_comes_too_late_is_nobody_elses() -> None:
    """The last answer of a group meets its deadline; the next group gets its own rewards."""

    async def main() -> list[list[Reward | RewardFailure]]:
        async with started(limit_s=2.0) as pool:
            groups = [[*numbered(10, 20), answer("hang")], numbered(100, 200), [answer("hang")], numbered(7)]
            return [await pool.score(PROMPT, group) for group in groups]

    first, second, third, fourth = asyncio.run(main())
    assert [r.value for r in first[:2] if isinstance(r, Reward)] == [10.0, 20.0]
    assert isinstance(first[2], RewardFailure)
    assert second == [Reward(100.0, True), Reward(200.0, True)]
    assert isinstance(third[0], RewardFailure)
    assert fourth == [Reward(7.0, True)]


def test_what_a_reward_started_ends_with_it() -> None:
    """A forked process that lives on holds up nobody, and does not live on."""

    async def main() -> list[Reward | RewardFailure]:
        async with started(limit_s=2.0) as pool:
            outcomes = await pool.score(PROMPT, [answer("linger")])
            deadline_s = asyncio.get_running_loop().time() + 30.0
            while children() and asyncio.get_running_loop().time() < deadline_s:
                await asyncio.sleep(0.05)
            return outcomes

    assert asyncio.run(main()) == [RewardFailure("reward_timeout", "took longer than 2 s")]
    assert not children()


def children() -> list[int]:
    """Living processes of this test's rewards, orphans too: they inherit its environment.

    Other tests may run beside, with rewards of their own.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_reward = "echo_planes.data.tasks.reward_child" in process.cmdline()
            if is_reward and process.environ().get(MARK) == str(os.getpid()):
                found.append(process.pid)
    return found


def test_nothing_is_started_after_the_end() -> None:
    async def main() -> list[object]:
        async with started() as pool:
            scoring = [asyncio.ensure_future(pool.score(PROMPT, [answer("hang")])) for _ in range(7)]
            while not pool._children:
                await asyncio.sleep(0.01)
        return list(await asyncio.gather(*scoring, return_exceptions=True))

    results = asyncio.run(main())
    assert not children()
    assert sum(isinstance(result, RunError) for result in results) >= 3  # those that had no child yet


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
