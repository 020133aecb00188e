"""`python -m echo_planes.weights export`: a model folder that other programs load, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from echo_planes.config.schema import BUILTIN_MODELS  # noqa: E402
from echo_planes.errors import DataError  # noqa: E402
from echo_planes.reporting.metrics import PUBLICATION, MetricsWriter  # noqa: E402
from echo_planes.reporting.weights.cli import main  # noqa: E402
from echo_planes.reporting.weights.export import export_state  # noqa: E402
from echo_planes.weights.digest import BitTensor, state_digest  # noqa: E402
from echo_planes.weights.store.replay import State  # noqa: E402
from echo_planes.weights.tensor_files import load_tensors  # noqa: E402
from tests.unit.stored_states import store_state, writer_at  # noqa: E402

NAME = "builtin:tiny-math"
MODEL = BUILTIN_MODELS[NAME]


def published(model: Any) -> State:
    """The weights of a model as the learner publishes them."""
    state = {}
    for name, parameter in model.named_parameters():
        bits = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        state[name] = BitTensor(bits.reshape(-1).copy(), "bfloat16", tuple(parameter.shape))
    return state


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """The model that a run began with, and two later ones; in bf16."""
    models = []
    for step in range(3):
        torch.manual_seed(step)
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += step * 0.05 * torch.randn_like(parameter)
        models.append(model.eval())
    return models


@pytest.fixture
def run(tmp_path: Path, models: list[Any]) -> Path:
    """A run's folder with versions 0 to 2 in its store."""
    folder = tmp_path / "run"
    writer = writer_at(folder / "weights")
    states = [published(model) for model in models]
    store_state(writer, 0, states[0])
    for version in (1, 2):
        store_state(writer, version, states[version], (version - 1, states[version - 1]))
    (folder / "config.yaml").write_text(json.dumps({"model": {"path": NAME}}))
    return folder


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize(("version", "wanted"), [("", 2), ("@1", 1), ("@L0:0", 0)])
def test_transformers_loads_what_was_published(
    version: str,
    wanted: int,
    run: Path,
    models: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "out" / "model"
    assert main(["export", f"{run}{version}", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"version {wanted} of lineage L0" in said
    assert state_digest(load_tensors(folder)) in said
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded.eval()), logits(models[wanted]))
    text = "3 + 4 ="
    mine, theirs = (transformers.AutoTokenizer.from_pretrained(one) for one in (folder, MODEL))
    assert mine(text)["input_ids"] == theirs(text)["input_ids"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # nothing is left beside it


def test_an_export_says_if_the_run_ended_with_newer_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert main(["export", *arguments, str(tmp_path / "out")]) == 0
        return capsys.readouterr().err

    events = MetricsWriter(run)
    for version in (0, 1, 2):
        events.event(1.0, PUBLICATION, "", version=version, lineage="L0")
    assert said(str(run)) == ""
    events.event(2.0, PUBLICATION, "", version=3, lineage="L0")
    events.event(3.0, "checkpoint", "step 3 saved")
    note = f"note: the run's last version, 3 of lineage L0, is not in the store: .* run.resume={run} "
    assert re.match(note, said(str(run)))
    assert re.match(note, said(f"{run}/weights", "--model", str(MODEL)))
    assert said(f"{run}@1") == ""  # it was asked for
    events.event(4.0, PUBLICATION, "", version=2, lineage="L1")  # of a resume
    assert "2 of lineage L1" in said(str(run))


def test_the_store_of_a_run_may_be_elsewhere(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str((run / "weights").rename(tmp_path / "elsewhere"))
    (run / "config.yaml").write_text(json.dumps({"model": {"path": NAME}, "weights": {"store": place}}))
    assert main(["export", f"{run}@1", str(tmp_path / "out")]) == 0
    assert "version 1 of lineage L0" in capsys.readouterr().out


def test_a_large_model_is_written_as_several_files(models: list[Any], tmp_path: Path) -> None:
    state = published(models[1])
    done = export_state(state, state_digest(state), MODEL, tmp_path / "out", file_bytes=200_000)
    assert done.num_files == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded.eval()), logits(models[1]))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status = main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    return f"{status} {captured.err}"


def test_mistakes_are_one_line_and_write_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert refused(capsys, f"{run}@9", out).startswith("1 error:")
    assert "no version" in refused(capsys, f"{run}@x", out)
    assert "is no store" in refused(capsys, tmp_path / "nowhere", out)
    assert "exists" in refused(capsys, run, run)
    assert "--model" in refused(capsys, run / "weights", out)
    assert "config.json" in refused(capsys, run, out, "--model", tmp_path)
    (run / "config.yaml").write_text(json.dumps({"model": {"path": str(tmp_path / "gone")}}))
    assert "--model" in refused(capsys, run, out)
    assert not out.exists()
    assert main(["export", str(run / "weights"), str(out), "--model", str(MODEL)]) == 0


def test_weights_that_do_not_read_back_are_not_left(models: list[Any], tmp_path: Path) -> None:
    state = published(models[0])
    with pytest.raises(DataError, match="have digest"):
        export_state(state, state_digest(published(models[1])), MODEL, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
