"""Checks of what a worker says: named attacks, every field made absurd, and honest work let through."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.config.schema import BUILTIN_MODELS, StalenessConfig
from echo_planes.data.claims import (
    FORMS,
    MOST_CHARS,
    MOST_PIECES,
    Rules,
    answers_fault,
    group_fault,
    stats_fault,
    tokens_fault,
    vocabulary_of,
)
from echo_planes.data.replay.batch import make_batch
from echo_planes.data.replay.buffer import MAX_ATTEMPTS, MAX_MALFORMED
from echo_planes.data.store.schema import to_batch, to_groups
from echo_planes.data.tasks.adapter import train_everything
from echo_planes.errors import LeaseError, ModelError
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
    Trajectory,
    WorkerStats,
    cover,
)
from tests.unit.ledger_attacks import LEDGER_ATTACKS, Attack, honest, mount
from tests.unit.test_buffer import Buffer

RULES = Rules(vocabulary=100, max_tokens=64)
PUBLISHED = {version: f"d{version}" for version in range(5)}
LEASE = Lease("L0.3", "L0.3", 0, "w0", Prompt(7, (1, 2), "9", "4 + 5"), 2, 0, 60.0)


def has_made(trajectory: Trajectory) -> bool:
    spans = trajectory.episode.spans
    return trajectory.lineage == "L0" and all(PUBLISHED.get(s.version) == s.digest for s in spans)


# --- named attacks -------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", LEDGER_ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_an_attack_is_refused_by_name_and_changes_nothing(attack: Attack, tmp_path: Path) -> None:
    verdict = asyncio.run(mount(attack, tmp_path / "run"))
    assert verdict.is_refused, verdict.reason
    assert verdict.is_unchanged
    assert verdict.is_served


def test_the_attacks_have_names_of_their_own() -> None:
    assert len({attack.name for attack in LEDGER_ATTACKS}) == len(LEDGER_ATTACKS) >= 60


# --- every field, made absurd --------------------------------------------------------------------


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Any good answer to `LEASE`."""
    samples = []
    for number in range(LEASE.num_samples):
        n = draw(st.integers(1, 12))
        mask = (*draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)), True)
        logprob = st.floats(-200.0, 0.0)
        stops = [*sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=n - 1))), n]
        spans = []
        for start, stop in zip([0, *stops], stops, strict=False):
            if stop > start:
                version = draw(st.sampled_from(sorted(PUBLISHED)))
                spans.append(Span(start, stop, version, PUBLISHED[version]))
        token = st.integers(0, RULES.vocabulary - 1)
        pairs = st.lists(st.tuples(token, st.one_of(logprob, st.just(-math.inf))), max_size=3).map(tuple)
        finite = st.floats(-1e9, 1e9)
        episode = Episode(
            response_ids=tuple(draw(st.lists(token, min_size=n, max_size=n))),
            response_mask=mask,
            logprobs=tuple(draw(logprob) if own else 0.0 for own in mask),
            spans=tuple(spans),
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            text=draw(st.text(max_size=12)),
            top_logprobs=tuple(draw(st.one_of(st.just([]), st.lists(pairs, min_size=n, max_size=n)))),
            num_turns=draw(st.integers(0, 5)),
            turn_rewards=tuple(draw(st.lists(finite, max_size=3))),
            notes=draw(st.text(max_size=8)),
        )
        reward = Reward(
            draw(finite), draw(st.booleans()), draw(st.dictionaries(st.text(max_size=8), finite, max_size=3))
        )
        name = f"{LEASE.group_id}/{number}"
        samples.append(Trajectory(name, LEASE.group_id, LEASE.prompt, episode, reward, "w0", "L0"))
    return Group(LEASE.group_id, tuple(samples))


