"""Checks that an adapter keeps the contract of `TaskAdapter`: probes call its methods and check the results.

A probe ends in findings, whatever the adapter raises. A probe may also hang, so it must run in a process that
can be killed, as `python -m echo_planes.task check` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from operator import attrgetter
from typing import Any, Literal

from echo_planes.config.extensions import in_words, raised_at
from echo_planes.config.schema import TaskConfig
from echo_planes.data.tasks.adapter import TaskAdapter, Tokenizer
from echo_planes.data.tasks.registry import adapter_class, build_adapter, folder_of
from echo_planes.data.tasks.reward_child import checked
from echo_planes.errors import TaskError, UserError
from echo_planes.types import Episode, Omega, Prompt, Reward, Sample, Span, Trajectory

Level = Literal["ok", "warning", "error"]
Said = Iterator[tuple[Level, str]]
# Called before each probe and each reward: its name, the finding's level if it hangs, its limit in seconds.
Arm = Callable[[str, Level, float], None]

NUM_PROMPTS = 64  # prompts checked in each stream
NUM_TRAINING = 512  # training prompts that are searched for held-out ones
FAR_INDEX = 1_000_003  # an index that long runs reach
MAX_TURNS = 256
PROBE_LIMIT_S = 60.0  # for everything but rewards, which have a limit of their own
SLOW_BUILD_S = 5.0
RIGHT = "\0right"  # placeholder of what `right_answer` returns

# Kinds of answers that a policy gives sooner or later.
ANSWERS: dict[str, tuple[str, ...]] = {
    "right answer": (RIGHT,),
    "empty answer": ("", " \n\t"),
    "garbage": (
        "".join(random.Random(0).choices([*map(chr, range(33, 127))], k=300)),
        "(" * 5000,
        "}{" * 500,
    ),
    "very long answer": ("word and " * 20_000, "x" * 200_000),
    "odd numbers": ("9" * 5000, "1e999", "nan", "-inf", "1/0", "--1"),
    "non-ASCII": ("²", "٣", "½ 数学 😀 e\u0301 \u202e", "\x01\x1b[31m\r\ud7ff\ufeff"),
    "cut off": (RIGHT, "I was about to"),
}
_key = attrgetter("token_ids", "answer")  # two prompts with an equal key are the same question
_PLAIN = (RIGHT, "", "0", "7", "42", "no", "I do not know")


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of one probe. `text` gives the finding, the value, why it matters and what to do."""

    level: Level
    probe: str
    text: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that an adapter is built with, and the lengths it must keep to, in tokens."""

    task: TaskConfig
    tokenizer: Tokenizer
    vocabulary: int  # token ids are below this
    seed: int
    max_model_len: int
    max_new_tokens: int


class ScriptedPolicy:
    """Policy that gives fixed answers in order, again from the start after the last one.

    Args:
        tokenizer: encodes the answers.
        answers: texts; each is followed by an end token unless it is cut off.
        max_tokens: most tokens of one answer; longer ones are cut off there.
        is_cut: whether every answer counts as cut off.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answers: Sequence[str],
        max_tokens: int = sys.maxsize,
        is_cut: bool = False,
    ) -> None:
        self._tokenizer, self._max_tokens, self._is_cut = tokenizer, max_tokens, is_cut
        self._answers = cycle(answers)
        self.samples: list[Sample] = []  # answers given so far

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        """Return the next answer, with version 0 of the weights.

        Raises:
            TaskError: this is call number `MAX_TURNS` + 1.
        """
        if len(self.samples) == MAX_TURNS:
            raise TaskError(f"an episode asked the policy more than {MAX_TURNS} times; end it earlier")
        ids = tuple(self._tokenizer.encode(next(self._answers), add_special_tokens=False))
        if self._tokenizer.eos_token_id is not None and not (self._is_cut and ids):
            ids += (self._tokenizer.eos_token_id,)
        is_cut_off = self._is_cut or len(ids) > self._max_tokens
        ids = ids[: self._max_tokens]
        spans = (Span(0, len(ids), 0, "scripted"),)
        self.samples.append(Sample(ids, (-0.5,) * len(ids), spans, "length" if is_cut_off else "stop"))
        return self.samples[-1]


class _Wrong(Exception):
    """Exception that ends a probe; its text describes the breach of the contract."""

    def __init__(self, text: str, level: Level = "error") -> None:
        super().__init__(text)
        self.level: Level = level


