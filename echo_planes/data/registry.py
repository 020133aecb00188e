"""Finding a task adapter by name and building it.

`task=WORD` is, in this order: the file `configs/task/WORD.yaml`; a path to a YAML file of your own, with an
`adapter:` key; `package.module:Class`; `LIBRARY:NAME`, a task of a library that a module of that name in
`tasks/bridges/` brings; or an installed package's entry point WORD in the group `echo_planes.tasks`, whose
value is `package.module:Class`. So a package can add names, but take none over.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from echo_planes.config import Config, TaskConfig
from echo_planes.data.overlong import overlong_of
from echo_planes.data.refill import check_refill
from echo_planes.data.task import TaskAdapter, TaskOptions, Tokenizer
from echo_planes.errors import ConfigError, EchoPlanesError, ModelError, TaskError
from echo_planes.types import Prompt

ENTRY_POINTS = "echo_planes.tasks"
BRIDGES = "echo_planes.tasks.bridges"
# Of folders that name one of these, `AutoTokenizer` makes a `PreTrainedTokenizerFast`, after importing torch.
_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
PROBE_PROMPTS = 16  # made before a run starts, of both kinds
LIBRARY_TASK = "LIBRARY_TASK"  # what a bridge calls the adapter of a library's tasks


def installed_tasks() -> list[str]:
    """Names of the tasks that installed packages offer, sorted. Imports none of them."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)})


def installed_adapter(name: str) -> str | None:
    """`package.module:Class` of the task that an installed package offers as `name`; None: nobody does.

    Raises:
        ConfigError: two packages offer one of this name.
    """
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    offers = sorted({(entry.dist.name if entry.dist else "?", entry.value) for entry in entries})
    if len(offers) > 1:
        shown = " and ".join(f"{package} ({value})" for package, value in offers)
        raise ConfigError(
            f"task={name}: {shown} offer a task of this name; uninstall one, or write "
            "task=package.module:Class"
        )
    return offers[0][1] if offers else None


def raised_at(error: BaseException, folder: Path | None = None) -> str:
    """`file:line` of the user's code where `error` came from: the deepest frame in `folder`, else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [frame for frame in frames if folder is not None and Path(frame.filename).parent == folder]
    deepest = (own or frames)[-1]
    return f"{deepest.filename}:{deepest.lineno}"


def in_words(error: BaseException) -> str:
    """The last line of an error's traceback."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[0] if lines else type(error).__name__


def adapter_class(path: str) -> type[TaskAdapter]:
    """The class named by `package.module:Class`, or the one that brings the tasks of `LIBRARY:NAME`.

    Raises:
        ConfigError: no such module or class, a module that cannot be imported, or not a TaskAdapter.
    """
    module_name, _, class_name = path.partition(":")
    if not class_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"task.adapter='{path}' is not of the form package.module:Class")
    found = _library_task(path) or getattr(_imported(path, module_name), class_name, None)
    if not (isinstance(found, type) and issubclass(found, TaskAdapter)):
        raise ConfigError(f"task.adapter='{path}': '{class_name}' is not a TaskAdapter in {module_name}")
    return found


def _library_task(path: str) -> type[TaskAdapter] | None:
    """The adapter of a library's tasks, if `path` is `LIBRARY:NAME` and there is a bridge to the library."""
    library = path.partition(":")[0]
    module = f"{BRIDGES}.{library}"
    if "." in library or importlib.util.find_spec(module) is None:
        return None
    found: type[TaskAdapter] | None = getattr(_imported(path, module), LIBRARY_TASK, None)
    return found


def _imported(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.adapter='{path}': no module named '{error.name}'; check the spelling and that it can be "
            "imported from the current folder"
        ) from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"task.adapter='{path}': importing {module_name} raised {in_words(error)} ({raised_at(error)}); "
            "correct it there"
        ) from error


def adapter_options(task: TaskConfig) -> tuple[type[TaskAdapter], TaskOptions]:
    """The adapter's class and its validated options.

    Raises:
        pydantic.ValidationError: an option is unknown or of the wrong type.
        ConfigError: no such adapter, or `LIBRARY:NAME` and an option name two tasks.
    """
    cls, options = adapter_class(task.adapter), task.options
    if _library_task(task.adapter):
        name = task.adapter.partition(":")[2]
        if options.setdefault(cls.named_by, name) != name:
            raise ConfigError(
                f"task={task.adapter}: task.{cls.named_by}={options[cls.named_by]} names another task; "
                "leave it out"
            )
    return cls, cls.Options.model_validate(options)


def build_adapter(task: TaskConfig, tokenizer: Tokenizer, seed: int) -> TaskAdapter:
    """The run's adapter.

    Raises:
        UserError: it cannot be found, or its options are wrong.
        TaskError: its constructor raised.
    """
    try:
        cls, options = adapter_options(task)
    except ValidationError as error:
        raise ConfigError(f"task options: {error.errors()[0]['msg']}") from error
    try:
        return cls(options, tokenizer, seed)
    except EchoPlanesError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        place = raised_at(error, folder_of(cls))
        raise TaskError(
            f"task {task.name}: {cls.__name__} cannot be built: {in_words(error)} ({place})"
        ) from error


def folder_of(cls: type[TaskAdapter]) -> Path | None:
    """Where an adapter's source lies; None for a class without a file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).parent if file else None


def _tokenizer_class(folder: Path) -> Any:
    """What loads a folder's tokenizer. All of it takes seconds to import, and only some processes need it."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        settings = None  # what is wrong there is said by the library
    if isinstance(settings, dict) and settings.get("tokenizer_class") in _PLAIN_TOKENIZERS:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a local Hugging Face model folder; never runs code from it.

    Raises:
        ModelError: it cannot be loaded, or has no end token.
    """
    try:
        tokenizer: Tokenizer = _tokenizer_class(folder).from_pretrained(
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


def probe_task(config: Config) -> tuple[str, list[Prompt]]:
    """Build the task and its first prompts here, before engines take a minute to start.

    Returns:
        What the task has to say to the user, mostly nothing; and its first prompts, to train on and held out.

    Raises:
        UserError: a data file is unreadable, the tokenizer unusable, a prompt too long for the model, or this
            machine lacks something that the task needs.
    """
    task = build_adapter(config.task, load_tokenizer(config.model.folder), config.run.seed)
    check_refill(config, type(task))
    overlong_of(config, task.max_new_tokens)
    limit = config.model.max_model_len - (task.max_new_tokens or config.sampling.max_new_tokens)
    held_out = [task.eval_prompt(index) for index in range(min(PROBE_PROMPTS, config.eval.num_prompts))]
    prompts = [*map(task.prompt, range(PROBE_PROMPTS)), *held_out]
    for prompt in (prompts[0], held_out[0]):
        if not 0 < len(prompt.token_ids) <= limit:
            raise ConfigError(
                f"task {config.task.name}: prompt {prompt.index} has {len(prompt.token_ids)} tokens, but "
                f"model.max_model_len less the answer leaves {limit}; raise model.max_model_len or shorten "
                "the prompts"
            )
    return task.preflight(), prompts