TEXTS = ("\ud800", b"x", None, 7, math.nan)
NUMBERS = (math.nan, math.inf, -math.inf, 1e300, 2**70, "1", None)
WHOLE = (2**70, -(2**70), 1.5, math.nan, "1", None, True)
ROWS = (None, 7, "x", (None,) * 3, (2**70,) * 3, (math.nan,) * 3, ("x",) * 3, ((),) * 200)
ABSURD: dict[type, dict[str, tuple[Any, ...]]] = {
    Group: {"group_id": (*TEXTS, "L0.4"), "trajectories": ROWS},
    Trajectory: {
        **dict.fromkeys(
            ("trajectory_id", "group_id", "worker_id", "lineage", "status"), (*TEXTS, "L0.3/7", "accepted")
        ),
        **dict.fromkeys(("prompt", "episode", "reward"), (None, 7, "x", ())),
        "error": (b"x", None, 7),  # of an answer that did not fail nobody reads it
    },
    Prompt: {"index": WHOLE, "token_ids": (*ROWS, ()), "answer": TEXTS, "text": TEXTS},
    Episode: {
        "response_ids": (*ROWS, (), (-1,), (100,), (1.5,), (5,) * 65),
        "response_mask": (*ROWS, (), (False,), (1,)),
        "logprobs": (*ROWS, (), (0.7,), (math.inf,), (-math.inf,), (-1e30,)),
        "spans": (*ROWS, (), (Span(0, 1, 99, "d99"),), (Span(0, 1, -1, ""),), (Span(1, 2, 0, "d0"),)),
        "top_logprobs": (
            *ROWS,
            (((100, -1.0),),),
            (((1, math.nan),),),
            (((1, 0.7),),),
            (((1,),),),
            ((1, 2),),
        ),
        "turn_rewards": (*ROWS, (math.inf,), (0.0,) * 65),
        "finish_reason": (*TEXTS, "x" * 300),
        "text": (*TEXTS, "x" * (MOST_CHARS + 1)),
        "notes": (*TEXTS, "x" * (MOST_CHARS + 1)),
        "num_turns": (*WHOLE, -1, 2**31),
    },
    Reward: {
        "value": NUMBERS,
        "correct": (None, 1, "yes"),
        "parts": (None, (), {"a": math.nan}, {"a": "1"}, {"\ud800": 1.0}, {7: 1.0}),
        "notes": TEXTS,
    },
    Span: {
        "start": (*WHOLE, -1),
        "stop": (*WHOLE, -1),
        "version": (*WHOLE, -1, 99),
        "digest": (*TEXTS, "d9"),
        "schedule": (*WHOLE, -2),
    },
}


def with_field(group: Group, kind: type, field: str, value: Any, sample: int) -> Group:
    """`group`, with one field of one of its messages of a kind made another."""
    if kind is Group:
        return replace(group, **{field: value})
    members = list(group.trajectories)
    one = members[sample]
    if kind is Trajectory:
        one = replace(one, **{field: value})
    elif kind is Span:
        spans = list(one.episode.spans)
        spans[-1] = replace(spans[-1], **{field: value})
        one = replace(one, episode=replace(one.episode, spans=tuple(spans)))
    else:
        part = {Prompt: "prompt", Episode: "episode", Reward: "reward"}[kind]
        one = replace(one, **{part: replace(getattr(one, part), **{field: value})})
    members[sample] = one
    return replace(group, trajectories=tuple(members))


PLACES = [
    (kind, field, value) for kind, of in ABSURD.items() for field, values in of.items() for value in values
]


def ready_buffer() -> tuple[Buffer, Lease]:
    """A buffer that checks what it is told, and a lease of it that is `LEASE` but for its name."""
    buffer = Buffer(
        StalenessConfig(max_staleness=3, queue_batches=100.0),
        groups_per_step=2,
        samples_per_prompt=2,
        lease_s=60.0,
        lineage="L0",
        seed=0,
        rules=RULES,
    )
    for version, digest in PUBLISHED.items():
        buffer.publish(version, digest)
    for worker in ("w0", "w1"):
        buffer.register(worker, 0)
        buffer.installed(worker, 4)
    buffer.pull("w0", 0, 1, 0.0)
    return buffer, buffer.lease("w0", 0, replace(LEASE.prompt, index=0), 0.0)


