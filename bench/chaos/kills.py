"""`kills` and `resume`: kill -9 at random moments and at named places, of every process of a run.

Each victim has a run of its own that is killed, and resumed where that ends it, until it has died often
enough; then it is let end, and judged. Interrupted, the campaign goes on from what is in its folder.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.chaos.checkpoints import PARTS
from bench.chaos.failpoints import PLACES, SIDES, Armed, Place, Victim, arm, fired, seen
from bench.chaos.lives import (
    ENDS_THE_RUN,
    GOES_ON,
    START_S,
    Lineage,
    Reference,
    find,
    judge,
    kill,
    orphans,
    read_lines,
    wait_for,
)
from tests.integration.harness import Program
from tests.integration.leftovers import KILLED_S

VICTIMS: tuple[Victim, ...] = ENDS_THE_RUN + GOES_ON
PER_LIFE = 8  # kills of a process that the run goes on without, before the run is ended and resumed
PLACE_S = 90.0  # within which an armed place is reached, once the run makes steps
RESUME_S = 120.0  # until the next step after a kill
LONGEST_SAVE_S = 0.05  # of the models used here
EVERY_PLACE = 100  # kills of a victim, from which on each of its places must have been hit


@dataclass(frozen=True, slots=True)
class Target:
    """Whom the next kill hits, and where; `armed` None: at a random moment."""

    victim: Victim
    armed: Armed | None


Choose = Callable[[random.Random, int], Target]  # of the kill's number


def anything_of(victim: Victim) -> Choose:
    """Every other kill at a random moment, the others before or after a place of the victim's."""
    places = [place for place in PLACES if place.victim == victim]

    def choose(rng: random.Random, number: int) -> Target:
        if number % 2 == 0:
            return Target(victim, None)
        side = rng.choice((SIDES[0], SIDES[-1]))
        return Target(victim, Armed(rng.choice(places), side, rng.randint(1, 4)))

    return choose


def step_save_publish(rng: random.Random, number: int) -> Target:
    """Before, during and after a step, a checkpoint's parts, and a publication."""
    places = [_place(victim, name) for victim, name in _RESUME_PLACES]
    place = places[number % len(places)]
    side = rng.choice(SIDES)
    return Target(place.victim, Armed(place, side, rng.randint(1, 2), rng.uniform(0.0, LONGEST_SAVE_S)))


_RESUME_PLACES: tuple[tuple[Victim, str], ...] = (
    ("learner", "batch"),
    ("learner", "checkpoint"),
    ("learner", "publish"),
    ("data plane", "checkpoint"),
    ("driver", "checkpoint rename"),
    ("learner", "commit"),
    ("driver", "fsync"),
    ("driver", "publish"),
)


def _place(victim: Victim, name: str) -> Place:
    return next(one for one in PLACES if (one.victim, one.name) == (victim, name))


def kills(folder: Path, victims: Sequence[Victim], number: int, *, real_engine: bool) -> dict[str, Any]:
    """Figures by victim."""
    figures: dict[str, Any] = {}
    for victim in victims:
        lane = Lane(folder / victim.replace(" ", "-").replace("'", ""), anything_of(victim), real_engine)
        lane.kill_until(number)
        lane.end_well()
        reference = None if real_engine else Reference(folder / "reference", lane.lineage.last_step())
        figures[victim] = lane.figures(reference)
        print(f"[kills] {victim}: {figures[victim]}", flush=True)
    return figures


def resume(folder: Path, number: int) -> dict[str, Any]:
    """Figures of kills over step, save and publish: what was resumed from, part by part."""
    lane = Lane(folder / "resume", step_save_publish, real_engine=False)
    lane.kill_until(number)
    lane.end_well()
    reference = Reference(folder / "resume-reference", lane.lineage.last_step())
    loaded = seen(lane.lineage.folder, "loaded")
    unequal = {
        part: sum(reference.parts(one["name"]).get(part) != one["digests"][part] for one in loaded)
        for part in PARTS
    }
    return {**lane.figures(reference), "went_on": lane.went_on, "resumed": len(loaded), "unequal": unequal}


