"""Odd values for every field there is: taken as they are written, or refused in one line."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from echo_planes import run
from echo_planes.config.plain_yaml import dump_yaml
from echo_planes.config.schema import Config
from echo_planes.data.tasks.registry import adapter_class
from echo_planes.errors import MAX_LINE, ConfigError
from echo_planes.fleet.plan_config import PlanConfig, load_plan
from echo_planes.loop import loading as cli
from echo_planes.loop.loading import dump_config, load_config
from echo_planes.sim import scenario

LAUGHS = (
    "{a: &a [x,x,x,x,x,x,x,x,x,x], "
    + ", ".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "}"
)
ODD = {
    "empty": "",
    "blank": "  ",
    "null": "null",
    "tilde": "~",
    "quotes": "''",
    "octal": "010",
    "octal float": "010.5",
    "hex": "0x10",
    "binary": "0b11",
    "underscores": "1_000",
    "minutes": "12:30",
    "seconds": "1:2:3.5",
    "date": "2026-02-03",
    "no date": "2026-02-30",
    "moment": "2026-02-03T04:05:06Z",
    "digits": "9" * 5000,
    "minus digits": "-" + "9" * 5000,
    "decimals": "0." + "3" * 5000,
    "65 bits": str(2**64),
    "64 bits": str(2**63 - 1),
    "minus one": "-1",
    "zero": "0",
    "minus zero": "-0.0",
    "one": "1",
    "one.": "1.",
    "plus": "+7",
    "1e-5": "1e-5",
    "1e400": "1e400",
    "1e-400": "1e-400",
    "nan": "nan",
    ".nan": ".nan",
    "inf": "inf",
    "-inf": "-.inf",
    "true": "true",
    "yes": "yes",
    "off": "off",
    "text true": "'true'",
    "text one": "'1'",
    "open": "[",
    "deep lists": "[" * 5000,
    "deep maps": "{a: " * 5000,
    "deep closed": "[" * 60 + "]" * 60,
    "dashes": "- " * 3000,
    "map": "{a: 1}",
    "list": "[1, 2]",
    "lists": "[[[]]]",
    "number key": "{1: 2}",
    "null key": "{null: 2}",
    "list key": "{[a]: 2}",
    "in itself": "&a [*a]",
    "key in itself": "&a {b: *a}",
    "laughs": LAUGHS,
    "no bool": "!!bool x",
    "no time": "!!timestamp x",
    "no int": "!!int x",
    "bytes": "!!binary eA==",
    "python": "!!python/name:os.system x",
    "set": "!!set {a}",
    "nul": '"\\0"',
    "escape": '"\\e[31m"',
    "surrogate": '"\\ud800"',
    "bad bytes": "\udc80\udcff",
    "right to left": "\u202ex",
    "lines": "a\nb",
    "accents": "é漢",
    "long": "x" * 5000,
    "too long": "x" * 300_000,
    "home": "~nobody-of-that-name/x",
    "format": "%s{0}%(x)d",
    "pair": "a: b",
    "pairs": "a: b: c",
    "alias": "*a",
    "at": "@x",
    "tick": "`x`",
    "ask": "?",
    "colon": ":",
    "block": "|",
    "comment": "#x",
    "commented": "5 #x",
    "spaces": " 5 ",
    "class": "os:path",
    "module": "a..b:C",
}


def leaves(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Dotted keys of all fields, and of sections themselves."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        nested = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
        )
        if nested is not None:
            yield from leaves(nested, f"{key}.0." if field.annotation is not nested else f"{key}.")


def some(keys: list[str], name: str) -> list[str]:
    """Of values that are refused before the key matters, and take YAML a while, a few keys are enough."""
    return keys[:: len(keys) // 4] if name.startswith("deep") or name == "laughs" else keys


def every_key() -> list[str]:
    options = adapter_class(load_config([]).task.adapter).Options
    return [
        *leaves(Config, ""),
        *leaves(options, "task."),
        "fleet.workers.0.resources.GPU",
        "fleet.workers.0.labels.zone",
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of settings are read once."""
    read = cache(cli.read_yaml)
    monkeypatch.setattr(cli, "read_yaml", lambda path: copy.deepcopy(read(path)))