def of_lease(group: Group, lease: Lease) -> Group:
    """The same answers, to another lease."""
    return Group(
        lease.group_id,
        tuple(
            replace(t, trajectory_id=f"{lease.group_id}/{i}", group_id=lease.group_id, prompt=lease.prompt)
            for i, t in enumerate(group.trajectories)
        ),
    )


@settings(max_examples=150, deadline=None)
@given(group=groups(), place=st.sampled_from(PLACES), sample=st.integers(0, 1))
def test_a_field_made_absurd_is_refused_and_no_state_changes(
    group: Group, place: tuple[type, str, Any], sample: int
) -> None:
    buffer, lease = ready_buffer()
    before = buffer.state()
    spoilt = with_field(of_lease(group, lease), *place, sample)
    receipt = buffer.submit("w0", 0, lease.lease_id, spoilt, 0.0)
    assert not receipt.accepted, receipt
    assert receipt.reason
    assert receipt.detail
    assert receipt.detail.isprintable()
    after = buffer.state()
    assert (after.counts.refused, after.counts.malformed) == (2, 1)
    assert replace(after, counts=before.counts) == before


@settings(max_examples=50, deadline=None)
@given(group=groups())
def test_any_good_group_is_accepted_and_can_be_written_down(group: Group) -> None:
    assert group_fault(LEASE, group, has_made, RULES) is None
    assert to_groups(pa.Table.from_batches([to_batch([group], created_s=0.0)])) == [group]
    buffer, lease = ready_buffer()
    assert buffer.submit("w0", 0, lease.lease_id, of_lease(group, lease), 0.0).accepted


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.none()), max_size=12).map(tuple),
    st.sampled_from(
        [2**31, 2**63, 2**70, np.float32(-1.0), np.int64(5), np.float64("nan"), np.array([1, 2])]
    ),
    st.lists(st.sampled_from([np.int64(5), np.float32(-0.5), 3, -0.5]), min_size=1, max_size=12).map(tuple),
)
FIELDS = [(kind, field.name) for kind in ABSURD for field in dataclasses.fields(kind)]


@settings(max_examples=250, deadline=None)
@given(group=groups(), changes=st.lists(st.tuples(st.sampled_from(FIELDS), JUNK), min_size=1, max_size=2))
def test_whatever_is_accepted_can_be_written_down_and_trained(
    group: Group, changes: list[tuple[tuple[type, str], Any]]
) -> None:
    """The converse: nothing that passes can end a run where it is stored or laid out."""
    for (kind, field), value in changes:
        try:
            group = with_field(group, kind, field, value, 0)
        except (AttributeError, IndexError, TypeError):
            return  # there is no such part any more
    if group_fault(LEASE, group, has_made, RULES) is not None:
        return
    (kept,) = to_groups(pa.Table.from_batches([to_batch([group], created_s=0.0)]))
    batch = make_batch(0, [kept], train_everything)
    assert np.isfinite(batch.sampler_logprobs).all()
    assert np.isfinite(batch.rewards).all()
    assert ((batch.token_ids >= 0) & (batch.token_ids < RULES.vocabulary)).all()


def test_every_field_of_every_message_has_its_type_and_its_absurdities() -> None:
    """A new field needs its type and absurd values: the worker could put anything there."""
    for kind in (
        Group,
        Trajectory,
        Prompt,
        Episode,
        Reward,
        Span,
        LeaseTokens,
        PartialRollout,
        Sample,
        WorkerStats,
    ):
        names = {field.name for field in dataclasses.fields(kind)}
        assert FORMS[kind].keys() == names, kind
        if kind in ABSURD:
            assert ABSURD[kind].keys() == names, kind


# --- honest work that looks odd ------------------------------------------------------------------


