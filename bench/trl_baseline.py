"""The outside baseline: TRL's GRPOTrainer on our model, our prompts and our reward.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r bench/trl_requirements.txt
    .venv-trl/bin/python bench/trl_baseline.py [--json FILE]
    .venv-trl/bin/python bench/trl_baseline.py --task quiz --model FOLDER --bf16 [--lines FILE]
    .venv-trl/bin/python bench/trl_baseline.py --steps 20 --record FOLDER

This is what a person would pick on one CPU machine: one process, synchronous, transformers generation, fp32
(fp32 weights and bf16 matrices with --bf16), torch's own choice of threads unless --threads says another.
Settings that matter are those of a plain run of the task here, see SETUPS: prompts and samples a step, rate
after 10 steps of warm-up and its decay over the last 0.3 of the run, held-out prompts and when they are
asked; one optimizer update per batch, temperature 1, AdamW. Gradient checkpointing, on by default in TRL, is
off, because it only costs time on models this small. Warm-up begins at a tenth of the rate, as ours does;
TRL's own schedules give the first update a rate of 0.

--lines writes a JSON line for each step and each evaluation when it ends. Its seconds are since the process
started, without evaluations.

With --record nothing is measured, and the rate does not decay. Written are `start.npz` (names and sizes of
the parameters, and the weights before the first step, end to end) and for each step `step-000.npz`, ... with
its batch in the order of its prompts (B rows, P and C columns) and what it did to the W weights:

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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL's use of it, not ours
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

import numpy as np  # noqa: E402  the checkout must be importable first
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions  # noqa: E402
from echo_planes.tasks.math.adapter import MathOptions, MathTask  # noqa: E402
from echo_planes.tasks.quiz.adapter import QuizTask  # noqa: E402
from echo_planes.types import Episode, Prompt  # noqa: E402

MODEL = CHECKOUT / "echo_planes" / "assets" / "tiny-math"
SAMPLES_PER_PROMPT = 8
WARM_UP, DECAY = 10, 0.3  # steps, share of the run: those of a plain run of ours
TARGET_REWARD, TARGET_WINDOW = 0.9, 5
TARGET_ACCURACIES = (0.5, 0.7, 0.8, 0.85, 0.9)  # of held-out answers
PROGRESS_EVERY = 20
WARM_STEPS = 10  # left out of the steady-state step time


@dataclass(frozen=True, slots=True)
class Setup:
    """A task as a plain run of ours asks it."""

    task: Callable[[Any, int], TaskAdapter]  # of a tokenizer and a seed
    steps: int
    prompts_per_step: int
    max_new_tokens: int
    rate: float
    eval_prompts: int
    eval_samples: int
    eval_every: int  # steps; 0: only first and last
    is_chat: bool


SETUPS = {
    "math": Setup(
        task=lambda tokenizer, seed: MathTask(MathOptions(), tokenizer, seed),
        steps=120,
        prompts_per_step=32,
        max_new_tokens=6,
        rate=2.5e-4,
        eval_prompts=128,
        eval_samples=4,
        eval_every=0,
        is_chat=False,
    ),
    "quiz": Setup(
        task=lambda tokenizer, seed: QuizTask(TaskOptions(), tokenizer, seed),
        steps=60,
        prompts_per_step=8,
        max_new_tokens=24,
        rate=2e-5,
        eval_prompts=52,
        eval_samples=2,
        eval_every=15,
        is_chat=True,
    ),
}


def process_age_s() -> float:
    """Seconds since the kernel started this process, interpreter and imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def score(task: TaskAdapter, prompt: Prompt, ids: list[int]) -> float:
    """Our task's reward for completion `ids`, which keeps its end token where it has one."""
    eos = task.tokenizer.eos_token_id
    text = task.tokenizer.decode(ids, skip_special_tokens=True)
    reason = "stop" if eos in ids else "length"
    return task.reward(prompt, Episode(tuple(ids), (True,) * len(ids), (), (), reason, text)).value


