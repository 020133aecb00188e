"""Commands of docs/gpus.md: each passes the checks of its cluster, and on smaller cards none does."""

from __future__ import annotations

import math
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
# Of the models' config.json; weights as transformers counts them in a model of these sizes.
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(494_032_768, 24, 896, 151_936),
    "Qwen/Qwen3-0.6B": Shape(596_049_920, 28, 1024, 151_936),
    "Qwen/Qwen3-1.7B": Shape(1_720_574_976, 28, 2048, 151_936),
    "Qwen/Qwen3-4B": Shape(4_022_468_096, 36, 2560, 151_936),
    "Qwen/Qwen3-8B": Shape(8_190_735_360, 36, 4096, 151_936),
    "Qwen/Qwen3-14B": Shape(14_768_307_200, 40, 5120, 151_936),
    "Qwen/Qwen3-32B": Shape(32_762_123_264, 64, 5120, 151_936, heads=64),
    "meta-llama/Llama-3.2-1B-Instruct": Shape(1_235_814_400, 16, 2048, 128_256),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(3_212_749_824, 28, 3072, 128_256),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(8_030_261_248, 32, 4096, 128_256),
    "google/gemma-3-1b-it": Shape(999_885_952, 26, 1152, 262_144),
}
KV_HEADS = {"Qwen/Qwen2.5-0.5B-Instruct": (2, 64), "meta-llama/Llama-3.2-1B-Instruct": (8, 64)}
KV_BYTES = {  # of a token: keys and values, layers, heads of keys, their dimension, bf16
    name: 2 * shape.layers * math.prod(KV_HEADS.get(name, (8, 128))) * 2 for name, shape in SHAPES.items()
} | {"google/gemma-3-1b-it": 2 * 4 * 256 * 2}  # of its 26 layers four look back over the whole answer
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
    Case("Three machines of 8 x H100", (machine(8, "H100"),) * 3, "L4"),
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


MODELS = re.findall(
    r"^\| `(\S+)` \| ([0-9,]+) \| (\d+) x (\S+) \| ([0-9.]+) \|$", DOCS.read_text(), re.MULTILINE
)


def test_the_table_has_every_model_but_those_for_cpus() -> None:
    files = {path.stem for path in (DOCS.parents[1] / "configs" / "model").glob("*.yaml")}
    assert {name for name, *_ in MODELS} == {n for n in files if not n.startswith("tiny")} - {"smollm2-135m"}
    assert {load_config([f"model={name}"]).model.path for name, *_ in MODELS} == set(SHAPES)


@pytest.mark.parametrize(("name", "tokens", "ranks", "sku", "gib"), MODELS)
def test_a_model_of_the_table_fits_the_learner_that_is_said(
    name: str, tokens: str, ranks: str, sku: str, gib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = machine(int(ranks), sku)
    fleet = [
        "fleet=single",
        "fleet.workers.0.sku=H100",
        "fleet.workers.0.engine.tensor_parallel_size=2",
        "fleet.workers.0.resources={GPU: 2}",
    ]
    config = with_learner_resources(load_config([f"model={name}", *fleet]), [machine(int(ranks) + 2, sku)])
    assert config.learner.num_ranks == int(ranks)
    assert config.model.max_model_len == config.learner.micro_batch_tokens == int(tokens.replace(",", ""))
    needs = footprint(config, SHAPES[config.model.path], on_gpu=True)
    assert float(gib) == round(needs.total / GIB, 1)
    monkeypatch.setattr(type(config.model), "folder", Path("no such folder"))
    monkeypatch.setattr(memory, "shape_of", lambda folder: SHAPES[config.model.path])
    monkeypatch.setattr(memory, "size_of_folder", lambda folder: SIZES[config.model.path])
    memory.check_memory(config, [has], 0.0)
    too_small = {"L4": "L4", "L40S": "T4", "H100": "L4"}[sku]
    words = [f"model={name}", *fleet, *(["learner.micro_batch_tokens=500000"] if sku == "L4" else [])]
    small = with_learner_resources(load_config(words), [machine(int(ranks) + 2, too_small)])
    with pytest.raises(ConfigError, match="the learner needs at least"):
        memory.check_memory(small, [machine(int(ranks), too_small)], 0.0)
