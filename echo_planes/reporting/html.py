"""HTML of all pages, from the templates, the style sheet and the scripts in templates/.

Values that come from a run may be hostile. A template escapes every value and shows its invisible characters
as code points. It inserts only Markup unchanged, which other templates have made.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup, escape

from echo_planes.reporting.formats import (
    count,
    known,
    show_percent,
    show_power,
    show_seconds,
    show_short,
    show_usd,
    si,
    visible,
)
from echo_planes.reporting.metrics import number

TEMPLATES = Path(__file__).parent / "templates"


def page(template: str, **values: Any) -> Markup:
    """Render templates/`template`.html.jinja."""
    return Markup(_ENVIRONMENT.get_template(f"{template}.html.jinja").render(values))


def part(macro: str, **values: Any) -> Markup:
    """Render a macro of templates/parts.html.jinja."""
    module = _ENVIRONMENT.get_template("parts.html.jinja").module
    return Markup(getattr(module, macro)(**values))


@cache
def asset(name: str) -> Markup:
    """Return the text of a style sheet or script in templates/."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def policy(script: str) -> str:
    """Return the content security policy that allows only our style sheet and this script, both inline."""

    def named(name: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src '{named('style.css')}'; script-src '{named(script)}'; base-uri 'none'"
    )


def address(path: str, fields: Mapping[str, object]) -> Markup:
    """Return a link's target as an attribute's value; empty fields are left out."""
    given = {name: str(value) for name, value in fields.items() if str(value)}
    return escape(f"{path}?{urlencode(given, errors='replace')}" if given else path)


def heat_class(logprob: float | None) -> str:
    """Return the style class of a token: h0 (probability 1) to h9 (probability 0)."""
    probability = math.exp(min(0.0, logprob)) if logprob is not None else 1.0
    return f"h{min(9, int((1.0 - probability) * 10))}"


def _shown(value: object) -> object:
    return value if hasattr(value, "__html__") else visible(str(value))


class _OneLine(Extension):
    """Joins a template's lines between two tags, because a line break there would render as a space."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"(?<=[>}])\n\s*(?=[<{])", "", source)


_ENVIRONMENT = Environment(
    autoescape=True,
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_OneLine],
)
_FORMATS = {
    "percent": show_percent,
    "power": show_power,
    "seconds": show_seconds,
    "short": show_short,
    "si": si,
    "usd": show_usd,
}
_ENVIRONMENT.filters |= {
    **_FORMATS,
    "count": count,
    "heat": heat_class,
    "known": known,
    "number": number,
    "visible": visible,
}
_ENVIRONMENT.globals |= {**_FORMATS, "address": address, "asset": asset, "policy": policy}