class Lane:
    """One run that is killed until it has died often enough."""

    def __init__(self, folder: Path, choose: Choose, real_engine: bool) -> None:
        self.lineage = Lineage(folder, real_engine=real_engine)
        self._choose = choose
        self._real_engine = real_engine
        self._log = folder / "kills.jsonl"
        self._ends = folder / "ends.jsonl"  # of lives that were let end
        self.kills, self.ends = read_lines(self._log), read_lines(self._ends)
        self.lives = max((one["life"] for one in self.kills), default=0)

    @property
    def went_on(self) -> int:
        """Kills after which a checkpoint was loaded, unless the next kill came before that."""
        following = [*self.kills[1:], None]
        return sum(
            one["checkpoint"] and (then is None or then["steps"] > 0 or then["place"] != "random")
            for one, then in zip(self.kills, following, strict=True)
        )

    def kill_until(self, kills: int) -> None:
        """Go on until the victim has died so often."""
        while len(self.kills) < kills:
            self.lives += 1
            with self.lineage.life(self.lives) as running:
                for _ in range(min(PER_LIFE, kills - len(self.kills))):
                    if self._kill_once(running) in ENDS_THE_RUN:
                        break
                else:
                    running.interrupt()
                    running.wait(START_S)
                    _keep(self._ends, self.ends, {"left_behind": self.lineage.left_behind()})

    def end_well(self) -> None:
        """Let the run make a few more steps and end."""
        arm(self.lineage.folder, None, real_engine=self._real_engine)
        with self.lineage.life(self.lives + 1, self.lineage.last_step() + 3) as running:
            if running.wait(START_S + RESUME_S) != 0:
                raise RuntimeError(f"{self.lineage.folder}: the last life did not end well: {running.tail()}")

    def figures(self, reference: Reference | None) -> dict[str, Any]:
        """Of all lives, once the last has ended well."""
        places = Counter(f"{one['place']} {one['side']}".strip() for one in self.kills)
        return {
            "kills": len(self.kills),
            "lives": self.lives,
            "places": dict(sorted(places.items())),
            "left_behind": sum(bool(one["left_behind"]) for one in self.kills + self.ends),
            **asdict(judge(self.lineage, None if reference is None else reference.digests)),
        }

    def _kill_once(self, running: Program) -> Victim:
        number = len(self.kills)
        folder = self.lineage.folder
        # Campaigns in other folders draw other moments, so that their kills add up.
        rng = random.Random(f"{folder.parent.name}/{folder.name}/{number}")
        target = self._choose(rng, number)
        victim, armed = target.victim, target.armed
        begun_s, first = time.monotonic(), self.lineage.last_step()
        arm(self.lineage.folder, armed, real_engine=self._real_engine)
        if armed is not None:
            try:
                wait_for(lambda: self._fired(running), START_S + PLACE_S, f"a visit of {armed.place.name}")
            except TimeoutError:  # not on this run's way any more: at any moment, then
                armed = None
                arm(self.lineage.folder, None, real_engine=self._real_engine)
        if armed is None:
            self._kill_at_random(running, victim, rng)
        at_s = time.monotonic()
        left, resumed_s = self._what_follows(running, victim)
        record = {
            "life": self.lives,
            "victim": victim,
            "place": armed.place.name if armed else "random",
            "side": armed.side if armed else "",
            "after_s": round(at_s - begun_s, 2),
            "steps": self.lineage.last_step() - first,
            "resumed_s": resumed_s,
            "left_behind": left,
            "checkpoint": self.lineage.has_checkpoint(),
        }
        _keep(self._log, self.kills, record)
        print(f"[kills] {self.lineage.folder.name} {len(self.kills)}: {record}", flush=True)
        return victim

    def _fired(self, running: Program) -> bool:
        if fired(self.lineage.folder):
            return True
        if running.process.poll() is not None:
            raise RuntimeError(f"{self.lineage.folder}: the run ended by itself: {running.tail()}")
        return False

    def _kill_at_random(self, running: Program, victim: Victim, rng: random.Random) -> None:
        """Half of the kills that end a run come while it starts, the others within its first steps."""
        if victim in GOES_ON:
            time.sleep(rng.uniform(0.0, 3.0))
        elif rng.random() < 0.5:
            self._wait_for_step(running)
            time.sleep(rng.uniform(0.0, 6.0))
        else:
            wait_for(lambda: find(running, victim), START_S, victim)
            time.sleep(rng.uniform(0.0, 15.0))

        def killed() -> bool:
            process = find(running, victim)
            return process is not None and kill(process)

        wait_for(killed, START_S, f"{victim} to kill")

    def _wait_for_step(self, running: Program) -> None:
        first = len(seen(self.lineage.folder, "batch"))

        def made() -> bool:
            if running.process.poll() is not None:
                raise RuntimeError(f"{self.lineage.folder}: the run ended by itself: {running.tail()}")
            return len(seen(self.lineage.folder, "batch")) > first

        wait_for(made, START_S, "a step")

    def _what_follows(self, running: Program, victim: Victim) -> tuple[str, float | None]:
        """Return what a run that ended left behind; seconds to the next step of one that goes on."""
        if victim in ENDS_THE_RUN:
            running.wait(START_S)
            return self.lineage.left_behind(), None
        begun_s = time.monotonic()
        try:
            wait_for(lambda: not orphans(running), KILLED_S, "an end of what belonged to the victim")
        except TimeoutError:
            left = "; ".join(orphans(running))
        else:
            left = ""
        self._wait_for_step(running)
        return left, round(time.monotonic() - begun_s, 2)