class Recorder(TrainerCallback):
    """Collects what each step earned, how many tokens it trained, when it ended, and held-out accuracies.

    Args:
        lines: where a JSON line goes for each step and each evaluation.
    """

    def __init__(self, setup: Setup, tokenizer: Any, seed: int, lines: IO[str] | None = None) -> None:
        self.setup = setup
        self.tokenizer = tokenizer
        self.task = setup.task(tokenizer, seed)
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.step_ends_s: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.train_began_s = 0.0
        self._eval_s = 0.0  # so far, in none of the other seconds
        self._lines = lines

    def reward(
        self, completion_ids: list[list[int]], question: list[str], answer: list[str], **_: Any
    ) -> list[float]:
        """TRL's reward function: one call a step, all samples of the batch."""
        values = [
            score(self.task, Prompt(0, (), gold, text), ids)
            for text, ids, gold in zip(question, completion_ids, answer, strict=True)
        ]
        self.rewards.append(statistics.fmean(values))
        self.tokens.append(sum(map(len, completion_ids)))
        return values

    def evaluate(self, model: Any) -> None:
        """Measure the held-out accuracy after the steps so far."""
        began_s = process_age_s()
        shares = held_out_shares(model, self.setup, self.task)
        figures = {
            "step": len(self.rewards),
            "accuracy": statistics.fmean(shares),
            "seconds": began_s - self._eval_s,
            "tokens_trained": sum(self.tokens),
            "prompt_rewards": list(enumerate(shares)),
        }
        self._eval_s += process_age_s() - began_s
        self.evaluations.append(figures)
        self._write({"event": "eval", **figures})

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.train_began_s = process_age_s() - self._eval_s

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.step_ends_s.append(process_age_s() - self._eval_s)
        step, every = len(self.rewards), self.setup.eval_every
        self._write(
            {
                "event": "step",
                "step": step,
                "reward": self.rewards[-1],
                "seconds": self.step_ends_s[-1],
                "tokens_trained": self.tokens[-1],
            }
        )
        if step % PROGRESS_EVERY == 0:
            recent = statistics.fmean(self.rewards[-TARGET_WINDOW:])
            print(f"step {step}, {self.step_ends_s[-1]:.0f} s, reward {recent:.3f}", flush=True)
        if every and step % every == 0 and step < state.max_steps:
            self.evaluate(model)

    def _write(self, line: dict[str, Any]) -> None:
        if self._lines:
            print(json.dumps(line), file=self._lines, flush=True)


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
def held_out_shares(model: Any, setup: Setup, task: TaskAdapter) -> list[float]:
    """Share of right answers at temperature 1 to each of the first held-out prompts."""
    prompts = [task.eval_prompt(index) for index in range(setup.eval_prompts)]
    batch = task.tokenizer.pad(
        {"input_ids": [list(p.token_ids) for p in prompts]}, padding_side="left", return_tensors="pt"
    )
    model.eval()
    output = model.generate(
        **batch,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=setup.max_new_tokens,
        num_return_sequences=setup.eval_samples,
    )
    answers = output[:, batch["input_ids"].shape[1] :].tolist()
    values = [score(task, prompts[i // setup.eval_samples], ids) for i, ids in enumerate(answers)]
    return np.reshape(values, (-1, setup.eval_samples)).mean(axis=1).tolist()


def asked(setup: Setup, tokenizer: Any, prompt: Prompt) -> str | list[dict[str, str]]:
    """Our prompt in TRL's form, of which it makes the tokens.

    Raises:
        SystemExit: these would be other tokens than ours.
    """
    if not setup.is_chat:
        ids, form = tokenizer(text=prompt.text)["input_ids"], prompt.text
    else:
        form = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(form, add_generation_prompt=True, return_dict=True)["input_ids"]
    if tuple(ids) != prompt.token_ids:
        raise SystemExit(f"error: TRL would ask {prompt.text!r} in other tokens than we do")
    return form


def rate_share(steps: int, decay: float, done: int) -> float:
    """Return the share of the peak rate after `done` of `steps` steps, as ours: warm-up, 1, linear decay."""
    left = (1 - done / steps) / decay if decay else 1.0
    return min(1.0, (done + 1) / WARM_UP, left)


def train(
    model: Any, recorder: Recorder, steps: int, seed: int, record: Path | None = None, bf16: bool = False
) -> None:
    """Run GRPO for `steps` steps. `record`: an empty folder for what each step trained on and did."""
    task, setup, tokenizer = recorder.task, recorder.setup, recorder.tokenizer
    prompts = [task.prompt(index) for index in range(steps * setup.prompts_per_step)]
    rows = [{"prompt": asked(setup, tokenizer, p), "question": p.text, "answer": p.answer} for p in prompts]
    arguments = GRPOConfig(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        seed=seed,
        use_cpu=True,
        bf16=bf16,
        max_steps=steps,
        per_device_train_batch_size=setup.prompts_per_step * SAMPLES_PER_PROMPT,
        num_generations=SAMPLES_PER_PROMPT,
        steps_per_generation=1,
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=setup.max_new_tokens,
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
        model.parameters(), lr=setup.rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(rate_share, steps, DECAY if record is None else 0.0)
    )
    kind = GRPOTrainer if record is None else partial(RecordingTrainer, record)
    trainer = kind(
        model=model,
        reward_funcs=recorder.reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
        optimizers=(optimizer, schedule),
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


def mean(values: list[float]) -> float | None:
    """The mean; None of nothing."""
    return statistics.fmean(values) if values else None


def summarise(recorder: Recorder) -> dict[str, float | int | None]:
    """Plain numbers. Evaluation time is in none of the seconds."""
    rewards, tokens, ends = recorder.rewards, recorder.tokens, recorder.step_ends_s
    step_s = [after - before for before, after in itertools.pairwise(ends)]
    steady_s = step_s[WARM_STEPS - 1 :]
    first, last = statistics.fmean(rewards[:TARGET_WINDOW]), statistics.fmean(rewards[-TARGET_WINDOW:])
    reached = steps_to_target(rewards)
    figures = {
        "steps": len(rewards),
        "threads": torch.get_num_threads(),
        "seconds_startup": recorder.train_began_s,
        "seconds_first_step": ends[0] - recorder.train_began_s,
        "seconds_per_step_median": statistics.median(steady_s) if steady_s else None,
        "seconds_to_last_step": ends[-1],
        "seconds_to_090": None if reached is None else ends[reached - 1],
        "steps_to_090": reached,
        "tokens_trained": sum(tokens),
        "tokens_trained_to_090": None if reached is None else sum(tokens[:reached]),
        "tokens_trained_per_s": sum(tokens[WARM_STEPS:]) / sum(steady_s) if steady_s else None,
        "reward_first": first,
        "reward_step_30": mean(rewards[25:30]),
        "reward_step_60": mean(rewards[55:60]),
        "reward_last": last,
        "reward_gain_per_million_tokens": (last - first) / (sum(tokens) / 1e6),
        "held_out_accuracy_first": recorder.evaluations[0]["accuracy"],
        "held_out_accuracy_last": recorder.evaluations[-1]["accuracy"],
    }
    for target in TARGET_ACCURACIES:
        done = next((one for one in recorder.evaluations if one["accuracy"] >= target), {})
        for name in ("step", "seconds", "tokens_trained"):
            figures[f"{name}_to_held_out_{target:.2f}"] = done.get(name)
    return figures


def main() -> None:
    """Train once, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description="TRL GRPOTrainer on a task of ours.")
    parser.add_argument("--task", choices=SETUPS, default="math")
    parser.add_argument("--steps", type=int, help="default: those of a plain run of ours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--bf16", action="store_true", help="multiply in bf16 (autocast)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--lines", type=Path, help="file for a JSON line of each step and each evaluation")
    parser.add_argument("--record", type=Path, help="folder for batches and gradients; nothing is measured")
    args = parser.parse_args()
    setup = SETUPS[args.task]
    steps = setup.steps if args.steps is None else args.steps
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        train(model, Recorder(setup, tokenizer, args.seed), steps, args.seed, args.record)
        return

    with args.lines.open("w") if args.lines else nullcontext() as lines:
        recorder = Recorder(setup, tokenizer, args.seed, lines)
        recorder.evaluate(model)
        train(model, recorder, steps, args.seed, bf16=args.bf16)
        recorder.evaluate(model)
    result = summarise(recorder)

    for name, value in result.items():
        print(f"{name:34} {'-' if value is None else format(value, '.4g' if value < 1e4 else '.0f')}")
    if args.json:
        curve = {  # of every step, and of every evaluation
            "rewards": recorder.rewards,
            "tokens": recorder.tokens,
            "step_ends_s": recorder.step_ends_s,
            "evaluations": recorder.evaluations,
        }
        args.json.write_text(json.dumps(result | curve, indent=2) + "\n")


if __name__ == "__main__":
    main()
