"""`python -m echo_planes.weights`: what a person sees, the exit status, and one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from echo_planes.reporting.weights.cli import main
from echo_planes.weights.digest import state_digest
from echo_planes.weights.store.replay import State
from echo_planes.weights.wire.signing import Signer
from tests.unit.store_publications import SIGNER
from tests.unit.stored_states import first_state, reader_at, stepped, store_chain, write_file

LAYER_0 = "model.layers.0.mlp.weight"


@pytest.fixture
def states(tmp_path: Path) -> list[State]:
    """A run's folder at tmp_path / "run" with versions 0 to 5 in its store."""
    return store_chain(tmp_path / "run" / "weights", 5, snapshots=(0, 3))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake gets."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_inspect_shows_every_publication(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "run")]) == 0
    lines = lines_of(capsys)
    assert lines[0].split() == ["stored", "lineage", "version", "codec", "base", "bytes", "B/changed",
                                "dense/bytes", "changed"]  # fmt: skip
    rows = [line.split() for line in lines[1:-1]]
    assert [row[2] for row in rows] == ["0", "1", "2", "3", "3", "4", "5"]
    assert [row[3] for row in rows] == ["full", "fast", "overwrite", "compact", "full", "fast", "overwrite"]
    assert [row[4] for row in rows] == ["-", "0", "1", "2", "-", "3", "4"]
    manifest = reader_at(tmp_path / "run" / "weights").index()[1].manifest
    assert rows[1][5:8] == [
        f"{manifest.payload_bytes:,}",
        f"{manifest.payload_bytes / 11:.2f}",
        f"{manifest.dense_bytes / manifest.payload_bytes:.1f}",
    ]
    assert " ".join(rows[1][8:]) == f"{100 * 11 / manifest.total_elements:.2f} %"
    assert lines[-1].startswith("2 snapshots, 5 patches")


