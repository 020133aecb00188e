"""The guard of a schedule, its keeper, and what is refused before a run decodes sparsely."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import BUILTIN_MODELS, Config
from echo_planes.errors import ConfigError, DataError
from echo_planes.loop.observers import QuietObserver
from echo_planes.loop.sparsity import FILE, QUIET_STEPS, Keeper, check_sparse, model_shape, schedule_of
from echo_planes.rollout.sparsity.acceptance import Audit, audit_fault, share_bounds
from echo_planes.rollout.sparsity.guard import LEAST, WINDOW, Guard

GOOD, POOR, BAD = 0.99, 0.8, 0.3  # acceptance: above the target of .86; below; below the floor too


def audit(alphas: Sequence[float], schedule: int = 0, context: int = 10) -> Audit:
    return Audit(schedule, 3, context, tuple(alphas), 0.01)


def hear(guard: Guard, count: int, alphas: Sequence[float], **named: int) -> None:
    for _ in range(count):
        guard.add(audit(alphas, **named))


def guard(pages: tuple[int, ...] = (20, 40), longest: int = 8000, tail_share: float = 0.05) -> Guard:
    return Guard(Schedule(pages=pages, bin_tokens=2000), 0.86, tail_share, longest)


# --- the guard ---------------------------------------------------------------------------------


def test_a_bin_below_target_rises_a_notch_and_the_others_stay() -> None:
    one = guard()
    hear(one, LEAST, [GOOD] * 50, context=3000)
    hear(one, LEAST, [POOR] * 10 + [GOOD] * 40, context=100)
    (rise,) = one.raises()
    assert (rise.place, rise.before, rise.after) == (0, 20, 30)
    after = one.apply([rise])
    assert (after.pages, after.number) == ((30, 40), 1)
    assert one.raises() == []


def test_a_bin_below_the_floor_becomes_dense_at_once() -> None:
    one = guard()
    hear(one, LEAST, [BAD] * 10 + [GOOD] * 40)
    (rise,) = one.raises()
    assert rise.after == 0
    assert one.apply([rise]).pages == (0, 40)


def test_a_notch_that_holds_the_whole_bin_is_dense() -> None:
    one = guard(pages=(84, 200), longest=5000)  # 84 x 1.5 x 16 = 2,016 tokens, 200 x 1.5 x 16 = 4,800
    hear(one, LEAST, [POOR] * 10 + [GOOD] * 40, context=100)
    hear(one, LEAST, [POOR] * 10 + [GOOD] * 40, context=3000)
    assert [rise.after for rise in one.raises()] == [0, 300]


def test_nothing_is_said_of_few_answers() -> None:
    one = guard()
    hear(one, LEAST - 1, [BAD] * 50)
    assert one.raises() == []
    hear(one, 1, [BAD] * 50)
    assert len(one.raises()) == 1


def test_the_share_that_may_be_below_the_target_is_allowed() -> None:
    one = guard()
    hear(one, WINDOW, [BAD] * 2 + [GOOD] * 48)
    assert one.raises() == []
    strict = guard(tail_share=0.03)
    hear(strict, WINDOW, [POOR] * 2 + [GOOD] * 48)
    (rise,) = strict.raises()
    assert (rise.after, rise.allowed) == (30, 0.03)
    assert "3.0% may be" in str(rise)


def test_answers_decoded_by_a_budget_that_is_gone_do_not_count() -> None:
    one = guard()
    hear(one, LEAST, [POOR] * 10 + [GOOD] * 40)
    one.apply(one.raises())
    hear(one, WINDOW, [BAD] * 50, schedule=0)  # still on their way
    assert one.raises() == []
    hear(one, WINDOW, [BAD] * 50, schedule=7)  # of no schedule that there was
    assert one.raises() == []
    # Those of the other bin, whose budget is the same under both numbers, do.
    hear(one, LEAST, [POOR] * 50, schedule=0, context=3000)
    assert [rise.place for rise in one.raises()] == [1]


def test_budgets_never_fall_and_end_dense() -> None:
    one, before = guard(), (20, 40)
    for number in range(30):
        for context in (10, 2500):
            hear(one, LEAST, [POOR] * 10 + [GOOD] * 40, schedule=number, context=context)
        if not (rises := one.raises()):
            break
        after = one.apply(rises).pages
        assert all(new == 0 or (old and new > old) for old, new in zip(before, after, strict=True))
        before = after
    assert before == (0, 0)


def test_an_answer_across_two_bins_counts_in_both() -> None:
    one = guard()
    hear(one, LEAST, [GOOD] * 50 + [POOR] * 50, context=1950)
    assert [rise.place for rise in one.raises()] == [1]


def test_bounds_of_a_share_hold_it_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(1000):
        share = rng.beta(0.06 * 10, 0.94 * 10, 64)  # of each answer: its tokens go together
        tokens = rng.integers(20, 200, 64)
        below = rng.binomial(tokens, share)
        low, high = share_bounds(list(zip(tokens.tolist(), below.tolist(), strict=True)), 1.96)
        held += low <= 0.06 <= high
    assert 900 <= held <= 975


# --- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        "no audit",
        replace(audit([GOOD]), alphas=()),
        replace(audit([GOOD]), alphas=(1.5,)),
        replace(audit([GOOD]), alphas=(math.nan,)),
        replace(audit([GOOD]), alphas=(1,)),
        replace(audit([GOOD]), context_tokens=-1),
        replace(audit([GOOD]), schedule=2**70),
        replace(audit([GOOD]), version=1.0),  # type: ignore[arg-type]
        replace(audit([GOOD]), drift=math.inf),
    ],
)
def test_a_malformed_audit_has_a_fault(wrong: Any) -> None:
    assert audit_fault(wrong)
    assert not audit_fault(audit([GOOD, 0.0, 1.0]))


# --- the keeper --------------------------------------------------------------------------------


class Told(QuietObserver):
    """Events of a keeper."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.drifts: list[float] = []

    def on_audited(self, drift: float) -> None:
        self.drifts.append(drift)

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        self.events.append((kind, text))


