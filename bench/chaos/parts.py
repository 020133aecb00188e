"""An engine and a task whose answers follow from the prompt alone, whoever is killed meanwhile.

Every answer's first token says which sample it is, all others follow from the tokens before them. So what a
group comes to does not hang on who made it, nor on how often it was handed on, and a run at S = 0 must end
with the same weights however many processes were killed on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.types import Draw, Episode, Manifest, Prompt, Publication, Reward, Sample, Span, joined

# Token ids: what they mean as text is of no matter here.
DIGIT, EQUALS, FIRST = 10, 9, 20  # DIGIT + 0 ... DIGIT + 9; FIRST + the sample's number
ANSWER_TOKENS = 6
TOKEN_S = float(os.environ.get("ECHO_CHAOS_TOKEN_S", "0.03"))


class ChaosTask(TaskAdapter):
    """Half of all answers are right, which ones by a hash."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (*(DIGIT + int(digit) for digit in str(index)), EQUALS))

    def eval_prompt(self, index: int) -> Prompt:
        return self.prompt(1_000_000 + index)

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        correct = _hash(prompt.token_ids + episode.response_ids) % 2 == 0
        return Reward(float(correct), correct)


class ChaosEngine:
    """In the place of `VllmEngine`; takes real publications, and answers by a hash."""

    def __init__(self, *_: Any) -> None:
        self.version, self.digest, self.digest_mismatches, self.last_pause_s = -1, "", 0, 0.0
        self.about = "answers by a hash"

    async def start(self) -> None:
        """Nothing to build."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        max_new_tokens: int,
        on_tokens: Callable[[int, Sample], None],
        draw: Draw | None = None,
    ) -> list[Sample]:
        contexts = [list(prompt_ids) for _ in range(num_samples)]
        pieces: list[list[Sample]] = [[] for _ in range(num_samples)]
        # A request that goes on from another worker's tokens has them behind the prompt.
        done = len(prompt_ids) - 1 - list(prompt_ids).index(EQUALS)
        for position in range(done, ANSWER_TOKENS):
            for number, context in enumerate(contexts):
                token = FIRST + number if position == 0 else DIGIT + _hash(context) % 10
                context.append(token)
                span = Span(0, 1, self.version, self.digest)
                reason: Literal["length", ""] = "length" if position == ANSWER_TOKENS - 1 else ""
                piece = Sample((token,), (-1.0,), (span,), reason)
                pieces[number].append(piece)
                on_tokens(number, piece)
            await asyncio.sleep(TOKEN_S)
        return [joined(sample) for sample in pieces]

    async def install(self, publication: Publication) -> None:
        manifest: Manifest = publication.manifest
        self.version, self.digest = manifest.version, manifest.digest

    async def live_digest(self) -> str:
        return self.digest

    async def close(self) -> None:
        """Nothing was started."""


def _hash(token_ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(tuple(token_ids)).encode(), digest_size=4).digest(), "big")
