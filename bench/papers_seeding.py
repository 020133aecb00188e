"""RLBoost whole: the learner's engines sample first, steps are trained in parts, spot machines do the rest.

Synchronous (S = 0) throughout. Throughput and cost are relative to the learner's machine alone, on which its
engines sample the whole step, which is then trained (veRL in the paper).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from bench.papers_base import BASE, Claim, Row, Values, Variation, run, variations
from bench.papers_spot import (
    FOLDER,
    gains,
    market_scenario,
    migration,
    reserved_only,
    traces_are_there,
    yielded,
)
from echo_planes.loop.seed_window import SeededStep, SeedWindow
from echo_planes.sim.scenario import Scenario
from echo_planes.sim.world import Result, World

ALL = 6  # spot machines of figures 11 and 12
LENGTHS = {5000: 3, 8000: 4, 11000: 5, 14000: 6}  # figure 18: longest answer -> spot machines


def seeded(
    values: Values,
    machines: int,
    *,
    seeding: bool = True,
    variation: Variation = BASE,
    types: list[Values] | None = None,
    **sections: Any,
) -> Scenario:
    """A step sampled by the learner's engines first, and by so many spot machines; trained in parts."""
    engine = {
        "peak_tokens_per_s": values["peak_tokens_per_s"] * variation.throughput,
        "half_batch": values["half_batch"],
        "max_groups": values["max_groups"],
        "prefill_tokens_per_s": values["prefill_tokens_per_s"] * variation.throughput,
    }
    usd_per_hour = values["spot_usd_per_hour"] * variation.price
    one = {"name": "spot", "count": machines, "boot_s": 0.0, "usd_per_hour": usd_per_hour, **engine}
    window = {"engines": values["reserved_engines"], "switch_s": values["switch_s"], **engine}
    learner = {
        "usd_per_hour": values["reserved_usd_per_hour"],
        "micro_batch_groups": values["micro_batch_groups"],
        "t_train_s": values["t_train_s"],
    }
    return market_scenario(
        values,
        0,
        [one] if types is None else [{**one, **more} for more in types],
        **{
            "seeding": window if seeding else {"engines": 0},
            "learner": learner,
            "fleet": {"mode": "fixed"},
            "run": {"steps": values["steps"]},
            "lengths": {"prompt_tokens": values["prompt_tokens"]},
            **sections,
        },
    )


def alone(values: Values, variation: Variation = BASE) -> Result:
    """The learner's machine alone, trained in one part."""
    own = reserved_only(values, variation)
    return run(own.model_copy(update={"run": own.run.model_copy(update={"steps": values["steps"]})}))


def claim(assumed: dict[str, Values], *, sensitivity: bool = True) -> Claim:
    """Figures 11, 12, 14 and 18, and section 6.2 on other markets."""
    values = {**assumed["spot"], **assumed["seeding"]}
    rows, windows, figures = _static(values)
    rows += [_falls(windows)]
    rows += _ablation(values)
    rows += _markets(values, figures) if traces_are_there() else []
    rows += [migration(values, at_s) for at_s in values["migration_at_s"]]
    rows += _by_length(values)
    varied = []
    for variation in variations("throughput", "price") if sensitivity else ():
        base = yielded(alone(values, variation), values["warm_up_steps"])
        found = yielded(run(seeded(values, ALL, variation=variation)), values["warm_up_steps"])
        varied.append(Row(f"{ALL} machines, {variation.name}", "2.25; 1.62", gains(found, base)))
    return Claim(
        "8. seeding",
        "RLBoost, 6.2 to 6.4, appendix E",
        tuple(rows),
        tuple(varied),
        (
            "Relative to the learner's machine alone: it samples the step, then trains it (veRL).",
            "Parts of a step are whole groups here, answers in the paper.",
            "Claimed: the sign of every effect, and at least half of the paper's gain.",
            "Memory gains little here: without it, our eta finds a window in one or two steps.",
        ),
        ("spot", "seeding"),
        figures,
    )


def _share(now: float, before: float) -> str:
    return f"{100 * (now / before - 1):+.0f} %"