class TaskCheck:
    """Probes of one adapter; a process may run any of them, "build" first. `arm`: see `Arm`."""

    def __init__(self, setting: Setting, arm: Arm = lambda doing, level, limit_s: None) -> None:
        self.setting = setting
        self.cls = adapter_class(setting.task.adapter)
        self.folder = folder_of(self.cls)
        self._arm = arm
        self.probes: dict[str, Callable[[], Said]] = {
            "build": self._build,
            "prompts": partial(self._stream, "prompt"),
            "held-out prompts": partial(self._stream, "eval_prompt"),
            "held out": self._held_out,
            "rollout": self._rollout,
            **{f"reward: {kind}": partial(self._rewards, kind) for kind in ANSWERS},
            "something to learn": self._spread,
            "materialize": self._materialize,
        }

    def run(self, probe: str) -> list[Finding]:
        """Run one probe; return its findings. An exception of the adapter is one of them."""
        found: list[Finding] = []
        self._arm(probe, "error", PROBE_LIMIT_S)
        try:
            found.extend(Finding(level, probe, text) for level, text in self.probes[probe]())
        except _Wrong as wrong:
            found.append(Finding(wrong.level, probe, str(wrong)))
        except UserError as error:  # its text already says what to do
            found.append(Finding("error", probe, str(error)))
        except Exception as error:  # noqa: BLE001  a user's adapter may raise anything; it becomes a finding
            found.append(Finding("error", probe, self._told(error)))
        return found

    def fingerprints(self) -> list[str]:
        """Return a hash of each prompt, training ones first, for comparison with another process."""
        task = self._built()
        prompts = [ask(i) for ask in (task.prompt, task.eval_prompt) for i in range(NUM_PROMPTS)]
        return [hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest() for prompt in prompts]

    def _built(self, seed_offset: int = 0) -> TaskAdapter:
        return build_adapter(self.setting.task, self.setting.tokenizer, self.setting.seed + seed_offset)

    def _told(self, error: BaseException) -> str:
        return f"raised {in_words(error)} ({raised_at(error, self.folder)}); correct it there"

    def _build(self) -> Said:
        begun_s = time.perf_counter()
        try:
            self.task = self._built()
        except TaskError as error:
            raise _Wrong(f"{error}; correct it there") from error
        took_s = time.perf_counter() - begun_s
        self.twin, self.other_seed = self._built(), self._built(1)
        limit, top = self.task.max_new_tokens, self.setting.max_model_len - 1
        if limit is not None and not (type(limit) is int and 0 < limit <= top):
            raise _Wrong(f"max_new_tokens={limit!r}; it must be None or 1 to {top} (model.max_model_len - 1)")
        if took_s > SLOW_BUILD_S:
            yield (
                "warning",
                f"{self.cls.__name__}(...) took {took_s:.1f} s, and every process of a run builds its own; "
                "put the slow part off until a prompt is asked for",
            )
        yield "ok", f"{self.cls.__name__} of {self.cls.__module__}"

    def _stream(self, method: str) -> Said:
        """Check the types and lengths of a prompt stream, and that two instances agree in any order."""
        indices = [*range(NUM_PROMPTS), FAR_INDEX]
        prompts = {i: getattr(self.task, method)(i) for i in indices}
        twins = {i: getattr(self.twin, method)(i) for i in reversed(indices)}
        for index, prompt in prompts.items():
            self._check_prompt(prompt, index, f"{method}({index})")
            if prompt != twins[index]:
                both = f"{_brief(prompt)} from one instance, {_brief(twins[index])} from its equal"
                raise _Wrong(f"{method}({index}) is {both}; draw from (seed, index) and nothing else")
        num_different = len({_key(prompt) for prompt in prompts.values()})
        if num_different == 1:
            yield "warning", f"all {len(prompts)} are {_brief(prompts[0])}; is the index used?"
        longest = max(len(prompt.token_ids) for prompt in prompts.values())
        yield "ok", f"{len(prompts)} looked at: {num_different} different, at most {longest} tokens"

    def _check_prompt(self, prompt: Any, index: int, name: str) -> None:
        if type(prompt) is not Prompt:
            raise _Wrong(f"{name} returned {_shown(prompt)}; it must return a Prompt")
        if type(prompt.index) is not int or prompt.index != index:
            raise _Wrong(f"{name}: Prompt.index is {_shown(prompt.index)}; it must be the index asked for")
        for field in ("answer", "text"):
            if type(value := getattr(prompt, field)) is not str:
                raise _Wrong(f"{name}: Prompt.{field} is {_shown(value)}; it must be text (JSON for more)")
        if type(prompt.token_ids) is not tuple:
            raise _Wrong(f"{name}: token_ids is {_shown(prompt.token_ids)}; it must be a tuple: tuple(...)")
        for token in prompt.token_ids:
            if type(token) is not int:
                raise _Wrong(f"{name}: token_ids holds {_shown(token)}; each must be an int: int(...)")
            if not 0 <= token < self.setting.vocabulary:
                top = self.setting.vocabulary - 1
                raise _Wrong(
                    f"{name}: token {token} is not of the tokenizer (0 to {top}); use self.tokenizer"
                )
        limit = self.setting.max_model_len - (self.task.max_new_tokens or self.setting.max_new_tokens)
        if not 0 < len(prompt.token_ids) <= limit:
            has = f"{len(prompt.token_ids)} tokens; it must have 1 to {limit}"
            raise _Wrong(f"{name} has {has} (less the answer); shorten it, or raise model.max_model_len")

    def _held_out(self) -> Said:
        held = [self.task.eval_prompt(i) for i in range(NUM_PROMPTS)]
        for i, prompt in enumerate(held):
            other = self.other_seed.eval_prompt(i)
            if prompt != other:
                raise _Wrong(
                    f"eval_prompt({i}) is {_brief(prompt)} for one seed and {_brief(other)} for another, so "
                    "accuracies of two runs cannot be compared; do not use self.seed there"
                )
        training = {_key(self.task.prompt(i)): i for i in range(NUM_TRAINING)}
        if both := [prompt for prompt in held if _key(prompt) in training]:
            first = f"eval_prompt({both[0].index}) is prompt({training[_key(both[0])]}) too"
            raise _Wrong(
                f"{first}: {_brief(both[0])}; {len(both)} of {NUM_PROMPTS} are among the first training "
                "prompts, so accuracy would measure memory; keep them apart",
                "warning" if self._plays else "error",  # games may go on differently from one opening
            )
        yield "ok", f"the same for every seed, none among the first {NUM_TRAINING} training prompts"

    @property
    def _some(self) -> list[Prompt]:
        return [self.task.prompt(0), self.task.prompt(1), self.task.eval_prompt(0)]

    def _rollout(self) -> Said:
        turns = []
        for prompt, answer in product(self._some, _PLAIN):
            episode, policy = self._played(prompt, answer)
            if wrong := _wrong_episode(episode, policy.samples):
                raise _Wrong(f"prompt {prompt.index}, answer {_quoted(self._text(prompt, answer))}: {wrong}")
            turns.append(episode.num_turns)
        yield "ok", f"{len(turns)} episodes on a scripted policy, at most {max(turns)} turns"

    @property
    def _plays(self) -> bool:
        """Whether the task overrides `rollout`; its rewards then get only episodes of this rollout."""
        return self.cls.rollout is not TaskAdapter.rollout

    def _played(self, prompt: Prompt, answer: str, is_cut_off: bool = False) -> tuple[Any, ScriptedPolicy]:
        limit = (self.task.max_new_tokens or self.setting.max_new_tokens) if self._plays else sys.maxsize
        policy = ScriptedPolicy(self.setting.tokenizer, [self._text(prompt, answer)], limit, is_cut_off)
        rolling: Any = self.task.rollout(prompt, policy)
        if not inspect.iscoroutine(rolling):
            raise _Wrong(f"rollout returned {_shown(rolling)} at once; write `async def rollout`")
        return asyncio.run(rolling), policy

    def _text(self, prompt: Prompt, answer: str) -> str:
        if answer != RIGHT:
            return answer
        text: Any = self.task.right_answer(prompt)
        if type(text) is not str:
            raise _Wrong(f"right_answer of prompt {prompt.index} is {_shown(text)}; it must be text")
        return text

    def _materialize(self) -> Said:
        prompt, group = self.task.prompt(0), []
        for i, answer in enumerate(_PLAIN):
            reward = Reward(float(i % 2), bool(i % 2))
            episode = self._played(prompt, answer)[0]
            group.append(Trajectory(f"g0/{i}", "g0", prompt, episode, reward, "w0", "check"))
        omegas: Any = self.task.materialize(group)
        if wrong := _wrong_omegas(omegas, group):
            raise _Wrong(wrong)
        if not any(any(omega.loss_mask) for omega in omegas):
            yield "warning", "no token of any answer is trained; set some of loss_mask to True"
        yield "ok", f"{len(omegas)} records that fit their answers"

    def _rewards(self, kind: str) -> Said:
        for prompt, answer in product(self._some, ANSWERS[kind]):
            episode = self._answered(prompt, answer, kind in ("cut off", "very long answer"))
            if self._scored(self.twin, prompt, episode) != self._scored(self.task, prompt, episode):
                about = f"prompt {prompt.index}, answer {_quoted(episode.text)}"
                raise _Wrong(f"{about} earned two different rewards; is that meant?", "warning")
        yield "ok", f"{len(ANSWERS[kind])} to each of three prompts"

    def _answered(self, prompt: Prompt, answer: str, is_cut_off: bool = False) -> Episode:
        """Return an episode; a single-turn one with the exact text, of which the tokenizer may lose parts."""
        episode: Episode = self._played(prompt, answer, is_cut_off)[0]
        return episode if self._plays else replace(episode, text=self._text(prompt, answer))

    def _scored(self, task: TaskAdapter, prompt: Prompt, episode: Episode) -> Reward:
        about, limit = f"prompt {prompt.index}, answer {_quoted(episode.text)}", task.max_new_tokens
        # The answer is longer than the task allows, so it could occur only under another limit.
        is_too_long = not self._plays and limit is not None and len(episode.response_ids) > limit
        level: Level = "warning" if is_too_long else "error"
        about += f" (too long for max_new_tokens={limit})" if is_too_long else ""
        self._arm(f"{about}: the reward", level, task.reward_limit_s)
        try:
            task.prepare(prompt, [episode])
            returned = task.reward(prompt, episode)
        except Exception as error:  # a user's reward may raise anything; it becomes a finding
            raise _Wrong(f"{about}: {self._told(error)}, so that it earns a number", level) from error
        try:
            return checked(returned)
        except (TypeError, ValueError) as error:
            raise _Wrong(f"{about}: {error}", level) from error

    def _spread(self) -> Said:
        values = {
            self._scored(self.task, prompt, self._answered(prompt, answer)).value
            for prompt, answer in product(self._some, _PLAIN)
        }
        if len(values) == 1:
            yield (
                "warning",
                f"right, wrong and empty answers all earn {values.pop():g}, and equal rewards train nothing; "
                "look at `reward`, and at `right_answer` (by default Prompt.answer)",
            )
        else:
            yield "ok", f"rewards from {min(values):g} to {max(values):g}"


