"""Policy from a model folder that never changes: an opponent, or the player that is evaluated.

The model runs in this process, on the CPU, by plain torch. Use small models: a large one would delay every
hand that waits for it. Questions that arrive while it computes form the next batch.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from echo_planes.data.tasks.adapter import Tokenizer
from echo_planes.errors import ConfigError, ModelError
from echo_planes.types import Sample, Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "frozen:"  # of `task.opponent`, before a folder or builtin:NAME
MAX_BATCH = 64  # questions computed at once, which bounds the memory
# Both tokenizers must encode this text alike. It has the signs of states and actions in both styles.
PROBE = "AhKd QsTh2c p24 c4 r8-94 b1/2 s*94,90+4,x98 r6cf/kr4:\nraise to 12 (33% of the pot after it)."


def model_folder(name: str) -> Path:
    """Find a model's folder: a Hugging Face folder, or `builtin:NAME` for one in this package.

    Raises:
        ModelError: there is no model.
    """
    folder = Path(name).expanduser()
    if name.startswith("builtin:"):
        folder = Path(str(files("echo_planes"))) / "assets" / name.removeprefix("builtin:")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: no model there (no config.json); give a Hugging Face model folder")
    return folder.resolve()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises ModelError without one that has an end token."""
    from transformers import AutoTokenizer  # takes seconds to import, and only some processes need it

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{folder}: no tokenizer ({reason}); give a whole model folder") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{folder}: its tokenizer has no end token, so answers would never stop; set one")
    return tokenizer


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Check that the model in `folder` uses the same tokens as `tokenizer`.

    Raises:
        ModelError: the model's tokenizer cannot be loaded, or differs.
    """
    own = load_tokenizer(folder)
    ids = [reader.encode(PROBE, add_special_tokens=False) for reader in (own, tokenizer)]
    if ids[0] != ids[1] or own.eos_token_id != tokenizer.eos_token_id:
        raise ModelError(f"{folder}: its tokenizer is not the policy's; give a model of the same family")


@dataclass(frozen=True, slots=True)
class Question:
    """Question to a frozen model: tokens, and the random generator for the answer."""

    token_ids: tuple[int, ...]
    rng: random.Random


class FrozenModel:
    """Model in a folder, whose answers are sampled. The first question loads its weights, as float32.

    Args:
        folder: see `model_folder`.
        end_token: the tokenizer's end token, which ends an answer; None: only the length ends it.
        max_new_tokens: most tokens of an answer, the end token included.
        temperature: divides the logits; 0 takes the likeliest token.

    Raises:
        ConfigError: the temperature is below 0 or not finite, or `max_new_tokens` is below 1.
    """

    def __init__(
        self, folder: Path, end_token: int | None, *, max_new_tokens: int, temperature: float = 1.0
    ) -> None:
        if not 0 <= temperature < math.inf or max_new_tokens < 1:
            raise ConfigError(
                f"temperature={temperature}, max_new_tokens={max_new_tokens}: need at least 0 and 1"
            )
        self.folder = folder
        self._end_token = end_token
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._model: PreTrainedModel | None = None
        self._forming: tuple[list[Question], asyncio.Task[list[Sample]]] | None = None
        self._computing = asyncio.Lock()  # one batch at a time

    def player(self, key: str) -> FrozenPlayer:
        """Return a policy whose random draws depend only on `key`, whatever else is in its batches."""
        return FrozenPlayer(self, random.Random(f"frozen/{key}"))

    async def answer(self, question: Question) -> Sample:
        """Sample one answer; its logprobs are after temperature (at 0: the model's own).

        Raises:
            ModelError: the folder cannot be loaded.
        """
        if self._forming is None:
            questions: list[Question] = []
            self._forming = questions, asyncio.create_task(self._compute(questions))
        questions, answers = self._forming
        questions.append(question)
        number = len(questions) - 1
        # Shielded: a cancelled hand must not cancel the answers of the other hands in the batch.
        return (await asyncio.shield(answers))[number]

    async def _compute(self, questions: list[Question]) -> list[Sample]:
        async with self._computing:
            self._forming = None  # later questions form the next batch
            return await asyncio.to_thread(self._answer_all, questions)

    def _answer_all(self, questions: Sequence[Question]) -> list[Sample]:
        if self._model is None:
            self._model = _load(self.folder)
        parts = [questions[first : first + MAX_BATCH] for first in range(0, len(questions), MAX_BATCH)]
        return [
            answer
            for part in parts
            for answer in sample(self._model, part, self._end_token, self._max_new_tokens, self._temperature)
        ]


class FrozenPlayer:
    """`Policy` of one player on a shared `FrozenModel`."""

    def __init__(self, model: FrozenModel, rng: random.Random) -> None:
        self._model = model
        self._rng = rng

    async def generate(self, token_ids: Sequence[int]) -> Sample:
        """Sample one continuation of `token_ids`."""
        return await self._model.answer(Question(tuple(token_ids), self._rng))


def sample(
    model: PreTrainedModel,
    questions: Sequence[Question],
    end_token: int | None,
    max_new_tokens: int,
    temperature: float,
) -> list[Sample]:
    """Answer all questions as one batch. Each draws one number per token from its own generator.

    Args:
        end_token, max_new_tokens: an answer ends at the end token, or at this many tokens.
        temperature: divides the logits; 0 takes the likeliest token and draws nothing.
    """
    import torch

    width = max(len(question.token_ids) for question in questions)
    ids = torch.zeros(len(questions), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(questions):  # padded on the left, so that all continue in the same column
        ids[row, width - len(question.token_ids) :] = torch.tensor(question.token_ids)
        mask[row, width - len(question.token_ids) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    said: list[list[tuple[int, float]]] = [[] for _ in questions]
    going, cache = set(range(len(questions))), None
    with torch.inference_mode():
        while going:
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logprobs = (output.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
            likeliest, mass = logprobs.argmax(-1), logprobs.double().exp().cumsum(-1)
            ids = likeliest[:, None].clone()
            for row in sorted(going):
                if temperature:
                    # The product is below the total mass, so the search finds a token with mass above 0.
                    drawn = questions[row].rng.random() * mass[row, -1]
                    ids[row, 0] = torch.searchsorted(mass[row], drawn, right=True)
                token = int(ids[row, 0])
                said[row].append((token, float(logprobs[row, token])))
                if token == end_token or len(said[row]) == max_new_tokens:
                    going.remove(row)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
            positions = positions[:, -1:] + 1
    return [_sample(tokens, end_token) for tokens in said]


def _sample(tokens: Sequence[tuple[int, float]], end_token: int | None) -> Sample:
    ids, logprobs = zip(*tokens, strict=True)
    reason: Literal["stop", "length"] = "stop" if ids[-1] == end_token else "length"
    return Sample(ids, logprobs, (Span(0, len(ids), 0, "frozen"),), reason)


def _load(folder: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar in a log file is noise
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{folder}: the model cannot be loaded ({reason}); give a whole model folder"
        ) from error
    return model.eval()
