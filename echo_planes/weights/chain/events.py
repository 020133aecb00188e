"""Events that the tracker hears and actions that it orders: frozen dataclasses, as JSON on the wire.

Events come from the sender's own node (publications, ticks) and from the peers (joining, reports,
accusations). Actions say which peer pulls from which. On the wire an event or action is its fields plus
`"kind"`, the name of its class; all else, or a value out of range, is refused before the tracker sees it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from echo_planes.errors import WeightsError
from echo_planes.types import BroadcastStats, Codec
from echo_planes.weights.wire.manifest import PublicationKey

SENDER_ID = "sender"  # the parent of every seed; no peer may call itself so
REPORT_INTERVAL_S = 0.25  # while any publication is incomplete at the peer
IDLE_REPORT_INTERVAL_S = 1.0  # otherwise; such reports have no key
TICK_INTERVAL_S = 0.25  # how often the sender's node hands the tracker a Tick
PING_INTERVAL_S = 0.5  # a parent with nothing to send pings so often: silence is then a fault

MAX_TEXT = 256  # characters in any string
MAX_NUMBER = 2**62  # of any integer


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A worker's node is up. Again from the same peer: it has restarted and has nothing."""

    peer_id: str
    address: str  # base URL that its children pull from
    region: str


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A worker's node says goodbye."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class PublicationOpened:
    """The sender starts to encode a publication; its first segment will follow."""

    key: PublicationKey
    est_bytes: int  # expected payload


@dataclass(frozen=True, slots=True)
class SegmentAdded:
    """The sender's node has one more segment to serve. Totals so far, so that a slow source is not blamed
    on whoever waits for it."""

    key: PublicationKey
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PublicationCommitted:
    """The sender has signed the manifest: the payload is whole."""

    key: PublicationKey
    payload_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Report:
    """A peer's heartbeat: one per publication it is still receiving, or one without key when it is idle.

    `complete` is sent in at least one report for each publication that it has in whole, verified with its
    manifest, and `installed_version` is repeated in every report.
    """

    peer_id: str
    parent_id: str  # whom it pulls from now; "" before its first assignment
    key: PublicationKey | None
    chunks_have: int  # accepted chunks of this publication
    bytes_received: int  # payload bytes in those chunks
    rate_bytes_per_s: float  # payload accepted over the last second or so
    damaged_chunks: int  # chunks of this publication that failed their hash, since it opened
    parent_silent_s: float  # since the last byte from this parent, pings included, or since told to use it
    parent_closed: bool  # no connection to the parent stands at present
    complete: bool
    installed_version: int  # of the sender's present lineage; -1: none
    staged_version: int = -1  # the same for what is staged here, whichever way it came


@dataclass(frozen=True, slots=True)
class Accusation:
    """`by` says that `peer_id`, its parent, alters bytes: they came over a connection that nobody else can
    write to, and fail their signed hash, repeatedly.

    It is a claim, not a proof, and no bytes beside it would make it one: parents do not sign what they pass
    on, so whoever shows altered bytes may have altered them itself. What the tracker makes of it is in
    `Tracker`.
    """

    peer_id: str
    by: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; from the sender's node, every TICK_INTERVAL_S."""


Event: TypeAlias = (
    PeerJoined
    | PeerLeft
    | PublicationOpened
    | SegmentAdded
    | PublicationCommitted
    | Report
    | Accusation
    | Tick
)


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """`peer_id` shall pull from `parent_id` from now on, and ask only for what it lacks."""

    peer_id: str
    parent_id: str  # SENDER_ID: the sender's node
    parent_address: str  # "" for the sender: every peer knows it
    shown: str = ""  # the peer's credential with that parent: the sender's node, which can make it, adds it