# --- checks of results ---------------------------------------------------------------------------


def _wrong_episode(episode: Any, samples: Sequence[Sample]) -> str:
    if type(episode) is not Episode:
        return f"returned {_shown(episode)}; it must return an Episode: EpisodeBuilder makes one"
    num = len(episode.response_ids)
    for field in ("response_ids", "response_mask", "logprobs", "spans", "top_logprobs"):
        value = getattr(episode, field)
        per_token = field != "spans" and (field != "top_logprobs" or value)
        if type(value) is not tuple or (per_token and len(value) != num):
            return f"{field} is {_shown(value)}; it must be a tuple, one entry for each of {num} tokens"
    edges = [0, *(span.stop for span in episode.spans)]
    if [span.start for span in episode.spans] != edges[:-1] or edges[-1] != num:
        return f"spans do not cover its {num} tokens once and in order; EpisodeBuilder keeps them right"
    if not all(type(p) is float and math.isfinite(p) for p in episode.logprobs):
        return "logprobs holds something that is no finite float; keep those of the policy's samples"
    own = [token for token, mine in zip(episode.response_ids, episode.response_mask, strict=True) if mine]
    if own != [token for sample in samples for token in sample.token_ids][: len(own)]:
        return (
            "response_mask is True on tokens that the policy did not sample; keep its very ids and mark the "
            "environment's False: EpisodeBuilder does both"
        )
    return "" if type(episode.text) is str else f"text is {_shown(episode.text)}; it must be text"


