"""The data plane's ledger in words, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo_planes.reporting.metrics import number

# Counts of the ledger besides its main terms; see `types.BufferCounts`.
LEDGER_DETAILS = (
    "dropped_hard",
    "dropped_middling",
    "dropped_easy",
    "removed",
    "uninformative",
    "reused",
    "malformed",
    "reward_timeout",
    "reward_error",
    "reward_invalid",
    "continued",
    "continued_tokens",
    "discarded_tokens",
    "unreadable_tokens",
    "damaged",
)


def ledger_equation(metrics: Mapping[str, Any]) -> str:
    """Return the ledger as an equation in words, with the drops by difficulty; "-" for unknown counts."""

    def shown(key: str, word: str) -> str:
        value = number(metrics.get(key))
        return f"{'-' if value is None else f'{value:,.0f}'} {word}"

    dropped = shown("dropped_stale", "dropped")
    kinds = [kind for kind in ("hard", "middling", "easy") if number(metrics.get(f"dropped_{kind}"))]
    if kinds:
        dropped += f" ({', '.join(shown(f'dropped_{kind}', kind) for kind in kinds)})"
    parts = [shown("trained", "trained"), dropped, shown("buffered", "buffered")]
    if number(metrics.get("removed")):
        parts.insert(2, shown("removed", "removed"))
    if number(metrics.get("uninformative")):
        parts.insert(-1, shown("uninformative", "uninformative"))
    again = f"; {shown('reused', 'trained again')}" if number(metrics.get("reused")) else ""
    malformed = (
        f"; {shown('malformed', 'malformed messages refused')}" if number(metrics.get("malformed")) else ""
    )
    damaged = f"; {shown('damaged', 'damaged places in replay/')}" if number(metrics.get("damaged")) else ""
    lost = ""
    if number(metrics.get("unreadable_tokens")):
        lost = f"; {shown('unreadable_tokens', 'tokens of the checkpoint unreadable, sampled again')}"
    return f"{shown('accepted', 'accepted')} = {' + '.join(parts)}{again}{malformed}{damaged}{lost}"


def reward_failures(metrics: Mapping[str, Any]) -> str:
    """Return the counts of answers without a reward so far, by reason, as text; "" if all had one."""
    words = {"reward_timeout": "timed out", "reward_error": "raised", "reward_invalid": "invalid"}
    counts = {word: int(number(metrics.get(key)) or 0) for key, word in words.items()}
    return ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
