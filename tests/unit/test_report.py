"""report.html: complete, self-contained, safe, and there even when little of the run is."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import DataError
from echo_planes.reporting.formats import si
from echo_planes.reporting.html import heat_class
from echo_planes.reporting.metrics import MetricsWriter, read_summary
from echo_planes.reporting.report import main, render, write_report
from echo_planes.reporting.sections.charts import (
    MAX_POINTS,
    Chart,
    Series,
    line_chart,
    moving_average,
    ticks,
)
from echo_planes.reporting.sections.rollouts import (
    decoded,
    read_rollouts,
    rollout_card,
    token_texts,
)
from tests.unit.stored_rollouts import a_row as a_stored_row
from tests.unit.stored_rollouts import store_rows

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "img"}


class Outline(HTMLParser):
    """Checks that tags nest, and collects what a page could load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes nothing"
        self.open.pop()


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def a_row(step: int, name: str, *, correct: bool = True, text: str = "42", **values: Any) -> dict[str, Any]:
    tokens = len(text) + 1
    return {
        **a_stored_row(name),
        "step": step,
        "prompt_text": f"prompt of {name}",
        "response_text": text,
        "response_ids": list(range(tokens)),
        "logprobs": [-0.1] * tokens,
        "reward": float(correct),
        "correct": correct,
        "version": max(0, step - 1),
        "worker_id": "w0",
        "lineage": "L",
        "span_stops": [1, tokens],
        "span_versions": [3, 4],
        **values,
    }


def an_eval(step: int, version: int, newest: int | None, pass_at: dict[str, float]) -> dict[str, Any]:
    drawn = {"samples_per_prompt": len(pass_at), "temperature": 0.8, "top_p": 0.95}
    mean = pass_at.get("1", 0.5)
    seen = {"step": step, "version": version, "newest_version": newest, "pass_at": pass_at}
    return {**seen, **drawn, "accuracy": mean, "reward_mean": mean}


def store(run: Path, *rows: dict[str, Any]) -> None:
    """Each row is a group of its own, trained at its step."""
    trained = {sequence: row["step"] for sequence, row in enumerate(rows) if row["step"] >= 0}
    store_rows(run, [[row] for row in rows], trained)


def a_lag(lag: int, tokens: int, drift: float | None) -> dict[str, Any]:
    return {"lag": lag, "tokens": tokens, "drift": drift, "k3": 0.0, "truncated": 0.0, "masked": 0.0}


def a_run(folder: Path, steps: int = 20) -> Path:
    writer = MetricsWriter(folder)
    for step in range(1, steps + 1):
        writer.step(
            {
                "step": step,
                "reward_mean": step / steps,
                "correct_mean": step / steps,
                "staleness_max": 2,
                "staleness_mean": 1.25,
                "t_train_s": 0.5,
                "t_idle_s": 0.1,
                "tokens": 100,
                "tokens_per_s": 166.0,
                "usd": 0.25,
                "mismatch_mean": 0.01,
                "mismatch_p99": float("nan") if step == 3 else 0.1,
                "bubble_ratio": 1 / 6,
                "accepted": step * 10,
                "trained": step * 8,
                "dropped_stale": step,
                "buffered": step,
                "entropy": None if step == 7 else 0.4,
                "grad_norm": 0.3,
                "learning_rate": None if step == 7 else 1e-3,
                "rate_factor": 0.5,
                "log_weight_p50": 0.01,
                "log_weight_max": 1.5,
                "clip_fraction": 0.1,
                "masked_fraction": None,
                "groups_mixed": 0.5,
                "groups_all_right": 0.375,
                "groups_all_wrong": 0.125,
                "effective_samples": 0.75,
                "response_tokens_mean": 20.0,
                "response_tokens_p95": 31.0,
                "cut_off_share": 0.25,
                "lags": [] if step == 7 else [a_lag(0, 100, 0.02), a_lag(2, 50, 0.08)],
                "time_s": 30.0 + step,
            }
        )
    writer.event(3.0, "worker lost", EVIL, worker="w1")
    writer.write_summary(
        {
            **writer.aggregates.summary(),
            "task": "math",
            "model": EVIL,
            "status": "done",
            "seconds": 60.0,
            "eval_first": 0.25,
            "eval_last": 0.875,
            "evals": [
                {**an_eval(10, 9, None, {"1": 0.5, "2": 0.625, "4": 0.75}), "num_unscored": 5},
                an_eval(20, 19, 20, {"1": 0.875, "2": 0.9, "4": 0.925}),
            ],
            "max_staleness": 3,
            "digest_mismatches": 0,
            "lost_trajectories": 0,
            "duplicate_trajectories": 0,
            "workers": [{"id": EVIL, "sku": "cpu", "usd_per_hour": 0.1, "tokens": 5000, "usd": 0.5}],
            "seconds_startup": {"Ray": 5.0},
        }
    )
    settings = "task:\n  name: math\nlearner:\n  drift_target: 0.125\n"
    (folder / "config.yaml").write_text(f"{settings}note: {json.dumps(EVIL)}\n")
    rows = [a_row(0, "g0"), a_row(0, "g1", correct=False), a_row(19, "g2", text=EVIL, prompt_text=EVIL)]
    store(folder, *rows)
    return folder


