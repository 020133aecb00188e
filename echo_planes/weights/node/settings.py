"""Settings that a node process gets at its start: one JSON object on stdin, never on the command line.

The settings hold the node's credential, which a command line would show to every user of the machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from echo_planes.errors import ConfigError, WeightsError
from echo_planes.types import TensorSpec
from echo_planes.weights.wire.messages import Message, decode

Role = Literal["sender", "worker"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_STREAMS = 16
KEY_BYTES = 32


class NodeSettings(Message, frozen=True):
    """Settings of one node: its name and keys, its addresses, and its handling of publications.

    Raises:
        ConfigError: a value that cannot work, in one line that says why and what to do.
    """

    role: Role
    node_id: str  # unique in the fleet; the tracker knows the node by it
    token: str  # sender: the run's secret; worker: this node's own `credential(secret, node_id)`
    public_key: str  # the learner's Ed25519 public key, 64 hex digits: only its signatures count
    sender: str = ""  # worker: the sender's address, "http://host:port" or "https://host:port"
    lineage: str = ""  # the only lineage that the node takes; "": any
    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # 0: any free one
    advertise: str = ""  # host, or host:port, by which other nodes reach this one; "": where it listens
    region: str = ""  # nodes of one region are neighbours in a chain
    folder: str = ""  # scratch of this node alone; "": the client makes one, memory-backed if there is room
    specs: tuple[TensorSpec, ...] = ()  # the model's tensors; (): learnt from the first full publication
    max_payload_bytes: int = 64 * 1024**3  # limit of a publication, used while `specs` is empty
    digest: str = "xxh3"  # algorithm of state digests: xxh3, blake3 or sha256
    codec: str = "auto"  # weights.codec of the run; a codec of the run's own is taken beside the bundled ones
    model_folder: str = ""  # worker: makes the model's own weights from its files; "": it receives them
    chunk_bytes: int = 256 * 1024  # worker: of the learner's publications, which it makes so
    staging: bool = True  # False: the node only relays
    streams_per_link: int = 2
    uplink_mbit: float | None = None  # sender: what it can send, Mbit/s; None: learnt from broadcasts
    worker_mbit: float | None = None  # sender: what one worker can take, Mbit/s; None: learnt
    starved_s: float = 4.0  # sender: seconds that a worker starves before it gets another parent
    direct: bool = False  # sender: every worker pulls from the sender itself (a star, not chains)
    store: str = ""  # sender: a path or s3://bucket/prefix to keep publications in; "": none
    signing_key: str = ""  # sender: the learner's private key, 64 hex digits: signs the sender's snapshots
    snapshot_every: int = 50
    keep_patches: int = 100
    keep_snapshots: int = 10
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
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, str) and not _is_utf8(value):
                raise ConfigError(f"{name} is not UTF-8 text: rename the file or folder it stands for")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port} does not exist; use 1 to 65535, or 0 for any")

    @property
    def public_bytes(self) -> bytes:
        """The public key, 32 bytes; b"" where `public_key` is not hexadecimal."""
        return _from_hex(self.public_key)

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> NodeSettings:
        """Parse the output of `to_json`.

        Raises:
            ConfigError: not JSON, an unknown name, a missing one, or a value that cannot work.
        """
        try:
            return decode(text, cls, "NodeSettings")
        except WeightsError as error:
            raise ConfigError(str(error)) from error


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