def _static(values: Values) -> tuple[list[Row], list[float], dict[str, Any]]:
    """Figure 11: a fixed number of spot machines. Also the mean window of each number."""
    found = [yielded(alone(values), values["warm_up_steps"])]
    windows = []
    for machines in range(1, ALL + 1):
        result = run(seeded(values, machines))
        found.append(yielded(result, values["warm_up_steps"]))
        late = [row["t_seed_s"] for row in result.steps[len(result.steps) // 2 :]]
        windows.append(sum(late) / len(late))
    none, one, most = found[0], found[1], found[-1]
    pairs = (
        ("1 machine over none", "+37 %; -22 %", one, none, 0.37),
        (f"{ALL} machines over 1", "+64 %; -21 %", most, one, 0.64),
    )
    rows = [
        Row(
            f"{name}: tokens/s; cost of a token",
            paper,
            f"{_share(now.tokens_per_s, before.tokens_per_s)}; "
            f"{_share(before.tokens_per_usd, now.tokens_per_usd)}",
            now.tokens_per_s / before.tokens_per_s - 1 >= gain / 2
            and now.tokens_per_usd > before.tokens_per_usd,
        )
        for name, paper, now, before, gain in pairs
    ]
    figures: dict[str, Any] = {
        f"{machines} machines": {"tokens_per_s": one.tokens_per_s, "tokens_per_usd": one.tokens_per_usd}
        for machines, one in enumerate(found)
    }
    figures["t_seed_s"] = windows
    return rows, windows, figures


def _falls(windows: list[float]) -> Row:
    """T_seed with the number of machines."""
    steady = all(b <= a * 1.05 for a, b in itertools.pairwise(windows))
    return Row(
        f"T_seed, s, for 1 to {ALL} machines", "falls", ", ".join(f"{one:.0f}" for one in windows), steady
    )


class PaperWindow(SeedWindow):
    """Algorithm 1 with the constant eta of the paper, with which it can diverge."""

    def divisor(self, mean_remote: float) -> float:
        """Return eta."""
        return self._eta


class _Forgetful:
    """Without the memory of Algorithm 1, before a window's class."""

    memory: dict[int, float]

    def observe(self, step: SeededStep) -> float:
        self.memory.clear()
        found: float = super().observe(step)  # type: ignore[misc]
        self.memory.clear()
        return found


class ForgetfulWindow(_Forgetful, SeedWindow):
    """Ours without its memory."""


class ForgetfulPaperWindow(_Forgetful, PaperWindow):
    """The paper's without its memory."""


def _ablation(values: Values) -> list[Row]:
    """Figure 12: five of six machines go at once, after all were there; others come one after another."""
    gap_s, warm_s = values["replacement_gap_s"], values["ramp_s"]
    types = [{"name": f"spot{place}", "count": 1, "boot_s": place * gap_s} for place in range(ALL)]
    faults = [{"at_s": warm_s, "kind": "preempt", "worker": f"w{place}"} for place in range(1, ALL)]
    end_s = warm_s + ALL * gap_s
    limits = {"hours": end_s / 3600, "steps": 1_000_000}

    def tokens_per_s(window: type[SeedWindow] | None, eta: float) -> float:
        seeding = window is not None
        world = World(seeded(values, 1, seeding=seeding, types=types, faults=faults, run=limits))
        if window is not None and world.controller.seeding is not None:
            first_s = world.scenario.seeding.first_s
            world.controller.seeding.window = window(values["reserved_engines"], first_s, eta)
        rows = [row for row in world.run().steps if row["time_s"] > warm_s]
        return float(sum(row["tokens"] for row in rows) / (rows[-1]["time_s"] - warm_s))

    eta, paper_eta = values["eta"], values["paper_eta"]
    whole = tokens_per_s(SeedWindow, eta)
    without = tokens_per_s(None, eta)
    memory = whole / tokens_per_s(ForgetfulWindow, eta) - 1
    paper = tokens_per_s(PaperWindow, paper_eta) / tokens_per_s(ForgetfulPaperWindow, paper_eta) - 1
    return [
        Row(
            "5 of 6 machines go, others come: without seeding",
            "-19 %",
            _share(without, whole),
            without / whole - 1 <= -0.095,
        ),
        Row(
            f"the same: memory of windows (with the paper's rule, eta = {paper_eta:g})",
            "+6 %",
            f"{100 * memory:+.1f} % ({100 * paper:+.1f} %)",
            memory >= 0.03,
        ),
    ]


def _markets(values: Values, figures: dict[str, Any]) -> list[Row]:
    """Section 6.2 on other recorded markets, with as many machines as there were and are asked for."""
    base = yielded(alone(values), values["warm_up_steps"])
    rows = []
    for trace, share in values["traces"].items():
        more = {
            "name": "spot",
            "count": values["machines"],
            "market": "spot",
            "boot_s": values["boot_s"],
            "notice_s": values["notice_s"],
            "trace": f"{FOLDER}/{trace}",
            "trace_share": share,
        }
        fleet = {"mode": "kept", "boot_limit_s": 1e6}
        found = yielded(
            run(seeded(values, 1, types=[more], fleet=fleet, run={"hours": values["hours"]})),
            values["warm_up_steps"],
        )
        figures[trace] = {"tokens_per_s": found.tokens_per_s, "tokens_per_usd": found.tokens_per_usd}
        gain = found.tokens_per_s / base.tokens_per_s, found.tokens_per_usd / base.tokens_per_usd
        rows.append(
            Row(
                f"{trace}: tokens/s; tokens/$",
                "1.51 to 1.97; 1.28 to 1.49",
                f"{gain[0]:.2f}; {gain[1]:.2f}",
                gain[0] >= 1.51 and gain[1] >= 1.28,
            )
        )
    return rows


def _by_length(values: Values) -> list[Row]:
    """Figure 18: longer answers, and more machines for them. Training takes as long as there are tokens."""
    pairs = []
    most = _mean_tokens(values, values["max_tokens"])
    for longest, machines in LENGTHS.items():
        shorter = {
            **values,
            "max_tokens": longest,
            "t_train_s": values["t_train_s"] * _mean_tokens(values, longest) / most,
        }
        base = yielded(alone(shorter), values["warm_up_steps"])
        pairs.append((yielded(run(seeded(shorter, machines)), values["warm_up_steps"]), base))
    speeds = [found.tokens_per_s / base.tokens_per_s for found, base in pairs]
    return [
        Row(
            f"answers up to {', '.join(f'{longest // 1000}k' for longest in LENGTHS)} "
            f"on {', '.join(map(str, LENGTHS.values()))} machines: tokens/s; tokens/$",
            "1.47 to 2.22; 1.24 to 1.61",
            ", ".join(gains(found, base) for found, base in pairs),
            speeds == sorted(speeds) and speeds[0] >= 1.235,
        )
    ]


def _mean_tokens(values: Values, longest: int) -> float:
    """Mean of a lognormal length that is cut off: E min(X, L)."""
    median, sigma = values["median_tokens"], values["sigma"]
    z = math.log(longest / median) / sigma
    below = 0.5 * (1 + math.erf((z - sigma) / math.sqrt(2)))
    above = 0.5 * (1 - math.erf(z / math.sqrt(2)))
    return float(median * math.exp(sigma**2 / 2) * below + longest * above)