# --- the page ------------------------------------------------------------------------------------


def test_a_finished_run_shows_its_key_figures(tmp_path: Path) -> None:
    path = write_report(a_run(tmp_path))
    page = path.read_text(encoding="utf-8")
    outline(page)
    assert path == tmp_path / "report.html"
    for expected in ("0.075 → </span>0.975", "0.250 → </span>0.875", "$5.00", "2 of 3", "16.7 %", "S = 3"):
        assert expected in page
    learning = ["Reward", "Does it learn, or only sharpen?", "Gradient norm"]
    drift = [
        "Does staleness hurt?",
        "How much does drift control slow learning?",
        "How far off are the worst tokens?",
        "How much is left out of the gradient?",
    ]
    signal = [
        "How much of the batch carries signal?",
        "Are answers cut off?",
        "Is the policy still exploring?",
    ]
    asynchrony = ["Staleness", "Learner time", "Learner bubble"]
    cost = ["Throughput", "Cost of a step", "Cumulative cost", "Tokens per worker", "Start-up", "Workers"]
    for title in [*learning, *drift, *signal, *asynchrony, *cost, "Ledger", "Events"]:
        assert f"<h3>{title}</h3>" in page


def a_card(page: str, title: str) -> str:
    start = page.index(f"<h3>{title}</h3>")
    return page[start : page.index("</figure>", start)]


def lines(card: str) -> dict[str, list[str]]:
    """Values that pointing at the lines of a card shows, by line, of all its pictures."""
    pictures = re.findall(r'data-hover="([^"]*)"', card)
    return {row["n"]: row["v"] for data in pictures for row in json.loads(unescape(data))["rows"]}


def test_drift_is_drawn_by_lag_with_its_target_and_gaps_where_nothing_was_measured(tmp_path: Path) -> None:
    card = a_card(render(a_run(tmp_path)), "Does staleness hurt?")
    drawn = lines(card)
    assert list(drawn) == ["lag 0", "lag 2", "all tokens"]
    assert (drawn["lag 2"][5], drawn["lag 2"][6]) == ("0.08", "-")
    assert "target 0.125" in card
    assert [path.count("M") for path in re.findall(r' d="([^"]*)"', card)] == [2, 2, 1]


def test_many_lags_share_lines_by_their_tokens(tmp_path: Path) -> None:
    lags = [a_lag(lag, 10 * (lag + 1), lag / 10) for lag in range(9)]
    lags[8]["drift"] = None  # was not finite
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write(json.dumps({"step": 1, "lags": lags}) + "\n")
    drawn = lines(a_card(render(tmp_path), "Does staleness hurt?"))
    assert list(drawn) == ["lag 0 to 1", "lag 2 to 3", "lag 4 to 5", "lag 6 to 7", "all tokens"]
    assert drawn["lag 2 to 3"] == [f"{(30 * 0.2 + 40 * 0.3) / 70:.3g}"]