def odd(**changes: Any) -> Group:
    group = of_lease(honest(replace(LEASE)), LEASE)
    one = group.trajectories[0]
    return replace(
        group, trajectories=(replace(one, episode=replace(one.episode, **changes)), group.trajectories[1])
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (1e-7, 0.0, -0.25, -700.0)},  # rounding; a rare token
        {"logprobs": (-1, 0, np.float32(-0.5), np.float64(-1.0))},
        {"response_ids": (np.int64(10), 11, 12, 13)},
        {"response_ids": [10, 11, 12, 13]},
        # Gone on with at a worker that was behind the first one.
        {"spans": (Span(0, 2, 2, "d2"), Span(2, 4, 0, "d0"))},
        {"finish_reason": "my environment's own"},
        {"top_logprobs": ()},
    ],
)
def test_honest_work_that_looks_odd_is_accepted(changes: dict[str, Any]) -> None:
    assert group_fault(LEASE, odd(**changes), has_made, RULES) is None


def test_prompt_and_answer_together_are_no_longer_than_the_model_takes() -> None:
    for length, reason in ((60, None), (61, "too_long")):
        lease = replace(LEASE, prompt=Prompt(7, (1,) * length))
        fault = group_fault(lease, of_lease(honest(lease), lease), has_made, RULES)
        assert (fault.reason if fault else None) == reason


def test_a_group_that_its_worker_gave_up_is_no_misconduct() -> None:
    nothing = Episode((), (), (), (), "abort")
    group = of_lease(honest(LEASE), LEASE)
    failed = [replace(t, episode=nothing, status="failed", error="x\ny\ud800") for t in group.trajectories]
    fault = group_fault(LEASE, replace(group, trajectories=tuple(failed)), has_made, RULES)
    assert fault is not None
    assert (fault.reason, fault.is_malformed, fault.detail) == ("failed", False, "x y\\ud800")


# --- misconduct ----------------------------------------------------------------------------------


def spoilt(lease: Lease) -> Group:
    group = of_lease(honest(lease), lease)
    return replace(group, trajectories=(replace(group.trajectories[0], trajectory_id="x"),) * 2)


def send(buffer: Buffer, lease: Lease, group: Group) -> str:
    receipt = buffer.submit("w0", 0, lease.lease_id, group, 0.0)
    return receipt.reason or "accepted"


def test_a_worker_that_sends_malformed_groups_in_a_row_is_fenced() -> None:
    buffer, first = ready_buffer()
    buffer.pull("w0", 0, 99, 0.0)
    leases = [first, *(buffer.lease("w0", 0, Prompt(i, (i,)), 0.0) for i in range(1, 9))]
    for lease in leases[: MAX_MALFORMED - 1]:
        assert send(buffer, lease, spoilt(lease)) == "wrong_name"
    good = leases[MAX_MALFORMED - 1]
    assert send(buffer, good, of_lease(honest(good), good)) == "accepted"  # a good one: it counts anew
    (complaint,) = buffer.take_complaints()
    assert (complaint.worker_id, complaint.count, complaint.is_fenced) == ("w0", MAX_MALFORMED - 1, False)
    assert buffer.take_complaints() == []
    bad = leases[MAX_MALFORMED : 2 * MAX_MALFORMED]
    assert [send(buffer, lease, spoilt(lease)) for lease in bad] == ["wrong_name"] * MAX_MALFORMED
    (complaint,) = buffer.take_complaints()
    assert complaint.is_fenced
    assert "L0.4" in complaint.detail or "L0.7" in complaint.detail
    assert (
        send(buffer, leases[-1], of_lease(honest(leases[-1]), leases[-1])) == "unknown"
    )  # it went to others
    with pytest.raises(LeaseError, match="fenced"):
        buffer.pull("w0", 0, 1, 0.0)
    buffer.register("w0", 1)  # its successor starts anew
    buffer.installed("w0", 4)
    assert buffer.pull("w0", 1, 1, 0.0)


