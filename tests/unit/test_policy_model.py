"""The policy's logprobs: the same packed as alone, for every kind of layer, and twice the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from echo_planes.errors import ModelError  # noqa: E402
from echo_planes.learning import policy_model  # noqa: E402
from echo_planes.learning.layer_kinds import layer_kinds, may_pack, turns_alike  # noqa: E402
from echo_planes.learning.memory import kept_bytes_per_token, needs_recompute  # noqa: E402
from echo_planes.learning.packing import (  # noqa: E402
    MicroBatch,
    Segment,
    build,
    find_inputs,
    make_units,
    plan,
)
from echo_planes.learning.policy_model import PolicyModel, load_policy  # noqa: E402
from echo_planes.learning.probe import probe_layout, settle_layout  # noqa: E402
from echo_planes.learning.sequence import SequenceGroup  # noqa: E402
from echo_planes.learning.tree_attention import ATTENTION  # noqa: E402
from echo_planes.types import TrainBatch  # noqa: E402
from tests.unit.test_packing import make_batch  # noqa: E402

WINDOW, VOCABULARY = 8, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXED = ["sliding_attention", "full_attention"] * 2
HYBRID = ["linear_attention", "full_attention"] * 2
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 40, "initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3Text": SIZES | {"sliding_window": WINDOW, "layer_types": MIXED},
    "GptOss": SIZES | EXPERTS | {"sliding_window": WINDOW, "layer_types": MIXED},
    "Qwen3": SIZES,
    "Llama": SIZES,
    "GPT2": {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None} | GPT2,
    "Mistral": SIZES | {"sliding_window": WINDOW},
    "Qwen3Next": SIZES | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16, "layer_types": HYBRID},
    "Qwen3_5Text": SIZES | LINEAR | {"layer_types": HYBRID},
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM", "Qwen3_5Text": "Qwen3_5ForCausalLM"}
PLAIN = {"Qwen3", "Llama", "GPT2"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved(name: str, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**MODELS[name] | changes)
    getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).save_pretrained(folder)
    return folder


def loaded(name: str, folder: Path, dtype: Any = torch.float32, **changes: Any) -> PolicyModel:
    return load_policy(saved(name, folder, **changes), dtype, 1.0, 1.0, longest=40)


def answers() -> TrainBatch:
    """Four answers of about 30 tokens to two prompts; one has a part that is not trained."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in (6, 3)]
    sequences = []
    for i, length in enumerate((30, 27, 31, 30)):
        mask = [not (i == 1 and 8 <= place < 12) for place in range(length)]
        sequences.append((prompts[i // 2], rng.integers(0, VOCABULARY, length).tolist(), mask))
    return make_batch(sequences)


def tensors(micro: MicroBatch) -> dict[str, Any]:
    arrays = {
        "token_ids": micro.token_ids,
        "position_ids": micro.position_ids,
        "predictors": micro.predictors,
        "targets": micro.targets,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | {"segments": micro.segments}


def together(policy: PolicyModel, batch: TrainBatch) -> Any:
    """Logprobs (T,) as the learner lays a batch out."""
    packs = policy.packs
    inputs = find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = make_units(batch, inputs, 1024 if packs else 0)
    lengths = np.array([unit.length for unit in units])
    found = torch.zeros(len(batch.token_ids))
    for layout in plan(lengths, 256, 1, several=packs)[0]:
        micro = build(layout, units, batch, inputs)
        with torch.no_grad():
            found[torch.from_numpy(micro.columns)] = policy(**tensors(micro))[0]
    return found


def force(policy: PolicyModel) -> None:
    """Let rows hold several trajectories, whatever the model's settings say."""
    policy.apart = ""
    policy.model.config.get_text_config()._attn_implementation = ATTENTION


def alone(policy: PolicyModel, batch: TrainBatch) -> Any:
    """The same from transformers' own forward, one sequence at a time."""
    expected = torch.zeros(len(batch.token_ids))
    model = policy.model.eval()
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:stop])
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        expected[start + 1 : stop] = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return expected * torch.from_numpy(batch.loss_mask)


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_alone(name: str, tmp_path: Path) -> None:
    policy, batch = loaded(name, tmp_path), answers()
    assert policy.packs == (name in PLAIN)
    expected = alone(policy, batch)
    assert float((together(policy, batch) - expected).abs().max()) < 1e-5
    if not policy.packs:
        # It is for a reason: several in a row would be wrong.
        force(policy)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(together(policy, batch), expected, atol=1e-2)


@pytest.mark.parametrize("name", ["Gemma3Text", "Mistral"])
def test_a_window_that_nothing_reaches_beyond_does_not_hinder_packing(name: str, tmp_path: Path) -> None:
    policy, batch = loaded(name, tmp_path, sliding_window=40), answers()
    assert policy.packs
    assert not loaded(name, tmp_path, sliding_window=39).packs
    assert float((together(policy, batch) - alone(policy, batch)).abs().max()) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_micro_batch_goes_through(name: str, tmp_path: Path) -> None:
    policy = loaded(name, tmp_path)
    batch = answers()
    inputs = find_inputs(batch, np.zeros(batch.num_trajectories, np.bool_))
    [[_], [layout]] = plan(np.array([5]), 64, 2, several=False)
    logprobs, entropy = policy(**tensors(build(layout, [], batch, inputs)))
    assert len(logprobs) == len(entropy) == 0
    (logprobs.sum() + entropy.sum()).backward()


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_scores_and_their_gradient_are_those_of_a_log_softmax(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_model, "CACHED_LOGITS", 3 * VOCABULARY)  # three rows at a time, of eight
    generator = torch.Generator().manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    head = policy_model.Head(model, 0.7, top_p)
    hidden = torch.randn(8, SIZES["hidden_size"], generator=generator, requires_grad=True)
    targets = torch.arange(8)
    pull = torch.randn(8, generator=generator)
    logprobs, entropy = head(hidden, targets)
    found = torch.autograd.grad((logprobs * pull).sum(), (hidden, model.lm_head.weight))
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight) / 0.7
    if top_p < 1:
        logits = logits.masked_fill(~policy_model.nucleus(logits.detach(), targets, top_p), -torch.inf)
    expected = logits.log_softmax(-1)
    chosen = expected.gather(-1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((chosen * pull).sum(), (hidden, model.lm_head.weight))
    probs = expected.detach().exp()
    pairs = [
        (logprobs, chosen),
        (entropy, -(probs * expected.detach().nan_to_num(neginf=0.0)).sum(-1)),
        *zip(found, wanted, strict=True),
    ]
    for one, other in pairs:
        assert float((one - other).detach().abs().max()) < 1e-6
    assert not entropy.requires_grad


# --- memory --------------------------------------------------------------------------------------


def gradients(policy: PolicyModel, batch: TrainBatch) -> tuple[dict[str, Any], int]:
    """The gradient of the mean logprob, and the bytes kept for the backward pass, weights left out."""
    inputs = find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = make_units(batch, inputs, 256 if policy.packs else 0)
    layouts = plan(np.array([unit.length for unit in units]), 256, 1, several=policy.packs)[0]
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    for layout in layouts:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _ = policy(**tensors(build(layout, units, batch, inputs)))
        logprobs.mean().backward()
    size = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    return {name: p.grad for name, p in policy.named_parameters()}, size


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_run_again_give_the_same_gradient_and_keep_less(name: str, tmp_path: Path) -> None:
    whole = loaded(name, tmp_path)
    again = load_policy(tmp_path, torch.float32, 1.0, 1.0, recompute=lambda model: True, longest=40)
    expected, most = gradients(whole, answers())
    found, least = gradients(again, answers())
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert least < most / 3


def test_a_token_of_8_b_weights_keeps_half_a_megabyte_where_layers_run_again() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    qwen3_8b = transformers.Qwen3Config(**sizes, **heads)
    assert kept_bytes_per_token(qwen3_8b, torch.bfloat16, recompute=True) < 0.5e6
    # Each layer keeps its input, of 4096 numbers, and the final norm keeps a few more.
    assert kept_bytes_per_token(qwen3_8b, torch.bfloat16, recompute=True) > 36 * 4096 * 2
    assert 7e6 < kept_bytes_per_token(qwen3_8b, torch.bfloat16) < 9e6
    assert needs_recompute(qwen3_8b, torch.bfloat16, 8192)


def test_what_is_counted_from_settings_is_what_a_forward_pass_keeps(tmp_path: Path) -> None:
    policy = loaded("Llama", tmp_path, num_hidden_layers=8)
    inputs = torch.randint(0, VOCABULARY, (1, 100))
    kept: dict[int, Any] = {p.untyped_storage().data_ptr(): None for p in policy.parameters()}

    def keep(tensor: Any) -> Any:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy.model.base_model(input_ids=inputs, use_cache=False)
    measured = sum(t.untyped_storage().nbytes() for t in kept.values() if t is not None) / 100
    del output
    assert kept_bytes_per_token(policy.model.config, torch.float32) == pytest.approx(measured, rel=0.1)


def test_layers_run_again_by_default_where_much_would_be_kept_or_nothing_can_be_counted() -> None:
    assert not needs_recompute(transformers.Qwen3Config(**SIZES), torch.float32, 8192)
    assert needs_recompute(transformers.GptOssConfig(**MODELS["GptOss"]), torch.float32, 8192)


# --- what is decided from the settings -----------------------------------------------------------


def test_layer_kinds_come_from_the_settings() -> None:
    assert layer_kinds(SimpleNamespace(layer_types=["conv", "attention"])) == ["conv", "full_attention"]
    assert layer_kinds(SimpleNamespace(block_types=["recurrent", "attention"])) == [
        "recurrent",
        "full_attention",
    ]
    assert layer_kinds(SimpleNamespace()) == ["full_attention"]
    assert layer_kinds(SimpleNamespace(sliding_window=None)) == ["full_attention"]
    assert layer_kinds(SimpleNamespace(sliding_window=4)) == ["sliding_attention"]
    assert layer_kinds(SimpleNamespace(sliding_window=4, use_sliding_window=False)) == ["full_attention"]


@pytest.mark.parametrize(
    ("settings", "packs"),
    [
        ({}, True),
        ({"layer_types": ["full_attention", "moe"]}, True),
        ({"sliding_window": 9}, False),
        ({"sliding_window": 10}, True),
        ({"layer_types": ["sliding_attention"]}, False),  # its window is not told
        ({"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 9}, False),
        ({"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 10}, True),
        ({"layer_types": ["full_attention", "linear_attention"], "sliding_window": 99}, False),
        ({"block_types": ["recurrent", "attention"]}, False),
    ],
)
def test_rows_hold_several_only_where_one_mask_serves_every_layer(
    settings: dict[str, Any], packs: bool
) -> None:
    assert may_pack(SimpleNamespace(**settings), 10) == packs


@pytest.mark.parametrize(
    ("rope", "alike"),
    [
        (None, True),
        ({"rope_type": "llama3", "factor": 8.0}, True),
        ({"rope_type": "longrope", "short_factor": [1.0]}, False),
        ({"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}, False),
    ],
)
def test_ranks_share_rows_only_where_positions_turn_alike(rope: dict[str, Any] | None, alike: bool) -> None:
    """Each rank sees a part of the positions, of which such models take the largest."""
    assert turns_alike(SimpleNamespace(rope_parameters=rope)) == alike


@pytest.mark.parametrize(("kind", "shares"), [("default", True), ("dynamic", False)])
def test_a_model_whose_rows_cannot_be_shared_is_refused(kind: str, shares: bool) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    group = SequenceGroup(None, 0, 2)
    if shares:
        assert PolicyModel(model, 1.0, 1.0, longest=10, sequence=group).packs
        return
    with pytest.raises(
        ModelError, match=r"learner\.sequence_ranks=2: rows of a llama cannot be shared .*rotary"
    ):
        PolicyModel(model, 1.0, 1.0, longest=10, sequence=group)


@pytest.mark.parametrize("setting", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_capped_logits_are_refused_by_the_setting_that_caps_them(setting: str, tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    settings = transformers.Gemma2Config(**SIZES | caps | {setting: 30.0})
    transformers.Gemma2ForCausalLM(settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"not supported: {setting}$"):
        load_policy(tmp_path, torch.float32, 1.0, 1.0)


def test_a_kind_that_nothing_serves_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'window_attention'.*\S$") as refused:
        may_pack(SimpleNamespace(layer_types=["full_attention", "window_attention"]), 10)
    assert "\n" not in str(refused.value)


# --- the probe -----------------------------------------------------------------------------------


def probe(policy: PolicyModel, longest: int = 40) -> None:
    def forward(micro: MicroBatch) -> Any:
        logprobs: Any = policy(**tensors(micro))[0]
        return logprobs

    probe_layout(policy, forward, longest=longest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_probe_stops_what_would_be_wrong_and_nothing_else(name: str, dtype: Any, tmp_path: Path) -> None:
    policy = loaded(name, tmp_path, dtype)
    for longest in (2, 3, 4096):
        probe(policy, longest)
    if not policy.packs:
        force(policy)
        with pytest.raises(ModelError, match=r"packed into one row.*layer [0-9]"):
            probe(policy)


def test_the_probe_names_the_layer_where_they_part(tmp_path: Path) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    policy = loaded("Gemma3Text", tmp_path, layer_types=kinds)
    force(policy)
    with pytest.raises(ModelError, match=r"gemma3_text .*at layer 2 \('sliding_attention'\)") as refused:
        probe(policy)
    assert "\n" not in str(refused.value)


def test_a_model_that_does_not_hand_the_forest_on_gets_rows_of_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.NemotronConfig(**SIZES)
    transformers.NemotronForCausalLM(config).save_pretrained(tmp_path)
    policy, other = (load_policy(tmp_path, torch.float32, 1.0, 1.0, longest=40) for _ in range(2))
    assert policy.packs
    settle_layout((policy, other), lambda micro: policy(**tensors(micro))[0], longest=40)
    assert policy.apart == other.apart == "the code of this model"
    batch = answers()
    assert float((together(policy, batch) - alone(policy, batch)).abs().max()) < 1e-5


# --- dropout -------------------------------------------------------------------------------------

DROPOUT = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}


def twice(policy: PolicyModel, *, grad: bool) -> float:
    """Largest difference between the logprobs of the same forward, made twice."""
    ids, segments = torch.arange(30)[None], (Segment(0, 30, 30, 0),)
    with torch.set_grad_enabled(grad):
        one, other = (policy(ids, ids, segments, torch.arange(29), ids[0, 1:])[0].detach() for _ in range(2))
    return float((one - other).abs().max())


def test_dropout_is_off_whoever_says_train(tmp_path: Path) -> None:
    policy = loaded("GPT2", tmp_path, **DROPOUT).train()
    assert twice(policy, grad=True) == twice(policy, grad=False) == 0.0


def test_dropout_that_is_asked_for_is_of_updates_alone(tmp_path: Path) -> None:
    policy = load_policy(saved("GPT2", tmp_path, **DROPOUT), torch.float32, 1.0, 1.0, dropout=True)
    assert twice(policy, grad=False) == 0.0
    assert twice(policy, grad=True) > 0.1
    assert twice(policy, grad=False) == 0.0


def test_what_only_training_mode_does_is_not_lost_in_silence(tmp_path: Path) -> None:
    path = saved("GPT2", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gradient_checkpointing": True}))
    with pytest.raises(ModelError, match="gradient_checkpointing=true"):
        load_policy(tmp_path, torch.float32, 1.0, 1.0)
