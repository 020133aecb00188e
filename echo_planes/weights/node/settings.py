"""Settings that a node process gets at its start: one JSON object on stdin, never on the command line.

The settings hold the node's credential, which a command line would show to every user of the machine.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from echo_planes.errors import ConfigError
from echo_planes.types import TensorSpec

Role = Literal["sender", "worker"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_STREAMS = 16
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node: who it is, whom it believes, where it listens, and what it does with what it receives.

    Raises:
        ConfigError: a value that cannot work, in one line that says why and what to do.
    """

    role: Role
    node_id: str  # unique in the fleet; the tracker knows the node by it
    token: str  # sender: the run's secret; worker: `credential(secret, node_id)`, its own and nobody else's
    public_key: str  # of the learner's Ed25519 key, 64 hex digits: whose signatures are believed
    sender: str = ""  # worker: the sender's address, "http://host:port" or "https://host:port"
    lineage: str = ""  # whose publications alone are taken; "": any
    host: str = "127.0.0.1"  # to listen on
    port: int = 0  # 0: any free one
    advertise: str = ""  # host, or host:port, by which others reach this node; "": where it listens
    region: str = ""  # nodes of one region lie together in a chain
    folder: str = ""  # scratch of this node alone; "": the client makes one in memory-backed storage
    specs: tuple[TensorSpec, ...] = ()  # the model's tensors; (): learnt from the first full publication
    max_payload_bytes: int = 64 * 1024**3  # while the model is not known: larger publications are refused
    digest: str = "xxh3"  # of whole states: xxh3, blake3 or sha256
    staging: bool = True  # False: the node only relays
    streams_per_link: int = 2
    uplink_mbit: float | None = None  # sender: what it can send, Mbit/s; None: learnt from broadcasts
    worker_mbit: float | None = None  # sender: what one worker can take, Mbit/s; None: learnt
    starved_s: float = (
        4.0  # sender: a worker too little reaches of what it lacks for so long is fed elsewhere
    )
    direct: bool = False  # sender: every worker pulls from the sender itself (a star, not chains)
    store: str = ""  # sender: a path or s3://bucket/prefix to keep publications in; "": none
    signing_key: str = ""  # sender: 64 hex digits, the learner's private key: signs the snapshots it makes
    anchor_every: int = 50
    keep_patches: int = 100
    keep_anchors: int = 10
    tls_cert: str = ""  # with tls_key: the node speaks TLS; PEM files
    tls_key: str = ""
    tls_ca: str = ""  # PEM file of the authority that signed the nodes' certificates; "": the system's

    def __post_init__(self) -> None:
        if self.role not in ("sender", "worker"):
            raise ConfigError(f"a node's role is sender or worker, not {self.role!r}")
        if not self.node_id:
            raise ConfigError("a node needs a name: node_id is empty")
        if self.role == "worker" and not self.sender.startswith(("http://", "https://")):
            raise ConfigError(f"a worker's node needs its sender as http(s)://host:port, not {self.sender!r}")
        if not self.token:
            raise ConfigError("a node needs a token: the sender a long random text, a worker its credential")
        if len(self.public_bytes) != KEY_BYTES:
            raise ConfigError("public_key is not an Ed25519 public key: it must have 64 hex digits")
        if self.signing_key and len(_from_hex(self.signing_key)) != KEY_BYTES:
            raise ConfigError("signing_key is not an Ed25519 private key: it must have 64 hex digits")
        if not 1 <= self.streams_per_link <= MAX_STREAMS:
            raise ConfigError(f"streams_per_link is {self.streams_per_link}; use 1 to {MAX_STREAMS}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both weights.tls_cert and weights.tls_key; one of them is missing")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port} does not exist; use 1 to 65535, or 0 for any")

    @property
    def public_bytes(self) -> bytes:
        """The public key, 32 bytes; b"" where `public_key` is not hexadecimal."""
        return _from_hex(self.public_key)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeSettings:
        """The inverse of `to_json`.

        Raises:
            ConfigError: not JSON, an unknown name, a missing one, or a value that cannot work.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            specs = tuple(
                TensorSpec(str(s["name"]), str(s["dtype"]), tuple(int(n) for n in s["shape"]))
                for s in fields.pop("specs", ())
            )
            return cls(specs=specs, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"a node's settings are not what NodeSettings writes: {error}") from error


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
