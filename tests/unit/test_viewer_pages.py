"""Pages of a trajectory: tokens, turns, notes, and nothing that a browser would run."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.reporting.formats import visible
from echo_planes.reporting.html import address, page
from echo_planes.reporting.sections.notes import draw_all, draw_notes, read_notes, turn_notes
from echo_planes.reporting.viewer.listing import list_body
from echo_planes.reporting.viewer.queries import find, parse_query
from echo_planes.reporting.viewer.reading import COLOURS, group_body, sample_body
from echo_planes.reporting.viewer.tokens import is_text_shown, response_tokens, turns_of, versions_of
from tests.unit.stored_rollouts import EVIL, a_row, store_rows

TAGS = """html head meta title style script body main header p div h1 h3 h4 a span i b pre article table thead
tbody tr th td form label input select option datalist button"""
VOID = {"meta", "input"}


class Outline(HTMLParser):
    """Checks that tags nest, and collects what a page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: set[str] = set()
        self.targets: list[str] = []
        self.tokens: list[dict[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.attributes |= values.keys()
        self.targets += [values[name] for name in ("href", "action", "src") if name in values]
        if values.get("class", "").startswith("tok "):
            self.tokens.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes nothing"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data


def outline(body: str) -> Outline:
    parser = Outline()
    parser.feed(page("viewer", title="t", body=Markup(body), run="r", crumbs=[], refresh_s=0))
    parser.close()
    assert parser.open == []
    return parser


class Characters:
    """A tokenizer: token i is the character i, 3 is the end."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("" if i == 3 and skip_special_tokens else "<end>" if i == 3 else chr(i) for i in ids)


def said(text: str, **values: Any) -> dict[str, Any]:
    """A row whose tokens are the characters of a text, as `Characters` reads them."""
    ids = [ord(character) for character in text]
    return a_row("g", 0, text, **{"response_ids": ids, "span_stops": [1, len(ids)], **values})


# --- tokens --------------------------------------------------------------------------------------


def test_a_token_knows_its_text_logprob_and_version() -> None:
    row = said("7!", response_ids=[55, 33, 3], logprobs=[-0.5, -0.25, 0.0], span_stops=[1, 3])
    tokens = response_tokens(row, Characters())
    assert [token.text for token in tokens] == ["7", "!", "<end>"]
    assert [token.logprob for token in tokens] == [-0.5, -0.25, 0.0]
    assert [token.version for token in tokens] == [3, 4, 4]
    assert versions_of(tokens) == [3, 4]
    assert is_text_shown(row, tokens, Characters())
    assert not is_text_shown({**row, "response_text": "other"}, tokens, Characters())


def test_without_a_tokenizer_characters_are_read_from_the_text_and_else_ids_are_shown() -> None:
    row = said("7!")
    assert [token.text for token in response_tokens(row, None)] == ["7", "!"]
    row["response_text"] = "several characters each"
    tokens = response_tokens(row, None)
    assert [token.text for token in tokens] == [None, None]
    page = outline(sample_body(row, None, "logprob"))
    assert "55" in page.text
    assert "several characters each" in page.text
    assert "No tokenizer was found" in page.text


def test_alternatives_are_named() -> None:
    row = said("7!", top_ids=[[55, 56], [33, 3]], top_logprobs=[[-0.1, -2.5], [-0.2, -3.0]])
    page = outline(sample_body(row, Characters(), "logprob"))
    shown = [token for token in page.tokens if "data-o" in token]
    assert json.loads(shown[0]["data-o"]) == [["7", "-0.1000"], ["8", "-2.5000"]]
    assert json.loads(shown[1]["data-o"])[1] == ["<end>", "-3.0000"]


def test_a_row_that_is_not_whole_is_shown_as_far_as_it_goes() -> None:
    row = said("7!", logprobs=[-0.5], response_mask=[], span_stops=[1], top_ids=None, turn_rewards=None)
    tokens = response_tokens(row, Characters())
    assert [(token.logprob, token.version) for token in tokens] == [(-0.5, 3), (None, None)]
    outline(
        sample_body({**row, "notes": None, "reward_parts": None, "status": None}, Characters(), "version")
    )


# --- turns ---------------------------------------------------------------------------------------

MASK = [True, False, False, True, True, False, True]


def test_turns_are_what_the_environment_stands_between() -> None:
    row = said("a##bc#d", response_mask=MASK, num_turns=3, turn_rewards=[0.5, -1.0, 2.0])
    turns = turns_of(row, response_tokens(row, Characters()))
    shown = [
        ("".join(t.text or "" for t in turn.said), "".join(t.text or "" for t in turn.answered), turn.reward)
        for turn in turns
    ]
    assert shown == [("a", "##", 0.5), ("bc", "#", -1.0), ("d", "", 2.0)]


def test_the_environments_tokens_stand_apart() -> None:
    row = said("a##bc#d", response_mask=MASK, num_turns=3, turn_rewards=[0.5, -1.0, 2.0])
    page = outline(sample_body(row, Characters(), "logprob"))
    of_response = page.tokens[-7:]
    assert [" env" in token["class"] for token in of_response] == [not sampled for sampled in MASK]
    assert ["data-p" in token for token in of_response] == MASK
    for words in ("Turn 1 of 3", "reward 0.5", "Turn 3 of 3", "reward 2", "4 and 3 of the environment"):
        assert words in page.text
    assert "turn 2 · reward -1" in outline(group_body([row], Characters(), "logprob", "5/")).text


def test_turns_that_cannot_be_told_apart_keep_their_rewards() -> None:
    row = said("abc", num_turns=2, turn_rewards=[0.5, -1.0])
    assert [turn.reward for turn in turns_of(row, response_tokens(row, None))] == [None]
    assert "Rewards of its 2 turns: 0.5, -1" in outline(sample_body(row, None, "logprob")).text


def test_a_response_may_begin_with_the_environment_or_be_empty() -> None:
    row = said("#a", response_mask=[False, True])
    turns = turns_of(row, response_tokens(row, None))
    assert [(len(turn.said), len(turn.answered)) for turn in turns] == [(0, 1), (1, 0)]
    outline(sample_body(said("", span_stops=[], span_versions=[], span_digests=[]), None, "version"))


def test_a_group_has_one_colour_for_a_version() -> None:
    rows = [said("ab", span_versions=[7, 8]), said("ab", span_versions=[8, 9])]
    page = outline(group_body(rows, Characters(), "version", "5/"))
    kinds = [(token["class"].split()[-1], token["data-v"]) for token in page.tokens if "data-v" in token]
    assert kinds == [("v0", "7"), ("v1", "8"), ("v1", "8"), ("v2", "9")]
    assert "the store holds the sampler's logprobs only" in page.text


# --- notes ---------------------------------------------------------------------------------------


def test_a_program_is_shown_with_its_tests_and_their_output() -> None:
    notes = {
        "program": "f=1\ng=2",
        "tests": "assert f == 2",
        "output": "AssertionError",
        "passed": 0,
        "total": 1,
    }
    page = outline(draw_notes(json.dumps(notes), without_turns=False))
    assert page.text.index("0 of 1 tests passed") < page.text.index("f=1\ng=2") < page.text.index("assert f")
    assert "AssertionError" in page.text
    assert page.seen.count("pre") == 3


def test_a_hand_is_shown_with_its_turns() -> None:
    hand = {
        "hole": ["Ah", "Tc"],
        "board": [],
        "pot": 12,
        "did": "raise to 6",
        "fault": "",
        "after": ["a", "b"],
    }
    notes = json.dumps({"value": 1.5, "turns": [hand, {**hand, "board": ["2d", "Qs", "9h"]}]})
    row = said("a#b", response_mask=[True, False, True], num_turns=2, turn_rewards=[0.0, 1.5], notes=notes)
    text = outline(sample_body(row, Characters(), "logprob")).text
    second = text.index("Turn 2 of 2")
    assert text.index("A♥T♣") < second < text.index("2♦Q♠9♥") < text.index("value")
    assert "fault" not in text
    assert "after a, b" in text
    # None of the notes is lost if turns do not fit.
    assert "raise to 6" in outline(sample_body({**row, "response_mask": [True] * 3}, None, "logprob")).text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "null",
            "[1]",
            '"x"',
            "{",
            "NaN",
            "1" * 5000,
            '{"a":' * 900 + "1" + "}" * 900,
            '{"turns": [1]}',
        ),
        *('{"turns": {}}', '{"program": 5, "passed": "x", "total": []}', '{"x": "\\ud800", "\\ud800": [[]]}'),
        '{"x": [["Ah"], {"y": null}], "z": [], "w": ["Ah", 5]}',
    ],
)
def test_any_notes_can_be_drawn(text: str) -> None:
    page = outline(draw_notes(text, without_turns=False))
    page.text.encode()
    assert len(turn_notes(read_notes(text))) == 0
    outline(sample_body(said("a", notes=text), Characters(), "logprob"))


def test_notes_that_are_no_object_are_shown_as_they_are() -> None:
    assert "three words here" in outline(draw_notes("three words here", without_turns=True)).text


# --- safety --------------------------------------------------------------------------------------


def test_a_hostile_model_cannot_leave_the_text(tmp_path: Path) -> None:
    turns = [{EVIL: EVIL, "hole": [EVIL], "program": EVIL}]
    values = dict.fromkeys(("prompt_text", "answer", "finish_reason", "worker_id", "lineage", "status"), EVIL)
    rows = [
        a_row(
            EVIL,
            sample,
            EVIL,
            notes=notes,
            reward_parts=json.dumps({EVIL: 1.0}),
            top_ids=[[ord(c) for c in EVIL]] * 3,
            top_logprobs=[[-1.0] * len(EVIL)] * 3,
            **values,
        )
        for sample, notes in enumerate((EVIL, json.dumps({EVIL: EVIL, "program": EVIL, "turns": turns})))
    ]
    store_rows(tmp_path, [rows])
    snapshot = StoreSnapshot(tmp_path / "replay")
    fields = {"text": EVIL, "worker": "", "sort": "step", "order": EVIL}
    query = parse_query(fields)
    bodies = [list_body(snapshot, query, find(snapshot, query), fields)]
    for tokenizer in (None, Characters()):
        for colour in COLOURS:
            bodies += [group_body(rows, tokenizer, colour, "5/")]
            bodies += [sample_body(row, tokenizer, colour) for row in rows]
    for body in bodies:
        page = outline(body)
        assert set(page.seen) <= set(TAGS.split())
        assert page.seen.count("script") == page.seen.count("style") == 1  # its own
        assert not [name for name in page.attributes if name.startswith("on")]
        assert not [target for target in page.targets if ":" in target or target.startswith("/")]
        assert "window.hacked" in page.text


def test_links_keep_what_was_asked_for() -> None:
    link = address("./", {"text": 'a&b="<', "order": "", "start": 50})
    assert link == "./?text=a%26b%3D%22%3C&amp;start=50"


def test_what_cannot_be_seen_is_named() -> None:
    assert visible("a\u202eb\x00\u2066\ufeff\ud800\r") == "a⟨202E⟩b⟨0⟩⟨2066⟩⟨FEFF⟩⟨D800⟩⟨D⟩"
    assert visible("tab\tline\nÄ € 漢 \U0001f600") == "tab\tline\nÄ € 漢 \U0001f600"


def test_the_report_draws_the_notes_of_all_turns_in_order() -> None:
    turns = [{"action": "call", "hole": ["Js", "Jd"]}, {"action": "<b>raise</b>"}]
    drawn = draw_all(json.dumps({"board": ["Ah", "Tc"], "turns": turns}))
    assert drawn.count("<li>") == 2
    assert drawn.index("call") < drawn.index("&lt;b&gt;raise") < drawn.index("board")
    assert '<span class="suit red">J♦</span>' in drawn
    assert draw_all(None) == draw_all("") == ""
    assert "not &lt;json" in draw_all("not <json")
