"""ECHO-2, figure 4 and table 2: what peer-assisted broadcast and cost-aware provisioning are worth."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass, replace

from bench import figure4
from bench.papers_base import (
    BASE,
    Claim,
    Row,
    Values,
    Variation,
    instance_type,
    run,
    scenario,
    variations,
    workers_for,
)
from echo_planes.fleet.capacity import needed_capacity

NETWORK = ("worker_mbit", "uplink_mbit", "rtt_s", "snapshot_mb", "install_s", "receive_in_place")
LEAST_T_BCAST = 1.15  # how much longer a star takes than chains, at least, to count as longer
NO_WAIT_S = 1.0
AS_MANY, ONE_MORE, RANDOM = "without P2P, as many", "without P2P, one more", "without cost"


def figure_4(workers: tuple[int, ...] = figure4.WORKERS) -> Claim:
    """T_bcast against the number of workers, by the tracker and the chains that run."""
    rows, figures = [], []
    unlimited = [figure4.broadcast_s(n, n * figure4.WORKER_MBIT, direct=True) for n in workers]
    for uplink_mbit in figure4.UPLINKS_MBIT:
        times = [
            _times(n, uplink_mbit) | {"unlimited_star_s": s} for n, s in zip(workers, unlimited, strict=True)
        ]
        figures += [
            {"n": number, "b0_mbit": uplink_mbit, **found}
            for number, found in zip(workers, times, strict=True)
        ]
        last = times[-1]
        grows = max(1.0, workers[-1] * figure4.WORKER_MBIT / uplink_mbit)
        flat = max(found["chains_s"] / found["unlimited_star_s"] for found in times)
        slower = last["star_s"] / last["unlimited_star_s"]
        rows += [
            Row(
                f"B0={uplink_mbit}: star at N={workers[-1]}, of unlimited",
                f"N Bw / B0 = {grows:.1f}",
                f"{slower:.1f}",
                slower >= 0.9 * grows,
            ),
            Row(
                f"B0={uplink_mbit}: chains, of unlimited, worst N",
                "near 1 for all N",
                f"{flat:.3f}",
                flat <= figure4.BAR,
            ),
        ]
    return Claim(
        "2. T_bcast against workers",
        "ECHO-2, figure 4 and 5.5.1",
        tuple(rows),
        notes=(
            "16 GB, 100 Mbit/s per worker, as bench/figure4.py says; N = "
            + ", ".join(map(str, workers))
            + ".",
            "Boot delay, throughput and price do not matter here.",
        ),
        figures={"t_bcast": figures},
    )


def _times(number: int, uplink_mbit: float) -> dict[str, float]:
    return {
        "star_s": figure4.broadcast_s(number, uplink_mbit, direct=True),
        "chains_s": figure4.broadcast_s(number, uplink_mbit, direct=False),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of table 2."""

    machines: int  # the upper median of the steps: the fleet follows the need from step to step
    most_machines: int
    usd_per_step: float
    learner_usd_per_step: float
    t_bcast_s: float
    wait_s: float  # of the learner, per publication period, as in the paper (see `claim`)

    def repriced(self, factor: float) -> Outcome:
        """The same with workers at another price: who is there and when does not depend on it."""
        workers_usd = self.usd_per_step - self.learner_usd_per_step
        return replace(self, usd_per_step=self.learner_usd_per_step + factor * workers_usd)


def claim(assumed: dict[str, Values], *, sensitivity: bool = True) -> Claim:
    """Table 2."""
    values, setting = assumed["echo2"], assumed["ablation"]
    outcomes = table(values, setting, BASE)
    varied = []
    for variation in variations("throughput", "price") if sensitivity else ():
        if variation.price == BASE.price:
            found = table(values, setting, variation)
        else:
            found = {name: outcome.repriced(variation.price) for name, outcome in outcomes.items()}
            found["full"] = simulate(values, setting, variation, "chain", None)
        ratios = ", ".join(f"{ratio:.3f}" for ratio in _ratios(found).values())
        machines = found["full"].machines
        varied.append(
            Row(f"$/step of full's, {variation.name}", "1.041, 1.066, 1.153", f"{ratios}; full: {machines}")
        )
    return Claim(
        "3. ablation on a mixed-price pool",
        "ECHO-2, table 2",
        tuple(_rows(outcomes)),
        tuple(varied),
        (
            "Wait is per period of kappa = 2 steps: the paper's dollars fit 131.9 s in 2 T_train.",
            "A star of ten needs 187 s longer than one of nine over 700 Mbit/s, and samples 157 s faster: "
            "that it waits less is not claimed. No number of machines saturates the learner over that star.",
            "Without cost: random fleets differ in price only, so one is simulated at their mean price.",
            "Boot delay does not matter: the steps that count come after the fleet has grown.",
        ),
        ("echo2", "ablation"),
        {name: asdict(outcome) for name, outcome in outcomes.items()},
    )