def test_numbers_of_one_question_share_a_card(tmp_path: Path) -> None:
    page = render(a_run(tmp_path))
    control = a_card(page, "How much does drift control slow learning?")
    assert lines(control).keys() == {"rate factor", "learning rate"}
    assert control.count("<svg") == 2
    assert lines(a_card(page, "Are answers cut off?"))["cut off"][0] == "25 %"
    assert lines(a_card(page, "How much is left out of the gradient?")).keys() == {"clipped"}


def test_evaluations_say_how_they_were_drawn_and_under_which_versions(tmp_path: Path) -> None:
    page = render(a_run(tmp_path))
    reward = a_card(page, "Reward")
    assert "held-out prompts at temperature 0.8, top-p 0.95" in reward
    assert "step 10, v9: held-out" in reward
    assert "step 20, v19 to v20: held-out" in reward
    assert lines(a_card(page, "Does it learn, or only sharpen?")) == {
        "pass@1": ["0.500", "0.875"],
        "pass@2": ["0.625", "0.900"],
        "pass@4": ["0.750", "0.925"],
    }
    assert "2 evaluations · last pass@4 0.925 · 1 of more than one version · 5 answers without" in page
    assert "accuracy 0.500; 5 answers without a reward left out" in page


def test_one_answer_a_prompt_has_no_curve(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    MetricsWriter(run).write_summary({**read_summary(run), "evals": [an_eval(10, 9, None, {"1": 0.5})]})
    assert "only sharpen" not in render(run)


def test_the_parts_of_rewards_have_a_chart_where_there_are_some(tmp_path: Path) -> None:
    title = "Parts of the reward"
    assert title not in render(a_run(tmp_path))
    writer = MetricsWriter(tmp_path)
    for step in range(21, 24):
        writer.step({"step": step, "reward_parts": {"format": 0.5, "<b>odd": "?" if step == 22 else 0.25}})
    page = render(tmp_path)
    assert title in page
    assert "&lt;b&gt;odd" in page
    assert "<b>odd" not in page
    outline(page)


def test_the_money_is_shown_by_part_and_by_machine(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    summary = read_summary(run)
    parts = {"learner": 2.0, "trained": 1.0, "learner_idle": 0.75, "stale": 1.25, "failed": 0.0}
    spent = {"usd_by_part": parts, "usd_by_sku": {"H100 spot": 3.0, EVIL: 2.0}, "wasted_share": 0.4}
    MetricsWriter(run).write_summary({**summary, **spent})
    page = render(run)
    outline(page)
    money = page[page.index("<h2>Money</h2>") : page.index("<h2>Data and events</h2>")]
    assert "<h3>Cost of a step</h3>" in money
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", money)
    plain = [re.sub(r"(</td><td[^>]*>)+", " | ", row) for row in rows]
    assert plain[:4] == [
        "learner | the learner trains | $2.00 | 40 %",
        "stale | tokens dropped as too old | wasted | $1.25 | 25 %",
        "trained | tokens that were trained | $1.00 | 20 %",
        "learner idle | the learner waits for a batch | wasted | $0.75 | 15 %",
    ]
    assert plain[4] == "H100 spot | $3.00 | 60 %"
    assert len(plain) == 6
    assert "40 % wasted" in page


def test_nothing_from_the_run_becomes_markup_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = render(a_run(tmp_path))
    parsed = outline(page)
    assert parsed.seen.count("script") == 1
    assert "img" not in parsed.seen
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert "url(" not in page
    assert "@import" not in page
    assert "&lt;script&gt;alert" in page


def test_the_content_policy_allows_exactly_this_pages_script(tmp_path: Path) -> None:
    page = render(a_run(tmp_path))
    parsed = outline(page)
    [policy] = [v for name, v in parsed.attributes if name == "content" and "default-src" in v]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{expected}'" in policy
    assert not [name for name, _ in parsed.attributes if name == "style"]  # the policy would drop them


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "summary.json", "events.jsonl"])
def test_any_one_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    (a_run(tmp_path) / missing).unlink()
    outline(render(tmp_path))


