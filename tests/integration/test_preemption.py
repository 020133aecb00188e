"""A worker's machine is taken with notice, another dies without: what they had begun goes on elsewhere.

Real Ray, vLLM and DeepSpeed; the model's logits are all equal, so that answers are long. The data plane
writes down every message of its workers, and everything is checked against that.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_planes.config.schema import BUILTIN_MODELS
from tests.integration.harness import (
    WATCHED_PROGRAM,
    Program,
    events,
    json_lines,
    metrics,
    program,
    summary,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STREAM_S = 0.5
STEPS = 12  # enough for a second worker whose engine starts a quarter of a minute later
MAX_TOKENS = 240
KILLED = "killed"  # the file beside the run that says when


class Metadata:
    """A cloud's metadata service on loopback: it announces the preemption for as long as `armed` is set.

    As a cloud does, it gives the answer again: a worker on a busy machine may have given up on the first one.
    """

    def __init__(self) -> None:
        self.armed = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = b"TRUE" if service.armed.is_set() else b"FALSE"
                with suppress(ConnectionError):  # who asked may have given up by now
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def model_of_long_answers(folder: Path) -> Path:
    """The tiny model with all logits equal: an answer ends at each token with probability 1 / vocabulary."""
    shutil.copytree(BUILTIN_MODELS["builtin:tiny-math"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros_like(weights["model.norm.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fleet_words(url: str) -> list[str]:
    """One spot kind that is cheap and announces its end, one on-demand kind."""
    same = {"engine": {"max_num_seqs": 64}, "max_groups": 8, "resources": {"CPU": 0.25}, "max_count": 1}
    spot = {"sku": "cpu-a", "market": "spot", "usd_per_hour": 0.02, "cloud": "gcp", "metadata_url": url}
    # So slow that it is in mid-answer for seconds: a notice takes some to come, and while the scorer starts
    # there is no room for new prompts.
    spot |= {"engine": {"max_num_seqs": 8}}
    steady = {"sku": "cpu-b", "usd_per_hour": 0.08}
    kinds = [{**same, **spot, "count": 1}, {**same, **steady, "count": 1}]
    return [f"fleet.workers={json.dumps(kinds)}", "fleet.scale=static", "fleet.tick_s=1", "fleet.sustain_s=5"]


def watched(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [note for note in json_lines(run_dir / "watched.jsonl") if note["kind"] == kind]


def in_flight(run_dir: Path, worker: str) -> set[str]:
    """Leases of a worker that have streamed tokens and are not handed in."""
    streamed = {note["lease"] for note in watched(run_dir, "stream") if note["worker"] == worker}
    return streamed - {note["lease"] for note in watched(run_dir, "submit")}


def wait_in_generation(running: Program, worker: str) -> None:
    def is_generating() -> bool:
        return len(in_flight(running.run_dir, worker)) >= 2

    running.wait_until(is_generating, f"{worker} is in mid-answer")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which w0 gets a notice and w1 is killed, each in mid-generation."""
    base = tmp_path_factory.mktemp("preemption")
    folder = base / "run"
    model = model_of_long_answers(base / "model")
    metadata = Metadata()
    words = [
        *fleet_words(metadata.url),
        f"model.path={model}",
        "task=tests.integration.long_answers:LongAnswers",
        f"run.steps={STEPS}",
        f"sampling.max_new_tokens={MAX_TOKENS}",
        f"sampling.stream_s={STREAM_S}",
        "sampling.lease_s=60",  # an answer that waits in the slow engine is not given to another worker
        "sampling.prompts_per_step=8",
        "staleness.queue_batches=3",  # workers always have something to do
        f"staleness.max_staleness={2 * STEPS}",  # on a slow machine too, no prefix is too old to go on from
        "staleness.publish_every=3",
        "sampling.samples_per_prompt=4",
        "eval.num_prompts=4",
        "eval.samples_per_prompt=1",
    ]
    with metadata.serving(), program(base / "work", folder, *words, command=WATCHED_PROGRAM) as running:
        # At the start both are full. Later w1 may take what there is, where the learner is slow.
        wait_in_generation(running, "w0")
        metadata.armed.set()
        running.wait_until(lambda: events(folder, "worker left"), "w0 left")
        metadata.armed.clear()  # before the next machine of this instance type asks
        running.wait_for_step(len(metrics(folder)) + 1)
        wait_in_generation(running, "w1")
        killed = running.actor("ray::WorkerProc")  # the oldest of those alive
        (base / KILLED).write_text(str(time.time()))
        killed.kill()
        running.wait_until(lambda: events(folder, "worker lost"), "w1 was missed")
        assert running.wait() == 0, running.tail()
        assert running.left_behind() == []
    return folder


@functools.cache
def everything(run_dir: Path) -> list[dict[str, Any]]:
    """List what the data plane was told, of a run that has ended."""
    return json_lines(run_dir / "watched.jsonl")