def table(values: Values, setting: Values, variation: Variation) -> dict[str, Outcome]:
    """All rows. The provisioner chooses the first fleet, with the real prices before it."""
    full = simulate(values, setting, variation, "chain", None)
    cheapest = _machines(setting, variation)
    return {
        "full": full,
        AS_MANY: simulate(values, setting, variation, "star", cheapest[: full.machines]),
        ONE_MORE: simulate(values, setting, variation, "star", cheapest[: full.machines + 1]),
        RANDOM: simulate(
            values, setting, variation, "chain", random_fleet(values, setting, variation, full.t_bcast_s)
        ),
    }


def _ratios(found: dict[str, Outcome]) -> dict[str, float]:
    full = found["full"].usd_per_step
    return {name: outcome.usd_per_step / full for name, outcome in found.items() if name != "full"}


def _rows(found: dict[str, Outcome]) -> list[Row]:
    """The paper's rows, and whether they keep its directions."""
    full, ratios = found["full"], _ratios(found)

    def waits(outcome: Outcome) -> bool:
        late = outcome.t_bcast_s > LEAST_T_BCAST * full.t_bcast_s
        return late and outcome.wait_s > full.wait_s + NO_WAIT_S

    papers = {
        "full": ("9, $8.098, 1437 s, 0 s", full.wait_s <= NO_WAIT_S),
        AS_MANY: ("9, $8.432 (1.041), 1830 s, 131.9 s", waits(found[AS_MANY]) and ratios[AS_MANY] > 1),
        ONE_MORE: (
            "10, $8.630 (1.066), 1872 s, 84.1 s",
            waits(found[ONE_MORE]) and ratios[ONE_MORE] > ratios[AS_MANY],
        ),
        RANDOM: (
            "9, $9.339 (1.153), 1437 s, 0 s",
            ratios[RANDOM] == max(ratios.values())
            and found[RANDOM].wait_s <= NO_WAIT_S
            and found[RANDOM].machines == full.machines,
        ),
    }
    rows = []
    for name, (paper, holds) in papers.items():
        outcome = found[name]
        ratio = f" ({ratios[name]:.3f})" if name in ratios else ""
        most = f" (at most {outcome.most_machines})" if outcome.most_machines > outcome.machines else ""
        ours = (
            f"{outcome.machines}{most}, ${outcome.usd_per_step:.3f}{ratio}, {outcome.t_bcast_s:.0f} s, "
            f"{outcome.wait_s:.1f} s"
        )
        rows.append(Row(f"{name}: machines, $/step, T_bcast, wait", paper, ours, holds))
    shorter = "yes" if found[ONE_MORE].wait_s < found[AS_MANY].wait_s else "no"
    rows.append(Row("without P2P, one more machine waits less", "yes", shorter))
    return rows


def _machines(setting: Values, variation: Variation) -> list[float]:
    """The prices of all machines, cheapest first. Of half as quick ones there are twice as many."""
    count = round(setting["machines_at_each"] / min(variation.throughput, 1.0))
    return [usd * variation.price for usd in setting["usd_per_hour"] for _ in range(count)]


def random_fleet(values: Values, setting: Values, variation: Variation, t_bcast_s: float) -> list[float]:
    """Machines taken at random until their throughput reaches the target, at the mean price of the draws."""
    per_step = values["prompts_per_step"] * values["samples_per_prompt"]
    mu_min = needed_capacity(setting["max_staleness"] - 1, per_step, values["t_train_s"], t_bcast_s) or 0.0
    count = workers_for(setting["gamma"] * mu_min, values["mu"] * variation.throughput)
    prices = []
    for seed in range(setting["draws"]):
        prices += random.Random(f"papers/{seed}").sample(_machines(setting, variation), count)
    return [statistics.mean(prices)] * count


def simulate(
    values: Values, setting: Values, variation: Variation, mode: str, fleet: list[float] | None
) -> Outcome:
    """One row. `fleet`: the prices of its machines; None: the provisioner chooses from the pool."""
    staleness, pool = setting["max_staleness"], fleet or _machines(setting, variation)
    instance_types = [
        instance_type(
            values,
            f"at-{usd}",
            values["mu"] * variation.throughput,
            usd_per_hour=usd,
            count=pool.count(usd) if fleet else int(usd == pool[0]),
            max_count=pool.count(usd),
        )
        for usd in sorted(set(pool))
    ]
    result = run(
        scenario(
            values,
            staleness={"max_staleness": staleness, "queue_batches": staleness + 1.0},
            learner={"usd_per_hour": values["learner_usd_per_hour"]},
            network={"mode": mode, **{key: values[key] for key in NETWORK}},
            fleet={"mode": "fixed" if fleet else "provisioned", "gamma": setting["gamma"]},
            run={"steps": setting["steps"]},
            instance_types=instance_types,
        )
    )
    begun_s = result.steps[setting["warm_up_steps"] - 1]["time_s"]
    steps = result.steps[setting["warm_up_steps"] :]
    hours = (steps[-1]["time_s"] - begun_s) / 3600 / len(steps)
    return Outcome(
        int(statistics.median_high(row["workers"] for row in steps)),
        max(row["workers"] for row in steps),
        statistics.mean(row["usd"] for row in steps),
        values["learner_usd_per_hour"] * hours,
        statistics.median(row["t_bcast_s"] for row in steps if row["t_bcast_s"] is not None),
        sum(row["t_idle_s"] for row in steps) * (staleness - 1) / len(steps),
    )
