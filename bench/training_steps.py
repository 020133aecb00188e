"""Weights before and after real optimizer steps: the embedded model and one of 10 M parameters.

Both learn `a+b=` by next-token loss with AdamW on float32 masters, and are looked at as a publication is:
cast to bf16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo_planes.weights.digest import BitTensor, bit_tensor

_ASSET = str(files("echo_planes") / "assets" / "tiny-math")
_WIDER = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
_WIDER |= {"num_attention_heads": 6, "num_key_value_heads": 2}
_BATCH, _WARM_UP = 64, 20

State = dict[str, BitTensor]


def states(model_name: str, learning_rate: float, num_steps: int, seed: int = 0) -> Iterator[State]:
    """The weights before the first looked-at step and after each: num_steps + 1 states.

    Args:
        model_name: "0.6M" (the embedded model as it is) or "10M" (its architecture, wider, random).
    """
    torch.manual_seed(seed)
    model = _model(model_name).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    draw = random.Random(seed)
    for step in range(_WARM_UP + num_steps):
        if step >= _WARM_UP:
            yield _published(model)
        tokens, labels = _batch(draw)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    yield _published(model)


def _model(name: str) -> Any:
    if name == "0.6M":
        return AutoModelForCausalLM.from_pretrained(_ASSET)
    config = AutoConfig.from_pretrained(_ASSET)
    kept = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", *_WIDER)}
    return AutoModelForCausalLM.from_config(type(config)(**kept, **_WIDER))


def _batch(draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums as bytes, padded to one length, and the tokens to predict: those of the answers."""
    rows, labels = [], []
    for _ in range(_BATCH):
        a, b = draw.randrange(100), draw.randrange(100)
        question, answer = f"{a}+{b}=".encode(), f"{a + b}".encode()
        padding = 12 - len(question) - len(answer)
        rows.append([*question, *answer, *[256] * padding])
        labels.append([*[-100] * len(question), *answer, *[-100] * padding])
    return torch.tensor(rows), torch.tensor(labels)


def _published(model: Any) -> State:
    return {name: bit_tensor(parameter.detach().bfloat16()) for name, parameter in model.named_parameters()}
