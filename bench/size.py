"""A model of half a billion weights through the whole loop: `python -m bench.size [--json FILE]`.

The model has the shape of Qwen2.5-0.5B and random weights from a seed. Its answers are noise, and the
reward, the share of an answer's tokens with an even id, differs within every group, so every step has
gradients. Six steps run on real Ray, vLLM and DeepSpeed, on the CPU of one machine: once with all weights
trained, once with adapters (LoRA). Printed: seconds by part of a step, bytes of publications, the peak of
memory of every process, and of the learner beside the arithmetic of `learning/footprint.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.learning.footprint import Shape, footprint, shape_of
from echo_planes.loop.loading import load_config
from echo_planes.types import Episode, Prompt, Reward
from tests.integration.harness import Program, metrics, program, summary

STEPS = 6
LAYERS = 24
PROMPTS, SAMPLES = 4, 4
MAX_NEW_TOKENS, MAX_MODEL_LEN = 16, 512
SEED = 7
SAMPLE_EVERY_S = 0.5
LIMIT_S = 1800.0
MACHINE_BYTES = 24 * 2**30
LEARNER = "ray::LearnerProcess"
ALL, ADAPTERS = "all weights", "adapters"
KINDS = {ALL: ("learner.lr=3e-6",), ADAPTERS: ("learner.lr=3e-5", "learner.lora_rank=16")}
WORDS = (
    f"run.steps={STEPS}",
    "task=bench.size:Noise",
    "eval.every=0",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=1",
    "fleet=single",
    "learner.warmup_steps=0",
    f"model.max_model_len={MAX_MODEL_LEN}",
    f"learner.micro_batch_tokens={MAX_MODEL_LEN}",
    "learner.activation_checkpointing=true",
    "learner.threads=2",
    "learner.zero_stage=0",  # of one rank: nothing to share, and no second copy of fp32 weights
    f"sampling.prompts_per_step={PROMPTS}",
    f"sampling.samples_per_prompt={SAMPLES}",
    f"sampling.max_new_tokens={MAX_NEW_TOKENS}",
    "staleness.max_staleness=1",
)


class Noise(TaskAdapter):
    """Asks for anything; an answer is worth the share of its tokens whose ids are even."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, tuple(1000 + (index * 31 + place) % 5000 for place in range(16)))

    def eval_prompt(self, index: int) -> Prompt:
        return self.prompt(1_000_000 + index)

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        even = sum(one % 2 == 0 for one in episode.response_ids)
        share = even / max(len(episode.response_ids), 1)
        return Reward(share, share > 0.5)


def write_model(folder: Path, layers: int) -> None:
    """Write a random model with the shape of Qwen2.5-0.5B and a tokenizer of its size."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=151_935,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t151935", unk_token="t0")
    fast.save_pretrained(folder)


def watched(running: Program) -> dict[str, int]:
    """Return the peak of memory by process title until the run ends, bytes, and of all with what they share.

    Shared memory and mapped files are not a process's own.
    """
    peaks: dict[str, int] = {}
    tick = threading.Event()
    waited = 0.0
    while running.process.poll() is None:
        total = 0
        for process in running.processes():
            try:
                title, own_bytes = _title(process), _own_bytes(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
                continue  # gone meanwhile
            peaks[title] = max(peaks.get(title, 0), own_bytes)
            total += own_bytes
        total += psutil.virtual_memory().shared  # once, though several processes map it
        peaks["all"] = max(peaks.get("all", 0), total)
        waited += SAMPLE_EVERY_S
        if waited > LIMIT_S:
            raise TimeoutError(f"no end within {LIMIT_S:.0f} s: {running.tail()}")
        tick.wait(SAMPLE_EVERY_S)
    return peaks


def _own_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0  # none: a zombie


def _title(process: psutil.Process) -> str:
    words = process.cmdline()
    title = words[0] if words else process.name()
    if "-m" in words[:6]:
        return words[words.index("-m") + 1]
    return title.split(".")[0].split()[0] if title.startswith("ray::") else Path(title).name


def measure(folder: Path, layers: int) -> dict[str, Any]:
    """Run the steps of each kind; return their figures."""
    writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(folder / "model", layers))
    writer.start()  # its memory goes with it
    writer.join()
    shape = shape_of(folder / "model")
    print(f"[size] {shape.weights / 1e6:.0f} million weights, {layers} layers", flush=True)
    return {kind: _measure(folder, kind, shape) for kind in KINDS}


def _measure(folder: Path, kind: str, shape: Shape) -> dict[str, Any]:
    run_dir = folder / kind / "run"
    run_dir.parent.mkdir()
    words = (*WORDS, *KINDS[kind], f"model.path={folder / 'model'}")
    with program(folder / kind / "work", run_dir, *words) as running:
        peaks = watched(running)
        if running.process.returncode:
            raise RuntimeError(running.tail())
    steps = metrics(run_dir)
    told = summary(run_dir)
    estimate = footprint(load_config(words), shape, on_gpu=False)
    return {
        "weights": shape.weights,
        "steps": told["steps"],
        "digest_mismatches": told["digest_mismatches"],
        "steps with gradients": sum(one["grad_norm"] > 0 for one in steps),
        "median of a step": {
            key: statistics.median(one[key] for one in steps)
            for key, value in steps[-1].items()
            if key in ("payload_bytes", "pause_s") or (key.startswith("t_") and value is not None)
        },
        "peak_bytes": dict(sorted(peaks.items(), key=lambda one: -one[1])),
        "learner by arithmetic": asdict(estimate),
        "learner, peak / arithmetic": round(peaks[LEARNER] / estimate.total, 3),
    }


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Claims, by their words."""
    peaks = {kind: one["peak_bytes"] for kind, one in figures.items()}
    return {
        f"{STEPS} steps, each with gradients": all(
            one["steps"] == one["steps with gradients"] == STEPS for one in figures.values()
        ),
        "every install ends with the manifest's digest": not any(
            one["digest_mismatches"] for one in figures.values()
        ),
        "the learner's peak is within 10 % of the arithmetic": all(
            0.9 <= one["learner, peak / arithmetic"] <= 1.1 for one in figures.values()
        ),
        "all processes together stay within 24 GiB": all(
            one["all"] <= MACHINE_BYTES for one in peaks.values()
        ),
        "adapters halve the learner's peak": peaks[ADAPTERS][LEARNER] <= peaks[ALL][LEARNER] / 2,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.size", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model; fewer for a quick look")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.layers)
    judged = verdicts(figures)
    print(json.dumps({"figures": figures, "verdicts": judged}, indent=2))
    if options.json:
        options.json.write_text(json.dumps({"size": {"figures": figures, "verdicts": judged}}, indent=2))
    return 0 if all(judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
