"""The outside baseline: TRL's GRPOTrainer on our model, our addition prompts and our reward.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r bench/trl_requirements.txt
    .venv-trl/bin/python bench/trl_baseline.py [--json FILE]
    .venv-trl/bin/python bench/trl_baseline.py --steps 20 --record FOLDER

This is what a person would pick on one CPU machine: one process, synchronous, transformers generation, fp32,
torch's own choice of threads. Settings that matter are those of a default `echo_planes.run`: 32 prompts x 8
samples a step, one optimizer update per batch, temperature 1, AdamW at 2.5e-4 after 10 steps of warm-up.
Gradient checkpointing, on by default in TRL, is off, because it only costs time on a model this small.
Warm-up begins at a tenth of the rate, as ours does; TRL's own schedules give the first update a rate of 0.

With --record nothing is measured. Written are `start.npz` (names and sizes of the parameters, and the weights
before the first step, end to end) and for each step `step-000.npz`, ... with its batch in the order of its
prompts (B rows, P and C columns) and what it did to the W weights:

    prompt_ids, prompt_mask (B, P), completion_ids, completion_mask (B, C), rewards, advantages (B,)
    logprobs (B, C)      of the policy that is trained, which is the one that sampled
    gradient (W,)        before it is clipped
    weights (W,)         after the step
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL's use of it, not ours
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

import numpy as np  # noqa: E402  the checkout must be importable first
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from echo_planes.tasks.math.adapter import MathOptions, MathTask  # noqa: E402
from echo_planes.types import Episode, Prompt  # noqa: E402

MODEL = CHECKOUT / "echo_planes" / "assets" / "tiny-math"
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 32, 8
EVAL_PROMPTS, EVAL_SAMPLES = 128, 4
RATE, WARM_UP = 2.5e-4, 10
TARGET_REWARD, TARGET_WINDOW = 0.9, 5
PROGRESS_EVERY = 20
WARM_STEPS = 10  # left out of the steady-state step time


def process_age_s() -> float:
    """Seconds since the kernel started this process, interpreter and imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def score(task: MathTask, prompt: Prompt, ids: list[int]) -> float:
    """Our task's reward for completion `ids`, which keeps its end token where it has one."""
    eos = task.tokenizer.eos_token_id
    text = task.tokenizer.decode(ids, skip_special_tokens=True)
    reason = "stop" if eos in ids else "length"
    return task.reward(prompt, Episode(tuple(ids), (True,) * len(ids), (), (), reason, text)).value