def _wrong_omegas(omegas: Any, group: Sequence[Trajectory]) -> str:
    if not isinstance(omegas, list) or len(omegas) != len(group):
        return f"returned {_shown(omegas)}; it must return a list of {len(group)} Omega, in order"
    for i, (omega, trajectory) in enumerate(zip(omegas, group, strict=True)):
        if type(omega) is not Omega:
            return f"entry {i} is {_shown(omega)}; it must be an Omega"
        mask = trajectory.episode.response_mask
        if len(omega.loss_mask) != len(mask):
            return f"entry {i}: loss_mask has {len(omega.loss_mask)} entries for {len(mask)} response tokens"
        if any(trained and not own for trained, own in zip(omega.loss_mask, mask, strict=True)):
            return f"entry {i}: loss_mask trains tokens that the environment wrote; stay within response_mask"
        if not isinstance(omega.advantage_group, str):
            return f"entry {i}: advantage_group is {_shown(omega.advantage_group)}; it must be text"
        known = omega.advantage
        if known is not None and not (isinstance(known, float) and math.isfinite(known)):
            return f"entry {i}: advantage is {_shown(known)}; it must be a finite float, or None"
    return ""


def _shown(value: object) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= 24 else f"{text[:20]!r}... of {len(text)} characters"


def _brief(prompt: object) -> str:
    return repr(prompt.text or prompt.token_ids)[:60] if isinstance(prompt, Prompt) else _shown(prompt)
