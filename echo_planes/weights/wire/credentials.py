"""Credentials of nodes: one per node, bound to its name, that nobody else can make.

The sender's node holds the run's secret, which no worker gets. A worker is given `credential(secret, name)`:
with it the sender knows who asks, and no other name can be claimed. At another worker, its parent, that would
give the name away; there a child shows `credential(parent's credential, child's name)`, which the sender
makes from the secret and hands out with the order to pull from that parent, and which the parent checks with
what it was given itself. So what a node shows to one parent opens nothing elsewhere, not even to that parent.

A run makes a fresh secret each time it starts, and a name holds the incarnation: nothing outlives either.
"""

from __future__ import annotations

import hmac

_PURPOSE = b"echo_planes/node/1\0"
MAX_NAME = 256  # characters of a node's name


def credential(key: str, name: str) -> str:
    """Credential that the node `name` shows to the holder of `key`: 64 hex digits.

    Args:
        key: the run's secret for the sender's node, a node's own credential for that node.
    """
    return hmac.digest(key.encode(), _PURPOSE + name.encode(errors="surrogateescape"), "sha256").hex()


def bearer(key: str) -> str:
    """The value of the Authorization header that shows `key`."""
    return f"Bearer {key}"


def is_bearer(given: str, key: str) -> bool:
    """Whether a header's value, of whatever bytes, shows `key`; takes as long for a wrong one."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), bearer(key).encode())


def may_enter(given: str, name: str, key: str) -> bool:
    """Whether a header's value shows the credential of `name` with the holder of `key`."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and is_bearer(given, credential(key, name))
