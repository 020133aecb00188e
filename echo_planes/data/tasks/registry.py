"""Registry of tasks: it finds a task adapter by name and builds it.

`task=WORD` is, in this order: the file `configs/task/WORD.yaml`; a path to a YAML file of your own, with an
`adapter:` key; `package.module:Class`; `LIBRARY:NAME`, a task of a library with a module of that name in
`tasks/bridges/`; or an installed package's entry point WORD in the group `echo_planes.tasks`, whose value is
`package.module:Class`. So a package can add names, but cannot replace existing ones.
"""

from __future__ import annotations

import datetime as dt
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from echo_planes.config.extensions import imported, in_words, raised_at
from echo_planes.config.files import MODEL_JSON_BYTES, check_regular, read_json
from echo_planes.config.schema import TaskConfig
from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions, Tokenizer
from echo_planes.errors import ConfigError, EchoPlanesError, ModelError, TaskError, nearest, one_line

ENTRY_POINTS = "echo_planes.tasks"
TOKENIZER_SETTINGS = "tokenizer_config.json"
_TEXTS = (".json", ".jinja", ".txt", ".model", ".py", "")  # suffixes of files whose size is limited
BRIDGES = "echo_planes.tasks.bridges"
# For these classes `AutoTokenizer` makes a `PreTrainedTokenizerFast` too, but imports torch first.
_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
LIBRARY_TASK = "LIBRARY_TASK"  # name in a bridge module of the adapter of the library's tasks


def installed_tasks() -> list[str]:
    """Return the names of the tasks that installed packages offer, sorted, without importing any."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)})


def installed_adapter(name: str) -> str | None:
    """Return the `package.module:Class` that an installed package offers as `name`; None: no package does.

    Raises:
        ConfigError: several packages offer a task of this name.
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


def adapter_class(path: str) -> type[TaskAdapter]:
    """Return the class named by `package.module:Class`, or the bridge's adapter for `LIBRARY:NAME`.

    Raises:
        ConfigError: no such module or class, a module that cannot be imported, or not a TaskAdapter.
    """
    module_name, _, class_name = path.partition(":")
    if not class_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"task.adapter='{path}' is not of the form package.module:Class")
    where = f"task.adapter='{path}'"
    found = _library_task(path) or getattr(imported(module_name, where), class_name, None)
    if found is None:
        own = [name for name, one in vars(sys.modules[module_name]).items() if isinstance(one, type)]
        raise ConfigError(f"{where}: there is no '{class_name}' in {module_name}{nearest(class_name, own)}")
    if not (isinstance(found, type) and issubclass(found, TaskAdapter)):
        raise ConfigError(f"task.adapter='{path}': '{class_name}' is not a TaskAdapter in {module_name}")
    return found


def _library_task(path: str) -> type[TaskAdapter] | None:
    """Return the adapter of a library's tasks; None unless `path` is `LIBRARY:NAME` of a bridge."""
    library = path.partition(":")[0]
    module = f"{BRIDGES}.{library}"
    if "." in library or importlib.util.find_spec(module) is None:
        return None
    found: type[TaskAdapter] | None = getattr(imported(module, f"task.adapter='{path}'"), LIBRARY_TASK, None)
    return found


def adapter_options(task: TaskConfig) -> tuple[type[TaskAdapter], TaskOptions]:
    """Return the adapter's class and its validated options.

    Raises:
        pydantic.ValidationError: an option is unknown or of the wrong type.
        ConfigError: there is no such adapter, `LIBRARY:NAME` and an option name two tasks, or the adapter's
            own check of an option raised.
    """
    cls, options = adapter_class(task.adapter), task.options
    if _library_task(task.adapter):
        name = task.adapter.partition(":")[2]
        if options.setdefault(cls.named_by, name) != name:
            raise ConfigError(
                f"task={task.adapter}: task.{cls.named_by}={options[cls.named_by]} names another task; "
                "leave it out"
            )
    try:
        return cls, cls.Options.model_validate(options)
    except (ValidationError, EchoPlanesError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's validator may raise anything
        raise ConfigError(
            f"task={task.name}: checking its options raised {in_words(error)} ({raised_at(error)}); correct "
            "them, or the check"
        ) from error


def build_adapter(task: TaskConfig, tokenizer: Tokenizer, seed: int) -> TaskAdapter:
    """Build the run's adapter.

    Raises:
        UserError: the adapter cannot be found, or its options are wrong.
        TaskError: its constructor raised.
    """
    try:
        cls, options = adapter_options(task)
    except ValidationError as error:
        raise ConfigError(f"task options: {error.errors()[0]['msg']}") from error
    with told(cls, f"task {task.name}: {cls.__name__} cannot be built"):
        return cls(options, tokenizer, seed)


@contextmanager
def told(cls: type[TaskAdapter], doing: str) -> Iterator[None]:
    """Turn an exception of a user's adapter in the block into a TaskError that names it and its place.

    Errors of this package and KeyboardInterrupt pass unchanged.
    """
    try:
        yield
    except (EchoPlanesError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit would end the process without a message
        place = raised_at(error, folder_of(cls))
        raise TaskError(one_line(f"{doing}: {in_words(error)} ({place})")) from error


def folder_of(cls: type[TaskAdapter]) -> Path | None:
    """Return the folder of an adapter's source; None for a class without a file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).parent if file else None


def check_model_files(folder: Path) -> None:
    """Check that the files in a model folder are regular, and that settings and texts are of limited size.

    Raises:
        ModelError: a file is not, or the folder cannot be read; the message names it.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ModelError(
            f"model.path={folder}: cannot be loaded ({error.strerror}); give a Hugging Face model folder"
        ) from error
    for entry in entries:
        if entry.exists() and not entry.is_dir():
            most_bytes = MODEL_JSON_BYTES if entry.suffix in _TEXTS else sys.maxsize
            check_regular(entry, most_bytes, error=ModelError, advice="put the model's own file there")


def _tokenizer_class(folder: Path) -> Any:
    """Return the class that loads a folder's tokenizer. The import is here because it takes seconds.

    Raises:
        ModelError: the tokenizer's settings are no JSON object.
    """
    settings: Any = {}
    path = folder / TOKENIZER_SETTINGS
    if path.exists():
        settings = read_json(path, MODEL_JSON_BYTES, error=ModelError, advice="save the tokenizer again")
    if not isinstance(settings, dict):
        raise ModelError(f"{path} is not a JSON object; save the tokenizer again")
    if settings.get("tokenizer_class") in _PLAIN_TOKENIZERS:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_tokenizer(folder: Path, date: dt.date | None = None) -> Tokenizer:
    """Load the tokenizer of a local Hugging Face model folder; never run code from it.

    Args:
        folder: the model's.
        date: the day that its chat template is told, since prompts must not change at midnight; None: today.

    Raises:
        ModelError: the tokenizer cannot be loaded, or has no end token.
    """
    check_model_files(folder)
    kind = _tokenizer_class(folder)
    try:
        tokenizer: Any = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, ImportError):
        raise
    except BaseException as error:  # the libraries raise many types; those in Rust a BaseException too
        raise ModelError(
            f"model.path={folder}: its tokenizer cannot be loaded ({in_words(error):.300}); save the "
            "tokenizer again"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path={folder}: its tokenizer has no end token, so answers would never stop; set "
            "'eos_token' in tokenizer_config.json"
        )
    if date is not None:  # in place of the library's function, the only clock of a template
        day = dt.datetime.combine(date, dt.time())
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=day.strftime)
    return cast(Tokenizer, tokenizer)
