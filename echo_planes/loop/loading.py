"""From command-line words to a validated `Config`: YAML groups, `key=value` overrides, errors that help.

Precedence of a new run: built-in defaults < configs/default.yaml < `defaults:` in the task's file < group
files with their `defaults:` < `key=value` words. Of a resume: built-in defaults < the run's config.yaml <
files of the groups that the words name < `key=value` words.
"""

from __future__ import annotations

import copy
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from echo_planes.config.conditions import check_counted, paths_of
from echo_planes.config.fields import unknown_key, with_present_keys
from echo_planes.config.gguf_model import is_gguf
from echo_planes.config.hub import is_hub_name
from echo_planes.config.plain_yaml import dump_yaml, parse_word, read_yaml
from echo_planes.config.schema import Config, TaskConfig
from echo_planes.data.tasks.registry import adapter_class, adapter_options, installed_adapter, installed_tasks
from echo_planes.errors import ConfigError, nearest, shown

GROUPS = ("task", "model", "fleet", "sparse")
MAX_KEY = 200  # characters
_USUAL = {  # settings by the names that other trainers have for them
    "learning_rate": "lr",
    "lrate": "lr",
    "train_batch_size": "prompts_per_step",
    "batch_size": "prompts_per_step",
    "num_generations": "samples_per_prompt",
    "group_size": "samples_per_prompt",
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "beta": "kl_beta",
    "kl_coef": "kl_beta",
    "max_steps": "steps",
}


def config_dir() -> Path:
    """Return the folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "default.yaml").is_file() else package / "configs"


def load_config(words: Sequence[str]) -> Config:
    """Return the validated configuration that `words` ask for.

    Args:
        words: `group=name` or `section.key=value`, as on the command line.

    Raises:
        ConfigError: names the key's path, the value, what is allowed and the nearest match.
    """
    tree, overrides, files = _tree(words)
    try:
        config = Config.model_validate(tree)
        adapter_options(config.task)
    except ValidationError as error:
        message = _explain(error, tree)
        path = ".".join(str(part) for part in error.errors()[0]["loc"])
        resume = overrides.get("run.resume")
        if resume is not None and path not in overrides:  # not a word of this command line
            message = f"{Path(str(resume)) / 'config.yaml'}: {message}"
        raise ConfigError(message) from error
    check_counted(config, _paths(overrides), _paths(files))
    return config


def _paths(given: dict[str, Any]) -> set[str]:
    return set().union(*(paths_of(key, value) for key, value in given.items()))


def _tree(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the settings that `words` ask for, not validated, and of them those of words and of files.

    The last are the sections of the groups that the words name, as their files have them.

    Raises:
        ConfigError: a word is no setting, or names a group or a place that does not exist.
    """
    chosen = {"task": "math", "model": "tiny", "fleet": "laptop", "sparse": "dense"}
    overrides: list[tuple[str, Any]] = []
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"{shown(word)} is not of the form key=value; see --help")
        if len(key) > MAX_KEY:
            raise ConfigError(f"{shown(key)} is longer than all keys there are; see --help for them")
        if key in GROUPS:
            chosen[key] = text
        else:
            overrides.append((key, parse_word(key, text)))
    tree = read_yaml(config_dir() / "default.yaml")
    for key, value in overrides:
        if key == "run" and isinstance(value, dict) and "resume" in value:
            raise ConfigError(
                "run={resume: ...}: a resume begins from another configuration; write run.resume=..."
            )
    resume = dict(overrides).get("run.resume")
    if resume is not None:
        tree = _resumed(Path(str(resume)), tree)
    named = {word.partition("=")[0] for word in words}
    if resume is None or "task" in named:
        tree["task"], defaults = _task(chosen["task"], overrides)
        if resume is None:  # on a resume they would override the run's own settings
            _merge(tree, {key: value for key, value in defaults.items() if key not in GROUPS})
            chosen |= {key: str(defaults[key]) for key in GROUPS if key in defaults and key not in named}
    for group in GROUPS[1:]:
        if resume is None or group in named:
            tree[group] = _group(group, chosen[group])
            _merge(tree, _defaults(f"{group}={chosen[group]}", tree[group]))
    files = {group: copy.deepcopy(tree[group]) for group in GROUPS[1:] if group in named}
    for key, value in overrides:
        set_key(tree, key, value)
    return tree, dict(overrides), files