def told(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [note for note in everything(run_dir) if note["kind"] == kind]


def test_it_ends_with_books_that_add_up(run_dir: Path) -> None:
    books = summary(run_dir)
    assert books["status"] == "done"
    assert books["steps"] == STEPS
    assert books["lost_trajectories"] == books["duplicate_trajectories"] == books["digest_mismatches"] == 0
    accepted = [note["lease"] for note in told(run_dir, "submit") if not note["refused"]]
    assert len(set(accepted)) == len(accepted)
    assert books["accepted"] == 4 * len(accepted)
    assert sum(row["trajectories"] for row in books["workers"]) == books["accepted"]  # the lost ones' too


def ended_without_result(run_dir: Path, worker: str) -> set[str]:
    mine = {note["lease"] for note in told(run_dir, "lease") if note["worker"] == worker}
    return mine - {note["lease"] for note in told(run_dir, "submit")}


def tokens_of(run_dir: Path, lease: str) -> list[list[int]]:
    """Of each call of a lease: what it began with, and what was streamed or handed over while it was live."""
    notes = everything(run_dir)
    begun = next(n for n in notes if n["kind"] == "lease" and n["lease"] == lease)
    calls = [list(partial["sample"]["token_ids"]) for partial in begun["partials"]]
    for note in notes:
        if note["kind"] in ("stream", "hand over") and note["lease"] == lease and not note.get("late"):
            for number, partial in note["pieces"]:
                if number == len(calls):
                    calls.append([])
                calls[number] += partial["sample"]["token_ids"]
    return calls


@pytest.mark.parametrize("worker", ["w0", "w1"])
def test_every_request_in_flight_goes_on_elsewhere_from_its_last_streamed_token(
    run_dir: Path, worker: str
) -> None:
    leases = told(run_dir, "lease")
    cut = [note for note in leases if note["lease"] in ended_without_result(run_dir, worker)]
    assert cut
    continued = 0
    for note in cut:
        later = [n for n in leases if n["prompt"] == note["prompt"] and n["at_s"] > note["at_s"]]
        had = [call for call in tokens_of(run_dir, note["lease"]) if call]
        if not later:  # the run ended first
            continue
        assert [list(d["sample"]["token_ids"]) for d in later[0]["partials"]] == had
        continued += bool(had)
    assert continued


def test_kept_prefixes_are_identical_with_their_logprobs_and_versions(run_dir: Path) -> None:
    begun = {note["lease"]: note["partials"] for note in told(run_dir, "lease") if note["partials"]}
    done = {note["lease"]: note["episodes"] for note in told(run_dir, "submit") if not note["refused"]}
    checked = 0
    for lease in begun.keys() & done.keys():
        for partial in begun[lease]:
            kept = partial["sample"]
            length = len(kept["token_ids"])
            assert any(
                episode["response_ids"][:length] == kept["token_ids"]
                and episode["logprobs"][:length] == kept["logprobs"]
                and versions(episode["spans"])[:length] == versions(kept["spans"])
                for episode in done[lease]
            )
            checked += 1
    assert checked


def versions(spans: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(s["version"], s["digest"]) for s in spans for _ in range(s["stop"] - s["start"])]


def heard_of(run_dir: Path, lease: str) -> list[float]:
    """Times when a lease was given, and each of its messages came; seconds since the epoch."""
    notes = told(run_dir, "lease") + told(run_dir, "stream")
    return sorted(note["at_s"] for note in notes if note["lease"] == lease)


def test_what_was_not_streamed_yet_is_what_came_since_the_last_message(run_dir: Path) -> None:
    """Of the worker that was killed; the one with a notice handed its last tokens over.

    Messages are as far apart as the engine gives tokens, where both cores are busy. So the last ones are held
    against all others: twice the longest of them, as the kill may fall on the busiest moment. That they are
    an interval apart where there are tokens is shown in virtual time (tests/unit/test_worker.py).
    """
    killed_at_s = float((run_dir.parent / KILLED).read_text())
    lost_at_s = next(n["at_s"] for n in told(run_dir, "lose") if n["worker"] == "w1" and in_use(run_dir, n))
    mine = {n["lease"] for n in told(run_dir, "stream") if n["worker"] == "w1"}
    gaps = [b - a for lease in mine for a, b in itertools.pairwise(heard_of(run_dir, lease))]
    silent = [killed_at_s - heard_of(run_dir, lease)[-1] for lease in ended_without_result(run_dir, "w1")]
    print(f"{len(gaps)} messages, {statistics.median(gaps):.2f} s apart (median; at most {max(gaps):.2f} s)")
    print(
        f"killed so many seconds after the last message of each of {len(silent)} requests: "
        f"{[round(s, 2) for s in silent]}; missed {lost_at_s - killed_at_s:.2f} s after it"
    )
    assert silent
    assert max(silent) <= 2 * max(gaps)
    again = [n for n in told(run_dir, "lease") if n["partials"] and n["at_s"] > lost_at_s]
    print(f"the first of them went on elsewhere after {again[0]['at_s'] - lost_at_s:.2f} s")


def in_use(run_dir: Path, lose: dict[str, Any]) -> bool:
    """Whether a `lose` is a worker's end, and not the fencing before its start."""
    leases = [n for n in told(run_dir, "lease") if n["worker"] == lose["worker"]]
    return bool(leases) and leases[0]["at_s"] < lose["at_s"]
