"""The fault campaigns' own judgement: every verdict can be false, and what they look for they find."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.chaos import __main__ as chaos
from bench.chaos import fuzz, kills, network, soak
from bench.chaos.checkpoints import PARTS, digests_of
from bench.chaos.failpoints import PLACES, Armed, Place, arm, fired, seen
from tests.integration.harness import ROOT

EVERY_PLACE = {f"{place.name} {side}": 5 for place in PLACES for side in ("before", "after")}
GOOD_KILLS: dict[str, Any] = {
    "kills": 200,
    "places": EVERY_PLACE,
    "left_behind": 0,
    "acknowledged_lost": 0,
    "trained_twice": 0,
    "digests": 40,
    "digests_unequal": 0,
    "books_exact": True,
}


def broken(good: dict[str, Any], **wrong: Any) -> dict[str, Any]:
    return {**good, **wrong}


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        ({"kills": 199}, "7 victims, 200 kills each"),
        ({"acknowledged_lost": 1}, "no acknowledged group is lost"),
        ({"trained_twice": 1}, "nothing is trained twice"),
        ({"books_exact": False}, "the accounting is exact"),
        ({"left_behind": 1}, "nothing is left 5 s later"),
        ({"digests_unequal": 1}, "weights are those of the undisturbed run"),
        ({"digests": 0}, "weights are those of the undisturbed run"),
        ({"places": {**EVERY_PLACE, "publish after": 0}}, "every place was hit, before and after"),
    ],
)
def test_each_verdict_on_kills_can_be_false(wrong: dict[str, Any], claim: str) -> None:
    figures = dict.fromkeys(kills.VICTIMS, GOOD_KILLS)
    assert all(kills.kill_verdicts(figures, 200, deterministic=True).values())
    figures["learner"] = broken(GOOD_KILLS, **wrong)
    held = kills.kill_verdicts(figures, 200, deterministic=True)
    assert [name for name, holds in held.items() if not holds] == [claim]


def test_each_verdict_on_resumes_can_be_false() -> None:
    good = {**GOOD_KILLS, "kills": 50, "went_on": 48, "resumed": 49, "unequal": dict.fromkeys(PARTS, 0)}
    assert all(kills.resume_verdicts(good, 50).values())
    for wrong in (
        {"kills": 49},
        {"resumed": 47},
        {"went_on": 20},
        {"digests": 0},
        {"trained_twice": 1},
        {"left_behind": 1},
        {"unequal": {**good["unequal"], "rng": 1}},
        {"digests_unequal": 1},
        {"acknowledged_lost": 1},
    ):
        assert list(kills.resume_verdicts(broken(good, **wrong), 50).values()).count(False) == 1


def test_each_verdict_on_a_soak_can_be_false() -> None:
    flat = {"driver": {"rss_bytes": {"early": 1.0, "late": 1.0, "is_flat": True}}}
    good = {"hours": 2.0, "faults": 360, "growth": flat, "lost": 0, "trained_twice": 0}
    good["replay_bytes_per_group"] = 300.0
    assert all(soak.verdicts(good, 2.0).values())
    grown = {"driver": {"rss_bytes": {"early": 1.0, "late": 9.0, "is_flat": False}}}
    for wrong in (
        {"faults": 100},
        {"growth": grown},
        {"growth": {}},
        {"lost": 1},
        {"trained_twice": 1},
        {"replay_bytes_per_group": 900},
    ):
        assert list(soak.verdicts(broken(good, **wrong), 2.0).values()).count(False) == 1


def test_a_fault_that_found_no_process_is_none() -> None:
    faults: list[dict[str, Any]] = [
        {"at_s": 20.0 * number, "fault": kind, "pid": pid}
        for number, (kind, pid) in enumerate((("worker", 7), ("reward", None), (soak.STILL, 8)))
    ]
    found = soak.fault_figures(faults)
    assert found["faults"] == 2
    assert found["by fault"] == {"worker": 1, "worker's node": 0, "reward": 0, soak.STILL: 1}


def test_what_grows_is_told_from_what_fills_up_and_stays() -> None:
    def line(at_s: float, rss: float, kept: float) -> list[dict[str, Any]]:
        process = {"at_s": at_s, "part": "driver", "rss_bytes": rss, "descriptors": 20, "threads": 9}
        return [process, {"at_s": at_s, "part": "disk", "bytes": kept}]

    mib = 2**20
    lines = [
        one
        for at_s in range(0, 7200, 10)
        for one in line(at_s, 200 * mib + at_s * mib / 60, min(at_s, 1000) * mib)
    ]
    found = soak.growth(lines, 7200)
    assert not found["driver"]["rss_bytes"].is_flat
    assert found["driver"]["threads"].is_flat
    assert found["disk"]["bytes"].is_flat  # it filled up within the first sixth


@pytest.mark.parametrize(("leak", "is_flat"), [(0, True), (40, False)])
def test_the_memory_of_all_is_compared_at_the_same_number_of_processes(leak: int, is_flat: bool) -> None:
    """Early, a worker is missing every other time: more memory late, and nothing leaks."""
    mib = 2**20
    lines = [
        {
            "at_s": at_s,
            "part": soak.WHOLE,
            "processes": 16 if missing else 17,
            "rss_bytes": ((2700 if missing else 3000) + leak * at_s / 600) * mib,
        }
        for at_s in range(0, 7200, 10)
        for missing in (at_s < 4000 and at_s % 30 > 0,)
    ]
    found = soak.growth(lines, 7200)[soak.WHOLE]
    assert found["rss_bytes"].is_flat == is_flat
    assert found["processes"].is_flat


def test_processes_that_stay_are_growth() -> None:
    lines = [
        {"at_s": at_s, "part": soak.WHOLE, "processes": 17 + at_s // 600, "rss_bytes": 3e9}
        for at_s in range(0, 7200, 10)
    ]
    assert not soak.growth(lines, 7200)[soak.WHOLE]["processes"].is_flat


def test_each_verdict_on_the_network_can_be_false() -> None:
    port = {"process": "raylet", "address": "127.0.0.1", "port": 1, "is_loopback": True, "answer": "403"}
    port["bytes_back"] = b"HTTP/1.1 400 Bad Request".hex()
    good = {"processes watched": 9, "unpickled by": {"ray._private.worker": ["x"]}, "ports": [port]}
    assert all(network.verdicts(good).values())
    for wrong in (
        {"processes watched": 0},
        {"unpickled by": {"echo_planes.weights.node.process": ["os.system"]}},
        {"ports": [{**port, "is_loopback": False}]},
        {"ports": [{**port, "answer": "200 hello"}]},
        {"ports": [{**port, "bytes_back": b"HTTP/1.1 200 OK".hex()}]},
        {"ports": [{**port, "bytes_back": b"\xff\0\0\0\0\0\0\0\x01\x7f".hex()}]},  # ZeroMQ's greeting
    ):
        assert list(network.verdicts(broken(good, **wrong)).values()).count(False) == 1
    silent = [{**port, "bytes_back": back} for back in ("", b"\0\0\x12\x04\0".hex())]
    assert all(network.verdicts({**good, "ports": silent}).values())
    assert all(
        network.verdicts(
            {**good, "ports": [{**port, "is_loopback": False, "answer": "200 # HELP ray_"}]}
        ).values()
    )


# --- fuzzing -------------------------------------------------------------------------------------


def test_a_decoder_that_fails_in_its_own_way_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: bytes) -> None:
        if data[:1] == b"E" and len(data) < 8:
            raise IndexError("beyond the end")

    monkeypatch.setattr(fuzz, "BLOCK", 2000)
    monkeypatch.setattr(fuzz, "DECODERS", {"careless": lambda: (careless, [b"EP12345678"])})
    line = fuzz._block(("careless", 0))
    assert line["findings"]
    assert "IndexError" in line["findings"][0]["error"]
    held = fuzz.verdicts({"careless": {"inputs": 2000, "grown_bytes": 0, "findings": line["findings"]}}, 2000)
    assert list(held.values()).count(False) == 1
    grown = {"inputs": 2000, "grown_bytes": fuzz.CAP_BYTES + 1, "findings": []}
    assert list(fuzz.verdicts({"careless": grown}, 2000).values()).count(False) == 1


def test_blocks_follow_from_their_number_alone() -> None:
    seeds = [b"EP\x02\x01\x00\x00", b'{"kind": "Report", "chunks_have": 3}']
    once, again = (list(fuzz.mutants(seeds, random.Random("a/1"))) for _ in range(2))
    assert once == again
    assert len(set(once)) > len(once) / 10
    assert not set(seeds) >= set(once)


@pytest.mark.parametrize("name", list(fuzz.DECODERS))
def test_every_decoder_takes_an_honest_input_and_no_damaged_one_breaks_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "BLOCK", 300)
    line = fuzz._block((name, 10**6))
    assert line["findings"] == []


# --- places and checkpoints ----------------------------------------------------------------------

VICTIM = """
import importlib, sys
from bench.chaos import failpoints
failpoints.install(sys.argv[1])
sys.path.insert(0, sys.argv[1])
victim = importlib.import_module("victim_module")
for number in range(9):
    print(number, flush=True)
    victim.Store().append(number)
