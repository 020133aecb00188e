"""A model that reads far back, and its task: `python -m bench.recall FOLDER` trains it in half an hour.

Sequences repeat a random period, with 3 % of the bytes replaced. To go on with one, the model must find the
last occurrences of the newest bytes: far back, and anywhere. A random model's attention is flat, so leaving
pages out says nothing there. The one in `bench/recall_model` was trained so, but in two sittings, the
second of which began with new moments of the optimizer.

The task continues such sequences: `task=bench.recall:Recall`.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_planes.config.fields import Fixed
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions
from echo_planes.types import Episode, Prompt, Reward

MODEL = Path(__file__).parent / "recall_model"
BYTES, NOISE = 256, 0.03
LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE = 3, 128, 4, 2, 32
WIDE = 8704  # of the MLPs of `grow`

Step = Callable[[int, int, float], float]  # a sequence's length, tokens of the batch, rate: the loss


class RecallOptions(TaskOptions):
    """Options of the task."""

    shortest: int = Fixed(200, ge=8, description="tokens of a prompt, at least")
    longest: int = Fixed(400, ge=8, description="tokens of a prompt, at most")
    shortest_period: int = Fixed(60, ge=4, description="tokens of a period, at least")
    longest_period: int = Fixed(150, ge=4, description="tokens of a period, at most")


class Recall(TaskAdapter):
    """Going on with a periodic sequence. Reward: share of the answer's tokens that are right."""

    Options = RecallOptions
    options: RecallOptions

    def prompt(self, index: int) -> Prompt:
        return self._prompt("train", index)

    def eval_prompt(self, index: int) -> Prompt:
        return self._prompt("held out", index)

    def _prompt(self, kind: str, index: int) -> Prompt:
        rng, options = random.Random(f"{self.seed if kind == 'train' else 0}/{kind}/{index}"), self.options
        length = rng.randint(options.shortest, options.longest)
        period = rng.randint(options.shortest_period, min(options.longest_period, length // 2))
        whole = [rng.randrange(BYTES) for _ in range(period)]
        sequence = [whole[i % period] for i in range(length + 1024)]
        noisy = [rng.randrange(BYTES) if rng.random() < NOISE else one for one in sequence[:length]]
        return Prompt(index, tuple(noisy), " ".join(map(str, sequence[length:])))

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        right = [int(one) for one in prompt.answer.split()]
        ids = episode.response_ids
        share = sum(one == two for one, two in zip(ids, right, strict=False)) / max(1, len(ids))
        return Reward(share, share == 1.0)


def sequences(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (count, length) and which of their tokens can be known, both by random periods."""
    ids, known = torch.empty(count, length, dtype=torch.long), torch.zeros(count, length, dtype=torch.bool)
    for row in range(count):
        longest = max(8, length // 3)
        period = int(4 * math.exp(torch.rand((), generator=generator).item() * math.log(longest / 4)))
        whole = torch.randint(0, BYTES, (period,), generator=generator)
        ids[row] = whole.repeat(length // period + 1)[:length]
        noisy = torch.rand(length, generator=generator) < NOISE
        ids[row][noisy] = torch.randint(0, BYTES, (int(noisy.sum()),), generator=generator)
        known[row, period + 1 :] = True
    return ids, known


def train(folder: Path, minutes: float) -> None:
    """Train a model from nothing: first with growing lengths, then with lengths of 1,024 to 16,384."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        rope_theta=1e6,
        initializer_range=0.05,
        eos_token_id=258,
        pad_token_id=256,
    )
    model = Qwen3ForCausalLM(config)
    step = _trainer(model)
    length, mean, steps, total = 32, math.log(BYTES), 0, 0
    while length <= 4096:
        mean += 0.05 * (step(length, 4096, 2e-3 * min(1.0, (total + 1) / 50)) - mean)
        steps, total = steps + 1, total + 1
        if mean < 0.75 and steps > 20:  # the next length starts worse
            print(f"[recall] {length} tokens: {total} steps", flush=True)
            length, mean, steps = 2 * length, mean + 0.5, 0
    _anneal(step, minutes, 1.5e-3)
    _write(model, folder)


def grow(folder: Path, minutes: float) -> None:
    """Give the model in `MODEL` wider MLPs, which at first add nothing, and train it on with all lengths.

    It has 10 million weights then, and the small one's three layers of attention.
    """
    torch.manual_seed(0)
    small = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = Qwen3Config(**small.config.to_dict() | {"intermediate_size": WIDE})
    model = Qwen3ForCausalLM(config)
    before = small.state_dict()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            old = before[name]
            if name.endswith("down_proj.weight"):
                weights.zero_()
            weights[tuple(map(slice, old.shape))] = old
    _anneal(_trainer(model), minutes, 3e-4)
    _write(model, folder)


def _trainer(model: Qwen3ForCausalLM) -> Step:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def step(length: int, tokens: int, rate: float) -> float:
        ids, known = sequences(max(1, tokens // length), length, generator)
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        chosen = known[:, 1:]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), ids[:, 1:][chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _write(model: Qwen3ForCausalLM, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUILTIN_MODELS["builtin:tiny-math"] / name, folder / name)


def _anneal(step: Step, minutes: float, peak: float) -> None:
    begun_s, number = time.monotonic(), 0
    while (done := (time.monotonic() - begun_s) / (60 * minutes)) < 1:
        length = 1024 << number % 5
        loss = step(length, 8192, peak * min(1.0, (number + 1) / 50) * max(0.02, 1 - done))
        if number % 100 < 5:
            print(f"[recall] step {number}, {length} tokens: loss {loss:.3f}", flush=True)
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=25.0, help="of the second part")
    parser.add_argument(
        "--grow", action="store_true", help="10 million weights, from the model that is there"
    )
    args = parser.parse_args()
    (grow if args.grow else train)(args.folder, args.minutes)


if __name__ == "__main__":
    main()