def test_one_bad_prompt_is_set_aside_before_its_worker_is_fenced() -> None:
    """A task that spoils one prompt costs that prompt, not the workers."""
    assert MAX_ATTEMPTS < MAX_MALFORMED
    buffer, lease = ready_buffer()
    for _ in range(MAX_ATTEMPTS - 1):
        send(buffer, lease, spoilt(lease))
        (index,) = buffer.pull("w0", 0, 1, 0.0)
        assert index == lease.prompt.index
        lease = buffer.lease("w0", 0, lease.prompt, 0.0)
    send(buffer, lease, spoilt(lease))
    assert buffer.pull("w0", 0, 1, 0.0) == [lease.prompt.index + 1]


def test_what_others_had_made_of_a_prompt_outlives_a_malformed_answer() -> None:
    buffer, lease = ready_buffer()
    piece = Sample((5, 6), (-0.5, -0.5), (Span(0, 2, 4, "d4"),), "")
    message = LeaseTokens(lease.lease_id, ((0, PartialRollout((1, 2), piece)),))
    assert buffer.stream("w0", 0, [message], 0.0) == ()
    before = buffer.state().partials
    assert send(buffer, lease, spoilt(lease)) == "wrong_name"
    assert buffer.state().partials == before != {}
    assert buffer.counts.discarded_tokens == 0


@pytest.mark.parametrize("call", ["stream", "hand over"])
def test_a_malformed_message_costs_only_its_own_lease(call: str) -> None:
    buffer, first = ready_buffer()
    buffer.pull("w0", 0, 1, 0.0)
    second = buffer.lease("w0", 0, Prompt(1, (3, 4)), 0.0)
    good = Sample((5,), (-0.5,), (Span(0, 1, 4, "d4"),), "")
    bad = replace(good, logprobs=(0.7,))
    messages = [
        LeaseTokens(first.lease_id, ((0, PartialRollout((1, 2), good)), (1, PartialRollout((1, 2), bad)))),
        LeaseTokens(second.lease_id, ((0, PartialRollout((3, 4), good)),)),
    ]
    if call == "stream":
        assert buffer.stream("w0", 0, messages, 0.0) == (first.lease_id,)
    else:
        assert buffer.hand_over("w0", 0, messages, 0.0) == 1
    assert set(buffer.state().partials) == {1}
    assert buffer.counts.malformed == 1


def test_who_is_fenced_in_mid_message_loses_every_lease_once() -> None:
    buffer, first = ready_buffer()
    buffer.pull("w0", 0, MAX_MALFORMED, 0.0)
    others = [buffer.lease("w0", 0, Prompt(i, (i,)), 0.0) for i in range(1, MAX_MALFORMED + 1)]
    bad = PartialRollout((1, 2), Sample((5,), (0.7,), (Span(0, 1, 4, "d4"),), ""))
    messages = [LeaseTokens(first.lease_id, ()), *(LeaseTokens(x.lease_id, ((0, bad),)) for x in others)]
    assert buffer.hand_over("w0", 0, messages, 0.0) == 0
    assert buffer.counts.leased == 0
    assert buffer.state().returned == tuple(range(MAX_MALFORMED + 1))


# --- evaluations, counters, rules ----------------------------------------------------------------


def answers(*indices: int) -> list[Trajectory]:
    found: list[Trajectory] = []
    for index in indices:
        lease = replace(LEASE, group_id=f"eval-{index}")
        found += of_lease(honest(lease), lease).trajectories
    return found


def test_answers_to_held_out_prompts_are_those_that_were_asked_for() -> None:
    good = answers(0, 2)
    assert answers_fault(good, [0, 2], 2, "w0", RULES) is None
    failed = replace(good[1], status="reward_error", error="it raised")
    assert answers_fault([good[0], failed], [0], 2, "w0", RULES) is None
    nan = replace(good[1], reward=Reward(math.nan, False))
    for wrong, reason in (
        (good[:3], "incomplete"),
        (None, "wrong_type"),
        ([*good[:3], good[2]], "wrong_name"),
        ([good[0], nan, *good[2:]], "bad_number"),
        ([replace(t, worker_id="w1") for t in good], "mismatched"),
        ([replace(t, prompt=Prompt(0, (100,))) for t in good], "bad_tokens"),
        ([replace(t, episode=replace(t.episode, spans=())) for t in good], "unspanned"),
    ):
        fault = answers_fault(wrong, [0, 2], 2, "w0", RULES)
        assert fault is not None
        assert fault.reason == reason


