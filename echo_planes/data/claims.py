"""Checks of workers' messages before anything uses them: groups, streamed tokens, counters, evaluations.

Pure functions of a message and of the receiver's knowledge (`Rules`, the lease, the published versions). They
take any object and never raise: they return a `Fault`, a named reason and one line for people. A check reads
sizes before it iterates, so it costs no more than for the largest valid message. Only loops in C iterate over
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from echo_planes.config.files import MODEL_JSON_BYTES, read_json
from echo_planes.config.schema import Config
from echo_planes.errors import ModelError
from echo_planes.types import (
    Episode,
    Group,
    Lease,
    LeaseTokens,
    PartialRollout,
    Prompt,
    Reward,
    Sample,
    Span,
    Status,
    Trajectory,
    WorkerStats,
    cover,
)

Reason = Literal[
    "wrong_type",  # a field does not have the type of the message class
    "incomplete",  # another group id, or another number of samples than the lease
    "wrong_name",  # a sample is not called "<group_id>/<its number>", or has an unknown status
    "failed",  # the worker itself reports that the sample failed
    "mismatched",  # another prompt or worker than the lease has
    "unspanned",  # no tokens, or spans that do not cover them exactly, in order
    "unpublished",  # another lineage, or a version or digest that was never published
    "too_long",  # more tokens, turns, names or text than the limits allow
    "bad_tokens",  # an id that the model does not have
    "bad_logprobs",  # too few or too many, not finite, above 0, or too low for a sampled token
    "bad_mask",  # another length than the response, or no sampled token
    "bad_number",  # a reward or a counter that is not finite, or outside its range
    "bad_text",  # text that cannot be encoded
]

ROUNDING = 1e-3  # nats: how far a log-probability may exceed 0
LOWEST_LOGPROB = -1e4  # nats; a token of probability e^-10000 is never sampled
LOWEST_ALTERNATIVE = -1e39  # nats; -inf is allowed too: a token outside the nucleus
MOST_REWARD = 1e12  # a batch's sum of its squares still fits into the learner's float32
MOST_CHARS = 2**22  # characters in an answer's text, or in its notes
MOST_NAME_CHARS = 256
MOST_PARTS = 1024  # parts of a reward
MOST_PIECES = 2**16  # pieces in a message, and calls of a lease
MOST_ALTERNATIVES = 32  # per token; `sampling.top_logprobs` is below it
MOST_COUNT = 2**53  # largest value of a counter
MOST_SECONDS = 1e10
MOST_TOKENS_PER_S = 1e8
LARGEST_INT32 = 2**31 - 1  # the store keeps token ids and counts of turns as int32
_STATUSES = frozenset(get_args(Status))
_REASONS = frozenset(("stop", "length", "abort", ""))
_ROW = (tuple, list)
_NUMBER = (float, int, np.floating, np.integer)
_MISSING = object()

# The fields of every message class and their allowed types. A test checks that none is missing.
FORMS: Mapping[type, Mapping[str, Any]] = {
    Group: {"group_id": str, "trajectories": _ROW},
    Trajectory: {
        **dict.fromkeys(("trajectory_id", "group_id", "worker_id", "lineage", "status", "error"), str),
        "prompt": Prompt,
        "episode": Episode,
        "reward": Reward,
    },
    Prompt: {"index": int, "token_ids": _ROW, "answer": str, "text": str},
    Episode: {
        **dict.fromkeys(("response_ids", "response_mask", "logprobs", "spans"), _ROW),
        **dict.fromkeys(("top_logprobs", "turn_rewards"), _ROW),
        **dict.fromkeys(("finish_reason", "text", "notes"), str),
        "num_turns": int,
    },
    Reward: {"value": _NUMBER, "correct": bool, "parts": dict, "notes": str},
    Span: {"start": int, "stop": int, "version": int, "digest": str, "schedule": int},
    LeaseTokens: {"lease_id": str, "pieces": _ROW},
    PartialRollout: {"context": _ROW, "sample": Sample, "first": int},
    Sample: {
        **dict.fromkeys(("token_ids", "logprobs", "spans", "top_logprobs"), _ROW),
        "finish_reason": str,
    },
    WorkerStats: {
        **dict.fromkeys(("worker_id", "digest"), str),
        **dict.fromkeys(("version", "groups_in_flight", "trajectories", "tokens", "full_tokens"), int),
        **dict.fromkeys(("slots", "scoring", "plateau"), int),
        **dict.fromkeys(("busy_s", "full_s"), _NUMBER),
        "leaves_in_s": (*_NUMBER, type(None)),
    },
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Reason for which a message is refused."""

    reason: Reason
    detail: str  # one line for people

    @property
    def is_malformed(self) -> bool:
        """Whether a worker that keeps the contract never sends such a message."""
        return self.reason != "failed"


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds that every valid message of a run keeps."""

    vocabulary: int  # token ids are below it
    max_tokens: int  # prompt and response together


class _Wrong(Exception):
    """Exception that ends a check; carries its `Fault`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail)


