"""Loading of a model one module at a time, so that no rank ever holds all of its weights (ZeRO-3).

transformers loads a whole model, which each rank would then divide. Here parameters have shapes alone until
their module is read from the files; `place` then keeps a rank's share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from echo_planes.cluster.process import release_freed
from echo_planes.learning.rounding import as_published

RELEASE_BYTES = 32 * 2**20
Place = Callable[[nn.Module], object]  # takes a module whose own parameters have been read


def load_by_module(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, attention: str, place: Place
) -> PreTrainedModel | None:
    """Load the model in a Hugging Face folder; None if its files have other names than its parameters.

    transformers renames, joins or keeps in fp32 the weights of such models while it loads them.

    Args:
        folder: with config.json and safetensors files.
        config: its settings.
        dtype: of the parameters.
        attention: implementation of attention.
        place: called once for each module with parameters of its own, after the modules within it.
    """
    with _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}.difference(names.values())
    with ExitStack() as stack:
        found: dict[str, Any] = {}  # the file of each tensor
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            found |= dict.fromkeys(file.keys(), file)
        if found.keys() - tied != set(names.values()) or model._keep_in_fp32_modules:
            return None
        read: dict[int, nn.Parameter] = {}  # by the parameter that it replaces: tied ones stay one
        freed_bytes = 0
        for module in reversed(list(model.modules())):
            before = len(read)
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in read:
                    full = names[id(parameter)]
                    tensor = found[full].get_tensor(full)
                    if tensor.shape != parameter.shape:
                        return None
                    read[id(parameter)] = nn.Parameter(as_published(full, tensor).to(dtype))
                    freed_bytes += parameter.nbytes
                setattr(module, name, read[id(parameter)])
            if len(read) > before:
                place(module)
            if freed_bytes > RELEASE_BYTES:  # else C's allocator keeps what lies between the shares
                release_freed()
                freed_bytes = 0
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Give parameters a shape and no storage as they are made. Buffers are made as ever."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is there already gets tied
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
