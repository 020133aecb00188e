"""The long proofs: `make proof`, or `python -m bench.proof [--only NAME ...] [--json FILE]`.

Whole runs on real Ray, vLLM and DeepSpeed with the embedded models: several seeds, a control, the synchronous
algorithm, also seeded, the other tasks, staleness bounds with a slow worker and a lost publication, kills, a
submitted job, GSM8K, the rollout benchmark, and TRL beside it. Ends in a table: claim, figure, bar, verdict.
Nothing else should run on the machine meanwhile: some figures are times.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import codec as codec_bench
from tests.integration.harness import LOSSY_PROGRAM, PROGRAM, ROOT, events, metrics, run_to_end, summary

SEEDS = (0, 1, 2)
ADAPTERS = ("learner.lora_rank=16",)
STEPS = 120
BOUNDS = (0, 1, 2, 3, 6)
DATA_DIR = Path(os.environ.get("ECHO_PLANES_DATA", ROOT.parent / "shared" / "data"))
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
REWARD_BAR = 0.9
Z_95 = statistics.NormalDist().inv_cdf(0.975)
REPORTED = "reported"  # the bar of a figure that is only shown


@dataclass(frozen=True)
class Claim:
    """One row of the table. `holds` is None where nothing was judged: the figure has no bar (`REPORTED`), or
    the claim could not be tried and `figure` says why."""

    name: str
    figure: str
    bar: str
    holds: bool | None


class Proof:
    """Runs of the program, remembered so that later claims can look at earlier runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._main: dict[int, dict[str, Any]] = {}
        self._trl: dict[str, Any] = {}

    def run(self, name: str, *words: str, command: Sequence[str] = PROGRAM) -> Path:
        """A whole run; returns its folder."""
        print(f"[proof] {name}: {' '.join(words)}", flush=True)
        run_dir = self._folder / name
        run_to_end(self._folder / f"{name}-cwd", run_dir, *words, command=command)
        return run_dir

    # --- claims ----------------------------------------------------------------------------------

    def seeds(self) -> Iterator[Claim]:
        """The embedded job, three seeds."""
        for seed in SEEDS:
            run_dir = self.run(f"seed{seed}", f"run.seed={seed}", f"run.steps={STEPS}")
            told = self._main[seed] = {**summary(run_dir), "folder": str(run_dir)}
            yield from self._judge_main(seed, told)

    def _judge_main(self, seed: int, told: dict[str, Any]) -> Iterator[Claim]:
        name = f"seed {seed}"
        first, last = told["eval_first"], told["eval_last"]
        yield Claim(
            f"{name}: held-out accuracy",
            f"{first:.3f} -> {last:.3f}",
            "<= 0.65 -> >= 0.90",
            first <= 0.65 and last >= 0.90,
        )
        mean, most = told["staleness_mean"], told["max_staleness_observed"]
        yield Claim(f"{name}: staleness", f"mean {mean:.2f}, max {most}", "> 0, <= 3", mean > 0 and most <= 3)
        wrong = [told[k] for k in ("digest_mismatches", "lost_trajectories", "duplicate_trajectories")]
        adds_up = told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
        yield Claim(
            f"{name}: digest mismatches, lost, duplicates",
            f"{wrong}, ledger {'adds up' if adds_up else 'is off'}",
            "[0, 0, 0], adds up",
            wrong == [0, 0, 0] and adds_up,
        )
        yield Claim(
            f"{name}: T_bcast, pause for an update (medians)",
            f"{told['t_bcast_s_median']:.3f} s, {told['install_pause_s_median']:.3f} s",
            REPORTED,
            None,
        )
        yield Claim(f"{name}: duration", f"{told['seconds']:.0f} s", "<= 600 s", told["seconds"] <= 600)
        same = told["mismatch_same_version_mean"]
        yield Claim(
            f"{name}: |vLLM - learner logprob|, same version", f"{same:.4f} nats", "<= 0.02", same <= 0.02
        )

    def adapters(self) -> Iterator[Claim]:
        """The embedded job with adapters (LoRA) alone trained, three seeds, and a control."""
        for seed in SEEDS:
            told = summary(self.run(f"lora{seed}", *ADAPTERS, f"run.seed={seed}", f"run.steps={STEPS}"))
            first, last = told["eval_first"], told["eval_last"]
            yield Claim(
                f"adapters, seed {seed}: held-out accuracy, digest mismatches",
                f"{first:.3f} -> {last:.3f}, {told['digest_mismatches']}",
                "<= 0.65 -> >= 0.90, 0",
                first <= 0.65 and last >= 0.90 and told["digest_mismatches"] == 0,
            )
        yield from self._control("adapters, ", *ADAPTERS)

    def control(self) -> Iterator[Claim]:
        """Nothing is learned at learning rate 0."""
        yield from self._control("")

    def _control(self, name: str, *words: str) -> Iterator[Claim]:
        run_dir = self.run(f"{name.partition(',')[0]}lr0", *words, "learner.lr=0.0", "run.steps=60")
        told = summary(run_dir)
        change = told["eval_last"] - told["eval_first"]
        yield Claim(
            f"{name}control at lr = 0: change of accuracy",
            f"{change:+.3f}",
            "within 0.06",
            abs(change) <= 0.06,
        )

    def synchronous(self) -> Iterator[Claim]:
        """S = 0 beside S = 3."""
        told = summary(self.run("sync", "staleness.max_staleness=0", f"run.steps={STEPS}"))
        beside = self._main.get(0)
        idle = f"S=0 {told['bubble_ratio']:.1%}" + (f", S=3 {beside['bubble_ratio']:.1%}" if beside else "")
        yield Claim("learner's idle share", idle, REPORTED, None)
        steps = _seconds_per_step(self._folder / "sync")
        also = f", S=3 {_seconds_per_step(Path(beside['folder'])):.3f} s" if beside else ""
        yield Claim("seconds per step", f"S=0 {steps:.3f} s{also}", REPORTED, None)
        most, last = told["max_staleness_observed"], told["eval_last"]
        yield Claim(
            "S=0: staleness, accuracy", f"max {most}, {last:.3f}", "0, >= 0.90", most == 0 and last >= 0.90
        )

    def seeding(self) -> Iterator[Claim]:
        """S = 0 with one remote worker, seeded and unseeded; then learner and sampler by turns."""
        unseeded = ("fleet=single", "staleness.max_staleness=0", "learner.micro_batch_groups=8")
        seeded = (*unseeded, "seeding.engines=1", "seeding.first_s=0.1")
        last: dict[str, list[float]] = {"unseeded": [], "seeded": []}
        for seed in SEEDS:
            for name, words in (("unseeded", unseeded), ("seeded", seeded)):
                run_dir = self.run(f"{name}{seed}", *words, f"run.seed={seed}", f"run.steps={STEPS}")
                last[name].append(summary(run_dir)["eval_last"])
        difference = statistics.mean(last["seeded"]) - statistics.mean(last["unseeded"])
        shown = "; ".join(
            f"{name} {', '.join(f'{one:.3f}' for one in found)}" for name, found in last.items()
        )
        yield Claim(
            "seeded less unseeded, accuracy",
            f"{difference:+.3f} ({shown})",
            "within 0.02",
            abs(difference) <= 0.02,
        )
        run_dir = self.run("colocated", "fleet=colocated", f"run.steps={STEPS}")
        told = summary(run_dir)
        yield Claim(
            "colocated: held-out accuracy",
            f"{told['eval_first']:.3f} -> {told['eval_last']:.3f}",
            "<= 0.65 -> >= 0.90",
            told["eval_first"] <= 0.65 and told["eval_last"] >= 0.90,
        )
        yield self._beside_trl("colocated: seconds per step, ours / TRL", run_dir)

    def bounds(self) -> Iterator[Claim]:
        """Every S, with a slow worker and publications that never arrive."""
        for bound in BOUNDS:
            run_dir = self.run(
                f"bound{bound}",
                f"staleness.max_staleness={bound}",
                "fleet.workers.1.slowdown_s=1.0",
                "run.steps=16",
                "eval.num_prompts=16",
                "staleness.policy=drop",
                command=LOSSY_PROGRAM,
            )
            told = summary(run_dir)
            most, lost = told["max_staleness_observed"], told["lost_trajectories"]
            again = len(events(run_dir, "publication")) - told["versions_published"]
            yield Claim(
                f"S={bound}, slow worker, lost publications",
                f"{told['steps']} steps, staleness {most}, lost {lost}, published again {again}x",
                f"16 steps, <= {bound}, 0",
                told["steps"] == 16 and most <= bound and lost == 0,
            )

    def tests(self) -> Iterator[Claim]:
        """The test suite with all its tests of minutes, file by file."""
        files = sorted((ROOT / "tests" / "integration").glob("test_*.py"))
        named = {path: str(ast.get_docstring(ast.parse(path.read_text()))).splitlines()[0] for path in files}
        named[ROOT / "tests" / "sim"] = "Schedules, crashes of the store, seeded faults and bugs, simulated."
        named[ROOT / "tests" / "unit"] = "Every unit, with all examples."
        for path, name in named.items():
            print(f"[proof] {path.relative_to(ROOT)}", flush=True)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", str(path)],
                cwd=ROOT,
                env={**os.environ, "ECHO_PLANES_THOROUGH": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
            yield Claim(name.rstrip(".:"), last, "all pass", done.returncode == 0)

    def gsm8k(self) -> Iterator[Claim]:
        """Five steps on real questions. The embedded model cannot solve them: what is tried is the way."""
        if not (DATA_DIR / "gsm8k").is_dir():
            yield Claim("five steps on GSM8K", f"no {DATA_DIR}/gsm8k: set ECHO_PLANES_DATA", "5 steps", None)
            return
        run_dir = self.run(
            "gsm8k",
            "task.dataset=gsm8k",
            f"task.data={DATA_DIR / 'gsm8k'}",
            "model.max_model_len=1024",
            "sampling.max_new_tokens=64",
            "sampling.prompts_per_step=8",
            "run.steps=5",
            "eval.num_prompts=8",
            "eval.samples_per_prompt=1",
        )
        told = summary(run_dir)
        report = (run_dir / "report.html").stat().st_size
        yield Claim(
            "five steps on GSM8K",
            f"{told['steps']} steps, {told['tokens_trained']:,} tokens, report {report // 1024} KiB",
            "5 steps",
            told["steps"] == 5 and report > 0,
        )

    def code(self) -> Iterator[Claim]:
        """Programs in the sandbox: the embedded functions."""
        yield from self._task("code")

    def poker(self) -> Iterator[Claim]:
        """Heads-up hold'em against a rule-based opponent; a deal counts once, played from both seats."""
        yield from self._task("poker", prompts_per_case=2, measure="net big blinds a hand")

    def _task(self, task: str, prompts_per_case: int = 1, measure: str = "reward") -> Iterator[Claim]:
        """A task's embedded default, three seeds, and a control that learns nothing."""
        for seed in SEEDS:
            told = summary(self.run(f"{task}{seed}", f"task={task}", f"run.seed={seed}"))
            figure, low, _ = _change(told, prompts_per_case)
            yield Claim(f"task={task}, seed {seed}: held-out {measure}", figure, "95 % above 0", low > 0)
            seconds = told["seconds"]
            yield Claim(f"task={task}, seed {seed}: duration", f"{seconds:.0f} s", "<= 900 s", seconds <= 900)
        told = summary(self.run(f"{task}-lr0", f"task={task}", "learner.lr=0.0"))
        figure, low, high = _change(told, prompts_per_case)
        yield Claim(f"task={task}, control at lr = 0", figure, "95 % around 0", low <= 0 <= high)

    def rollout(self) -> Iterator[Claim]:
        """The worker against the bare engine."""
        told = self._bench("bench.rollout")
        yield Claim("worker / bare vLLM, tokens/s", f"{told['ratio']:.3f}", ">= 0.95", told["ratio"] >= 0.95)

    def codec(self) -> Iterator[Claim]:
        """Sizes and speeds of patches."""
        for name, ours, baseline, _, bar, verdict in codec_bench.rows(self._bench("bench.codec")):
            beside = f"{ours}, baseline {baseline}" if baseline else ours
            yield Claim(name, beside, bar or REPORTED, verdict == "holds" if bar else None)

    def broadcast(self) -> Iterator[Claim]:
        """Chains on shaped links, and ECHO-2's figure 4 on simulated ones."""
        for case in self._bench("bench.broadcast"):
            megabytes, seconds = case["payload_bytes"] / 1e6, case["seconds"]
            what = f"{case['topology']} n={case['n']} B0={case['b0_mbit']:.0f} {megabytes:.0f} MB"
            figure = f"{seconds:.2f} s, {seconds / case['ideal_s']:.2f} x ideal"
            if case["topology"] == "star":
                yield Claim(what, figure, REPORTED, None)
            elif case["fault"] == "none":
                yield Claim(what, figure, "<= 1.15 x ideal", seconds <= case["bar_s"])
            else:
                found = case["detection_s"]
                figure += f", detected after {found:.2f} s" if found is not None else ", not detected"
                holds = found is not None and found <= 3.0 and seconds <= case["bar_s"]
                yield Claim(f"{what}, one {case['fault']}", figure, "<= 3 s, <= 1.25 x unfaulted + it", holds)
        largest = max(self._bench("bench.figure4"), key=lambda row: (row["n"], row["b0_mbit"]))
        ratio = largest["chains_s"] / largest["unlimited_star_s"]
        yield Claim(
            f"figure 4 (simulated), n={largest['n']}",
            f"{ratio:.3f} x the unlimited star",
            "<= 1.15",
            ratio <= 1.15,
        )

    def trl(self) -> Iterator[Claim]:
        """Compare TRL, which a person would pick on one box, with the first seed's run."""
        run_dir = Path(self._main[0]["folder"]) if self._main else self.run("beside", "eval.every=0")
        yield self._beside_trl("seconds per step, ours / TRL", run_dir)
        if TRL_PYTHON.exists():
            yield tokens_claim(_tokens_to_bar(run_dir), self._theirs()["tokens_trained_to_090"])

    def _beside_trl(self, name: str, run_dir: Path) -> Claim:
        """Compare the seconds of a step."""
        if not TRL_PYTHON.exists():
            return Claim(name, "no .venv-trl: see bench/trl_baseline.py", "<= 1.25", None)
        ours_s, theirs_s = _seconds_per_step(run_dir), self._theirs()["seconds_per_step_median"]
        figure = f"{ours_s:.3f} / {theirs_s:.3f} = {ours_s / theirs_s:.2f}"
        return Claim(name, figure, "<= 1.25", ours_s <= 1.25 * theirs_s)

    def _theirs(self) -> dict[str, Any]:
        """Return what TRL's run came to; it runs once."""
        if not self._trl:
            print("[proof] bench/trl_baseline.py", flush=True)
            out = self._folder / "trl.json"
            subprocess.run(
                [str(TRL_PYTHON), str(ROOT / "bench" / "trl_baseline.py"), "--json", str(out)], check=True
            )
            self._trl = json.loads(out.read_text())
        return self._trl

    def _bench(self, module: str) -> Any:
        """Run a benchmark; return its JSON. One that misses its own bar ends with 1, and is judged here."""
        print(f"[proof] {module}", flush=True)
        out = self._folder / f"{module}.json"
        subprocess.run([sys.executable, "-m", module, "--json", str(out)], cwd=ROOT, check=False)
        return json.loads(out.read_text())


def _change(told: dict[str, Any], prompts_per_case: int) -> tuple[str, float, float]:
    """Change of the held-out reward from the first evaluation to the last: in words, and the 95 % interval
    of the mean change of a case (so many prompts in a row)."""
    first, last = (dict(told["evals"][i]["prompt_rewards"]) for i in (0, -1))
    changes: dict[int, list[float]] = {}
    for index in first.keys() & last.keys():
        changes.setdefault(index // prompts_per_case, []).append(last[index] - first[index])
    cases = [statistics.mean(found) for found in changes.values()]
    mean, half = statistics.mean(cases), Z_95 * statistics.stdev(cases) / math.sqrt(len(cases))
    means = [told["evals"][i]["reward_mean"] for i in (0, -1)]
    words = f"{means[0]:.3f} -> {means[1]:.3f}: {mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
    return words, mean - half, mean + half


def _seconds_per_step(run_dir: Path) -> float:
    """Steady state: the median, without the first ten steps."""
    return float(statistics.median(row["t_step_s"] for row in metrics(run_dir)[10:]))


def tokens_claim(ours: int | None, theirs: int | None) -> Claim:
    """Tokens that both sides trained until their reward reached the bar; None: it never did."""
    shown = " / ".join("never" if tokens is None else f"{tokens:,}" for tokens in (ours, theirs))
    holds = ours is not None and (theirs is None or ours <= theirs)
    return Claim(f"trained tokens until reward {REWARD_BAR}, ours / TRL", shown, "no more", holds)


def _tokens_to_bar(run_dir: Path) -> int | None:
    """Trained tokens until the mean reward of five steps reaches the bar; None: it never does."""
    rows = metrics(run_dir)
    tokens = 0
    for i, row in enumerate(rows):
        tokens += row["tokens"]
        if i >= 4 and statistics.mean(r["reward_mean"] for r in rows[i - 4 : i + 1]) >= REWARD_BAR:
            return int(tokens)
    return None


def print_table(claims: Sequence[Claim]) -> None:
    rows = [("claim", "figure", "bar", "verdict")]
    verdicts = {True: "holds", False: "FAILS", None: "not tried"}
    for claim in claims:
        verdict = "no verdict" if claim.bar == REPORTED else verdicts[claim.holds]
        rows.append((claim.name, claim.figure, claim.bar, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = [
        "seeds",
        "control",
        "adapters",
        "synchronous",
        "seeding",
        "trl",
        "code",
        "poker",
        "rollout",
        "codec",
        "broadcast",
        "bounds",
        "gsm8k",
        "tests",
    ]
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--json", type=Path, help="write the claims to this file")
    arguments = parser.parse_args()
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="echo_planes_proof_") as folder:
        proof = Proof(Path(folder))
        for name in arguments.only:
            section: Callable[[], Iterator[Claim]] = getattr(proof, name)
            try:
                for claim in section():
                    claims.append(claim)
                    print(f"[proof] {claim.name}: {claim.figure} ({claim.bar})", flush=True)
            except (AssertionError, subprocess.CalledProcessError, OSError) as failure:
                print(failure, file=sys.stderr)
                claims.append(Claim(name, str(failure).splitlines()[0][:80], "runs to its end", False))
    print_table(claims)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(claim) for claim in claims], indent=2))
    return 0 if all(claim.holds is not False for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
