"""A real pretrained model in the whole loop: `python -m bench.real PART ... [--json FILE]`.

SmolLM2-135M-Instruct learns the quiz (`task=quiz`) on Ray, vLLM and DeepSpeed, with the settings of a plain
run unless said. Install it first: docs/running.md, "Models".

    mismatch   of every published version, |log-probability of its own weights - of the worker that served it|
    bytes      patches of these runs beside PULSE's code on the same states, and the share of weights changed
    learning   S = 0, 3, 6 and adapters, three seeds; what must not learn: rate 0, rewards that tell nothing
    visible    what share of the masters' movement the served weights show, by rate and step, without engines
    noise      a bf16 engine beside an fp32 learner, and steps of which about half make no update
    trl        TRL 1.16 on the same prompts, model, rate and batch (an environment of its own)

Runs lie in --runs and are not made again. Every figure goes into FILE, with `verdicts`: {claim: true or
false}. The exit status is 1 where one is false.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow as pa

from bench import coo_baseline
from bench.learning.intervals import difference, interval
from echo_planes.config.hub import pinned
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.loop.loading import load_config, recorded_config
from echo_planes.reporting.metrics import read_metrics, read_summary
from echo_planes.reporting.weights.sparsity import changed_elements
from echo_planes.tasks.quiz.adapter import QuizTask
from echo_planes.tasks.quiz.questions import TRAINED, held_out_family
from echo_planes.types import Episode, Prompt, Reward, TrainBatch
from echo_planes.weights.digest import BitTensor
from echo_planes.weights.store.objects import open_objects
from echo_planes.weights.store.reading import Store, read_public_key
from echo_planes.weights.store.replay import State, copied, replay
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.signing import Verifier

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)  # fixed before the first run
BASE = ("task=quiz",)
EXACT = (
    "learner.dtype=fp32",
    "fleet.workers.0.engine.dtype=float32",
    "fleet.workers.0.engine.kv_cache_gib=1",  # so that no answer is preempted
    "sampling.prompts_per_step=4",  # fp32 takes its time
    "learner.threads=2",
)
SHORT = ("run.steps=30", "eval.num_prompts=8", "eval.every=0")
LORA = ("learner.lora_rank=16",)
NO_SIGNAL = "bench.real:RandomRewards"
# Shorter: at rate 0 the weights never move, and after 30 steps those that learn are half way or further.
CONTROLS = {
    "rate-0": ["learner.lr=0", "run.steps=5"],
    "no-signal": [f"task.adapter={NO_SIGNAL}", "run.steps=30"],
}
RATES = (1e-6, 3e-6, 1e-5, 2e-5)
LIMIT_S = 4 * 3600.0
REACHED, MISMATCH, FACTOR, IDLE = 0.85, 1e-4, 0.9, 0.4
TOKENS_SCORED = 400  # of each version, at most
Figures = tuple[dict[str, Any], dict[str, bool]]


class RandomRewards(QuizTask):  # type: ignore[misc]  # tasks are not typed from outside
    """The quiz with rewards that tell nothing about the answer; `correct` stays true to it."""

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        """Return 1 for about one answer in six, drawn by the tokens of the answer."""
        true = super().reward(prompt, episode)
        drawn = hashlib.sha256(np.array([prompt.index, *episode.response_ids], np.int64).tobytes()).digest()
        return Reward(float(drawn[0] < 43), true.correct, true.parts)


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run."""

    name: str
    seed: int
    status: str
    seconds: float
    step_s: float  # median over the steps
    tokens: int  # trained
    start: float  # accuracy on held-out questions of the trained families before the first step
    end: float  # and after the last
    unseen: float  # after the last, on families that were never trained
    accuracy: list[tuple[int, float]]  # (step, held out, of the trained families)
    rewards: list[float]  # of each step
    drift: list[float | None]
    factor: list[float]
    updates: int
    to_reach: tuple[int, int, float] | None  # step, trained tokens, seconds at the first one that reached it

    @property
    def smallest_factor(self) -> float:
        return min(self.factor)