def rules_of(config: Config) -> Rules:
    """Return the rules of a run.

    Raises:
        ModelError: the model's config.json is not readable, or holds no valid `vocab_size`.
    """
    return Rules(vocabulary_of(config.model.folder), config.model.max_model_len)


def vocabulary_of(folder: Path) -> int:
    """Return the vocabulary size of the model in a Hugging Face folder, padding included.

    Raises:
        ModelError: see `rules_of`.
    """
    path = folder / "config.json"
    settings: Any = read_json(path, MODEL_JSON_BYTES, error=ModelError, advice="save the model again")
    if isinstance(settings, dict) and isinstance(settings.get("text_config"), dict):
        settings = {**settings["text_config"], **settings}  # a model of several modalities
    size = settings.get("vocab_size") if isinstance(settings, dict) else None
    if type(size) is not int or not 0 < size <= LARGEST_INT32:
        raise ModelError(f"{path}: vocab_size is {size!r:.60}, not a number of tokens; save it again")
    return size


def plain(text: object, most_chars: int = 500) -> str:
    """Turn text from another process into one printable line that can be encoded as UTF-8."""
    line = text if isinstance(text, str) else repr(type(text))
    kept = line[:most_chars].encode("utf-8", "backslashreplace").decode()
    return "".join(character if character.isprintable() else " " for character in kept)


# --- groups --------------------------------------------------------------------------------------


def group_fault(
    lease: Lease, group: object, has_made: Callable[[Trajectory], bool], rules: Rules | None
) -> Fault | None:
    """Return why a group cannot be accepted for a live lease; None: it can.

    Args:
        lease: the lease that the worker names.
        group: any object that the worker sent.
        has_made: whether a trajectory is of this lineage, and all of its tokens of published versions.
        rules: None in simulations, whose groups carry no real tokens and share equal samples.
    """
    return _fault(_check_group, lease, group, has_made, rules)


def answers_fault(
    answers: object, indices: Sequence[int], num_samples: int, worker_id: str, rules: Rules
) -> Fault | None:
    """Return why a worker's answers to held-out prompts cannot be counted; None: they can.

    Args:
        answers: any object that the worker sent; valid are trajectories, those of one prompt together.
        indices: held-out prompts that the worker was asked to answer, in this order.
        num_samples: answers per prompt.
        worker_id: the worker that was asked.
        rules: bounds of the run.
    """
    return _fault(_check_answers, answers, indices, num_samples, worker_id, rules)


def tokens_fault(message: object, rules: Rules) -> Fault | None:
    """Return why the streamed tokens of a lease cannot be kept; None: they can."""
    return _fault(_check_tokens, message, rules)


def stats_fault(stats: object, worker_id: str) -> Fault | None:
    """Return why a worker's counters cannot be true; None: they can."""
    return _fault(_check_stats, stats, worker_id)


def _fault(check: Callable[..., None], *arguments: Any) -> Fault | None:
    try:
        check(*arguments)
    except _Wrong as why:
        return why.fault
    return None


