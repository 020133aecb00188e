"""Commands of docs/gpus.md: each passes the checks of its cluster, and on smaller cards none does."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from echo_planes.cluster.placement import Machine, check_fit, check_nodes, with_learner_resources
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError
from echo_planes.fleet.throughput import ModelSize
from echo_planes.learning.footprint import GIB, Shape, footprint
from echo_planes.loop import memory, preflight
from echo_planes.loop.loading import load_config

DOCS = Path(__file__).parents[2] / "docs" / "gpus.md"
# Of the models' config.json, and of the headers of their weight files.
SHAPES = {
    "Qwen/Qwen3-8B": Shape(8_190_735_360, 36, 4096, 151_936),
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(494_032_768, 24, 896, 151_936),
    "Qwen/Qwen3-32B": Shape(32_762_123_264, 64, 5120, 151_936),
}
KV_BYTES = {  # of a token: keys and values, layers, heads of keys, their dimension, bf16
    "Qwen/Qwen3-8B": 2 * 36 * 8 * 128 * 2,
    "Qwen/Qwen2.5-0.5B-Instruct": 2 * 24 * 2 * 64 * 2,
    "Qwen/Qwen3-32B": 2 * 64 * 8 * 128 * 2,
}
SIZES = {name: ModelSize(shape.weights, KV_BYTES[name], "given") for name, shape in SHAPES.items()}


def machine(gpus: int, card: str) -> Machine:
    return Machine("n", {"CPU": 64.0, "GPU": float(gpus)}, {"ray.io/accelerator-type": card})


@dataclass(frozen=True)
class Case:
    """Section of the page: its cluster before anything is bought, and a type of card that is too small."""

    title: str
    machines: tuple[Machine, ...]
    too_small: str


CASES = (
    Case("One machine of 8 x H100", (machine(8, "H100"),), "L4"),
    Case("That learner, and spot", (machine(4, "H100"),), "L4"),
    Case("One card of 24 GB", (machine(1, "L4"),), "T4"),
    Case("Two machines of 8 x H100", (machine(8, "H100"),) * 3, "L4"),  # the third has the workers
)


def section(case: Case) -> str:
    (found,) = (text for text in DOCS.read_text().split("\n## ") if text.startswith(case.title))
    return found


def command(case: Case) -> Config:
    (code,) = re.findall(r"```bash\n(.*?)```", section(case), re.DOTALL)
    words = shlex.split(code.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "echo_planes.run"]
    return load_config(words[3:])


def test_the_first_line_says_what_was_run_on_gpus() -> None:
    assert DOCS.read_text().splitlines()[2].startswith("Nothing here has run on a GPU")
    assert DOCS.read_text().count("```bash") == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_command_fits_its_cluster_and_no_smaller_cards(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_learner_resources(command(case), case.machines)
    preflight.check_fleet(config)
    preflight.check_seeding(config.seeding, config.learner.rank_resources)
    preflight.check_engines([*config.fleet.workers, *config.seeding.workers().values()])
    preflight.check_lengths(config)
    has = {name: sum(one.resources[name] for one in case.machines) for name in ("CPU", "GPU")}
    check_fit(config, has, [one.labels for one in case.machines])
    check_nodes(config.fleet, [one.resources for one in case.machines])
    monkeypatch.setattr(type(config.model), "folder", Path("no such folder"))
    monkeypatch.setattr(memory, "shape_of", lambda folder: SHAPES[config.model.path])
    monkeypatch.setattr(memory, "size_of_folder", lambda folder: SIZES[config.model.path])
    memory.check_memory(config, case.machines, 0.0)
    small = [replace(one, labels={"ray.io/accelerator-type": case.too_small}) for one in case.machines]
    with pytest.raises(ConfigError, match="the learner needs at least"):
        memory.check_memory(config, small, 0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_page_tells_the_memory_that_the_check_counts(case: Case) -> None:
    config = command(case)
    (told,) = re.findall(r"At least ([0-9.]+) of", section(case))
    needs = footprint(config, SHAPES[config.model.path], on_gpu=True)
    assert float(told) == round(needs.total / GIB, 1)
