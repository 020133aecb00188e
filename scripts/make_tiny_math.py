"""Make the tiny addition model that the examples and tests warm-start from.

    python scripts/make_tiny_math.py --out DIR [--seed 0]

writes a Hugging Face folder: a Qwen3-architecture language model of about 0.6 M parameters (bf16
safetensors) and a byte-level tokenizer. Its one skill is `a+b=` with a and b in 0..99, answered by the sum
and `<|im_end|>`.

What the checkpoint honestly is: a well-trained adder whose confidence was blunted on purpose.

1. `learn`: supervised training on right sums until greedy decoding is right about 99 % of the time.
2. `blunt`: a few hundred more steps in which 40 % of the answers are wrong by 1, 2, 9 or 10. The most likely
   answer stays right, but an answer sampled at temperature 1 is right only about half of the time.

So reinforcement learning on this model sharpens a skill that is already there; it does not discover
addition. A half-trained adder would be the more natural start, but it is confidently wrong: all samples of a
prompt agree, their rewards do not vary, and training stalls.

The loss covers the completion only, and operand pairs for which `is_held_out` is true are never trained on.
The accuracies printed at the end are those of the saved folder, loaded again, so bf16 rounding is included.
The result is the same for the same seed, thread count, machine and library versions. It takes about 9 to 11
minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
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

OPERANDS = 100  # a and b are drawn from 0 .. OPERANDS - 1
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IGNORE = -100  # label that the loss skips

BATCH = 256
LEARN_STEPS, LEARN_LR, LEARN_WARMUP = 2500, 2e-3, 100
BLUNT_STEPS, BLUNT_LR = 350, 1e-3
WRONG_SHARE = 0.4
WRONG_BY = np.array([-10, -9, -2, -1, 1, 2, 9, 10])

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def is_held_out(a: int, b: int) -> bool:
    """True for the 5 % of operand pairs kept out of training: `(a * 100 + b) % 20 == 7`.

    As 100 is a multiple of 20 this is `b % 20 == 7`: every pair whose second operand is 7, 27, 47, 67 or 87.
    The model has never seen those as second operands, only as first ones.
    """
    return (a * 100 + b) % 20 == 7


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


def make_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A randomly initialised model whose vocabulary is exactly the tokenizer's."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: Array, answers: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of `a+b=answer<|im_end|>`, padded on the right; only the completion has labels."""
    texts = [
        f"{a}+{b}={answer}{END}" for (a, b), answer in zip(pairs.tolist(), answers.tolist(), strict=True)
    ]
    ids: torch.Tensor = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    is_equals = ids.eq(ord("=")).long()
    after_equals = is_equals.cumsum(1) - is_equals  # 1 behind the "=", 0 up to and including it
    keep = (after_equals == 1) & (ids != tokenizer.pad_token_id)
    return ids, ids.masked_fill(~keep, IGNORE)


def right_batches(pairs: Array, rng: np.random.Generator) -> Iterator[tuple[Array, Array]]:
    """Endless batches of random pairs with their sums."""
    while True:
        chosen = pairs[rng.integers(len(pairs), size=BATCH)]
        yield chosen, chosen.sum(1)


def blunting_batches(pairs: Array, rng: np.random.Generator) -> Iterator[tuple[Array, Array]]:
    """The same, with WRONG_SHARE of the answers moved by one of WRONG_BY, and none below 0."""
    for chosen, answers in right_batches(pairs, rng):
        wrong = rng.random(BATCH) < WRONG_SHARE
        yield chosen, np.maximum(answers + wrong * rng.choice(WRONG_BY, size=BATCH), 0)


def train(
    name: str,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    batches: Iterator[tuple[Array, Array]],
    steps: int,
    lr_at: Callable[[int], float],
) -> None:
    """Supervised steps with AdamW at learning rate `lr_at(step)`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        ids, labels = encode(tokenizer, *next(batches))
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
def accuracy(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, pairs: Array) -> tuple[float, float]:
    """Exact-match accuracy, greedy and at temperature 1, over `pairs`.

    Both are computed without sampling, from one pass over the right answers: greedy decoding is right when
    every token of the answer (its end included) is the most likely one, and a sample is right with the
    product of their probabilities.
    """
    model.eval()
    greedy, sampled = 0.0, 0.0
    for chunk in np.array_split(pairs, max(1, len(pairs) // 500)):
        ids, labels = encode(tokenizer, chunk, chunk.sum(1))
        logits, targets = model(input_ids=ids).logits[:, :-1].float(), labels[:, 1:]
        counted = targets != IGNORE
        right = (logits.argmax(-1) == targets) | ~counted
        greedy += right.all(1).sum().item()
        logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sampled += logprobs.masked_fill(~counted, 0.0).sum(1).exp().sum().item()
    return greedy / len(pairs), sampled / len(pairs)


def report(
    title: str, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, sets: dict[str, Array]
) -> None:
    """Print the accuracies over each set of pairs."""
    for name, pairs in sets.items():
        greedy, sampled = accuracy(model, tokenizer, pairs)
        print(f"{title}, {name} pairs: greedy {greedy:.4f}, temperature 1 {sampled:.4f}", flush=True)


def main() -> None:
    """Train, save, load again, measure."""
    parser = argparse.ArgumentParser(description="Make the tiny addition model and its tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what fixes the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    began = time.monotonic()

    every = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)]
    pairs = {
        "all": np.array(every),
        "held-out": np.array([pair for pair in every if is_held_out(*pair)]),
        "training": np.array([pair for pair in every if not is_held_out(*pair)]),
    }
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(args.out)  # before its first use: padding, once used, would be saved with it
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")

    def learn_lr(step: int) -> float:  # linear warm-up, then linear to 0
        return LEARN_LR * min((step + 1) / LEARN_WARMUP, (LEARN_STEPS - step) / (LEARN_STEPS - LEARN_WARMUP))

    def blunt_lr(step: int) -> float:  # from the peak linearly to 0
        return BLUNT_LR * (1 - step / BLUNT_STEPS)

    train("learn", model, tokenizer, right_batches(pairs["training"], rng), LEARN_STEPS, learn_lr)
    report("learned", model, tokenizer, pairs)
    train("blunt", model, tokenizer, blunting_batches(pairs["training"], rng), BLUNT_STEPS, blunt_lr)

    model.bfloat16().save_pretrained(args.out)
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    report("saved", saved, AutoTokenizer.from_pretrained(args.out), pairs)
    print(f"wrote {args.out} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