def test_an_empty_folder_still_makes_a_page(tmp_path: Path) -> None:
    page = render(tmp_path)
    outline(page)
    assert "unfinished" in page
    assert "0 learner steps" in page


def test_a_run_that_failed_at_step_0_shows_its_error(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write_summary(
        {"task": "math", "model": "m", "status": "failed", "steps": 0, "error": "ClusterError: <no GPU>"}
    )
    page = render(tmp_path)
    outline(page)
    assert "ClusterError: &lt;no GPU&gt;" in page
    assert '<span class="pill failed">failed</span>' in page
    assert "data-hover" not in page.split("<script>")[0]


def test_a_violation_is_shown_in_red(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write_summary({"max_staleness": 3, "max_staleness_observed": 4})
    assert '<div class="value bad">4 of 3</div>' in render(tmp_path)


def test_an_interrupted_run_is_summed_up_from_its_steps(tmp_path: Path) -> None:
    (a_run(tmp_path) / "summary.json").unlink()
    page = render(tmp_path)
    assert "unfinished" in page
    assert "0.975" in page
    assert "$5.00" in page
    assert "200 accepted = 160 trained + 20 dropped + 20 buffered" in page


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "reward_mean": 0.5, "staleness_max": step % 4}) + "\n")
    page = render(tmp_path)
    assert len(page) < 500_000
    assert page.count("<path") > 0


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main([]) == 2


# --- charts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 120, [0, 50, 100, 150]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (5, 5, None),
    ],
)
def test_ticks_cover_the_range_with_round_numbers(
    low: float, high: float, expected: list[float] | None
) -> None:
    found = ticks(low, high, 4)
    assert found[0] <= low
    assert found[-1] >= high
    if expected is not None:
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.1234, "0.123"), (1234, "1,234"), (61_000, "61k"), (2.5e6, "2.5M")]
)
def test_si(value: float, text: str) -> None:
    assert si(value) == text


