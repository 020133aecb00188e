"""`hostile`: everything that a worker with a credential of its own may try, by name.

The attacks stand beside the tests that CI runs of them: on the data plane `tests/unit/ledger_attacks.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.unit import ledger_attacks

LEAST = 60


def hostile(folder: Path) -> dict[str, Any]:
    """What came of each attack, by where it was made."""
    return {"data plane": [asdict(one) for one in ledger_attacks.mount_all(folder / "ledger")]}


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Claims of the section, by their words."""
    attacks = [one for of in figures.values() for one in of]
    return {
        f"at least {LEAST} named attacks": len({one["name"] for one in attacks}) >= LEAST,
        "each is refused with its reason": all(one["is_refused"] for one in attacks),
        "none changes anything": all(one["is_unchanged"] for one in attacks),
        "honest workers are served": all(one["is_served"] for one in attacks),
    }
