"""A fleet of peers around a tracker, with a clock of its own, for tests of the tracker's decisions."""

from __future__ import annotations

from msgspec.structs import replace

from echo_planes.weights.chain.events import (
    Action,
    Assign,
    Event,
    PeerJoined,
    PublicationCommitted,
    PublicationOpened,
    Report,
    SegmentAdded,
    Tick,
)
from echo_planes.weights.chain.tracker import Tracker, TrackerSettings
from echo_planes.weights.wire.manifest import PublicationKey

RATE = 1000  # bytes/s, of every healthy hop
STEP_S = 0.25


def key(version: int, codec: str = "full", base: int = -1) -> PublicationKey:
    return PublicationKey("run", version, codec, base)  # type: ignore[arg-type]


class Fleet:
    """Peers that report every 0.25 s; each hop adds RATE x its factor, of what the parent has."""

    def __init__(
        self, names: str, *, chains: int | None = 1, direct: bool = False, regions: str = ""
    ) -> None:
        rates = (chains * 2000.0, 2000.0) if chains else (None, None)
        known = TrackerSettings(*rates, direct, least_bytes_per_s=RATE / 10)
        self.tracker = Tracker(known)
        self.now_s = 0.0
        self.have: dict[str, dict[PublicationKey, int]] = {}
        self.size: dict[PublicationKey, int] = {}
        self.ready: dict[PublicationKey, int] = {}
        self.factor: dict[str, float] = {}  # of the hop that ends at the peer
        self.parent: dict[str, str] = {}
        self.extra: dict[str, dict[str, object]] = {}  # fields of a peer's reports that are set by the test
        self.mute: set[str] = set()  # partitioned from everybody
        self.freezing: dict[str, int] = {}  # peers that pass on so many bytes of a version, and no more
        self.silent_s: dict[str, float] = {}
        self.actions: list[Action] = []
        for place, name in enumerate(names):
            self.join(name, regions[place : place + 1])

    def send(self, event: Event) -> list[Action]:
        actions = self.tracker.handle(event, self.now_s)
        self.actions += actions
        return actions

    def join(self, name: str, region: str = "") -> None:
        self.have[name] = {}
        self.send(PeerJoined(name, f"http://{name}", region))
        self.parent[name] = self.tracker.parents()[name]

    def publish(self, version: int, size: int, ready: int | None = None, **more: object) -> PublicationKey:
        one = key(version, **more)  # type: ignore[arg-type]
        self.size[one], self.ready[one] = size, size if ready is None else ready
        self.send(PublicationOpened(one, size))
        self.send(SegmentAdded(one, self.ready[one], self.ready[one]))
        if ready is None:
            self.send(PublicationCommitted(one, size, size))
        return one

    def report(self, name: str) -> None:
        open_now = [one for one in self.size if self.have[name].get(one, 0) < self.size[one]]
        for one in list(self.size) or [None]:
            have = self.have[name].get(one, 0) if one else 0
            whole = one is not None and have == self.size[one]
            report = Report(
                peer_id=name,
                parent_id=self.parent[name],
                key=one if open_now else None,
                chunks_have=have,
                bytes_received=have,
                rate_bytes_per_s=RATE,
                damaged_chunks=0,
                parent_silent_s=self.silent_s.get(name, 0.0),
                parent_closed=False,
                complete=whole,
                installed_version=one.version if one and whole else -1,
                staged_version=-1,
                made=False,
            )
            self.send(replace(report, **self.extra.get(name, {})))  # type: ignore[arg-type]
        self.parent[name] = getattr(self.tracker.assignment(name), "parent_id", "")

    def run(self, seconds: float) -> list[Action]:
        """Everybody receives and reports; returns the actions of that time."""
        begin = len(self.actions)
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            before = {name: dict(have) for name, have in self.have.items()}
            for name, have in self.have.items():
                room = RATE * STEP_S * self.factor.get(name, 1.0)
                for one in self.size:
                    cut_off = self.mute & {name, self.parent[name]}
                    above = {} if cut_off else before.get(self.parent[name], self.ready)
                    passed = min(above.get(one, 0), self.freezing.get(self.parent[name], above.get(one, 0)))
                    gain = min(room, max(0, passed - have.get(one, 0)))
                    have[one] = int(have.get(one, 0) + gain)
                    room -= gain
            for name in self.have:
                muted = self.parent.get(name) in self.mute
                self.silent_s[name] = self.silent_s.get(name, 0.0) + STEP_S if muted else 0.0
                if name not in self.mute and name in self.parent:
                    self.report(name)
            self.send(Tick())
        return self.actions[begin:]

    def assigned(self, actions: list[Action]) -> dict[str, str]:
        return {a.peer_id: a.parent_id for a in actions if isinstance(a, Assign)}