def test_answers_without_a_reward_are_checked_as_well() -> None:
    """Their tokens are counted, and the learner scores them."""
    good, other = answers(0)
    nothing = replace(good, status="failed", error="it raised", episode=Episode((), (), (), (), "abort"))
    assert answers_fault([nothing, other], [0], 2, "w0", RULES) is None
    for changes, reason in (
        ({"response_ids": (10**9,) * len(good.episode.response_ids)}, "bad_tokens"),
        ({"response_mask": ("a",) * len(good.episode.response_ids)}, "bad_mask"),
        ({"response_ids": (), "logprobs": (), "spans": (), "response_mask": ("a",)}, "unspanned"),
    ):
        wrong = replace(good, status="reward_error", episode=replace(good.episode, **changes))
        fault = answers_fault([wrong, other], [0], 2, "w0", RULES)
        assert fault is not None
        assert fault.reason == reason


STATS = WorkerStats("w0", 3, "d3", 2, 10, 500, 12.5, full_s=5.0, full_tokens=200)


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "w1"},
        {"busy_s": -1.0},
        {"busy_s": math.nan},
        {"tokens": -1},
        {"tokens": 2**70},
        {"tokens": True},
        {"full_tokens": 10**12},
        {"leaves_in_s": -1.0},
        {"version": -2},
        {"digest": None},
    ],
)
def test_counters_that_cannot_be_true_are_not_believed(changes: dict[str, Any]) -> None:
    assert stats_fault(STATS, "w0") is None
    assert stats_fault(replace(STATS, leaves_in_s=30), "w0") is None
    assert stats_fault(replace(STATS, **changes), "w0") is not None


def test_pieces_are_whole_and_of_the_model_s_tokens() -> None:
    piece = Sample((5, 6), (-0.5, -0.5), (Span(0, 2, 4, "d4"),), "stop")
    assert tokens_fault(LeaseTokens("l", ((0, PartialRollout((1,), piece, 3)),)), RULES) is None
    assert tokens_fault(LeaseTokens("l", ()), RULES) is None
    empty = Sample((), (), (), "stop")
    assert tokens_fault(LeaseTokens("l", ((0, PartialRollout((), empty, 3)),)), RULES) is None
    assert cover((), 0)
    for wrong in (
        None,
        LeaseTokens("l", ((0, PartialRollout((1,), replace(piece, finish_reason="gone"))),)),  # type: ignore[arg-type]
        LeaseTokens("l", ((0, PartialRollout((1,) * 63, piece)),)),
        LeaseTokens("l", ((0,),)),  # type: ignore[arg-type]
        LeaseTokens("l", ((0, PartialRollout((1,), piece)),) * (MOST_PIECES + 1)),
        LeaseTokens("l", ((True, PartialRollout((1,), piece)),)),
        LeaseTokens("l", ((0, PartialRollout((1,), piece, 2**70)),)),
    ):
        assert tokens_fault(wrong, RULES) is not None


def test_the_vocabulary_is_the_model_s(tmp_path: Path) -> None:
    assert vocabulary_of(BUILTIN_MODELS["builtin:tiny-math"]) == 259
    path = tmp_path / "config.json"
    path.write_text('{"text_config": {"vocab_size": 1000}}')
    assert vocabulary_of(tmp_path) == 1000
    for content in ("", "[]", "{}", '{"vocab_size": 0}', '{"vocab_size": "many"}', '{"text_config": 3}'):
        path.write_text(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            vocabulary_of(tmp_path)