def config(**sparse: Any) -> Config:
    return Config.model_validate(
        {
            "sparse": {"schedule": [20, 40]} | sparse,
            "sampling": {"top_logprobs": 20},
            "model": {"max_model_len": 8000},
            "learner": {"micro_batch_tokens": 8192},
        }
    )


def test_a_keeper_writes_down_every_schedule_and_a_resume_goes_on_with_the_last(tmp_path: Path) -> None:
    told = Told()
    keeper = Keeper(config(), tmp_path, told)
    assert keeper.schedule == schedule_of(config().sparse)
    assert keeper.hear([audit([POOR] * 10 + [GOOD] * 40)] * LEAST) == ""
    changed = keeper.change()
    assert changed is not None
    assert (changed.number, changed.pages) == (1, (30, 40))
    assert keeper.change() is None
    assert [kind for kind, _ in told.events] == ["sparse audit", "sparse guard"]
    assert [one["pages"] for one in json.loads((tmp_path / FILE).read_text())["schedules"]] == [
        [20, 40],
        [30, 40],
    ]
    told.events.clear()
    assert Keeper(config(), tmp_path, told).schedule == changed
    ((_, text),) = told.events  # the settings ask for less
    assert "[20, 40]" in text
    assert "[30, 40]" in text
    other = Keeper(config(schedule=[50]), tmp_path, told)
    assert (other.schedule.number, other.schedule.pages) == (2, (50,))


@pytest.mark.parametrize(("mode", "words"), [("warn", 1), ("off", 0)])
def test_a_guard_that_only_warns_says_it_once(tmp_path: Path, mode: str, words: int) -> None:
    told = Told()
    keeper = Keeper(config(guard=mode), tmp_path, told)
    keeper.hear([audit([BAD] * 50)] * LEAST)
    for _ in range(3):
        assert keeper.change() is None
    assert sum(kind == "sparse guard" for kind, _ in told.events) == words
    assert keeper.schedule.pages == (20, 40)


WORKERS = {"fleet": {"workers": [{"sku": "x", "count": 1, "resources": {"GPU": 1.0}}]}}
SEEDERS = {"staleness": {"max_staleness": 0}, "seeding": {"engines": 1, "resources": {"GPU": 0.5}}}


@pytest.mark.parametrize("where", [WORKERS, SEEDERS])
@pytest.mark.parametrize(("share", "advice"), [(0.25, "look at the first audits"), (0.0, "set it above 0")])
def test_a_run_with_engines_on_gpus_says_that_nobody_has_run_sparse_decoding_there(
    tmp_path: Path, where: dict[str, Any], share: float, advice: str
) -> None:
    told = Told()
    sparse = {"audit_share": share, "guard": "act" if share else "off"}
    settings = changed({**where, "sparse": sparse})
    check_sparse(settings)
    Keeper(settings, tmp_path, told)
    ((kind, text),) = told.events
    assert kind == "sparse on GPUs"
    assert advice in text


def test_a_keeper_tells_the_acceptance_now_and_then(tmp_path: Path) -> None:
    told = Told()
    keeper = Keeper(config(), tmp_path, told)
    keeper.hear([audit([GOOD] * 50)] * WINDOW)
    ((kind, text),) = told.events
    assert kind == "sparse audit"
    assert "bin 0 (20 pages) 5th percentile 0.99" in text
    keeper.hear([audit([GOOD] * 50, context=3000)] * 2)
    keeper.close()
    assert "bin 1 (40 pages) too few answers (2)" in told.events[-1][1]


