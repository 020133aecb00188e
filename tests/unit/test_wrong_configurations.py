"""Wrong changes to the commands of docs/gpus.md: each is refused in one line that names the key to change."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from echo_planes.cluster.placement import Machine, check_fit, check_nodes, with_learner_resources
from echo_planes.errors import UserError
from echo_planes.learning.footprint import Shape
from echo_planes.loop import memory, preflight
from echo_planes.loop.loading import load_config
from tests.unit.test_gpu_docs import CASES, SHAPES, SIZES, Case, machine, section

ONE, SPOT, CARD, LARGE = CASES
LINEAR = {"q_proj": 1, "k_proj": 1, "v_proj": 1}
SMALL = (machine(8, "L4"),)
FEW = (machine(2, "H100"),)
NO_CARDS = (Machine("n", {"CPU": 64.0, "GPU": 0.0}, {}),)

# Of the case: changed words; the cluster, where it is another; what the line says.
WRONG: list[tuple[Case, str, Sequence[Machine] | None, str]] = [
    # cards: too few, too small, shared, negative
    (ONE, "learner.num_ranks=6", None, "smaller learner.num_ranks"),
    (ONE, "fleet.workers.0.count=5", None, "choose a smaller fleet"),
    (ONE, "fleet.workers.0.resources={CPU: 8, GPU: 2}", None, "choose a smaller fleet"),
    (ONE, "fleet.workers.0.resources={CPU: 8}", None, "fleet.workers.0.resources has no GPU"),
    (ONE, "fleet.workers.0.resources={CPU: 8, GPU: 0}", None, "fleet.workers.0.resources has no GPU"),
    (ONE, "fleet.workers.0.resources={GPU: -1}", None, "fleet.workers.0.resources.GPU=-1"),
    (ONE, "learner.resources={GPU: -0.5}", None, "learner.resources.GPU=-0.5"),
    (ONE, "learner.resources={GPU: 2}", None, "num_ranks=2"),
    (ONE, "learner.resources={GPU: 0.5}", None, "set GPU: 1, or num_ranks=1"),
    (ONE, "learner.num_ranks=4", FEW, "2 GPU"),
    (ONE, "learner.num_ranks=4", NO_CARDS, "the cluster has 0"),
    (ONE, "fleet.workers.0.count=0", None, "fleet.workers: the fleet has zero workers"),
    (ONE, "fleet.workers.0.resources={CPU: 200, GPU: 1}", None, "CPU"),
    (SPOT, "learner.num_ranks=8", None, "smaller learner.num_ranks"),
    (SPOT, "fleet.workers.0.resources={CPU: 8}", None, "fleet.workers.0.resources has no GPU"),
    (SPOT, "fleet.workers.0.max_count=0", None, "max_count=0"),
    (SPOT, "fleet.workers.0.market=reserved", None, "fleet.workers.0.market='reserved'"),
    (SPOT, "fleet.boot_limit_s=0", None, "fleet.boot_limit_s=0"),
    (CARD, "learner.resources={CPU: 1, GPU: 0.7}", None, "1.2 GPU, the cluster has 1"),
    (CARD, "seeding.resources={GPU: 1}", None, "1.5 GPU, the cluster has 1"),
    (CARD, "learner.num_ranks=2", None, "learner.resources"),
    (CARD, "seeding.engine.gpu_memory_utilization=0.8", None, "seeding.engine.gpu_memory_utilization=0.8"),
    (LARGE, "learner.num_ranks=24", None, "smaller learner.num_ranks"),
    (LARGE, "fleet.workers.0.count=3", None, "choose a smaller fleet"),
    (LARGE, "fleet.workers.0.resources={CPU: 16, GPU: 16}", None, "choose a smaller fleet"),
    # memory of a learner rank
    (ONE, "learner.num_ranks=1", None, "learner.zero_stage=3 and more learner.num_ranks"),
    (ONE, "learner.zero_stage=3", SMALL, "the learner needs at least"),
    (ONE, "learner.micro_batch_tokens=1000000", None, "a smaller learner.micro_batch_tokens"),
    (ONE, "learner.zero_stage=0", None, "the learner needs at least"),
    (CARD, "learner.micro_batch_tokens=200000", None, "a smaller learner.micro_batch_tokens"),
    (CARD, "model.path=Qwen/Qwen3-8B", None, "model.path=Qwen/Qwen3-8B"),
    (LARGE, "learner.zero_stage=2", None, "learner.zero_stage=3"),
    (LARGE, "learner.num_ranks=4", None, "more learner.num_ranks"),
    (LARGE, "learner.num_ranks=1 learner.offload_optimizer=true", None, "or learner.offload_weights=true"),
    # memory of an engine
    (ONE, "fleet.workers.0.sku=T4", None, "of 1 x 16 GiB; choose a larger card"),
    (ONE, "fleet.workers.0.engine.gpu_memory_utilization=0.2", None, "gpu_memory_utilization=0.2 of 1 x 80"),
    (ONE, "fleet.workers.0.engine.dtype=float32 fleet.workers.0.sku=A100", None, "weights of 30.5 GiB and"),
    (
        SPOT,
        "fleet.workers.0.sku=T4",
        None,
        "the KV of an answer of model.max_model_len=16384 tokens, 2.2 GiB",
    ),
    (SPOT, "fleet.workers.0.resources={CPU: 8, GPU: 0.5}", None, "fleet.workers.0.resources.GPU=0.5"),
    (CARD, "seeding.engine.gpu_memory_utilization=0.03", None, "seeding.engine: weights of 0.9 GiB"),
    (LARGE, "fleet.workers.0.sku=T4", None, "larger tensor_parallel_size"),
    (LARGE, "fleet.workers.0.engine.tensor_parallel_size=1 fleet.workers.0.sku=A40", None, "of 1 x 48 GiB"),
    (ONE, "learner.offload_optimizer=true learner.zero_stage=0", None, "set learner.zero_stage=1"),
    (LARGE, "learner.offload_optimizer=true", None, "of host memory, this machine has 0.0"),
    (ONE, "learner.offload_weights=true learner.zero_stage=3", None, "learner.offload_optimizer=true"),
    (
        ONE,
        "learner.offload_weights=true learner.offload_optimizer=true learner.zero_stage=2",
        None,
        "set learner.zero_stage=3",
    ),
    (ONE, "learner.sequence_ranks=3", None, "does not divide learner.num_ranks=4"),
    (
        ONE,
        "learner.sequence_ranks=4 learner.micro_batch_tokens=16386",
        None,
        "does not divide learner.micro_batch_tokens=16386",
    ),
    (ONE, "learner.sequence_ranks=2 learner.dropout=true", None, "with learner.dropout=true"),
    (
        LARGE,
        "learner.sequence_ranks=12 learner.num_ranks=12 learner.micro_batch_tokens=24576",
        None,
        "the 64 attention heads of Qwen/Qwen3-32B",
    ),
    # lengths and engines
    (ONE, "learner.micro_batch_tokens=8192", None, "learner.micro_batch_tokens=8192"),
    (ONE, "sampling.max_new_tokens=16384", None, "model.max_model_len=16384"),
    (ONE, "model.max_model_len=0", None, "model.max_model_len=0"),
    (ONE, "fleet.workers.0.engine.tensor_parallel_size=2", None, "ask for GPU: 2"),
    (LARGE, "fleet.workers.0.engine.tensor_parallel_size=8", None, "ask for GPU: 8"),
    (ONE, "fleet.workers.0.engine.gpu_memory_utilization=1.5", None, "gpu_memory_utilization=1.5"),
    (ONE, "fleet.workers.0.engine.extra={quantization: fp8}", None, "fleet.workers.0.engine.extra"),
    (ONE, "fleet.workers.0.engine.extra={enable_lora: true}", None, "fleet.workers.0.engine.extra"),
    # the learner's settings
    (ONE, "learner.zero_stage=4", None, "learner.zero_stage=4"),
    (ONE, "learner.dtype=fp16", None, "did you mean 'bf16'"),
    (ONE, "learner.lr=-1", None, "learner.lr=-1"),
    (ONE, "learner.lora_rank=-1", None, "learner.lora_rank=-1"),
    (ONE, "learner.lora_alpha=0", None, "learner.lora_alpha=0"),
    (ONE, "learner.lora_targets=[q_proj]", None, "learner.lora_rank=0"),
    (ONE, "learner.lora_rank=8 learner.lora_targets=[wq]", None, "learner.lora_targets: wq"),
    (ONE, "learner.num_rank=4", None, "did you mean 'num_ranks'"),
    (ONE, "learner.activation_checkpointing=maybe", None, "learner.activation_checkpointing='maybe'"),
    (CARD, "staleness.max_staleness=2", None, "set staleness.max_staleness=0"),
    # names
    (ONE, "objective.name=ppo", None, "objective.name: 'ppo'"),
    (ONE, "weights.codec=zip", None, "weights.codec: 'zip'"),
    (ONE, "weights.mode=patch", None, "weights.mode='patch'"),
    (ONE, "run.tracker=mlflow", None, "run.tracker: 'mlflow'"),
    (ONE, "fleet.scale=kubernetes", None, "fleet.scale: 'kubernetes'"),
]


@pytest.mark.parametrize(("case", "changes", "cluster", "told"), WRONG, ids=lambda one: str(one)[:60])
def test_a_wrong_configuration_is_one_line_with_its_key(
    case: Case,
    changes: str,
    cluster: Sequence[Machine] | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check(case, "", None, monkeypatch) == ""
    message = check(case, changes, cluster, monkeypatch)
    assert told in message
    assert "\n" not in message
    assert not message.startswith(":")


def check(
    case: Case, changes: str, cluster: Sequence[Machine] | None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The line that refuses the documented command with these changes; "": none does."""
    (code,) = re.findall(r"```bash\n(.*?)```", section(case), re.DOTALL)
    documented = shlex.split(code.replace("\\\n", " "))[3:]
    changed = re.split(r" (?=learner\.|fleet\.)", changes) if changes else []
    keys = {word.partition("=")[0] for word in changed}
    words = [word for word in documented if word.partition("=")[0] not in keys] + changed
    machines = list(cluster or case.machines)

    def shape_of(folder: Path) -> Shape:
        return replace(SHAPES[config.model.path], linear=LINEAR)

    try:
        config = load_config(words)
        monkeypatch.setattr(type(config.model), "folder", Path("no such folder"))
        monkeypatch.setattr(preflight, "shape_of", shape_of)
        monkeypatch.setattr(memory, "shape_of", shape_of)
        monkeypatch.setattr(memory, "size_of_folder", lambda folder: SIZES[config.model.path])
        preflight.check_learner(config)
        preflight.check_extensions(config)
        preflight.check_fleet(config)
        preflight.check_seeding(config.seeding, config.learner.rank_resources)
        preflight.check_engines([*config.fleet.workers, *config.seeding.workers().values()])
        preflight.check_lengths(config)
        config = with_learner_resources(config, machines)
        has = {name: sum(one.resources[name] for one in machines) for name in ("CPU", "GPU")}
        check_fit(config, has, [one.labels for one in machines])
        check_nodes(config.fleet, [one.resources for one in machines])
        preflight.check_cards(config.fleet, machines)
        memory.check_memory(config, machines, 0.0)
    except UserError as error:
        return str(error)
    return ""