def recorded_config(folder: Path) -> Config:
    """Return the configuration that an earlier run's folder holds.

    Raises:
        ConfigError: it holds none, or one that this version does not accept.
    """
    tree = _resumed(folder, {})
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{folder / 'config.yaml'}: {_explain(error, tree)}") from error


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML."""
    return dump_yaml(config.model_dump(mode="json"))


def dump_resolved(config: Config) -> str:
    """Return `dump_config` with the defaults of the task's options filled in, as `--print` shows it."""
    tree = config.model_dump(mode="json")
    _, options = adapter_options(config.task)
    tree["task"] |= options.model_dump(mode="json")
    return dump_yaml(tree)


def describe(words: Sequence[str] = ()) -> str:
    """Return every key for `--help`, with the value that `words` give it and its meaning, the task's too.

    Raises:
        ConfigError: a word is no setting, or names a key, a group or a place that does not exist.
    """
    tree, *_ = _tree(words)
    try:
        tree = Config.model_validate(tree).model_dump(mode="json")
    except ValidationError as error:  # what a task needs may be missing yet: --help is to tell that
        if any(one["type"] == "extra_forbidden" for one in error.errors()):
            raise ConfigError(_explain(error, tree)) from error
    groups = [f"{group}={'|'.join(_names(group))}" for group in GROUPS]
    lines = [f"groups: {', '.join(groups)}", ""]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            lines += [*describe_section(name, section, tree.get(name)), ""]
    task = TaskConfig.model_validate(tree["task"])
    options = adapter_class(task.adapter).Options
    lines += [f"options of task={task.name}:", *describe_section("task", options, tree["task"])]
    return "\n".join(lines)


# --- reading -------------------------------------------------------------------------------------


def _resumed(folder: Path, default: dict[str, Any]) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not os.path.exists(path):
        raise ConfigError(f"run.resume={folder}: no config.yaml there; give the folder of an earlier run")
    tree = with_present_keys(read_yaml(path))
    _merge(tree, {"run": {"dir": str(folder)}})
    return tree


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def _group(group: str, name: str) -> dict[str, Any]:
    if name in _names(group):
        return read_yaml(config_dir() / group / f"{name}.yaml")
    if name.endswith((".yaml", ".yml")):
        return read_yaml(Path(name))
    if group == "task" and ":" in name:
        return {"name": name.partition(":")[2], "adapter": name}
    # Unlike Path.is_dir, os.path.isdir never raises.
    if group == "model" and name and (os.path.isdir(name) or is_hub_name(name) or is_gguf(name)):
        return {"path": name}
    known = _names(group)
    if group == "task":
        if adapter := installed_adapter(name):
            return {"name": name, "adapter": adapter}
        known += installed_tasks()
    raise ConfigError(f"{group}={name:.200}: unknown; allowed: {', '.join(known)}{nearest(name, known)}")


