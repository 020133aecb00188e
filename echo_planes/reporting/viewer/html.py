"""Parts that all pages share: the frame and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import urlencode

from echo_planes.reporting.report import csp_hash
from echo_planes.reporting.sections.html import safe
from echo_planes.reporting.viewer.style import PAGE_CSS, PAGE_JS

POLICY = (
    f"default-src 'none'; style-src '{csp_hash(PAGE_CSS)}'; script-src '{csp_hash(PAGE_JS)}'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def address(path: str, fields: Mapping[str, object]) -> str:
    """A link's target as an attribute's value; empty fields are left out."""
    given = {name: str(value) for name, value in fields.items() if str(value)}
    return escape(f"{path}?{urlencode(given, errors='replace')}" if given else path)


def layout(
    title: str, body: str, *, run: str, crumbs: Sequence[tuple[str, str]] = (), refresh_s: int = 0
) -> str:
    """A whole page.

    Args:
        title: of the page.
        body: HTML.
        run: name of the run.
        crumbs: (target, name) of the pages above.
        refresh_s: load again after so many seconds; 0: never.
    """
    trail = "".join(f'<a href="{escape(target)}">{safe(name)}</a> / ' for target, name in crumbs)
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)} · {safe(run)}</title><style>{PAGE_CSS}</style></head><body><main>"
        f'<header><p class="over">{trail}echo_planes run {safe(run)}</p>'
        f'<div class="line"><h1>{safe(title)}</h1></div></header>{body}'
        f'</main><div id="tip"></div><script>{PAGE_JS}</script></body></html>\n'
    )