def run(folder: Path, name: str, seed: int, words: Sequence[str]) -> Run:
    """Make a run, unless its folder holds a summary already, and read its figures."""
    place = folder / f"{name}-{seed}"
    if not (place / "summary.json").exists():
        command = [sys.executable, "-m", "echo_planes.run", f"run.dir={place}", f"run.seed={seed}"]
        command += [*BASE, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if not (place / "summary.json").exists():
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    steps, summary = read_metrics(place), read_summary(place)
    if summary["status"] != "done":
        raise RuntimeError(f"{place} ended as {summary['status']}: {summary['error']}; remove it")
    accuracy = [(int(one["step"]), by_kind(one["prompt_rewards"])[0]) for one in summary["evals"]]
    found = Run(
        name,
        seed,
        str(summary["status"]),
        float(summary["seconds"]),
        median(row["t_train_s"] + row["t_idle_s"] for row in steps),
        sum(row["tokens"] for row in steps),
        accuracy[0][1],
        accuracy[-1][1],
        by_kind(summary["evals"][-1]["prompt_rewards"])[1],
        accuracy,
        [row["reward_mean"] for row in steps],
        [row["mismatch_mean"] for row in steps],
        [row["rate_factor"] for row in steps],
        int(steps[-1]["num_updates"]),
        to_reach(accuracy, [row["tokens"] for row in steps], [row["time_s"] for row in steps]),
    )
    print(f"{name:20s} seed {seed} {found.status} {found.start:.3f} -> {found.end:.3f}", flush=True)
    return found


def by_kind(prompt_rewards: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the mean reward on held-out questions of trained families, and on families never trained."""
    trained, unseen = list[float](), list[float]()
    for index, reward in prompt_rewards:
        (trained if held_out_family(int(index)) in TRAINED else unseen).append(reward)
    return fmean(trained), fmean(unseen) if unseen else 0.0


def to_reach(
    accuracy: Sequence[tuple[int, float]], tokens: Sequence[int], ends_s: Sequence[float]
) -> tuple[int, int, float] | None:
    """Return step, trained tokens and seconds when the first evaluation of at least `REACHED` was asked."""
    step = next((step for step, share in accuracy if step and share >= REACHED), None)
    return None if step is None else (step, sum(tokens[:step]), ends_s[step - 1])


# --- versions of a run ---------------------------------------------------------------------------


def versions(place: Path) -> Iterator[tuple[int, int, State]]:
    """Yield version, bytes of its publication and its weights, in order, each once."""
    objects = open_objects(str(place / "weights"))
    store = Store(objects, Verifier(read_public_key(objects)), relay_limits(2**42))
    seen = set[int]()
    for one in replay(store, store.index()):
        version = one.entry.manifest.version
        if one.state is None:
            raise RuntimeError(f"{place}: {one.problem}")
        if version not in seen:
            seen.add(version)
            yield version, one.entry.manifest.payload_bytes, one.state


class Scorer:
    """Log-probabilities by transformers in fp32, with a version's weights."""

    def __init__(self, place: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(os.cpu_count() or 1)
        self._torch = torch
        folder = recorded_config(place).model.folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def install(self, state: State) -> None:
        """Compute with these weights."""
        torch = self._torch
        for name, parameter in self._model.named_parameters():
            bits = torch.from_numpy(state[name].bits.view(np.int16)).view(torch.bfloat16)
            parameter.data.copy_(bits.reshape(parameter.shape))

    def differences(self, row: dict[str, Any]) -> list[float]:
        """Return |log-probability - that of the worker| of an answer's tokens."""
        torch = self._torch
        ids = torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        with torch.inference_mode():
            logits = self._model(ids[None]).logits[0, len(row["prompt_ids"]) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, ids[len(row["prompt_ids"]) :, None])[:, 0]
        told = torch.tensor(row["logprobs"])
        return list((ours - told).abs()[torch.tensor(row["response_mask"])].tolist())


def mismatch_by_version(place: Path) -> list[dict[str, float]]:
    """Of each version: mean |difference| over answers that it sampled from the first token to the last."""
    table: pa.Table = StoreSnapshot(place / "replay").table()
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        if len(row["span_versions"]) == 1:
            rows.setdefault(row["span_versions"][0], []).append(row)
    scorer, found = Scorer(place), []
    for version, _, state in versions(place):
        differences: list[float] = []
        scorer.install(state)
        for row in rows.get(version, []):
            if len(differences) < TOKENS_SCORED:
                differences += scorer.differences(row)
        if differences:
            found.append(
                {"version": version, "tokens": len(differences), "mean": fmean(differences)}
                | {"largest": max(differences)}
            )
    return found


def patches(place: Path) -> list[dict[str, float]]:
    """Of each patch: bytes, elements changed, and bytes of PULSE's code for the same two states."""
    before: dict[str, BitTensor] | None = None
    found = []
    for version, num_bytes, state in versions(place):
        if before is not None:
            changed = sum(changed_elements(before, state).values())
            total = sum(tensor.bits.size for tensor in state.values())
            found.append(
                {
                    "version": version,
                    "bytes": num_bytes,
                    "changed": changed,
                    "share": changed / total,
                    "dense": 2 * total,
                    "pulse_bytes": coo_baseline.encode(before, state).num_bytes,
                }
            )
        before = copied(state)
    return found


# --- parts ---------------------------------------------------------------------------------------


def run_mismatch(args: argparse.Namespace) -> Figures:
    figures, verdicts = {}, {}
    for stale in (0, 3):
        for kind, words in (("weights", ()), ("adapters", LORA)):
            name = f"exact-S{stale}-{kind}"
            run(args.runs, name, 0, [*EXACT, *SHORT, f"staleness.max_staleness={stale}", *words])
            rows = mismatch_by_version(args.runs / f"{name}-0")
            figures[name] = rows
            worst = max(row["mean"] for row in rows)
            print(f"{name}: {len(rows)} versions, mean at most {worst:.2g} nats")
            verdicts[f"{name}: mean below {MISMATCH:g} nats at every version"] = worst < MISMATCH
    return figures, verdicts


def run_bytes(args: argparse.Namespace) -> Figures:
    figures: dict[str, Any] = {}
    smaller = []
    for rate in RATES:
        name = f"rate-{rate:g}"
        words = [*SHORT, "run.steps=12", "staleness.max_staleness=0", f"learner.lr={rate}"]
        words += ["weights.codec=compact"]
        run(args.runs, name, 0, [*words, "learner.warmup_steps=0", "learner.decay=0"])
        rows = figures[name] = patches(args.runs / f"{name}-0")
        moved = [row for row in rows if row["changed"]]
        ours = sum(row["bytes"] for row in moved) / sum(row["changed"] for row in moved)
        theirs = sum(row["pulse_bytes"] for row in moved) / sum(row["changed"] for row in moved)
        ratio = median(row["dense"] / row["bytes"] for row in moved)
        share = median(row["share"] for row in moved)
        print(
            f"{name}: {share:.2%} changed, {ours:.3f} B each (PULSE {theirs:.3f}), {ratio:.0f} times smaller"
        )
        smaller.append(ours < 0.4 * theirs)
    return figures, {"patches take less than 0.4 of the bytes of PULSE's code": all(smaller)}


def stale_cells(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the settings of each S."""
    return {f"S{stale}": [f"staleness.max_staleness={stale}"] for stale in args.stale}


def run_learning(args: argparse.Namespace) -> Figures:
    stale = stale_cells(args)
    cells: dict[str, Sequence[str]] = {**stale, "adapters": LORA, **CONTROLS}
    runs = [
        run(args.runs, name, seed, [*words, *args.words])
        for seed in SEEDS[: args.seeds]
        for name, words in cells.items()
        if name not in CONTROLS or seed == SEEDS[0]  # controls once
    ]
    for name in cells:
        cell = [one for one in runs if one.name == name]
        start, end = interval([one.start for one in cell]), interval([one.end for one in cell])
        factor = min(one.smallest_factor for one in cell)
        print(f"{name}: {start} -> {end}, factor at least {factor:.2f}")
    return {"runs": [asdict(one) for one in runs]}, learning_verdicts(runs)


def learning_verdicts(runs: Sequence[Run]) -> dict[str, bool]:
    """The claims about what learns, what must not, and what staleness costs."""
    cells = {name: [one for one in runs if one.name == name] for name in dict.fromkeys(r.name for r in runs)}
    verdicts = {}
    for name, cell in cells.items():
        if name in CONTROLS:
            verdicts[f"{name} does not learn"] = all(one.end < one.start + 0.15 for one in cell)
        else:
            verdicts[f"{name}: held-out accuracy at least {REACHED}"] = (
                fmean(one.end for one in cell) >= REACHED
            )
    fresh = {one.seed: one.end for one in cells.get("S0", [])}
    for name in ("S3", "S6"):
        if pairs := [fresh[one.seed] - one.end for one in cells.get(name, []) if one.seed in fresh]:
            lost = interval(pairs)
            verdicts[f"{name}: ends within the interval of S0"] = lost.mean <= lost.half < math.inf
    return verdicts


def visible_shares(model: Path, rates: Sequence[float], steps: int) -> dict[str, list[float]]:
    """Return by rate, after each step, sum |served weight - first| / sum |master - first| over all weights.

    Full rate from the first step on. Two batches of the first policy's answers take turns, since sampling
    without an engine takes far longer than a step.
    """
    import torch

    from bench.learning.harness import Loop, Setup

    task = {"name": "quiz", "adapter": "echo_planes.tasks.quiz.adapter:QuizTask"}
    batches: list[TrainBatch] = []
    shares: dict[str, list[float]] = {}
    for rate in rates:
        settings: dict[str, dict[str, Any]] = {
            "sampling": {"prompts_per_step": 4, "max_new_tokens": 24},
            "learner": {"lr": rate, "drift_target": 0.0, "warmup_steps": 0, "decay": 0.0},
        }
        setup = Setup(0, rate, 0, settings, steps=steps, task=task, model=str(model))
        row = shares[f"{rate:g}"] = []
        with tempfile.TemporaryDirectory() as folder:
            loop = Loop(setup, Path(folder))
            batches = batches or [loop.sample(0)[0] for _ in range(2)]
            optimizer = loop.learner._engine._optimizer
            (shown,) = optimizer.bit16_groups_flat
            first = shown.detach().clone()
            for step in range(steps):
                loop.learner.train_step(replace(batches[step % 2], step=step))
                (state,) = optimizer.optimizer.state.values()  # beneath ZeRO's wrapper
                master = state["master"][: len(first)]
                went = float((master - first).abs().sum(dtype=torch.float64))
                row.append(float((shown - first).abs().sum(dtype=torch.float64)) / went)
            loop.close()
        print(f"rate {rate:g}: visible {', '.join(f'{share:.2f}' for share in row)}", flush=True)
    return shares


def run_visible(args: argparse.Namespace) -> Figures:
    shares = visible_shares(Path(pinned(load_config(BASE).model.path)), RATES, args.steps)
    if args.picture:
        args.picture.write_text(picture(shares))
    return {"shares": shares}, {}


def picture(shares: dict[str, list[float]]) -> str:
    """SVG of the visible share, a line a rate, steps across."""
    width, height, left, top = 460, 220, 50, 20
    steps = max(map(len, shares.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 130} {height + 70}" '
        f'width="{width + 130}" height="{height + 70}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in range(0, 101, 20):
        y = top + height * (1 - tick / 100)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{tick} %</text>')
    for (rate, row), color in zip(shares.items(), ("#2166ac", "#1b7837", "#b2182b", "#762a83"), strict=True):
        points = [
            (left + width * (i + 1) / steps, top + height * (1 - min(share, 1.0)))
            for i, share in enumerate(row)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{color}">lr {rate}</text>')
    parts.append(
        f'<text x="{left}" y="{top + height + 36}">steps, 1 to {steps}; share of the masters\' movement that '
        "the served weights show</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def run_noise(args: argparse.Namespace) -> Figures:
    """The engine in bf16 beside an fp32 learner; three answers a step, so that about half have no signal."""
    words = ["learner.dtype=fp32", "fleet.workers.0.engine.dtype=bfloat16", "eval.num_prompts=8"]
    words += ["sampling.prompts_per_step=1", "sampling.samples_per_prompt=3", "eval.every=0"]
    found = run(args.runs, "noise", 0, [*words, "run.steps=120"])
    idle = 1 - found.updates / len(found.rewards)
    print(f"noise: {idle:.0%} of the steps without an update, factor at least {found.smallest_factor:.2f}")
    holds = found.smallest_factor >= FACTOR and idle >= IDLE
    return {"run": asdict(found), "idle": idle}, {
        f"a noisy engine, {IDLE:.0%} idle steps or more: the factor stays at {FACTOR} or more": holds
    }


def run_trl(args: argparse.Namespace) -> Figures:
    """TRL beside the runs of `learning`, which come first. Its seconds are without evaluations."""
    runs = []
    for seed in SEEDS[: args.trl_seeds]:
        path = args.runs / f"trl-{seed}.json"
        if not path.exists():
            model = str(recorded_config(args.runs / "S0-0").model.folder)
            script = [str(ROOT / "bench" / "trl_baseline.py"), "--task", "quiz", "--model", model]
            command = [str(args.trl), *script, "--seed", str(seed), *args.trl_words, "--json", str(path)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
        runs.append(trl_run(json.loads(path.read_text()), seed))
    for name, words in stale_cells(args).items():
        runs += [run(args.runs, name, one, [*words, *args.words]) for one in SEEDS[: args.seeds]]
    for one in runs:
        print(f"{one.name} seed {one.seed}: {one.start:.3f} -> {one.end:.3f}, reached {one.to_reach}")
    return {"runs": [asdict(one) for one in runs]}, trl_verdicts(runs)


def trl_run(found: dict[str, Any], seed: int) -> Run:
    """Return what `trl_baseline.py` wrote as a run."""
    kinds = [(one["step"], *by_kind(one["prompt_rewards"])) for one in found["evaluations"]]
    accuracy = [(step, trained) for step, trained, _ in kinds]
    return Run(
        "trl",
        seed,
        "done",
        found["step_ends_s"][-1],
        found["seconds_per_step_median"],
        found["tokens_trained"],
        accuracy[0][1],
        accuracy[-1][1],
        kinds[-1][2],
        accuracy,
        found["rewards"],
        [],
        [],
        found["steps"],
        to_reach(accuracy, found["tokens"], found["step_ends_s"]),
    )


def trl_verdicts(runs: Sequence[Run]) -> dict[str, bool]:
    """Ours ends where TRL does or higher, within the interval of the difference of the means."""
    theirs = [one.end for one in runs if one.name == "trl"]
    verdicts = {}
    for name in sorted({one.name for one in runs} - {"trl"}):
        lost = difference(theirs, [one.end for one in runs if one.name == name])
        verdicts[f"{name}: ends within the interval of TRL"] = lost.mean <= lost.half < math.inf
    return verdicts


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "mismatch": run_mismatch,
    "bytes": run_bytes,
    "learning": run_learning,
    "visible": run_visible,
    "noise": run_noise,
    "trl": run_trl,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real", description="A real model in the loop.")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path, help="file for figures and verdicts")
    parser.add_argument("--runs", type=Path, default=Path("runs/real"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of the fixed list, the first")
    parser.add_argument("--stale", nargs="*", type=int, default=[0, 3, 6], help="S of the learning runs")
    parser.add_argument("--steps", type=int, default=16, help="of `visible`")
    parser.add_argument("--picture", type=Path, help="SVG of `visible`")
    parser.add_argument("--words", nargs="*", default=[], help="more settings of the learning runs")
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl/bin/python"), help="Python with TRL")
    parser.add_argument("--trl-seeds", type=int, default=1, help="of the fixed list: 45 minutes each")
    parser.add_argument("--trl-words", nargs="*", default=[], help="as `--trl-words=--bf16`")
    args = parser.parse_args()
    args.runs = args.runs.absolute()
    args.runs.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    for part in args.parts:
        figures[part], told = PARTS[part](args)
        verdicts |= {f"{part}: {claim}": holds for claim, holds in told.items()}
    for claim, holds in verdicts.items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    if args.json:
        args.json.write_text(json.dumps({**figures, "verdicts": verdicts}, indent=2) + "\n")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
