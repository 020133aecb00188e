"""The process that computes rewards: a worker starts `python -m echo_planes.data.tasks.reward_child`.

Messages in both directions are JSON after their length in four bytes, on the original standard input and
output. First comes the task's setup, answered by {} once the adapter is built. Then each request holds a
prompt and its episodes; each episode is answered by one outcome as soon as it is scored.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from echo_planes.cluster.process import die_with_parent
from echo_planes.config.extensions import raised_at
from echo_planes.config.schema import TaskConfig
from echo_planes.data.claims import MOST_NAME_CHARS, MOST_PARTS, MOST_REWARD
from echo_planes.data.tasks.adapter import Tokenizer
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer
from echo_planes.types import Episode, Prompt, Reward, RewardFailure, Span

MOST_NOTES = 20_000  # most characters kept of Reward.notes


class Rewarding(Protocol):
    """The part of a task adapter that computes rewards."""

    def prepare(self, prompt: Prompt, episodes: Sequence[Episode]) -> None: ...

    def reward(self, prompt: Prompt, episode: Episode) -> Reward: ...


def outcomes(
    task: Rewarding, prompt: Prompt, episodes: Sequence[Episode]
) -> Iterator[Reward | RewardFailure]:
    """Yield the checked rewards of one group's answers; any exception becomes a failure with a reason."""
    try:
        task.prepare(prompt, episodes)
    except Exception as why:  # noqa: BLE001  a user's code may raise anything; it fails every answer
        for _ in episodes:
            yield _raised(why)
        return
    for episode in episodes:
        try:
            reward = task.reward(prompt, episode)
        except Exception as why:  # noqa: BLE001  a user's code may raise anything; it becomes a counted status
            yield _raised(why)
            continue
        try:
            yield checked(reward)
        except (TypeError, ValueError) as why:
            yield RewardFailure("reward_invalid", str(why))


def _raised(why: Exception) -> RewardFailure:
    return RewardFailure("reward_error", f"{type(why).__name__} at {Path(raised_at(why)).name}: {why}")


def checked(reward: object) -> Reward:
    """Check the result of an adapter's `reward`, and return it as a plain `Reward`.

    It refuses all that `data.claims` refuses: there it would count as a fault of the worker.

    Raises:
        TypeError: the result, or a field of it, is of another type.
        ValueError: a number in it is not finite or too large, it has too many parts, or a part's name is too
            long, or a text cannot be encoded.
    """
    if not isinstance(reward, Reward):
        raise TypeError(f"reward returned {_shown(reward)}; it must return a Reward")
    if not isinstance(reward.correct, bool | np.bool_):
        raise TypeError(f"Reward.correct is {_shown(reward.correct)}; it must be True or False")
    if not isinstance(reward.parts, Mapping):
        raise TypeError(f"Reward.parts is {_shown(reward.parts)}; it must be a mapping of names to numbers")
    if len(reward.parts) > MOST_PARTS:
        raise ValueError(f"Reward.parts has {len(reward.parts)} parts; at most {MOST_PARTS} are allowed")
    parts = {_name(str(name)): _finite(f"Reward.parts[{name!r}]", p) for name, p in reward.parts.items()}
    if not isinstance(reward.notes, str):
        raise TypeError(f"Reward.notes is {_shown(reward.notes)}; it must be text")
    notes = _encodable("Reward.notes", reward.notes[:MOST_NOTES])
    return Reward(_finite("Reward.value", reward.value), bool(reward.correct), parts, notes)


def _name(name: str) -> str:
    if len(name) > MOST_NAME_CHARS:
        raise ValueError(f"Reward.parts has a name of {len(name)} characters; at most {MOST_NAME_CHARS}")
    return _encodable("a name in Reward.parts", name)


def _encodable(what: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as why:
        raise ValueError(f"{what} holds half a character (at {why.start}); it must be text") from why
    return text


def _finite(name: str, number: object) -> float:
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        raise TypeError(f"{name} is {_shown(number)}; it must be a number")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not abs(value) <= MOST_REWARD:  # also where it is NaN
        raise ValueError(f"{name} is {value}; it must be finite, from {-MOST_REWARD:g} to {MOST_REWARD:g}")
    return value


def _shown(value: object) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


class _LazyTokenizer:
    """The model's tokenizer, loaded at its first use because its import takes seconds."""

    def __init__(self, folder: Path, date: dt.date | None) -> None:
        self._folder = folder
        self._date = date
        self._loaded: Tokenizer | None = None

    def __getattr__(self, name: str) -> Any:
        self._loaded = self._loaded or load_tokenizer(self._folder, self._date)
        return getattr(self._loaded, name)


def _receive(stream: BinaryIO) -> Any:
    """Receive the next message; return None when the worker is gone."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    body = stream.read(int.from_bytes(head, "big"))
    return json.loads(body)


def _send(stream: BinaryIO, message: object) -> None:
    data = json.dumps(message).encode()
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def _prompt(fields: dict[str, Any]) -> Prompt:
    return Prompt(**{**fields, "token_ids": tuple(fields["token_ids"])})


def _episode(fields: dict[str, Any]) -> Episode:
    tops = tuple(tuple((i, p) for i, p in pairs) for pairs in fields["top_logprobs"])
    spans = tuple(Span(**span) for span in fields["spans"])
    lists = ("response_ids", "response_mask", "logprobs", "turn_rewards")
    flat: dict[str, Any] = {name: tuple(fields[name]) for name in lists}
    return Episode(**{**fields, **flat, "spans": spans, "top_logprobs": tops})


def _answer(outcome: Reward | RewardFailure) -> dict[str, Any]:
    if isinstance(outcome, RewardFailure):
        return {"status": outcome.status, "error": outcome.error[:4000]}
    return asdict(outcome)


def main() -> None:
    """Answer requests until the worker closes the pipe."""
    die_with_parent()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Processes that a reward forks must not keep the pipes open, or the worker would wait for them.
    os.register_at_fork(after_in_child=lambda: os.closerange(requests.fileno(), replies.fileno() + 1))
    # Output that a reward prints must not mix with the replies, and a reward has no input to read.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = _receive(requests)
    try:
        date = dt.date.fromisoformat(setup["date"]) if setup.get("date") else None
        tokenizer = cast(Tokenizer, _LazyTokenizer(Path(setup["model_folder"]), date))
        task = build_adapter(TaskConfig.model_validate(setup["task"]), tokenizer, setup["seed"])
    except Exception as why:  # noqa: BLE001  a user's constructor may raise anything; the worker reports it
        _send(replies, {"error": f"{type(why).__name__}: {why}"})
        return
    _send(replies, {})
    while (request := _receive(requests)) is not None:
        prompt, episodes = _prompt(request[0]), [_episode(fields) for fields in request[1]]
        for outcome in outcomes(task, prompt, episodes):
            _send(replies, _answer(outcome))


if __name__ == "__main__":
    main()