"""


@pytest.mark.parametrize(("side", "written"), [("before", 2), ("after", 3), ("during", 3)])
def test_an_armed_place_ends_its_process_at_the_visit_it_names(
    side: Any, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim_module.py").write_text(
        "import time\n"
        "class Store:\n"
        "    def append(self, number):\n"
        f"        open({str(tmp_path / 'written')!r}, 'a').write('x')\n"
        f"        time.sleep({30 if side == 'during' else 0})\n"
    )
    place = Place("data plane", "fsync", "victim_module", "Store.append")
    arm(tmp_path, Armed(place, side, 1 if side == "during" else 3, 0.2))
    patched = VICTIM.replace(
        "failpoints.install", f"failpoints.PLACES = (failpoints.{place!r},)\nfailpoints.install"
    )
    ended = subprocess.run(
        [sys.executable, "-c", patched, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert fired(tmp_path)
    assert [one["place"] for one in seen(tmp_path, "killed")] == ["fsync"]
    assert len((tmp_path / "written").read_text()) == (1 if side == "during" else written)


def test_every_place_is_still_there() -> None:
    """A place whose function was renamed would never be visited, and its kills be random ones."""
    for place in PLACES:
        module = ROOT / (place.module.replace(".", "/") + ".py")
        method = place.function.split(".")[-1]
        assert f"def {method}(" in module.read_text(), place
        assert place.function.split(".")[0] in module.read_text(), place


def a_checkpoint(folder: Path) -> Path:
    """The parts of a checkpoint that are compared, small."""
    learner = folder / "learner"
    (learner / "engine").mkdir(parents=True)
    (folder / "data").mkdir()
    weights, masters = torch.arange(4, dtype=torch.bfloat16), torch.arange(4, dtype=torch.float32)
    moments = {"state": {0: {"exp_avg": masters * 2}}, "param_groups": [{"lr": 0.5}]}
    torch.save({"module": {"w": weights}}, learner / "engine" / "mp_rank_00_model_states.pt")
    optimizer = {"single_partition_of_fp32_groups": [masters], "base_optimizer_state": moments}
    torch.save(
        {"optimizer_state_dict": optimizer}, learner / "engine" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    torch.save({"cpu": torch.zeros(8, dtype=torch.uint8)}, learner / "rng-0.pt")
    (learner / "engine.json").write_text(json.dumps({"num_updates": 5}))
    counts = {
        "accepted": 30,
        "buffered": 6,
        "trained": 24,
        "dropped_stale": 0,
        "uninformative": 0,
        "reused": 0,
    }
    cut = {"step": 4, "next_index": 9, "returned": [6, 8], "groups": [{"prompt_index": 7}], "counts": counts}
    (folder / "data" / "state.json").write_text(json.dumps({**cut, "published": [["L0", 4, "d4"]]}))
    return folder


def test_equal_checkpoints_have_equal_digests_and_each_part_shows_its_own_change(tmp_path: Path) -> None:
    base = digests_of(a_checkpoint(tmp_path / "a"))
    assert tuple(base) == PARTS
    assert digests_of(a_checkpoint(tmp_path / "b")) == base

    def change_cut(folder: Path, **changes: Any) -> None:
        path = folder / "data" / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def change_tensor(folder: Path, name: str, part: str, key: str) -> None:
        path = folder / "learner" / name
        saved = torch.load(path, weights_only=True)
        holder = saved[part] if part else saved
        value = holder[key]
        holder[key] = [value[0] + 1] if isinstance(value, list) else value
        if isinstance(value, torch.Tensor):
            holder[key] = value + 1
        torch.save(saved, path)

    optim = "engine/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    changes = {
        "weights": lambda f: change_tensor(f, "engine/mp_rank_00_model_states.pt", "module", "w"),
        "masters": lambda f: change_tensor(
            f, optim, "optimizer_state_dict", "single_partition_of_fp32_groups"
        ),
        "rng": lambda f: change_tensor(f, "rng-0.pt", "", "cpu"),
        "learner's counters": lambda f: (f / "learner" / "engine.json").write_text('{"num_updates": 6}'),
        "cursor": lambda f: change_cut(f, returned=[8]),
        "versions": lambda f: change_cut(f, published=[["L0", 4, "d5"]]),
    }
    for part, make in changes.items():
        folder = a_checkpoint(tmp_path / part)
        make(folder)
        assert [name for name, digest in digests_of(folder).items() if digest != base[name]] == [part]


@pytest.mark.parametrize("of", ["abc+changes", None])
def test_a_folder_of_another_commit_is_refused(
    of: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without a name was begun before campaigns kept it: of which commit, nobody knows."""
    if of is None:
        (tmp_path / "kills.jsonl").touch()
    else:
        (tmp_path / "commit").write_text(of)
    assert chaos.main(["hostile", "--folder", str(tmp_path)]) == 2
    assert f"{tmp_path} holds a campaign of {of or 'an unnamed commit'}" in capsys.readouterr().out


def test_a_campaign_in_a_new_folder_names_its_commit_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = chaos.Section({}, lambda options, folder: ({"asked": 1}, {"it holds": True}))
    monkeypatch.setattr(chaos, "SECTIONS", {"hostile": section})
    told = tmp_path / "told.json"
    for _ in range(2):
        assert chaos.main(["hostile", "--folder", str(tmp_path / "new"), "--json", str(told)]) == 0
    assert json.loads(told.read_text())["hostile"]["commit"] == chaos.commit()
