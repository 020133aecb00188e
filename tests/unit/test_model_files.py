"""Loading by module: what transformers loads, one module at a time; other files are left to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.errors import ModelError
from echo_planes.learning.model_files import load_by_module
from echo_planes.learning.policy_model import load_policy


def load(folder: Path, seen: list[nn.Module], dtype: torch.dtype = torch.float32) -> PreTrainedModel | None:
    return load_by_module(folder, AutoConfig.from_pretrained(folder), dtype, "sdpa", seen.append)


def copied(folder: Path, change: dict[str, str]) -> Path:
    """Write a copy of the tiny model, some of its tensors under other names."""
    folder.mkdir()
    source = BUILTIN_MODELS["builtin:tiny-math"]
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for old, new in change.items():
        assert old in tensors
        tensors[new] = tensors.pop(old)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(BUILTIN_MODELS))
def test_a_model_is_what_transformers_loads(name: str, dtype: torch.dtype) -> None:
    folder = BUILTIN_MODELS[name]
    seen: list[nn.Module] = []
    found = load(folder, seen, dtype)
    assert found is not None
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.training == expected.training
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(found, kind)(), getattr(expected, kind)(), strict=True)
        for (name_found, one), (name_expected, other) in pairs:
            assert name_found == name_expected
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert (found.lm_head.weight is found.get_input_embeddings().weight) == (
        expected.lm_head.weight is expected.get_input_embeddings().weight
    )
    ids = torch.arange(12)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)


def test_each_module_is_placed_once_when_its_own_parameters_are_there() -> None:
    folder = BUILTIN_MODELS["builtin:tiny-math"]
    seen: list[nn.Module] = []

    def place(module: nn.Module) -> None:
        assert not any(parameter.is_meta for parameter in module.parameters())
        seen.append(module)

    found = load_by_module(folder, AutoConfig.from_pretrained(folder), torch.float32, "sdpa", place)
    assert found is not None
    own = [module for module in found.modules() if list(module.named_parameters(recurse=False))]
    assert found.config.tie_word_embeddings  # so that the weights of the embedding came with lm_head
    expected = [module for module in reversed(own) if module is not found.get_input_embeddings()]
    assert [id(module) for module in seen] == [id(module) for module in expected]


def test_a_damaged_file_is_a_users_mistake(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model", {})
    (folder / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(folder, torch.float32, 1.0, 1.0, place=lambda module: None)


def test_a_module_comes_after_those_within_it(tmp_path: Path) -> None:
    sizes = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(sizes).to(torch.bfloat16).save_pretrained(tmp_path)

    def place(module: nn.Module) -> None:  # a mixer has parameters and modules of its own
        assert not any(parameter.is_meta for parameter in module.parameters())

    found = load_by_module(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32, "eager", place)
    assert found is not None
    expected = MambaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(map(torch.equal, found.parameters(), expected.parameters()))


def test_modules_are_made_as_ever_afterwards() -> None:
    load(BUILTIN_MODELS["builtin:tiny-math"], [])
    assert not nn.Linear(2, 2).weight.is_meta


def test_files_with_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    assert load(copied(tmp_path / "same", {}), []) is not None
    # A checkpoint of the base model alone has names without this prefix; transformers adds it.
    old = "model.layers.0.self_attn.q_proj.weight"
    seen: list[nn.Module] = []
    other = copied(tmp_path / "other", {old: old.removeprefix("model.")})
    assert load(other, seen) is None
    assert seen == []
    model = load_policy(other, torch.float32, 1.0, 1.0, place=seen.append)
    assert seen == []
    assert not any(parameter.is_meta for parameter in model.parameters())