def _keep(path: Path, records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Add a record to those of a file, and to the file."""
    records.append(record)
    with path.open("a") as log:
        log.write(json.dumps(record) + "\n")


def kill_verdicts(figures: dict[str, Any], number: int, *, deterministic: bool) -> dict[str, bool]:
    """Claims of the campaign, by their words."""
    rows = list(figures.values())
    claims = {
        f"{len(VICTIMS)} victims, {number} kills each": set(figures) == set(VICTIMS)
        and all(row["kills"] >= number for row in rows),
        "no acknowledged group is lost": all(row["acknowledged_lost"] == 0 for row in rows),
        "nothing is trained twice": all(row["trained_twice"] == 0 for row in rows),
        "the accounting is exact": all(row["books_exact"] for row in rows),
        "nothing is left 5 s later": all(row["left_behind"] == 0 for row in rows),
    }
    if number >= EVERY_PLACE:
        claims["every place was hit, before and after"] = all(
            row["places"].get(f"{place.name} {side}", 0) > 0
            for victim, row in figures.items()
            for place in PLACES
            if place.victim == victim
            for side in (SIDES[0], SIDES[-1])
        )
    if deterministic:
        claims["weights are those of the undisturbed run"] = all(
            row["digests_unequal"] == 0 and row["digests"] > 0 for row in rows
        )
    return claims


def resume_verdicts(figures: dict[str, Any], number: int) -> dict[str, bool]:
    """Claims of the campaign, by their words."""
    return {
        f"{number} kills over step, save and publish": figures["kills"] >= number,
        "every run with a checkpoint went on from one": figures["resumed"] >= figures["went_on"] > number / 2,
        "every checkpoint that was loaded is that of the undisturbed run": not any(
            figures["unequal"].values()
        ),
        "weights are those of the undisturbed run": figures["digests_unequal"] == 0 < figures["digests"],
        "the accounting is exact": figures["books_exact"] and figures["acknowledged_lost"] == 0,
        "nothing is trained twice": figures["trained_twice"] == 0,
        "nothing is left 5 s later": figures["left_behind"] == 0,
    }
