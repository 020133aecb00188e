"""Parts that the scripts for tiny models share: a byte-level tokenizer, a small Qwen3, and its two stages.

A tiny model is what reinforcement learning starts from on a laptop. It is trained in two stages:

1. `learn`: supervised training on right answers until greedy decoding is nearly always right.
2. `blunt`: a few hundred more steps in which 40 % of the answers are wrong. The most likely answer stays
   right, but an answer sampled at temperature 1 is right only about half of the time.

So reinforcement learning on such a model sharpens a skill that is already there; it does not discover it. A
half-trained model would be the more natural start, but it is confidently wrong: all samples of a prompt
agree, their rewards do not vary, and training stalls. make_tiny_carry.py goes further: nearly all answers of
its second stage are wrong, and a few are right, for reinforcement learning to find.

The loss covers answers only. The accuracies printed at the end are those of the saved folder, loaded again,
so bf16 rounding is included. The result is the same for the same seed, thread count, machine and library
versions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Rows = Sequence[tuple[str, str]]  # prompts and answers, the end token left out
Batches = Callable[[np.random.Generator], Iterator[Rows]]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IGNORE = -100  # label that the loss skips

BATCH = 256
LEARN_LR, LEARN_WARMUP, BLUNT_LR = 2e-3, 100, 1e-3
WRONG_SHARE = 0.4
HEAD_DIM = 32


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE uses for each byte 0 .. 255 (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))  # stand-ins for bytes that do not print, in order
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, its id the byte's value, then three special tokens; adds nothing."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="right",
    )


@dataclass(frozen=True)
class Size:
    """Dimensions of a model, whose heads are HEAD_DIM wide."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2


def make_model(tokenizer: PreTrainedTokenizerBase, size: Size = Size()) -> Qwen3ForCausalLM:
    """A randomly initialised model whose vocabulary is exactly the tokenizer's."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]


def encode(tokenizer: PreTrainedTokenizerBase, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of prompt, answer and end token, padded on the right; prompts have no labels."""
    texts = [f"{prompt}{answer}{END}" for prompt, answer in rows]
    ids: torch.Tensor = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    begins = torch.tensor([len(ids) for ids in tokenizer([prompt for prompt, _ in rows])["input_ids"]])[
        :, None
    ]
    keep = (torch.arange(ids.shape[1])[None] >= begins) & (ids != tokenizer.pad_token_id)
    return ids, ids.masked_fill(~keep, IGNORE)


def train(
    name: str,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    batches: Iterator[Rows],
    steps: int,
    lr_at: Callable[[int], float],
) -> None:
    """Supervised steps with AdamW at learning rate `lr_at(step)`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        ids, labels = encode(tokenizer, next(batches))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - began
            print(f"{name} step {step + 1}/{steps} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


@torch.no_grad()
def chances(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact answers, (rows,) each: whether greedy decoding is right, and how probably a sample is.

    Both are computed without sampling, from one pass over the right answers: greedy decoding is right when
    every token of the answer (its end included) is the most likely one, and a sample is right with the
    product of their probabilities.
    """
    model.eval()
    greedy, sampled = [], []
    for first in range(0, len(rows), 500):
        ids, labels = encode(tokenizer, rows[first : first + 500])
        logits, targets = model(input_ids=ids).logits[:, :-1].float(), labels[:, 1:]
        counted = targets != IGNORE
        greedy.append(((logits.argmax(-1) == targets) | ~counted).all(1))
        logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sampled.append(logprobs.masked_fill(~counted, 0.0).sum(1).exp())
    return torch.cat(greedy), torch.cat(sampled)


def report(
    title: str, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Rows]
) -> None:
    """Print the shares of each set that are right: greedily, by one sample, by one of 64 at least."""
    for name, rows in sets.items():
        greedy, chance = chances(model, tokenizer, rows)
        figures = (greedy.float().mean(), chance.mean(), (1 - (1 - chance) ** 64).mean())
        text = "greedy {:.4f}, temperature 1 {:.4f}, pass@64 {:.4f}".format(*figures)
        print(f"{title}, {name}: {text}", flush=True)


def make(
    description: str,
    right: Batches,
    blunted: Batches,
    sets: Mapping[str, Rows],
    *,
    learn_steps: int,
    blunt_steps: int,
    size: Size = Size(),
) -> None:
    """The command line: train, save, load again, measure.

    Args:
        right, blunted: endless batches of the two stages, given the randomness.
        sets: what is measured, by name.
        learn_steps, blunt_steps: length of the two stages.
        size: dimensions of the model.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what fixes the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    began = time.monotonic()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(args.out)  # before its first use: padding, once used, would be saved with it
    model = make_model(tokenizer, size)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")

    def learn_lr(step: int) -> float:  # linear warm-up, then linear to 0
        return LEARN_LR * min((step + 1) / LEARN_WARMUP, (learn_steps - step) / (learn_steps - LEARN_WARMUP))

    def blunt_lr(step: int) -> float:  # from the peak linearly to 0
        return BLUNT_LR * (1 - step / blunt_steps)

    train("learn", model, tokenizer, right(rng), learn_steps, learn_lr)
    report("learned", model, tokenizer, sets)
    train("blunt", model, tokenizer, blunted(rng), blunt_steps, blunt_lr)

    model.bfloat16().save_pretrained(args.out)
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    report("saved", saved, AutoTokenizer.from_pretrained(args.out), sets)
    print(f"wrote {args.out} in {time.monotonic() - began:.0f} s")
