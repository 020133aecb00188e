"""Credentials of nodes, each bound to a node's name.

The sender's node holds the run's secret, which no worker gets. A worker gets `credential(secret, name)`,
which proves its name to the sender. If the worker showed this to its parent, the parent could use its name.
So it shows `credential(parent's credential, child's name)` there. The sender makes that from the secret and
sends it with the order to pull from that parent, which checks it with its own credential. So a credential
shown to one parent is of no use with any other node.

A run makes a new secret at every start, and a name includes the incarnation, so no credential outlives
either.
"""

from __future__ import annotations

import hmac

_PURPOSE = b"echo_planes/node/1\0"
MAX_NAME = 256  # characters of a node's name


def credential(key: str, name: str) -> str:
    """Return the credential that the node `name` shows to the holder of `key`: 64 hex digits.

    Args:
        key: the run's secret if the holder is the sender's node, else the holder's own credential.
    """
    return hmac.digest(key.encode(), _PURPOSE + name.encode(errors="surrogateescape"), "sha256").hex()


def bearer(key: str) -> str:
    """Return the value of the Authorization header that shows `key`."""
    return f"Bearer {key}"


def is_bearer(given: str, key: str) -> bool:
    """Return whether a header's value, of any bytes, shows `key`; in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), bearer(key).encode())


def may_enter(given: str, name: str, key: str) -> bool:
    """Return whether a header's value shows the credential of `name` with the holder of `key`."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and is_bearer(given, credential(key, name))