def _task(name: str, overrides: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the task's section, and its defaults for other sections.

    `defaults:` in the task's file holds names of groups (`model: tiny_code`), keys of sections, and, under
    `option=value`, further ones for when the task's option has that value.
    """
    section = _group("task", name)
    defaults = _defaults(f"task={name}", section)
    options = {f"task.{key}": value for key, value in section.items()} | dict(overrides)
    for condition in [key for key in defaults if "=" in key]:
        suitable = defaults.pop(condition)
        if not isinstance(suitable, dict):
            raise ConfigError(
                f"task={name}: 'defaults' of {condition} must be settings, not {shown(suitable)}"
            )
        key, _, value = condition.partition("=")
        if str(options.get(f"task.{key}")) == value:
            _merge(defaults, suitable)
    return section, defaults


def _defaults(word: str, section: dict[str, Any]) -> dict[str, Any]:
    """Take `defaults:` out of a group's section: settings of other sections."""
    defaults = section.pop("defaults", {})
    own = word.partition("=")[0]
    if not isinstance(defaults, dict) or own in defaults or not all(type(key) is str for key in defaults):
        raise ConfigError(f"{word}: 'defaults' must be settings of other sections, not {shown(defaults)}")
    return defaults


def _merge(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key; numbers index lists (fleet.workers.0.count=2)."""
    *path, last = key.split(".")
    node: Any = tree
    for part in path:
        if isinstance(node, list):
            node = node[_index(key, part, node)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            raise ConfigError(f"{key}: '{part}' is a value, not a section")
    if isinstance(node, list):
        node[_index(key, last, node)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{key}: '{path[-1]}' is a value, not a section")


def _index(key: str, part: str, node: list[Any]) -> int:
    if not (part.isascii() and part.isdigit() and len(part) < 10) or int(part) >= len(node):
        raise ConfigError(f"{key}: '{part}' is not an index below {len(node)}")
    return int(part)


# --- explaining ----------------------------------------------------------------------------------


def _fields_at(path: Sequence[Any], tree: dict[str, Any]) -> dict[str, FieldInfo]:
    """Return the fields allowed in the section at `path`."""
    model: type[BaseModel] = Config
    for part in path:
        field = _fields(model, tree).get(str(part))
        nested = _section_in(field) if field else None
        if nested is not None:  # otherwise a list's index, or a key that a task defines itself
            model = nested
    return _fields(model, tree)


def _fields(model: type[BaseModel], tree: dict[str, Any]) -> dict[str, FieldInfo]:
    if model is not TaskConfig:
        return dict(model.model_fields)
    adapter = TaskConfig.model_validate(tree["task"]).adapter
    return {**TaskConfig.model_fields, **adapter_class(adapter).Options.model_fields}


def _section_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of a field, or of a list field's items; None: it has none."""
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _explain(error: ValidationError, tree: dict[str, Any]) -> str:
    """Return one line about the first validation error."""
    first = error.errors()[0]
    location = list(first["loc"])
    if error.title not in ("Config",):  # the adapter's options live under task
        location = ["task", *location]
    path = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(location[:-1], tree))
        hint = _elsewhere(str(location[0])) if len(location) == 1 else ""
        usual = _USUAL.get(str(location[-1]))
        hint = hint or (
            f"; did you mean '{usual}'?" if usual in allowed else nearest(str(location[-1]), allowed)
        )
        words = unknown_key(path, hint or "; allowed: " + ", ".join(allowed))
        return f"{path}={_value(first['input'])}: {words}"
    if first["type"] == "missing":
        return f"{path}=...: this setting is needed, it has no default"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        if not path or path in message:
            return message
        is_of_a_key = message.partition(":")[0] in _fields_at(location, tree)
        return f"{path}.{message}" if is_of_a_key else f"{path}: {message}"
    hint = ""
    if first["type"] == "literal_error":
        allowed = [word.strip("' ") for word in str(first.get("ctx", {}).get("expected", "")).split(" or ")]
        options = [option.strip("' ") for part in allowed for option in part.split(",")]
        hint = nearest(str(first["input"]), options)
        if path == "task.reward" and ":" in str(first["input"]):
            hint = "; a function of your own is the reward of task=function"
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        hint = "; as a text it has quotes of its own: '\"...\"'"
    return f"{path}={shown(first['input'])}: {message[0].lower()}{message[1:]}{hint}"


def _elsewhere(name: str) -> str:
    """Return the end of a message about a key without its section: the whole key; "" if there is none."""
    name = _USUAL.get(name, name)
    sections = {section: _section_in(field) for section, field in Config.model_fields.items()}
    found = [f"{section}.{name}" for section, cls in sections.items() if cls and name in cls.model_fields]
    return f"; did you mean '{found[0]}'?" if found else ""


def _value(given: object) -> str:
    return given if isinstance(given, str) and len(given) < MAX_KEY else shown(given)


def describe_section(name: str, section: type[BaseModel], values: object = None) -> list[str]:
    """Return a line for every key of a section: its value in `values`, else its default; and its meaning."""
    rows = []
    for key, field in section.model_fields.items():
        nested = _section_in(field)
        value = values.get(key, field.default) if isinstance(values, dict) else field.default
        if nested is None:
            meaning = " ".join(part for part in (field.description, _choices(field)) if part)
            rows.append(f"  {f'{name}.{key}={_default(value)}':44s} {meaning}".rstrip())
        else:
            index = ".0" if isinstance(field.default, list) else ""
            if index:
                value = value[0] if isinstance(value, list) and value else None
            rows += describe_section(f"{name}.{key}{index}", nested, value)
    return rows


def _default(value: object) -> object:
    return "..." if value is PydanticUndefined else value


def _choices(field: FieldInfo) -> str:
    """Return the values that a field allows, where they are few words that its meaning does not name."""
    named = [
        str(choice)
        for kind in (field.annotation, *typing.get_args(field.annotation))
        if typing.get_origin(kind) is typing.Literal
        for choice in typing.get_args(kind)
    ]
    meaning = field.description or ""
    return f"[{'|'.join(named)}]" if not all(choice in meaning for choice in named) else ""
