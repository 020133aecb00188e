"""Settings as YAML: values mean what they look like, and nothing that is written can hurt the reader.

YAML 1.1 reads 010 as 8, 12:30 as 750, 2026-02-03 as a date and 1e-5 as a text. Here 1e-5 is a number and the
others are texts, as in JSON. What is read is of bounded size and depth: aliases can write a tree of billions
of values in a line, or one that never ends.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from echo_planes.config.files import SETTINGS_BYTES, read_text
from echo_planes.errors import ConfigError, shown

MAX_TEXT = 64 << 10  # characters of a text, of settings on a command line too
MAX_VALUES = 100_000
MAX_DEPTH = 32
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_INT64 = 2**63
_INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_WHOLE = r"[-+]?(?:0|[1-9][0-9_]*)"
_NUMBER = rf"(?:{_WHOLE}(?:\.[0-9_]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NO_NUMBER = r"[-+]?\.?(?:inf|Inf|INF)|\.?(?:nan|NaN|NAN)"
_COMMENT = re.compile(r"(?:\A|\s)#")
NONE = ("null", "Null", "NULL", "~")
QUOTE, QUOTED = "'", "'\"[{&!|>"  # what begins with one of these says itself where it ends
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Safe, with the numbers of JSON, no key twice, and no deeper than MAX_DEPTH."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"{shown(twice[0])} stands in it twice")
        return node


class _Dumper(yaml.SafeDumper):
    """Puts quotes around what either reading of YAML takes for more than a text."""


def _resolve() -> None:
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (_INT, _FLOAT, _TIME)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for kind in (_Loader, _Dumper):
        kind.add_implicit_resolver(_INT, re.compile(rf"(?:{_WHOLE})\Z"), list("-+0123456789"))
        kind.add_implicit_resolver(
            _FLOAT, re.compile(rf"(?:{_NUMBER}|{_NO_NUMBER})\Z"), list("-+0123456789.iInN")
        )


_resolve()


def parse_yaml(text: str, where: str) -> Any:
    """The value that a YAML text is.

    Args:
        text: of settings, or of one.
        where: what it is, for messages ("run.steps=x", a file).

    Raises:
        ConfigError: it is no YAML, or no plain value: too long, too deep, with invisible characters, or a
            number that has more than 64 bits.
    """
    if len(text) > SETTINGS_BYTES:
        raise ConfigError(f"{where} is longer than {SETTINGS_BYTES} characters; shorten it")
    try:
        value = yaml.load(text, _Loader)
        _check(value)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        why = str(error).splitlines()[0].partition(";")[0]
        raise ConfigError(f"{where} is not YAML: {why}; correct it, or put quotes around it") from error
    return value


def parse_word(key: str, text: str) -> Any:
    """The value in `key=text`, as on a command line. What is no list, no number and in no quotes is a text.

    Raises:
        ConfigError: as `parse_yaml`; or there is none: mostly a variable of the shell that is not set.
    """
    where = f"{key}={shown(text)}"
    plain = text.strip()
    if not plain:
        raise ConfigError(f"{key}=: no value, as of a variable that is not set; write {key}=null for none")
    if plain[0] not in QUOTED and _COMMENT.search(plain):  # YAML would leave it out unseen
        plain = f"'{plain.replace(QUOTE, 2 * QUOTE)}'"
    value = parse_yaml(plain, where)
    if isinstance(value, str) and plain[0] not in QUOTED:
        return plain  # with its line ends
    if value is None and plain not in NONE:
        raise ConfigError(f"{where}: no value; put quotes around it, or write {key}=null for none")
    return value


def read_yaml(path: Path, advice: str = "give another file") -> dict[str, Any]:
    """The settings in a file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    tree = parse_yaml(read_text(path, SETTINGS_BYTES, error=ConfigError, advice=advice), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; {advice}")
    return tree


def dump_yaml(value: Any) -> str:
    """The inverse of `parse_yaml`, for what JSON can hold."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def _check(tree: Any) -> None:
    """Nothing that is too much, or that no file and no terminal could hold.

    Raises:
        ValueError: says what.
    """
    todo, seen = [(tree, 0)], 0
    while todo:
        value, depth = todo.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values, those of aliases counted")
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, dict):
            todo += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            todo += [(part, depth + 1) for part in value]
        elif isinstance(value, str):
            _check_text(value)
        elif isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise ValueError("a number in it has more than 64 bits")


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ValueError(f"a text in it has more than {MAX_TEXT:,} characters")
    if hidden := _HIDDEN.search(text):
        raise ValueError(f"a text in it holds the character {hidden[0]!a}")