def test_moving_average_leaves_gaps_out() -> None:
    assert moving_average([1.0, None, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert moving_average([None, 2.0], 1) == [None, 2.0]


def hover(svg: str) -> dict[str, Any]:
    [data] = [value for name, value in outline(svg).attributes if name == "data-hover"]
    return json.loads(data)  # type: ignore[no-any-return]


def test_a_gap_breaks_the_line_and_shows_as_missing() -> None:
    chart = Chart("t", "n", [1, 2, 3, 4], "u", si)
    svg = line_chart(chart, [Series("s", [1.0, None, 3.0, 4.0], 1)])
    [path] = re.findall(r' d="([^"]*)"', svg)
    assert path.count("M") == 2
    assert path.count("a2,2") == 2  # of the ring around the lone point; the other two have a line
    assert hover(svg)["rows"][0]["v"] == ["1", "-", "3", "4"]


def test_thinning_keeps_the_peaks_of_a_maximum() -> None:
    size = MAX_POINTS * 10
    values: list[float | None] = [0.0] * size
    values[1234] = 7.0
    chart = Chart("t", "n", list(range(size)), "u", si)
    svg = line_chart(chart, [Series("m", values, 1, pool="max"), Series("a", values, 2)])
    top, mean = hover(svg)["rows"]
    assert len(top["v"]) == MAX_POINTS
    assert "7" in top["v"]
    assert "0.7" in mean["v"]


def test_a_constant_and_a_single_step_can_be_drawn() -> None:
    outline(line_chart(Chart("t", "n", [5], "u", si), [Series("s", [0.0], 1)]))
    outline(line_chart(Chart("t", "n", [1, 2], "u", si), [Series("s", [-3.0, -3.0], 1)]))


# --- rollouts ------------------------------------------------------------------------------------


def test_first_and_last_trained_steps_are_picked_right_and_wrong(tmp_path: Path) -> None:
    late = [a_row(7, "late", correct=False), a_row(-1, "never"), a_row(7, "late2")]
    first = [a_row(0, "x"), a_row(0, "y"), a_row(0, "z", correct=False)]
    store(tmp_path, *late, *first, a_row(3, "middle"))
    found = read_rollouts(tmp_path)
    assert [row["group_id"] for row in found.first] == ["x", "z", "y"]
    assert [row["group_id"] for row in found.last] == ["late2", "late"]
    assert found.problem == ""


def test_damage_is_counted_and_skipped_and_a_strange_store_is_named(tmp_path: Path) -> None:
    store(tmp_path, a_row(0, "x"), a_row(0, "y"))
    segment = tmp_path / "replay" / "segments" / "00000000.arrows"
    whole = bytearray(segment.read_bytes())
    whole[len(whole) // 2] ^= 1
    segment.write_bytes(whole)
    found = read_rollouts(tmp_path)
    assert len(found.first) == 1
    assert found.problem.startswith("1 damaged place")
    segment.write_bytes(b"x" * 9000)
    assert "no file of this store" in render(tmp_path)


def test_untrained_rollouts_are_shown_when_there_are_no_others(tmp_path: Path) -> None:
    store(tmp_path, a_row(-1, "x"))
    found = read_rollouts(tmp_path)
    assert [row["group_id"] for row in found.first] == ["x"]
    assert "not trained" in rollout_card(found.first[0], None)


def test_a_token_carries_its_logprob_and_version_and_the_turn_is_marked() -> None:
    card = rollout_card(a_row(0, "x", logprobs=[-0.01, -3.0, 0.0]), None)
    assert '<span class="tok h0" title="token 0, logprob -0.010, v3">4</span>' in card
    assert '<span class="tok h9 turn" title="token 1, logprob -3.000, v4">2</span>' in card
    assert "v3 [0, 1), v4 [1, 3)" in card


def test_without_a_tokenizer_the_text_stands_whole_above_its_tokens() -> None:
    card = rollout_card(
        a_row(0, "x", text="a longer answer", response_ids=[5, 6], logprobs=[-1.0, -2.0]), None
    )
    assert "a longer answer\n" in card
    assert card.count(" cell") == 2


class WordTokenizer:
    """Token i is the i-th word; the first word of a text loses its leading space."""

    words = ("one", " two", " three")

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids).lstrip()


def test_token_texts_keep_the_spaces() -> None:
    assert token_texts([0, 1, 2], "one two three", WordTokenizer()) == ["one", " two", " three"]
    assert token_texts([0, 1, 2], "something else", WordTokenizer()) is None


class SumTokenizer:
    """One token for a number, and an end-of-sequence token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("42" for i in ids if i == 7)


def test_as_many_characters_as_tokens_are_not_a_character_each() -> None:
    assert token_texts([7, 1], "42", SumTokenizer()) == ["42", ""]
    assert token_texts([7, 1], "no", SumTokenizer()) == ["n", "o"]  # another tokenizer: a guess


class BytesTokenizer:
    """Token i is one byte."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    ids = list("a€ß".encode())
    assert decoded(ids, BytesTokenizer(), skip_special_tokens=True) == ["a", "", "", "€", "", "ß"]
    faces = decoded(list("\U0001f600\U0001f601".encode()), BytesTokenizer(), skip_special_tokens=True)
    assert faces == ["", "", "", "\U0001f600", "", "", "", "\U0001f601"]
    assert decoded([0xE2], BytesTokenizer(), skip_special_tokens=True) == ["\ufffd"]


def test_heat_goes_from_certain_to_impossible() -> None:
    assert [heat_class(v) for v in (0.0, -0.7, -9.0, None)] == ["h0", "h5", "h9", "h0"]


def test_a_damaged_config_is_the_persons_to_know(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1\n")
    with pytest.raises(DataError, match=r"config\.yaml"):
        render(tmp_path)


def test_of_a_run_that_collapsed_the_report_says_so_first(tmp_path: Path) -> None:
    for status, begins in (("collapsed", True), ("failed", False)):
        MetricsWriter(tmp_path).write_summary({"status": status, "error": "k3 1 nats, above guard.k3"})
        page = render(tmp_path)
        assert ('<header><p class="error">k3 1 nats' in page) == begins
        assert page.count("k3 1 nats, above guard.k3") == 1
        assert f'<span class="pill failed">{status}</span>' in page
        outline(page)
