"""Probe of the task: builds it and its first prompts before Ray and the engines start."""

from __future__ import annotations

from pathlib import Path

from echo_planes.config.schema import Config
from echo_planes.data.claims import vocabulary_of
from echo_planes.data.replay.overlong import overlong_of
from echo_planes.data.replay.refill import check_companions
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer, told
from echo_planes.errors import ConfigError, ModelError
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
    tokenizer = load_tokenizer(config.model.folder)
    task = build_adapter(config.task, tokenizer, config.run.seed)
    overlong_of(config, task.max_new_tokens)
    limit = config.model.max_model_len - (task.max_new_tokens or config.sampling.max_new_tokens)
    with told(type(task), f"task {config.task.name}: its first prompts cannot be made"):
        held_out = list(map(task.eval_prompt, range(config.eval.num_prompts)))
        prompts = list(map(task.prompt, range(PROBE_PROMPTS)))
        most = max((token for prompt in (*prompts, *held_out) for token in prompt.token_ids), default=0)
    check_vocabulary(config.model.folder, max(most, tokenizer.eos_token_id or 0))
    with told(type(task), f"task {config.task.name}: materialize of made-up answers to prompt 0"):
        check_companions(config, task, prompts[0])
    for kind, prompt in (("", prompts[0]), *(("held-out ", prompt) for prompt in held_out)):
        if not 0 < len(prompt.token_ids) <= limit:
            raise ConfigError(
                f"task {config.task.name}: {kind}prompt {prompt.index} has {len(prompt.token_ids)} tokens, "
                f"but model.max_model_len less the answer leaves {limit}; raise model.max_model_len or "
                "shorten the prompts"
            )
    with told(type(task), f"task {config.task.name}: preflight"):
        return task.preflight(), [*prompts, *held_out[:PROBE_PROMPTS]]


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
