"""Share of weights that change, the share predicted by magnitude, and states rebuilt from a store for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.reporting.weights.differences import max_ulp_step
from echo_planes.reporting.weights.sparsity import (
    STEPS,
    KStepSparsity,
    changed_share,
    layer_of,
    predicted_share,
    sparsity_table,
)
from echo_planes.weights.digest import BitTensor
from echo_planes.weights.store.objects import Objects, StoreUnreachableError
from echo_planes.weights.store.replay import State, rebuild, replay
from tests.unit.stored_states import (
    first_state,
    reader_at,
    stepped,
    store_chain,
    store_state,
    writer_at,
)

LAYER_0 = "model.layers.0.mlp.weight"


def bf16(*numbers: float) -> BitTensor:
    bits = (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return BitTensor(bits, "bfloat16", bits.shape)


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n].bits, b[n].bits) for n in a)


def test_changed_share_counts_bits() -> None:
    old = first_state()
    new = stepped(old, {LAYER_0: [0, 5, 1023], "model.norm.weight": [1]})
    shares = changed_share(old, new)
    assert shares[LAYER_0] == 3 / 1024
    assert shares["model.norm.weight"] == 1 / 32
    assert shares["model.nothing"] == shares["model.embed_tokens.weight"] == 0.0


def test_minus_zero_is_a_change_and_an_equal_nan_is_none() -> None:
    nan = float("nan")
    assert changed_share({"w": bf16(0.0, nan)}, {"w": bf16(-0.0, nan)}) == {"w": 0.5}


def test_states_of_other_models_are_not_compared() -> None:
    old = first_state()
    for new in (
        {name: tensor for name, tensor in old.items() if name != LAYER_0},
        old | {LAYER_0: BitTensor(old[LAYER_0].bits, "float16", (32, 32))},
        old | {LAYER_0: BitTensor(old[LAYER_0].bits, "bfloat16", (1024,))},
    ):
        with pytest.raises(WeightsError, match=LAYER_0):
            changed_share(old, new)


def test_the_predicted_share_is_that_of_small_weights() -> None:
    rate = 2.0**-18  # 256 lr = 2^-10
    small, large = 2.0**-11, 2.0**-9
    weights = bf16(small, -small, 0.0, -0.0, large, -large, float("nan"), float("inf"))
    assert predicted_share({"w": weights, "empty": bf16()}, rate) == {"w": 0.5, "empty": 0.0}


def test_the_bound_follows_the_dtype_s_precision() -> None:
    rate, weights = 2.0**-18, np.array([2.0**-9, 2.0**-6, 0.5], np.float32)
    half = BitTensor(weights.astype(np.float16).view(np.uint16), "float16", (3,))
    single = BitTensor(weights.view(np.uint32), "float32", (3,))
    shares = predicted_share({"half": half, "single": single}, rate)
    assert shares == {"half": pytest.approx(1 / 3), "single": 1.0}  # below 2^11 lr and below 2^24 lr


def test_the_prediction_agrees_with_adam_like_steps() -> None:
    """Weights below 256 lr change under steps of +-lr, those far above do not."""
    rng, rate = np.random.default_rng(0), 3e-6
    old = rng.normal(0.0, 0.015, 200_000).astype(np.float32)
    old = (old.view(np.uint32) >> 16 << 16).view(np.float32)  # exactly representable in bf16
    new = old + rate * rng.choice(np.array([-1, 1], np.float32), old.size)
    rounded = ((new.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    share = changed_share({"w": bf16(*old)}, {"w": BitTensor(rounded, "bfloat16", rounded.shape)})["w"]
    predicted = predicted_share({"w": bf16(*old)}, rate)["w"]
    assert predicted / 2 < share < 2 * predicted
    assert 0.01 < predicted < 0.1


def test_k_steps_by_hand() -> None:
    states = [first_state()]
    for version in range(1, 9):
        back = {LAYER_0: [0]} if version % 2 else {LAYER_0: [0, 1]}
        states.append(stepped(states[-1], back, ulp=1 if version % 2 else -1))
    k_steps = KStepSparsity()
    for version, state in enumerate(states):
        k_steps.add(version, state)
    assert k_steps.num_windows == {1: 8, 2: 4, 4: 2, 8: 1}
    means = [k_steps.mean_changed(k) for k in STEPS]
    # Element 0 goes up and down, element 1 goes down every second version.
    assert [means_of[LAYER_0] for means_of in means if means_of] == [1.5, 1.0, 1.0, 1.0]


def test_versions_that_were_not_published_make_no_window() -> None:
    k_steps = KStepSparsity()
    for version in (0, 2, 4, 5):
        k_steps.add(version, first_state())
    assert k_steps.num_windows == {1: 1, 2: 2, 4: 1, 8: 0}
    assert k_steps.mean_changed(8) is None


def test_layers() -> None:
    assert layer_of("model.layers.10.self_attn.q_proj.weight") == "model.layers.10"
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert layer_of("lm_head.weight") == "lm_head"


def test_the_table_of_a_stored_run(tmp_path: Path) -> None:
    states = store_chain(tmp_path, 9, snapshots=(0, 4))
    table = sparsity_table(reader_at(tmp_path), learning_rate=1e-5)
    assert [row.layer for row in table] == [
        "all", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.nothing",
    ]  # fmt: skip
    layer = table[2]
    assert layer.num_elements == 1024
    assert layer.changed_shares == (10 / 1024, 20 / 1024, 40 / 1024, 80 / 1024)
    assert table[3].changed_shares == (0.0, 0.0, 0.0, 0.0)
    assert layer.predicted_share == predicted_share(states[0], 1e-5)[LAYER_0]
    total = 64 * 32 + 2 * 1024 + 32
    assert table[0].num_elements == total
    assert table[0].changed_shares[0] == pytest.approx(11 / total)
    assert table[0].predicted_share is not None
    assert 0.1 < table[0].predicted_share < 0.2  # about P(|N(0, 0.015)| < 0.00256)
    json.dumps([dataclasses.asdict(row) for row in table])
    assert sparsity_table(reader_at(tmp_path), None)[0].predicted_share is None


def test_the_table_is_of_the_newest_lineage(tmp_path: Path) -> None:
    store_chain(tmp_path, 3)
    writer, state = writer_at(tmp_path), first_state(seed=5)
    store_state(writer, 3, state, lineage="L1")
    store_state(writer, 4, stepped(state, {LAYER_0: [7]}), (3, state), lineage="L1")
    assert sparsity_table(reader_at(tmp_path), None)[2].changed_shares == (1 / 1024, None, None, None)
    assert sparsity_table(reader_at(tmp_path), None, "L0")[2].changed_shares[0] == 10 / 1024


def test_an_empty_store_has_no_table(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no version"):
        sparsity_table(reader_at(tmp_path), None)


@given(st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), max_size=20))
def test_the_ulp_step_counts_values_between(pairs: list[tuple[int, int]]) -> None:
    def rank(pattern: int) -> int:
        """Place in the list of all patterns from the lowest to the highest value, by definition."""
        return 0x8000 + pattern if pattern < 0x8000 else 0x7FFF - (pattern - 0x8000)

    old = np.array([a for a, _ in pairs], np.uint16)
    new = np.array([b for _, b in pairs], np.uint16)
    assert max_ulp_step(old, new) == max((abs(rank(a) - rank(b)) for a, b in pairs), default=0)


# --- rebuilding ----------------------------------------------------------------------------------


def test_every_version_is_rebuilt_bit_for_bit(tmp_path: Path) -> None:
    states = store_chain(tmp_path, 7, snapshots=(0, 5))
    store = reader_at(tmp_path)
    for version, state in enumerate(states):
        assert same(rebuild(store, "L0", version), state)


def test_replay_goes_through_every_entry_also_where_two_share_a_base(tmp_path: Path) -> None:
    states = store_chain(tmp_path, 4, snapshots=(0, 3))
    writer = writer_at(tmp_path)
    store_state(writer, 3, states[3], (1, states[1]), "fast")  # for laggards
    store_state(writer, 2, states[2], (1, states[1]), "fast")
    store = reader_at(tmp_path)
    entries = store.index()
    seen = []
    for replayed in replay(store, entries):
        assert replayed.problem == ""
        assert replayed.state is not None
        assert same(replayed.state, states[replayed.entry.manifest.version])
        seen.append(replayed.entry.name)
    assert sorted(seen) == sorted(entry.name for entry in entries)
    assert len(seen) == 8


def test_a_state_that_is_not_the_signed_one_is_told(tmp_path: Path) -> None:
    writer, states = writer_at(tmp_path), [first_state(), first_state(seed=1)]
    store_state(writer, 0, states[0])
    store_state(writer, 1, states[1], (0, states[0]), digest="xxh3:" + "0" * 32)
    problems = [replayed.problem for replayed in replay(writer, writer.index())]
    assert problems[0] == ""
    assert "must have digest xxh3:000" in problems[1]
    with pytest.raises(WeightsError, match="no way leads to version 1"):
        rebuild(reader_at(tmp_path), "L0", 1)


def test_a_store_that_does_not_answer_is_told_as_that_and_marks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = store_chain(tmp_path, 2, snapshots=(0,))
    store = reader_at(tmp_path)

    def silent(*arguments: object) -> bytes:
        raise StoreUnreachableError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "read_range", silent)
        with pytest.raises(StoreUnreachableError, match="no answer"):
            rebuild(store, "L0", 1)
    assert same(rebuild(store, "L0", 1), states[1])


def test_a_damaged_patch_leads_to_another_way_or_is_told(tmp_path: Path) -> None:
    states = store_chain(tmp_path, 5, snapshots=(0, 4))
    store = reader_at(tmp_path)
    patch = next(e for e in store.index() if e.manifest.version == 3)
    blob = tmp_path / "objects" / patch.manifest.payload_digest.removeprefix("b3:")
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    assert same(rebuild(store, "L0", 5), states[5])
    with pytest.raises(WeightsError, match="no way leads to version 3"):
        rebuild(store, "L0", 3)
    assert patch.name not in {entry.name for entry in store.index()}  # no longer offered
    fresh = reader_at(tmp_path)
    problems = {
        (replayed.entry.manifest.base_version, replayed.entry.manifest.version): replayed.problem
        for replayed in replay(fresh, fresh.index())
    }
    assert "damaged" in problems.pop((2, 3))
    assert "version 3, its base" in problems.pop((3, 4))
    assert problems == {(-1, 0): "", (0, 1): "", (1, 2): "", (-1, 4): "", (4, 5): ""}