class Recorder(TrainerCallback):
    """Collects what each step earned, how many tokens it trained and when it ended."""

    def __init__(self, task: MathTask) -> None:
        self.task = task
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.step_ends_s: list[float] = []
        self.train_began_s = 0.0

    def reward(
        self, prompts: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """TRL's reward function: one call a step, all samples of the batch."""
        values = [
            score(self.task, Prompt(0, (), gold, text), ids)
            for text, ids, gold in zip(prompts, completion_ids, answer, strict=True)
        ]
        self.rewards.append(statistics.fmean(values))
        self.tokens.append(sum(map(len, completion_ids)))
        return values

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.train_began_s = process_age_s()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step_ends_s.append(process_age_s())
        if len(self.rewards) % PROGRESS_EVERY == 0:
            recent = statistics.fmean(self.rewards[-TARGET_WINDOW:])
            print(f"step {len(self.rewards)}, {self.step_ends_s[-1]:.0f} s, reward {recent:.3f}", flush=True)


class RecordingTrainer(GRPOTrainer):
    """Writes what every step trained on, its gradient and the weights that it made."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder = folder
        self.columns: dict[str, Any] = {}
        parameters = dict(self.model.named_parameters())
        sizes = [parameter.numel() for parameter in parameters.values()]
        np.savez(folder / "start.npz", names=list(parameters), sizes=sizes, weights=self.flat_weights())

    def flat_weights(self) -> np.ndarray:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).cpu().numpy()

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args)
        self.columns["rewards"] = rewards[:, 0]
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        # TRL shuffles the rows of everything that is returned here: by `place` they find back.
        return {**super()._generate_and_score_completions(inputs), "place": torch.arange(len(inputs))}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.order = inputs["place"].argsort()
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
            self.columns[name] = inputs[name][self.order]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.columns["logprobs"] = result[0].detach()[self.order]
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)  # the gradient is clipped after it
        self.columns["gradient"] = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        return loss

    def write(self, step: int) -> None:
        """Write step `step` (from 0), which has just ended."""
        arrays = {name: value.cpu().numpy() for name, value in self.columns.items()}
        np.savez(self.folder / f"step-{step:03}.npz", **arrays, weights=self.flat_weights())


class Writer(TrainerCallback):
    """Has a recording trainer write at the end of every step."""

    def __init__(self, trainer: RecordingTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.write(state.global_step - 1)


@torch.no_grad()
def held_out_accuracy(model: Any, tokenizer: Any, task: MathTask) -> float:
    """avg@4 at temperature 1 over the first 128 held-out prompts."""
    prompts = [task.eval_prompt(index) for index in range(EVAL_PROMPTS)]
    batch = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True, padding_side="left")
    model.eval()
    output = model.generate(
        **batch,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=task.max_new_tokens,
        num_return_sequences=EVAL_SAMPLES,
    )
    answers = output[:, batch["input_ids"].shape[1] :].tolist()
    return statistics.fmean(score(task, prompts[i // EVAL_SAMPLES], ids) for i, ids in enumerate(answers))


def train(
    model: Any, tokenizer: Any, recorder: Recorder, steps: int, seed: int, record: Path | None = None
) -> None:
    """Run GRPO for `steps` steps. `record`: an empty folder for what each step trained on and did."""
    task = recorder.task
    prompts = [task.prompt(index) for index in range(steps * PROMPTS_PER_STEP)]
    arguments = GRPOConfig(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        seed=seed,
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
        num_generations=SAMPLES_PER_PROMPT,
        steps_per_generation=1,
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=task.max_new_tokens,
        temperature=1.0,
        loss_type="grpo",
        beta=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=True
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARM_UP))
    kind = GRPOTrainer if record is None else partial(RecordingTrainer, record)
    trainer = kind(
        model=model,
        reward_funcs=recorder.reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": p.text, "answer": p.answer} for p in prompts]),
        processing_class=tokenizer,
        callbacks=[recorder],
        optimizers=(optimizer, warm_up),
    )
    trainer.remove_callback(PrinterCallback)
    if record is not None:
        trainer.add_callback(Writer(trainer))
    trainer.train()


def steps_to_target(rewards: list[float]) -> int | None:
    """Steps done when the mean of the last 5 step rewards first reaches 0.9; None if it never does."""
    for done in range(TARGET_WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[done - TARGET_WINDOW : done]) >= TARGET_REWARD:
            return done
    return None


def summarise(recorder: Recorder, eval_first_s: float) -> dict[str, float | int | None]:
    """Plain numbers. Evaluation time is in none of the seconds."""
    rewards, tokens, ends = recorder.rewards, recorder.tokens, recorder.step_ends_s
    step_s = [after - before for before, after in itertools.pairwise(ends)]
    first, last = statistics.fmean(rewards[:TARGET_WINDOW]), statistics.fmean(rewards[-TARGET_WINDOW:])
    reached = steps_to_target(rewards)
    return {
        "steps": len(rewards),
        "threads": torch.get_num_threads(),
        "seconds_startup": recorder.train_began_s - eval_first_s,
        "seconds_first_step": ends[0] - recorder.train_began_s,
        "seconds_per_step_median": statistics.median(step_s[WARM_STEPS - 1 :]),
        "seconds_to_last_step": ends[-1] - eval_first_s,
        "seconds_to_090": None if reached is None else ends[reached - 1] - eval_first_s,
        "steps_to_090": reached,
        "tokens_trained": sum(tokens),
        "tokens_trained_to_090": None if reached is None else sum(tokens[:reached]),
        "tokens_trained_per_s": sum(tokens[WARM_STEPS:]) / (ends[-1] - ends[WARM_STEPS - 1]),
        "reward_first": first,
        "reward_step_30": statistics.fmean(rewards[25:30]),
        "reward_step_60": statistics.fmean(rewards[55:60]),
        "reward_last": last,
        "reward_gain_per_million_tokens": (last - first) / (sum(tokens) / 1e6),
    }


def main() -> None:
    """Train once, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description="TRL GRPOTrainer on the embedded addition model.")
    parser.add_argument("--steps", type=int, default=120, help="at least 60 where they are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--record", type=Path, help="folder for batches and gradients; nothing is measured")
    args = parser.parse_args()
    if args.steps < 60 and not args.record:
        parser.error("--steps must be at least 60")
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    task = MathTask(MathOptions(), tokenizer, args.seed)
    recorder = Recorder(task)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        train(model, tokenizer, recorder, args.steps, args.seed, args.record)
        return

    began_s = time.perf_counter()
    accuracy_first = held_out_accuracy(model, tokenizer, task)
    eval_first_s = time.perf_counter() - began_s
    train(model, tokenizer, recorder, args.steps, args.seed)
    result = summarise(recorder, eval_first_s)
    result["held_out_accuracy_first"] = accuracy_first
    result["held_out_accuracy_last"] = held_out_accuracy(model, tokenizer, task)

    for name, value in result.items():
        print(f"{name:34} {'-' if value is None else format(value, '.4g' if value < 1e4 else '.0f')}")
    if args.json:
        curve = {"rewards": recorder.rewards, "tokens": recorder.tokens}  # of every step
        args.json.write_text(json.dumps(result | curve, indent=2) + "\n")


if __name__ == "__main__":
    main()
