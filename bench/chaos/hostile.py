"""`hostile`: everything that a worker with a credential of its own may try, by name.

The attacks stand beside the tests that CI runs of them: on the data plane `tests/unit/ledger_attacks.py`, on
weight nodes over the wire `tests/integration/hostile_attacks.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.integration.hostile_attacks import run_attacks
from tests.integration.hostile_field import Field
from tests.unit import ledger_attacks

LEAST = 60  # names, in all
WIRE_LIMIT_S = 300.0


def hostile(folder: Path) -> dict[str, Any]:
    """Make all attacks; return the verdict on each, by where it was made."""
    ledger = [asdict(one) for one in ledger_attacks.mount_all(folder / "ledger")]
    return {"data plane": ledger, "weight nodes": asyncio.run(asyncio.wait_for(_wire(), WIRE_LIMIT_S))}


async def _wire() -> list[dict[str, Any]]:
    async with Field() as field:
        told = await run_attacks(field)
    return [{"name": name, **asdict(verdict)} for name, verdict in told.items()]


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Claims of the section, by their words."""
    attacks = [one for of in figures.values() for one in of]
    return {
        f"at least {LEAST} named attacks": len({one["name"] for one in attacks}) >= LEAST,
        "each is refused with its reason": all(one["is_refused"] for one in attacks),
        "none changes anything": all(one["is_unchanged"] for one in attacks),
        "honest workers are served": all(one["is_served"] for one in attacks),
    }
