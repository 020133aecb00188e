"""`kills`: kill -9 at random moments and at named places, of every process that a run is made of.

Each victim has a run of its own that is killed, and resumed where that ends it, until it has died often
enough; then it is let end, and judged. Interrupted, the campaign goes on from what is in its folder.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.chaos.failpoints import PLACES, Armed, Side, Victim, arm, fired, seen
from bench.chaos.lives import (
    ENDS_THE_RUN,
    GOES_ON,
    GONE_S,
    START_S,
    Lineage,
    find,
    judge,
    kill,
    read_lines,
    reference_digests,
    wait_for,
)
from tests.integration.harness import Program

VICTIMS: tuple[Victim, ...] = ENDS_THE_RUN + GOES_ON
PER_LIFE = 8  # kills of a process that the run goes on without, before the run is ended and resumed
PLACE_S = 90.0  # within which an armed place is reached, once the run makes steps
RESUME_S = 120.0  # until the next step after a kill


def campaign(folder: Path, victims: list[Victim], kills: int, *, real_engine: bool) -> dict[str, Any]:
    """Figures by victim."""
    done: dict[str, Any] = {}
    for victim in victims:
        lane = Lane(folder / victim.replace(" ", "-").replace("'", ""), victim, real_engine)
        lane.kill_until(kills)
        lane.end_well()
        reference = None
        if not real_engine:
            reference = reference_digests(folder / "reference", lane.lineage.last_step())
        judgement = judge(lane.lineage, reference)
        places = Counter(f"{one['place']} {one['side']}".strip() for one in lane.kills)
        left = [one for one in lane.kills if one["left_behind"]]
        done[victim] = {
            "kills": len(lane.kills),
            "lives": lane.lives,
            "places": dict(sorted(places.items())),
            "left_behind": len(left),
            **asdict(judgement),
        }
        print(f"[kills] {victim}: {done[victim]}", flush=True)
    return done


class Lane:
    """The kills of one victim."""

    def __init__(self, folder: Path, victim: Victim, real_engine: bool) -> None:
        self.lineage = Lineage(folder, real_engine=real_engine)
        self.victim = victim
        self._real_engine = real_engine
        self._log = folder / "kills.jsonl"
        self.kills = read_lines(self._log)
        self.lives = max((one["life"] for one in self.kills), default=0)
        self._places = [place for place in PLACES if place.victim == victim]

    def kill_until(self, kills: int) -> None:
        """Go on until the victim has died so often."""
        while len(self.kills) < kills:
            self.lives += 1
            with self.lineage.life(self.lives) as running:
                if self.victim in ENDS_THE_RUN:
                    self._kill_once(running)
                else:
                    for _ in range(min(PER_LIFE, kills - len(self.kills))):
                        self._kill_once(running)
                    running.interrupt()
                    running.wait(START_S)

    def end_well(self) -> None:
        """Let the run make a few more steps and end."""
        arm(self.lineage.folder, None, real_engine=self._real_engine)
        with self.lineage.life(self.lives + 1, self.lineage.last_step() + 3) as running:
            if running.wait(START_S + RESUME_S) != 0:
                raise RuntimeError(f"{self.victim}: the last life did not end well: {running.tail()}")

    def _kill_once(self, running: Program) -> None:
        number = len(self.kills)
        rng = random.Random(f"{self.victim}/{number}")
        place, side = "", ""
        begun_s, first = time.monotonic(), self.lineage.last_step()
        if number % 2:
            armed = Armed(rng.choice(self._places), _side(rng), rng.randint(1, 4))
            place, side = armed.place.name, armed.side
            arm(self.lineage.folder, armed, real_engine=self._real_engine)
            try:
                wait_for(lambda: self._fired(running), START_S + PLACE_S, f"a visit of {place}")
            except TimeoutError:  # not on this run's way any more: at any moment, then
                place = side = ""
        if not place:
            arm(self.lineage.folder, None, real_engine=self._real_engine)
            self._kill_at_random(running, rng)
        at_s = time.monotonic()
        left, resumed_s = self._what_follows(running)
        record = {
            "life": self.lives,
            "place": place or "random",
            "side": side,
            "after_s": round(at_s - begun_s, 2),
            "steps": self.lineage.last_step() - first,
            "resumed_s": resumed_s,
            "left_behind": left,
        }
        self.kills.append(record)
        with self._log.open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(f"[kills] {self.victim} {len(self.kills)}: {record}", flush=True)

    def _fired(self, running: Program) -> bool:
        if fired(self.lineage.folder):
            return True
        if running.process.poll() is not None:
            raise RuntimeError(f"{self.victim}: the run ended by itself: {running.tail()}")
        return False

    def _kill_at_random(self, running: Program, rng: random.Random) -> None:
        """Half of the kills come while the run starts, the others within its first steps."""
        if self.victim in ENDS_THE_RUN:
            if rng.random() < 0.5:
                self._wait_for_step(running)
                time.sleep(rng.uniform(0.0, 6.0))
            else:
                wait_for(lambda: find(running, self.victim), START_S, self.victim)
                time.sleep(rng.uniform(0.0, 15.0))
        else:
            time.sleep(rng.uniform(0.0, 3.0))

        def killed() -> bool:
            process = find(running, self.victim)
            return process is not None and kill(process)

        wait_for(killed, START_S, f"{self.victim} to kill")

    def _wait_for_step(self, running: Program) -> None:
        first = len(seen(self.lineage.folder, "batch"))

        def made() -> bool:
            if running.process.poll() is not None:
                raise RuntimeError(f"{self.victim}: the run ended by itself: {running.tail()}")
            return len(seen(self.lineage.folder, "batch")) > first

        wait_for(made, START_S, "a step")

    def _what_follows(self, running: Program) -> tuple[list[str], float | None]:
        """Processes left behind by a run that ended; seconds to the next step of one that goes on."""
        if self.victim in ENDS_THE_RUN:
            running.wait(START_S)
            return running.left_behind(GONE_S), None
        begun_s = time.monotonic()
        self._wait_for_step(running)
        return [], round(time.monotonic() - begun_s, 2)


def _side(rng: random.Random) -> Side:
    return "before" if rng.random() < 0.5 else "after"


def verdicts(figures: dict[str, Any], kills: int, *, deterministic: bool) -> dict[str, bool]:
    """Claims of the campaign, by their words."""
    rows = list(figures.values())
    claims = {
        f"{len(VICTIMS)} victims, {kills} kills each": set(figures) == set(VICTIMS)
        and all(row["kills"] >= kills for row in rows),
        "no acknowledged group is lost": all(row["acknowledged_lost"] == 0 for row in rows),
        "nothing is trained twice": all(row["trained_twice"] == 0 for row in rows),
        "the books are exact": all(row["books_exact"] for row in rows),
        "no process is left 5 s later": all(row["left_behind"] == 0 for row in rows),
    }
    if deterministic:
        claims["weights are those of the undisturbed run"] = all(
            row["digests_unequal"] == 0 and row["digests"] > 0 for row in rows
        )
    return claims