@dataclass(frozen=True, slots=True)
class Drop:
    """`peer_id` is out for a while: refuse its requests and reports."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Readmit:
    """`peer_id` was out for long enough: it may join again."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class Demote:
    """`peer_id` is rollout-only from now on: it receives, as a leaf, but is nobody's parent."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Throttle:
    """The link from `parent_id` to `child_id` damages bytes: send no faster; 0: as fast as it can."""

    child_id: str
    parent_id: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CancelBroadcast:
    """These peers stop asking for `key`: a newer publication reaches them sooner."""

    key: PublicationKey
    peer_ids: tuple[str, ...]


Action: TypeAlias = Assign | Drop | Readmit | Demote | Throttle | CancelBroadcast


# --- JSON ----------------------------------------------------------------------------------------

_EVENTS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Event)}
_ACTIONS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Action)}
_CODECS: tuple[str, ...] = typing.get_args(Codec)


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object."""
    return _to_json(event)


def event_from_json(data: object) -> Event:
    """The event that `event_to_json` wrote.

    Raises:
        WeightsError: not such an object, an unknown field, or a value out of range.
    """
    return typing.cast(Event, _from_json(data, _EVENTS, "event"))


def action_to_json(action: Action) -> dict[str, Any]:
    """The action as a JSON object."""
    return _to_json(action)


def action_from_json(data: object) -> Action:
    """The action that `action_to_json` wrote.

    Raises:
        WeightsError: not such an object, an unknown field, or a value out of range.
    """
    return typing.cast(Action, _from_json(data, _ACTIONS, "action"))


def stats_to_json(stats: BroadcastStats) -> dict[str, Any]:
    """Figures that a tracker has of one broadcast, as a JSON object."""
    return dataclasses.asdict(stats)


def stats_from_json(data: object) -> BroadcastStats:
    """Parse what `stats_to_json` wrote.

    Raises:
        WeightsError: not such an object, an unknown field, or a value out of range.
    """
    if not isinstance(data, Mapping):
        raise WeightsError(f"the figures of a broadcast are a JSON object, not a {type(data).__name__}")
    return typing.cast(BroadcastStats, _message(BroadcastStats, data, "BroadcastStats"))


def _to_json(message: Event | Action) -> dict[str, Any]:
    return {"kind": type(message).__name__, **dataclasses.asdict(message)}


def _from_json(data: object, kinds: Mapping[str, type], what: str) -> object:
    if not isinstance(data, Mapping):
        raise WeightsError(f"a tracker {what} is a JSON object, not a {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise WeightsError(f"unknown tracker {what} {_shown(kind)}")
    return _message(kinds[kind], {name: value for name, value in data.items() if name != "kind"}, kind)


def _message(kind: type, data: Mapping[Any, Any], where: str) -> object:
    expected = typing.get_type_hints(kind)
    if data.keys() != expected.keys():
        raise WeightsError(
            f"{where}: expected the fields {sorted(expected)}, got {_shown(sorted(map(str, data)))}"
        )
    return kind(**{name: _value(data[name], form, f"{where}.{name}") for name, form in expected.items()})


def _value(value: object, form: Any, where: str) -> object:
    """`value` as the annotation `form` says, checked."""
    if isinstance(form, types.UnionType):  # only `X | None` occurs
        return None if value is None else _value(value, typing.get_args(form)[0], where)
    if form is PublicationKey and isinstance(value, Mapping):
        return _message(PublicationKey, value, where)
    if form is bool and isinstance(value, bool):
        return value
    if form is int and type(value) is int and -1 <= value <= MAX_NUMBER:
        return value
    if form is float and type(value) in (int, float):
        number = float(typing.cast(float, value)) if abs(typing.cast(float, value)) <= MAX_NUMBER else -1.0
        if math.isfinite(number) and number >= 0:
            return number
    if form is str and isinstance(value, str) and len(value) <= MAX_TEXT:
        return value
    if form == Codec and value in _CODECS:
        return value
    if typing.get_origin(form) is tuple and isinstance(value, list | tuple):  # only tuple[X, ...] occurs
        return tuple(_value(item, typing.get_args(form)[0], where) for item in value)
    raise WeightsError(f"{where}: {_shown(value)} is out of range or of the wrong type")


def _shown(value: object) -> str:
    return repr(value)[:80]