def value_at(config: Config, key: str) -> Any:
    node: Any = config.model_dump(mode="json")
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


def one_line(error: ConfigError) -> None:
    message = str(error)
    assert message.isprintable()
    assert len(message) <= MAX_LINE + 10


def means(text: str, value: Any) -> bool:
    """Whether a setting is what was written, by a reading that has nothing to do with YAML's."""
    text = text.strip()
    if isinstance(value, bool):
        return text.lower() in (("true", "yes", "on") if value else ("false", "no", "off"))
    if isinstance(value, int | float):
        return type(value)(text) == value
    if value is None:
        return text in ("null", "~")
    if isinstance(value, str):
        return value in (text, text[1:-1]) or (text, value) == ("off", "off")
    return text[0] in "[{&" or (isinstance(value, dict) and ": " in text)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ODD)
def test_every_field_takes_it_as_written_or_refuses_it_in_one_line(name: str, quick: None) -> None:
    text = ODD[name]
    for key in some(every_key(), name):
        try:
            config = load_config([f"{key}={text}"])
        except ConfigError as error:
            one_line(error)
            continue
        value = value_at(config, key)
        assert means(text, value), f"{key}={text[:50]!r} became {value!r:.100}"
        again = (
            dump_yaml({"it": value}).partition(":")[2].strip() if not isinstance(value, dict | list) else None
        )
        if again is not None:
            assert load_config([f"{key}={again}"]) == config, f"{key}={again}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ODD)
def test_groups_and_keys_that_are_odd_are_refused_in_one_line(name: str, quick: None) -> None:
    text = ODD[name]
    words = [f"{group}={text}" for group in cli.GROUPS] + [
        f"model={text}/no/where",
        f"fleet={text}.yaml",
        f"task={text}:X",
        f"task.adapter={text}.x:Y",
    ]
    words += [
        f"{text}=1",
        f"run.{text}=1",
        f"fleet.workers.{text}.no_such=1",
        f"task.{text}=1",
        f"{text}.{text}=1",
        text,
    ]
    words += ["." * 50_000 + "=1", "run" + ".x" * 50_000 + "=1"]
    for word in words:
        try:
            load_config([word])
        except ConfigError as error:
            one_line(error)
        else:
            pytest.fail(f"{word[:100]!r} was accepted")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ODD)
def test_a_file_of_settings_with_it_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text in (
        ODD[name],
        f"workers: {ODD[name]}",
        f"workers: [{{sku: {ODD[name]}}}]",
        f"? {ODD[name]}\n: 1",
    ):
        path.write_bytes(text.encode(errors="surrogateescape"))
        try:
            config = load_config([f"fleet={path}"])
        except ConfigError as error:
            one_line(error)
        else:
            assert Config.model_validate(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    "word",
    [
        "run.resume=",
        "run.resume=''",
        "run.resume=2026-02-30",
        "run.steps=" + "9" * 5000,
        "run.dir=" + "[" * 5000,
    ],
)
def test_the_command_says_it_in_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([word, "--print"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: {word.partition('=')[0]}=")


def test_no_value_is_none_only_where_it_is_called_so() -> None:
    for key in ("run.resume", "run.dir", "budget.usd", "weights.key_file", "model.path"):
        with pytest.raises(ConfigError, match=rf"{key}=: no value.*{key}=null"):
            load_config([f"{key}="])
    assert load_config(["budget.usd=null"]).budget.usd is None


@pytest.mark.parametrize("name", ODD)
def test_plans_and_scenarios_take_it_or_refuse_it_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = cache(scenario.read_yaml)
    monkeypatch.setattr(scenario, "read_yaml", lambda path: copy.deepcopy(read(path)))
    needed = {"prices": "x", "params_b": "1", "uplink_mbit": "1", "worker_mbit": "1", "t_train_s": "1"}
    for key in [*leaves(PlanConfig, ""), "mu.L4"]:
        try:
            load_plan([f"{key}={text}" for key, text in {**needed, key: ODD[name]}.items()])
        except ConfigError as error:
            one_line(error)
    for key in some([*leaves(scenario.Scenario, "")], name):
        try:
            scenario.load_scenario(["scenario=steady", f"{key}={ODD[name]}"])
        except ConfigError as error:
            one_line(error)