def _check_group(
    lease: Lease, group: Any, has_made: Callable[[Trajectory], bool], rules: Rules | None
) -> None:
    if rules:
        _check_form(group, Group, "the group")
    if group.group_id != lease.group_id:
        raise _Wrong("incomplete", f"it is group {plain(group.group_id, 60)}, not {lease.group_id}")
    samples = group.trajectories
    if len(samples) != lease.num_samples:
        raise _Wrong("incomplete", f"{len(samples)} samples, not {lease.num_samples}")
    for number, sample in enumerate(samples if rules else ()):
        _check_parts(sample, f"{lease.group_id}/{number}", lease.group_id)
    for sample in {id(one): one for one in samples}.values():  # equal samples may be one shared object
        _check_claim(sample, lease, has_made)
    if rules:
        for sample in samples:
            _check_sample(sample, rules)


def _check_claim(sample: Trajectory, lease: Lease, has_made: Callable[[Trajectory], bool]) -> None:
    """Check the prompt, worker, spans and versions of a sample against its lease."""
    name, episode = sample.trajectory_id, sample.episode
    if sample.status != "ok":
        raise _Wrong("failed", plain(sample.error) or sample.status)
    if sample.prompt != lease.prompt or sample.worker_id != lease.worker_id:
        raise _Wrong("mismatched", f"{name} is of another prompt or another worker than its lease")
    if not episode.response_ids or not cover(episode.spans, len(episode.response_ids)):
        raise _Wrong("unspanned", f"{name}: its spans do not cover its {len(episode.response_ids)} tokens")
    if not has_made(sample):
        raise _Wrong("unpublished", f"{name} is of another lineage, or of a version that is not published")


def _check_parts(sample: Any, name: str, group_id: str) -> None:
    """Check types and names, which all later checks rely on."""
    _check_form(sample, Trajectory, name)
    if sample.trajectory_id != name or sample.group_id != group_id:
        raise _Wrong("wrong_name", f"{name} is called {plain(sample.trajectory_id, 60)}")
    if sample.status not in _STATUSES:
        raise _Wrong("wrong_name", f"{name}: its status is {plain(sample.status, 60)}")
    for part, kind in ((sample.prompt, Prompt), (sample.episode, Episode), (sample.reward, Reward)):
        _check_form(part, kind, name)
    _check_spans(sample.episode.spans, len(sample.episode.response_ids), name)


def _check_sample(sample: Trajectory, rules: Rules) -> None:
    """Check the content of a sample whose parts have the right types."""
    name, episode, reward = sample.trajectory_id, sample.episode, sample.reward
    length = len(episode.response_ids)
    if len(sample.prompt.token_ids) + length > rules.max_tokens:
        raise _Wrong("too_long", f"{name}: prompt and answer have more than {rules.max_tokens} tokens")
    _check_row(sample.prompt.token_ids, rules, name)  # they equal the lease's, but True equals 1 as well
    _check_drawn(episode.response_ids, episode.logprobs, episode.top_logprobs, rules, name)
    mask = episode.response_mask
    if len(mask) != length or any(kind not in (bool, np.bool_) for kind in set(map(type, mask))):
        raise _Wrong("bad_mask", f"{name}: {len(mask)} mask entries for {length} tokens, or no booleans")
    if not any(mask):
        raise _Wrong("bad_mask", f"{name}: not one of its tokens was sampled")
    if not 0 <= episode.num_turns <= LARGEST_INT32 or len(episode.turn_rewards) > rules.max_tokens:
        raise _Wrong("too_long", f"{name}: more turns than there can be")
    if len(reward.parts) > MOST_PARTS:
        raise _Wrong("too_long", f"{name}: its reward has more than {MOST_PARTS} parts")
    for number in (reward.value, *episode.turn_rewards, *reward.parts.values()):
        _check_number(number, -MOST_REWARD, MOST_REWARD, f"{name}: a reward")
    for text in (episode.text, episode.notes, reward.notes):
        _check_text(text, MOST_CHARS, name)
    for text in (episode.finish_reason, *reward.parts):
        _check_text(text, MOST_NAME_CHARS, name)


