"""Templates: what they escape, and that a page runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from jinja2 import UndefinedError

from echo_planes.reporting.html import TEMPLATES, page, part, policy
from tests.unit.stored_rollouts import EVIL


def test_every_value_is_escaped_and_what_cannot_be_seen_is_named() -> None:
    note = part("note", text=f"{EVIL}\u202e\x00")
    assert "<script" not in note
    assert "&lt;script&gt;" in note
    assert note.endswith("⟨202E⟩⟨0⟩</p>")
    assert part("note", text=note).count("<p") == 2  # made by a template: it stands as it is


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="is_feasible"):
        page("plan")


def test_a_policy_names_the_style_sheet_and_the_script_of_its_page() -> None:
    for script, text in (
        ("report.js", page("base")),
        ("viewer.js", page("viewer", title="t", body="b", run="r", crumbs=[], refresh_s=0)),
    ):
        for tag in ("style", "script"):
            [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            hashed = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{hashed}'" in policy(script)


def test_no_template_turns_escaping_off() -> None:
    for template in TEMPLATES.glob("*.jinja"):
        assert not re.search(
            r"\|\s*safe\b|autoescape|<script>(?!\{% block)|\son\w+=", template.read_text()
        ), template.name
