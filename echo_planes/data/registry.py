"""Finding a task adapter by name and building it."""

from __future__ import annotations

import importlib
from pathlib import Path

from pydantic import ValidationError

from echo_planes.config import Config, TaskConfig
from echo_planes.data.task import TaskAdapter, TaskOptions, Tokenizer
from echo_planes.errors import ConfigError, ModelError


def adapter_class(path: str) -> type[TaskAdapter]:
    """The class named by `package.module:Class`.

    Raises:
        ConfigError: no such module or class, or not a TaskAdapter.
    """
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ConfigError(f"task.adapter='{path}' is not of the form package.module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.adapter='{path}': no module named '{error.name}'; check the spelling and that it can be "
            "imported from the current folder"
        ) from error
    if not (isinstance(found, type) and issubclass(found, TaskAdapter)):
        raise ConfigError(f"task.adapter='{path}': '{class_name}' is not a TaskAdapter in {module_name}")
    return found


def adapter_options(task: TaskConfig) -> tuple[type[TaskAdapter], TaskOptions]:
    """The adapter's class and its validated options.

    Raises:
        pydantic.ValidationError: an option is unknown or of the wrong type.
    """
    cls = adapter_class(task.adapter)
    return cls, cls.Options.model_validate(task.options)


def build_adapter(task: TaskConfig, tokenizer: Tokenizer, seed: int) -> TaskAdapter:
    """The run's adapter."""
    try:
        cls, options = adapter_options(task)
    except ValidationError as error:
        raise ConfigError(f"task options: {error.errors()[0]['msg']}") from error
    return cls(options, tokenizer, seed)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a local Hugging Face model folder; never runs code from it.

    Raises:
        ModelError: it cannot be loaded, or has no end token.
    """
    from transformers import AutoTokenizer  # seconds to import, and only some processes need it

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"model.path={folder}: its tokenizer cannot be loaded ({reason})") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path={folder}: its tokenizer has no end token, so answers would never stop; set "
            "'eos_token' in tokenizer_config.json"
        )
    return tokenizer


def probe_task(config: Config) -> None:
    """Build the task and its first prompts here, before engines take a minute to start.

    Raises:
        UserError: a data file is unreadable, the tokenizer unusable, or a prompt too long for the model.
    """
    task = build_adapter(config.task, load_tokenizer(config.model.folder), config.run.seed)
    limit = config.model.max_model_len - (task.max_new_tokens or config.sampling.max_new_tokens)
    for prompt in (task.prompt(0), task.eval_prompt(0)):
        if not 0 < len(prompt.token_ids) <= limit:
            raise ConfigError(
                f"task {config.task.name}: prompt {prompt.index} has {len(prompt.token_ids)} tokens, but "
                f"model.max_model_len less the answer leaves {limit}; raise model.max_model_len or shorten "
                "the prompts"
            )