def _check_answers(
    answers: Any, indices: Sequence[int], num_samples: int, worker_id: str, rules: Rules
) -> None:
    if not isinstance(answers, _ROW):
        raise _Wrong("wrong_type", f"the answers are {type(answers).__name__}")
    names = [(index, f"eval-{index}", sample) for index in indices for sample in range(num_samples)]
    if len(answers) != len(names):
        raise _Wrong("incomplete", f"{len(answers)} answers, not {len(names)}")
    for answer, (index, group_id, sample) in zip(answers, names, strict=True):
        name = f"{group_id}/{sample}"
        _check_parts(answer, name, group_id)
        if answer.worker_id != worker_id:
            raise _Wrong("mismatched", f"{name} is of another worker than was asked")
        if answer.status != "ok" and not (answer.episode.response_ids or answer.episode.response_mask):
            continue
        _check_row(answer.prompt.token_ids, rules, name)
        if not answer.episode.response_ids or not cover(
            answer.episode.spans, len(answer.episode.response_ids)
        ):
            raise _Wrong("unspanned", f"{name}: its spans do not cover its tokens (prompt {index})")
        _check_sample(answer, rules)


# --- streamed tokens -----------------------------------------------------------------------------


def _check_tokens(message: Any, rules: Rules) -> None:
    _check_form(message, LeaseTokens, "the message")
    name = plain(message.lease_id, 60)
    if len(message.pieces) > MOST_PIECES:
        raise _Wrong("too_long", f"lease {name}: more than {MOST_PIECES} pieces in a message")
    for entry in message.pieces:
        if not isinstance(entry, _ROW) or len(entry) != 2:
            raise _Wrong("wrong_type", f"lease {name}: a piece is no pair of call and partial rollout")
        number, partial = entry
        _check_form(partial, PartialRollout, f"lease {name}")
        if type(number) is not int or not 0 <= number < MOST_PIECES or partial.first < 0:
            raise _Wrong("bad_number", f"lease {name}: call or place of a piece is not one")
        sample = partial.sample
        _check_form(sample, Sample, f"lease {name}")
        if len(partial.context) + partial.first + len(sample.token_ids) > rules.max_tokens:
            raise _Wrong("too_long", f"lease {name}: a call has more than {rules.max_tokens} tokens")
        _check_row(partial.context, rules, f"lease {name}")
        _check_drawn(sample.token_ids, sample.logprobs, sample.top_logprobs, rules, f"lease {name}")
        _check_spans(sample.spans, len(sample.token_ids), f"lease {name}")
        if not cover(sample.spans, len(sample.token_ids)) or sample.finish_reason not in _REASONS:
            raise _Wrong("unspanned", f"lease {name}: the spans of a piece do not cover its tokens")


# --- counters ------------------------------------------------------------------------------------


def _check_stats(stats: Any, worker_id: str) -> None:
    _check_form(stats, WorkerStats, "the counters")
    if stats.worker_id != worker_id:
        raise _Wrong("mismatched", f"counters of {plain(stats.worker_id, 60)} came from {worker_id}")
    for name in ("groups_in_flight", "trajectories", "tokens", "full_tokens", "slots", "scoring", "plateau"):
        _check_number(getattr(stats, name), 0, MOST_COUNT, name)
    _check_number(stats.version, -1, MOST_COUNT, "version")
    for name in ("busy_s", "full_s", "leaves_in_s"):
        if getattr(stats, name) is not None:
            _check_number(getattr(stats, name), 0, MOST_SECONDS, name)
    if stats.full_tokens > MOST_TOKENS_PER_S * max(stats.full_s, 1.0):
        raise _Wrong("bad_number", f"{stats.full_tokens:.3g} tokens in {stats.full_s:.3g} s")


# --- shared checks -------------------------------------------------------------------------------


def _check_form(message: object, kind: type, name: str) -> None:
    """Check that a message is of class `kind`, and each of its fields of an allowed type."""
    if type(message) is not kind:
        raise _Wrong("wrong_type", f"{name}: {type(message).__name__} where {kind.__name__} should be")
    for field, allowed in FORMS[kind].items():
        found = type(getattr(message, field, _MISSING))
        exact = allowed if isinstance(allowed, tuple) else (allowed,)
        if found not in exact and not (float in exact and _is_number(found)):
            raise _Wrong("wrong_type", f"{name}: {kind.__name__}.{field} is {found.__name__}")


