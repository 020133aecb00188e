"""Probe of the task: builds it and its first prompts before Ray and the engines start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echo_planes.config.schema import Config
from echo_planes.data.claims import vocabulary_of
from echo_planes.data.replay.overlong import overlong_of
from echo_planes.data.replay.refill import check_companions
from echo_planes.data.tasks.adapter import TaskAdapter, Tokenizer
from echo_planes.data.tasks.environment import EpisodeOptions
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer, told
from echo_planes.errors import ConfigError, DataError, ModelError, UserError
from echo_planes.types import Prompt

PROBE_PROMPTS = 16  # of each kind, to train on and held out, that tell a run's prompts from others


def probe_task(config: Config) -> tuple[str, list[Prompt]]:
    """Build the task, its first prompts and all held-out ones, so that mistakes show before engines start.

    Returns:
        The task's message for the user, usually ""; and its first prompts, to train on and held out.

    Raises:
        UserError: a data file is unreadable, the tokenizer unusable or another model's, a prompt too long for
            the model, or this machine lacks something that the task needs.
        TaskError: the adapter raised.
    """
    tokenizer = load_tokenizer(config.model.folder, config.run.date)
    task = build_adapter(config.task, tokenizer, config.run.seed)
    overlong_of(config, task.max_new_tokens)
    limit = longest_prompt(config, task)
    with told(type(task), f"task {config.task.name}: its first prompts cannot be made"):
        check_rows(task, tokenizer, limit)
        held_out = list(map(task.eval_prompt, range(config.eval.num_prompts)))
        prompts = list(map(task.prompt, range(PROBE_PROMPTS)))
        most = max((token for prompt in (*prompts, *held_out) for token in prompt.token_ids), default=0)
    check_vocabulary(config.model.folder, max(most, tokenizer.eos_token_id or 0))
    with told(type(task), f"task {config.task.name}: materialize of made-up answers to prompt 0"):
        check_companions(config, task, prompts[0])
    for kind, some in (("", prompts), ("held-out ", held_out)):
        for prompt in some:
            if wrong := wrong_length(prompt, limit):
                raise ConfigError(f"task {config.task.name}: {kind}prompt {prompt.index} {wrong}")
    with told(type(task), f"task {config.task.name}: preflight"):
        return task.preflight(), [*prompts, *held_out[:PROBE_PROMPTS]]


def longest_prompt(config: Config, task: TaskAdapter) -> int:
    """Return the most tokens of a prompt that leave room for an answer."""
    limit = config.model.max_model_len - (task.max_new_tokens or config.sampling.max_new_tokens)
    if isinstance(task.options, EpisodeOptions):
        limit = min(limit, task.options.max_episode_tokens - (task.max_new_tokens or 1))
    return limit


def wrong_length(prompt: Prompt, limit: int) -> str:
    """Return why a prompt cannot be asked, and what to do; "" if it has 1 to `limit` tokens."""
    if 0 < len(prompt.token_ids) <= limit:
        return ""
    return (
        f"has {len(prompt.token_ids)} tokens, but model.max_model_len (for several turns also "
        f"task.max_episode_tokens) less the answer leaves {limit}, and a prompt has 1 or more; raise it, or "
        "change or leave out the prompt"
    )


def check_rows(task: TaskAdapter, tokenizer: Tokenizer, limit: int) -> None:
    """Make all prompts that come from a file, so that no row ends the run when its turn comes.

    Args:
        task, tokenizer: the task, and the tokenizer that it was built with.
        limit: most tokens of a prompt.

    Raises:
        DataError: rows cannot be asked; it names the first, and says how many there are.
    """
    training, held_out = task.sources()
    rows: list[tuple[Callable[[int], Prompt], int, str]] = [
        *((task.prompt, index, place) for index, place in enumerate(training)),
        *((task.eval_prompt, index, place) for index, place in enumerate(held_out)),
    ]
    wrong: list[str] = []
    long: list[tuple[Callable[[int], Prompt], int, str]] = []
    with in_bytes(tokenizer):
        for make, index, place in rows:
            try:
                if not 0 < len(make(index).token_ids) < limit:  # less one, for a token that begins the text
                    long.append((make, index, place))
            except UserError as error:
                wrong.append(str(error))
    for make, index, place in long:
        if why := wrong_length(make(index), limit):
            wrong.append(f"{place}: its prompt {why}")
    if wrong:
        raise DataError(f"{wrong[0]} ({len(wrong)} of {len(rows)} rows cannot be asked)")


@contextmanager
def in_bytes(tokenizer: Any) -> Iterator[None]:
    """Have a tokenizer make a token of every byte in the block: no fewer than its own, and far sooner."""
    encode, render = tokenizer.encode, tokenizer.apply_chat_template

    def rendered(conversation: Any, *, tokenize: bool = True, **options: Any) -> Any:
        text = render(conversation, tokenize=False, **options)
        return list(text.encode()) if tokenize else text

    tokenizer.encode = lambda text, **options: list(text.encode())
    tokenizer.apply_chat_template = rendered
    try:
        yield
    finally:
        tokenizer.encode, tokenizer.apply_chat_template = encode, render


def check_vocabulary(folder: Path, token: int) -> None:
    """Check that the model's vocabulary holds a token of its tokenizer.

    Raises:
        ModelError: the tokenizer is another model's, or config.json is not readable.
    """
    size = vocabulary_of(folder)
    if token >= size:
        raise ModelError(
            f"model.path={folder}: its tokenizer makes token {token}, but config.json has vocab_size={size}; "
            "it may be another model's: save the model's own beside it"
        )