def test_a_keeper_tells_each_steps_sparse_drift_by_its_tokens(tmp_path: Path) -> None:
    told = Told()
    keeper = Keeper(config(), tmp_path, told)
    keeper.hear([replace(audit([GOOD] * 30), drift=0.1), replace(audit([GOOD] * 10), drift=0.5)])
    keeper.change()
    keeper.change()  # a step without audits
    keeper.hear([replace(audit([GOOD] * 10), drift=0.4)])
    keeper.change()
    assert told.drifts == pytest.approx([(30 * 0.1 + 10 * 0.5) / 40, 0.4])


def test_malformed_audits_are_named(tmp_path: Path) -> None:
    keeper = Keeper(config(), tmp_path, Told())
    assert "malformed" in keeper.hear("no list")
    assert "malformed" in keeper.hear([audit([GOOD]), audit([2.0])])


def test_audits_that_cannot_be_of_this_run_are_named(tmp_path: Path) -> None:
    keeper = Keeper(config(), tmp_path, Told())
    assert keeper.hear([audit([GOOD] * 7, context=8000 - 8)]) == ""
    assert "max_model_len=8000" in keeper.hear([audit([GOOD] * 8, context=8000 - 8)])
    assert "newest 0" in keeper.hear([audit([GOOD], schedule=1)])


@pytest.mark.parametrize(("sparse", "words"), [({}, 1), ({"guard": "off", "audit_share": 0.0}, 0)])
def test_a_keeper_says_that_nothing_is_audited(tmp_path: Path, sparse: dict[str, Any], words: int) -> None:
    told = Told()
    keeper = Keeper(config(**sparse), tmp_path, told)
    for _ in range(QUIET_STEPS - 1):
        keeper.change()
    assert not told.events
    for _ in range(QUIET_STEPS):
        keeper.change()
    assert [text[:12] for _, text in told.events] == ["no answer in"] * words


@pytest.mark.parametrize(
    "text", ["no JSON", "{}", '{"schedules": []}', '{"schedules": [{"pages": "many"}]}', '{"schedules": [7]}']
)
def test_a_damaged_record_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match="restore it"):
        Keeper(config(), tmp_path, Told())


# --- before a run ------------------------------------------------------------------------------


def changed(tree: dict[str, Any]) -> Config:
    base = config().model_dump()
    for section, keys in tree.items():
        base[section] |= keys
    return Config.model_validate(base)


def test_a_run_without_a_schedule_is_not_checked() -> None:
    check_sparse(Config.model_validate({"sampling": {"temperature": 0.7}}))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"sampling": {"temperature": 0.7}}, ["sampling.temperature=0.7", "set sampling.temperature=1"]),
        ({"sampling": {"top_p": 0.9}}, ["sampling.top_p=0.9"]),
        ({"sampling": {"top_logprobs": 0}}, ["top_logprobs=0", "set sampling.top_logprobs=20"]),
        ({"sparse": {"model": "llama, 2 layers of 8, 2/1 heads"}}, ["another model", "calibrate"]),
        (
            {"fleet": {"workers": [{"sku": "x", "count": 1, "engine": {"enable_prefix_caching": True}}]}},
            ["enable_prefix_caching=true"],
        ),
        (
            {"fleet": {"workers": [{"sku": "x", "count": 1, "engine": {"extra": {"block_size": 64}}}]}},
            ["block_size=64", "leave block_size out"],
        ),
        (
            {"sparse": {"distill_rank": 8}, "learner": {"zero_stage": 3}},
            ["distill_rank=8", "zero_stage=3", "at most 2"],
        ),
        (
            {"sparse": {"distill_rank": 8}, "learner": {"sequence_ranks": 2, "num_ranks": 2}},
            ["sequence_ranks=2"],
        ),
        (
            {
                "fleet": {"workers": [{"sku": "x", "count": 1, "resources": {"GPU": 1.0}}]},
                "sparse": {"distill_rank": 8},
            },
            ["SKU 'x'", "enforce_eager=false", "sparse.distill_rank=0"],
        ),
    ],
)
def test_what_does_not_go_with_sparse_decoding_is_one_line(tree: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_sparse(changed(tree))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("change", "word"), [({"sliding_window": 512}, "sliding window"), ({"model_type": "bloom"}, "ALiBi")]
)
def test_models_whose_pages_cannot_be_left_out_are_refused(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    settings = json.loads((BUILTIN_MODELS["builtin:tiny-math"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"use_sliding_window": True} | change))
    with pytest.raises(ConfigError, match=word):
        check_sparse(changed({"model": {"path": str(tmp_path)}}))


def test_a_schedule_of_this_model_is_taken() -> None:
    shape = model_shape(BUILTIN_MODELS["builtin:tiny-math"])
    assert shape == "qwen3, 4 layers of 128, 4/2 heads"
    check_sparse(changed({"sparse": {"model": shape}}))


@pytest.mark.parametrize(
    ("sparse", "word"),
    [
        ({"schedule": [2]}, "bin 0 reads 2 pages"),
        ({"audit_share": 0.0}, "audits none"),
        ({"page_tokens": 48}, "page_tokens"),
        ({"target": 1.0}, "target"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(sparse: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        config(**sparse)