def _check_spans(spans: Sequence[Any], length: int, name: str) -> None:
    if len(spans) > length:
        raise _Wrong("unspanned", f"{name}: {len(spans)} spans of {length} tokens")
    for span in spans:
        _check_form(span, Span, name)
        _check_number(span.schedule, -1, MOST_COUNT, f"{name}: the schedule of a span")


def _check_row(ids: Sequence[Any], rules: Rules, name: str) -> None:
    """Check that token ids are ids of the model's vocabulary."""
    if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, ids))):
        raise _Wrong("bad_tokens", f"{name}: a token id is not a whole number")
    if ids and not (min(ids) >= 0 and max(ids) < rules.vocabulary):
        raise _Wrong("bad_tokens", f"{name}: a token id is not one of the model's {rules.vocabulary}")


def _check_drawn(
    ids: Sequence[Any], logprobs: Sequence[Any], tops: Sequence[Any], rules: Rules, name: str
) -> None:
    """Check sampled tokens, their log-probabilities, and their alternatives if there are any."""
    if len(ids) > rules.max_tokens:
        raise _Wrong("too_long", f"{name}: more than {rules.max_tokens} tokens")
    _check_row(ids, rules, name)
    if len(logprobs) != len(ids):
        raise _Wrong("bad_logprobs", f"{name}: {len(logprobs)} log-probabilities of {len(ids)} tokens")
    _check_logprobs(logprobs, LOWEST_LOGPROB, name)
    if len(tops) > len(ids):
        raise _Wrong("bad_logprobs", f"{name}: alternatives of {len(tops)} tokens where there are {len(ids)}")
    for pairs in tops:
        if not isinstance(pairs, _ROW) or len(pairs) > MOST_ALTERNATIVES:
            raise _Wrong("bad_logprobs", f"{name}: more alternatives of a token than there can be")
        if not all(isinstance(pair, _ROW) and len(pair) == 2 for pair in pairs):
            raise _Wrong("wrong_type", f"{name}: an alternative is no pair of token and log-probability")
        _check_row([token for token, _ in pairs], rules, name)
        likely = [p for _, p in pairs if not (isinstance(p, float) and p == -math.inf)]
        _check_logprobs(likely, LOWEST_ALTERNATIVE, name)


def _check_logprobs(logprobs: Sequence[Any], lowest: float, name: str) -> None:
    if not all(_is_number(kind) for kind in set(map(type, logprobs))):
        raise _Wrong("bad_logprobs", f"{name}: a log-probability is not a number")
    # Arrow raises at whole numbers of more than 64 bits.
    if any(type(one) is int and one < -(2**53) for one in logprobs):
        raise _Wrong("bad_logprobs", f"{name}: a log-probability is a huge whole number")
    # min and max can pass over a NaN; the sum of a list with a NaN is NaN.
    if logprobs and not (
        min(logprobs) >= lowest and max(logprobs) <= ROUNDING and not math.isnan(sum(logprobs))
    ):
        raise _Wrong("bad_logprobs", f"{name}: a log-probability is not from {lowest:g} to 0")


def _is_number(kind: type) -> bool:
    return issubclass(kind, _NUMBER) and kind is not bool


def _check_number(number: Any, least: float, most: float, name: str) -> None:
    if not _is_number(type(number)) or not least <= number <= most:  # false for NaN too
        shown = f"{number:g}" if isinstance(number, float) else "a huge or no number"
        raise _Wrong("bad_number", f"{name} is {shown}, not from {least:g} to {most:g}")


def _check_text(text: object, most_chars: int, name: str) -> None:
    if not isinstance(text, str) or len(text) > most_chars:
        raise _Wrong("too_long", f"{name}: a text of more than {most_chars:,} characters, or none")
    try:
        text.encode()
    except UnicodeEncodeError as why:
        raise _Wrong("bad_text", f"{name}: a text holds half a character (at {why.start})") from why
