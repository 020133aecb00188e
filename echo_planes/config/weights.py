"""Settings of the transfer of weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator

from echo_planes.config.extensions import one_of
from echo_planes.config.fields import Free, PositiveFloat, PositiveInt, Section, not_with, only_with

_CHAIN = only_with("weights.mode", "chain")
_PATCHES = not_with("weights.mode", "full", instead="=chain or direct")


class WeightsConfig(Section):
    """Transport of published weights from the learner to the workers, and their store."""

    mode: Literal["chain", "direct", "full"] = Free(
        "chain",
        description="chain: patches along chains of workers; direct: patches, every worker from the learner; "
        "full: whole snapshots, every worker from the learner",
    )
    codec: Annotated[str, one_of("auto", "compact", "fast", "overwrite")] = Free(
        "auto",
        counts=_PATCHES,
        description="how patches are written down; auto: the quickest for the slowest link; or "
        "package.module:NAME of a PatchCodec",
    )
    digest: Literal["xxh3", "blake3", "sha256"] = Free(
        "xxh3", description="what proves that a worker's live weights are the learner's"
    )
    chunk_kib: int = Free(256, ge=4, le=4096, description="verified and forwarded at once, KiB")
    streams_per_link: int = Free(2, ge=1, le=16, description="connections from a worker to its parent")
    uplink_mbit: PositiveFloat | None = Free(
        None, counts=_CHAIN, description="B0: learner's uplink, Mbit/s; None: learnt"
    )
    worker_mbit: PositiveFloat | None = Free(
        None, counts=_CHAIN, description="Bw: worker's link, Mbit/s; None: learnt"
    )
    starved_s: PositiveFloat = Free(
        4.0, counts=_CHAIN, description="with too little of a version so long: another parent"
    )
    snapshot_every: PositiveInt = Free(
        50, counts=_PATCHES, description="publications between full snapshots in the store"
    )
    keep_patches: PositiveInt = Free(100, counts=_PATCHES, description="newest patches kept in the store")
    keep_snapshots: PositiveInt = Free(10, description="newest full snapshots kept in the store")
    store: str | None = Free(None, description="folder or s3:// address; default: weights/ in run.dir")
    key_file: str | None = Free(
        None, description="Ed25519 private key (PEM) that signs publications; default: made in run.dir"
    )
    host: str | None = Free(
        None,
        description="address that the nodes listen on; 'node': each machine's own; default: loopback on a "
        "private cluster, 'node' on one that is joined",
    )
    port: int | None = Free(None, ge=1024, le=65535, description="the learner's port; default: a free one")
    tls_cert: str | None = Free(None, description="certificate (PEM) of every node; default: no TLS")
    tls_key: str | None = Free(None, description="its private key (PEM)")
    tls_ca: str | None = Free(None, description="authority (PEM) that nodes must be certified by")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = [self.tls_cert, self.tls_key, self.tls_ca]
        if any(given) and not all(given):
            raise ValueError("tls_cert, tls_key and tls_ca belong together: give all three or none")
        return self
