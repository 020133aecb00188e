"""The files behind a path: a resume notices that they are others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.errors import ConfigError, DataError, ModelError
from echo_planes.loop.inputs import (
    INPUTS_FILE,
    check_inputs,
    digest_of_model,
    digest_of_prompts,
    keep_inputs,
)
from echo_planes.types import Prompt

INPUTS = {"model": "m", "prompts": "p"}


@pytest.mark.parametrize(
    ("changed", "part"),
    [({"model": "x"}, "files of model.path=my-model"), ({"prompts": "x"}, "the first prompts of the task")],
)
def test_other_files_are_refused(tmp_path: Path, changed: dict[str, str], part: str) -> None:
    check_inputs(tmp_path, INPUTS, "my-model")  # of a run that wrote none
    keep_inputs(tmp_path, INPUTS)
    check_inputs(tmp_path, INPUTS, "my-model")
    with pytest.raises(ConfigError, match=f"{part} .*not those that the run was started with"):
        check_inputs(tmp_path, INPUTS | changed, "my-model")
    keep_inputs(tmp_path, INPUTS | changed)  # what it was started from stays
    check_inputs(tmp_path, INPUTS, "my-model")


@pytest.mark.parametrize("content", ["", "[]", "nonsense"])
def test_a_damaged_record_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / INPUTS_FILE).write_text(content)
    with pytest.raises(DataError, match=r"inputs\.json is damaged"):
        check_inputs(tmp_path, INPUTS, "my-model")


def test_a_model_is_its_settings_its_tokenizer_and_the_sizes_of_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_MODELS["builtin:tiny-math"], folder)
    before = digest_of_model(folder)
    (folder / "README.md").write_text("of no weight")
    assert digest_of_model(folder) == before == digest_of_model(BUILTIN_MODELS["builtin:tiny-math"])
    seen = {before}
    for name in ("config.json", "tokenizer.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"one": "more"}))
        seen.add(digest_of_model(folder))
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    seen.add(digest_of_model(folder))
    assert len(seen) == 4
    with pytest.raises(ModelError, match="cannot be read"):
        digest_of_model(tmp_path / "nowhere")


def test_prompts_are_their_tokens_and_answers() -> None:
    one = Prompt(0, (1, 2), "3", "1 + 2")
    same = [one, Prompt(1, (4,))]
    assert digest_of_prompts(same) == digest_of_prompts(
        [Prompt(0, (1, 2), "3", "shown another way"), same[1]]
    )
    others = [[one], same[::-1], [Prompt(0, (1, 2), "4"), same[1]], [Prompt(0, (1, 5), "3"), same[1]]]
    assert len({digest_of_prompts(prompts) for prompts in [same, *others]}) == 5
    assert digest_of_prompts([Prompt(0, (1,), "\ud800")])
