"""Events that the tracker takes, actions that it orders, and the messages that carry both.

Events come from the sender's own node (publications, ticks) and from the peers (joining, reports,
accusations). Actions say which peer pulls from which. In JSON an event or action is its fields plus
`"kind"`, the name of its class. Decoding refuses other fields and values out of range.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from echo_planes.weights.wire.manifest import PublicationKey
from echo_planes.weights.wire.messages import Message

SENDER_ID = "sender"  # the parent of every seed; no peer may use this id
REPORT_INTERVAL_S = 0.25  # while any publication is incomplete at the peer
IDLE_REPORT_INTERVAL_S = 1.0  # otherwise; such reports have no key
TICK_INTERVAL_S = 0.25  # how often the sender's node hands the tracker a Tick
PING_INTERVAL_S = 0.5  # between pings of a parent with nothing to send, so that silence means a fault

MAX_EVENTS = 64  # in one message of a peer
MAX_TEXT = 256  # characters in any string
MAX_NUMBER = 2**62

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=-1, le=MAX_NUMBER)]
Amount = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]


class _Message(Message, frozen=True, tag_field="kind", tag=True):
    pass


# --- events --------------------------------------------------------------------------------------


class PeerJoined(_Message, frozen=True):
    """Start of a worker's node. A repeated one means that the node has restarted and holds no data."""

    peer_id: Text
    address: Text  # base URL that its children pull from
    region: Text


class PublicationOpened(_Message, frozen=True):
    """Start of a publication: the sender encodes it, and its first segment will follow."""

    key: PublicationKey
    est_bytes: Count  # expected payload


class SegmentAdded(_Message, frozen=True):
    """One more segment at the sender's node, as totals so far. With them the tracker does not blame a peer
    for a slow source."""

    key: PublicationKey
    num_chunks: Count
    num_bytes: Count


class PublicationCommitted(_Message, frozen=True):
    """Commit of a publication: the sender has signed the manifest, and the payload is whole."""

    key: PublicationKey
    payload_bytes: Count
    num_chunks: Count


class Report(_Message, frozen=True):
    """Heartbeat of a peer: one per publication it is still receiving, or one without key when it is idle.

    The peer sends at least one report with `complete` for each publication that it has whole, verified with
    its manifest. Every report repeats `installed_version`.
    """

    peer_id: Text
    parent_id: Text  # present parent; "" before its first assignment
    key: PublicationKey | None
    chunks_have: Count  # accepted chunks of this publication
    bytes_received: Count  # payload bytes in those chunks
    rate_bytes_per_s: Amount  # payload accepted over the last second
    damaged_chunks: Count  # chunks of this publication that failed their hash, since it opened
    parent_silent_s: Amount  # since the last byte from this parent, pings included, or since turning to it
    parent_closed: bool  # no connection to the parent is open now
    complete: bool
    installed_version: Count  # of the key's lineage; without key, of the newest publication's; -1: none
    staged_version: Count  # the same for the version staged, from the chain or the store; -1: none
    made: bool  # some of the chunks were made from the model's files: they say nothing about the link


class Accusation(_Message, frozen=True):
    """Claim of the peer `by` that its parent `peer_id` alters bytes: chunks that came over TLS fail their
    signed hash repeatedly.

    It is a claim, not a proof, and the altered bytes would not prove it either: parents do not sign the
    chunks they forward, so the accuser may have altered them. `tracker` documents the consequences.
    """

    peer_id: Text
    by: Text


class Tick(_Message, frozen=True):
    """Passage of time, from the sender's node every TICK_INTERVAL_S."""


Event: TypeAlias = (
    PeerJoined | PublicationOpened | SegmentAdded | PublicationCommitted | Report | Accusation | Tick
)


# --- actions -------------------------------------------------------------------------------------


class Assign(_Message, frozen=True):
    """Order to `peer_id` to pull from `parent_id` from now on, and to request only missing chunks."""

    peer_id: Text
    parent_id: Text  # SENDER_ID: the sender's node
    parent_address: Text  # "" for the sender: every peer knows it
    shown: Text  # the peer's credential with that parent; the tracker leaves it "", the sender's node adds it


class Drop(_Message, frozen=True):
    """Exclusion of `peer_id` for a while: the sender's node serves it nothing and ignores its reports."""

    peer_id: Text
    reason: Text


class Readmit(_Message, frozen=True):
    """End of an exclusion: `peer_id` may join again."""

    peer_id: Text


class Demote(_Message, frozen=True):
    """Demotion of `peer_id` to rollout-only: it receives as a leaf, and forwards to no peer."""

    peer_id: Text
    reason: Text


class Throttle(_Message, frozen=True):
    """Limit on the rate of a link that damages bytes; `bytes_per_s` 0 lifts it."""

    child_id: Text
    parent_id: Text
    bytes_per_s: Amount


class CancelBroadcast(_Message, frozen=True):
    """Order to these peers to stop requesting `key`: a newer publication reaches them sooner."""

    key: PublicationKey
    peer_ids: tuple[Text, ...]


Action: TypeAlias = Assign | Drop | Readmit | Demote | Throttle | CancelBroadcast


# --- messages between a peer and the sender's node -----------------------------------------------


class Greeting(Message, frozen=True):
    """Joining of a peer: `POST /v1/tracker/join`."""

    events: Annotated[tuple[PeerJoined, ...], Meta(max_length=MAX_EVENTS)]


class Heard(Message, frozen=True):
    """Observations of a peer: `POST /v1/tracker/report`."""

    events: Annotated[tuple[Report | Accusation, ...], Meta(max_length=MAX_EVENTS)]


class Answer(Message, frozen=True, omit_defaults=True):
    """The sender's answer to `Greeting` and `Heard`: all orders that hold for the peer now."""

    orders: tuple[Action, ...] | None = None  # None: the peer must join first
    join: bool = False  # the sender does not know the peer, which must join again
