"""Digests of a checkpoint's contents, part by part, so that two runs' checkpoints can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = ("weights", "masters", "moments", "rng", "learner's counters", "ledger", "cursor", "versions")


def digests_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 by part of what a resume takes from a checkpoint.

    Names of lineages and leases are left out: each life of a run has its own.

    Raises:
        OSError, KeyError, ValueError, RuntimeError: a part is not whole.
    """
    import torch

    def tensors(name: str) -> Any:
        return torch.load(checkpoint / "learner" / name, weights_only=False, map_location="cpu")

    cut = json.loads((checkpoint / "data" / "state.json").read_text())
    about = json.loads((checkpoint / "learner" / "engine.json").read_text())
    counts = cut["counts"]
    # Answers to the step that goes on may be in already, or not yet: they are not of the past.
    ledger = {"settled": counts["accepted"] - counts["buffered"]}
    ledger |= {name: counts[name] for name in ("trained", "dropped_stale", "uninformative", "reused")}
    optimizer = tensors("engine/zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    untrained = {*cut["returned"], *(group["prompt_index"] for group in cut["groups"])}
    parts: dict[str, Any] = {
        "weights": tensors("engine/mp_rank_00_model_states.pt")["module"],
        "masters": optimizer["single_partition_of_fp32_groups"],
        "moments": optimizer["base_optimizer_state"],
        "rng": tensors("rng-0.pt"),
        "learner's counters": about,
        "ledger": ledger,
        "cursor": [cut["step"], sorted(set(range(cut["next_index"])) - untrained)],
        "versions": sorted({(version, digest) for _, version, digest in cut["published"]}),
    }
    return {name: _digest(parts[name]) for name in PARTS}


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Hash numbers, text, tensors, and what holds them."""
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"key {key}".encode())
            _feed(digest, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"list {len(value)}".encode())
        for one in value:
            _feed(digest, one)
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(repr(value).encode())
    else:
        raise ValueError(f"a {type(value).__name__} in a checkpoint: say how it is compared")