def test_inspect_of_one_publication_and_of_files(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    entry = reader_at(tmp_path / "run" / "weights").index()[3]
    assert main(["inspect", str(tmp_path / "run" / "weights" / "publications" / entry.name)]) == 0
    assert len(lines_of(capsys)) == 3
    (tmp_path / "model").mkdir()
    file = write_file(tmp_path / "model" / "model.safetensors", states[5])
    for path in (file, tmp_path / "model"):
        assert main(["inspect", str(path)]) == 0
        lines = lines_of(capsys)
        assert lines[-1] == f"state digest {state_digest(states[5])}"
        assert len(lines) == 1 + len(states[5]) + 2


def test_verify_rebuilds_every_version(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["--key", SIGNER.public_bytes().hex()]):
        assert main(["verify", str(tmp_path / "run"), *arguments]) == 0
        lines = lines_of(capsys)
        assert lines[0].startswith(f"key {SIGNER.public_bytes().hex()}")
        assert sum(line.startswith("ok ") for line in lines) == 7
        assert lines[-1].startswith("7 publications verified")


def test_verify_finds_damage_and_what_hangs_on_it(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run" / "weights"
    entry = reader_at(store).index()[1]
    blob = store / "objects" / entry.manifest.payload_digest.removeprefix("b3:")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    assert main(["verify", str(store)]) == 1
    failed = [line for line in lines_of(capsys) if line.startswith("FAILED")]
    assert [line.split()[1].split("-", 1)[1] for line in failed] == [
        "L0.1.fast.0",
        "L0.2.overwrite.1",
        "L0.3.compact.2",
    ]
    assert "damaged" in failed[0]


def test_verify_with_another_key_finds_forgeries(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text(Signer.generate().public_bytes().hex() + "\n")
    assert main(["verify", str(tmp_path / "run"), "--key", str(key)]) == 1
    lines = lines_of(capsys)
    assert sum("forged" in line for line in lines) == 7
    assert lines[-1].startswith("0 publications verified")


def test_diff_of_versions_and_files(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    file = str(write_file(tmp_path / "model.safetensors", states[2]))
    assert main(["diff", f"{run}@2", file]) == 0
    assert "same" in lines_of(capsys)[0]
    assert main(["diff", f"{run}@L0:2", f"{run}@5"]) == 1
    lines = lines_of(capsys)
    assert [line.split()[0] for line in lines[1:-1]] == [LAYER_0, "model.norm.weight"]
    assert lines[1].split()[1:] == ["1,024", "30", "2.93", "%", "1"]
    assert lines[2].split()[1:] == ["32", "1", "3.12", "%", "3"]
    assert lines[-1].startswith("2 of 5 tensors differ")


def test_sparsity_takes_the_learning_rate_from_the_run(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["sparsity", str(run)]) == 0
    lines = lines_of(capsys)
    assert lines[0].split() == ["layer", "elements", "expected", "k=1", "k=2", "k=4", "k=8"]
    assert lines[1].split()[:3] == ["all", "4,128", "-"]
    assert "--lr" in lines[-1]
    rows = [{"step": step, "learning_rate": rate} for step, rate in enumerate((1e-6, 1e-5, 5e-6), 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["sparsity", str(run)]) == 0
    assert "learning rate 1e-05" in lines_of(capsys)[-1]
    assert main(["sparsity", str(run), "--lr", "3e-6"]) == 0
    lines = lines_of(capsys)
    assert "learning rate 3e-06" in lines[-1]
    assert lines[3].split()[:2] == ["model.layers.0", "1,024"]
    assert lines[3].split()[4:] == ["0.98", "%", "1.95", "%", "3.91", "%", "-"]


def test_mistakes_are_one_line(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    note = tmp_path / "note.txt"
    note.write_text("hello")
    (tmp_path / "empty").mkdir()
    cut = write_file(tmp_path / "cut.safetensors", first_state())
    cut.write_bytes(cut.read_bytes()[:100])
    nothing = tmp_path / "nothing.safetensors"
    nothing.write_bytes(b"")
    assert "does not exist" in mistake(capsys, "inspect", str(tmp_path / "gone"))
    assert "neither a store nor" in mistake(capsys, "inspect", str(note))
    assert "no .safetensors files" in mistake(capsys, "inspect", str(tmp_path / "empty"))
    assert "not a safetensors file" in mistake(capsys, "inspect", str(cut))
    assert "not a safetensors file" in mistake(capsys, "inspect", str(nothing))
    assert "is no store" in mistake(capsys, "verify", str(cut))
    assert "is no store" in mistake(capsys, "sparsity", str(cut))
    assert "hex digits" in mistake(capsys, "verify", run, "--key", "abc")
    assert "which version" in mistake(capsys, "diff", run, run)
    assert "no version" in mistake(capsys, "diff", f"{run}@newest", f"{run}@2")
    assert "is no store" in mistake(capsys, "diff", f"{tmp_path}/gone@2", f"{run}@2")
    assert "gs://" in mistake(capsys, "inspect", "gs://bucket/x")
    (tmp_path / "run" / "weights" / "public_key").unlink()
    assert "--key" in mistake(capsys, "verify", run)


def test_a_version_that_is_not_there_is_a_problem_not_a_traceback(
    tmp_path: Path, states: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["diff", f"{run}@2", f"{run}@77"]) == 1
    assert "no way leads to version 77" in capsys.readouterr().err
    other = write_file(tmp_path / "other.safetensors", {LAYER_0: states[0][LAYER_0]})
    assert main(["diff", f"{run}@2", str(other)]) == 1
    assert "differ in names" in capsys.readouterr().err


def test_metadata_and_odd_offsets_in_a_file_are_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header may have metadata and any length: data may then lie at odd addresses."""
    bits = np.arange(6, dtype=np.uint16)
    fields = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    }
    text = json.dumps(fields).encode()
    text += b" " * (1 + len(text) % 2)  # an odd length
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())
    assert main(["inspect", str(file)]) == 0
    assert lines_of(capsys)[1].split() == ["w", "bfloat16", "2x3", "6", "12"]


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    state = first_state()
    a = write_file(tmp_path / "a.safetensors", state)
    b = write_file(tmp_path / "b.safetensors", stepped(state, {LAYER_0: [4]}))
    command = [sys.executable, "-m", "echo_planes.weights", "diff", str(a), str(b)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert LAYER_0 in done.stdout
    usage = subprocess.run(command[:3], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
