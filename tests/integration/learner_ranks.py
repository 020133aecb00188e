"""One learner rank in a process of its own: `python learner_ranks.py SPECS.json RANK`.

SPECS: a list of {"config", "world_size", "first_step", "num_steps", "save_at", "save_to", "load_from",
"parts", "gradient", "killed", "chunk_logits", "out"}: learners of their own, one after the other. Each writes
`<out>-<rank>.npz`: per-step loss and grad_norm, the fp32 weights and the published bits of rank 0, and with
`parts` or `gradient` the first step's gradient; with `shown` the bits to publish after each update. `parts`:
groups in each part of a step; none: steps are whole. `killed`: before it goes on from its checkpoint, another
learner does so, and is gone after the first part of its step. `chunk_logits`: most logits held at once.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echo_planes.config.schema import Config
from echo_planes.types import TrainBatch

if TYPE_CHECKING:
    from torch.distributed import Store

VOCABULARY = 48
TOKEN_COLUMNS = ("token_ids", "loss_mask", "sampler_logprobs", "token_versions")
TRAJECTORY_COLUMNS = ("rewards", "advantage_groups", "advantages", "versions", "correct", "cut_off")
LIMIT_S = 400.0  # of all; the machine may be busy


def make_batch(step: int, num_groups: int = 6, samples: int = 4) -> TrainBatch:
    """Random trajectories of uneven length; every third group has equal rewards, one has two turns."""
    rng = np.random.default_rng(1000 + step)
    ids: list[int] = []
    mask: list[bool] = []
    offsets = [0]
    rewards: list[float] = []
    for group in range(num_groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(2, 7)).tolist()
        for sample in range(samples):
            length = int(rng.integers(1, 8))
            ids += prompt + rng.integers(0, VOCABULARY, length).tolist()
            own = [True] * length
            if group == 1 and length > 3:
                own[1:3] = [False, False]
            mask += [False] * len(prompt) + own
            offsets.append(len(ids))
            rewards.append(1.0 if group % 3 == 2 else float(sample % 2 + rng.integers(0, 2)))
    n = num_groups * samples
    trained = np.array(mask, np.bool_)
    return TrainBatch(
        step=step,
        trajectory_ids=tuple(str(i) for i in range(n)),
        token_ids=np.array(ids, np.int64),
        offsets=np.array(offsets, np.int64),
        loss_mask=trained,
        sampler_logprobs=np.where(trained, -3.9 + 0.3 * rng.standard_normal(len(ids)), 0).astype(np.float32),
        rewards=np.array(rewards, np.float32),
        advantage_groups=np.repeat(np.arange(num_groups), samples),
        advantages=np.full(n, np.nan, np.float32),
        versions=np.full(n, step, np.int64),
        correct=np.array(rewards) > 0.5,
        token_versions=np.where(trained, step, -1),
        cut_off=np.zeros(n, np.bool_),
    )


def parts_of(batch: TrainBatch, sizes: Sequence[int]) -> list[TrainBatch]:
    """A batch in parts of so many groups each; the sizes add up to the groups of the batch."""
    bounds = np.cumsum([0, *sizes])
    parts = []
    for first, stop in pairwise(bounds.tolist()):
        (own,) = np.nonzero((batch.advantage_groups >= first) & (batch.advantage_groups < stop))
        of_token = slice(batch.offsets[own[0]], batch.offsets[own[-1] + 1])
        of_trajectory = slice(own[0], own[-1] + 1)
        columns = {name: getattr(batch, name)[of_token] for name in TOKEN_COLUMNS}
        columns |= {name: getattr(batch, name)[of_trajectory] for name in TRAJECTORY_COLUMNS}
        parts.append(
            replace(
                batch,
                trajectory_ids=batch.trajectory_ids[of_trajectory],
                offsets=batch.offsets[own[0] : own[-1] + 2] - batch.offsets[own[0]],
                step_trajectories=batch.num_trajectories,
                last=stop == bounds[-1],
                **columns,
            )
        )
    return parts


def meet(path: Path, rank: int, world_size: int) -> Store:
    """The store of the ranks; rank 0 tells its port to the others in a file."""
    from echo_planes.learning.meeting import join_store, open_store

    if rank == 0:
        store, port = open_store("127.0.0.1", None, world_size)
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)
        return store
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"rank 0 has not written {path} within {LIMIT_S:.0f} s")
        time.sleep(0.02)
    return join_store("127.0.0.1", int(path.read_text()), world_size)


def main(spec: dict[str, Any], rank: int) -> None:
    from echo_planes.learning import policy_model
    from echo_planes.learning.learner import Learner

    policy_model.CHUNK_LOGITS = spec.get("chunk_logits", 2**27)
    if spec.get("killed"):
        begin_a_step({**spec, "out": f"{spec['out']}-killed"}, rank)
    config = Config.model_validate(spec["config"])
    store = meet(Path(f"{spec['out']}.port"), rank, spec["world_size"])
    learner = Learner(config, rank, spec["world_size"], store, Path(spec["out"]).parent / "failures")
    learner.start()
    if spec.get("load_from"):
        learner.load(Path(spec["load_from"]))
    stats = []
    gradient = watch_gradient(learner) if "parts" in spec or spec.get("gradient") else {}
    shown = watch_weights(learner) if spec.get("shown") else {}
    for step in range(spec["first_step"], spec["first_step"] + spec["num_steps"]):
        if step == spec.get("save_at"):
            learner.save(Path(spec["save_to"]))
        *earlier, last = parts_of(make_batch(step), spec["parts"]) if "parts" in spec else [make_batch(step)]
        for part in earlier:
            learner.train_part(part)
        stats.append(asdict(learner.train_step(last)))
    probe = learner.logprobs(make_batch(999))
    bits = learner.state_bits()
    columns = {name: np.array([s[name] for s in stats]) for name in ("loss", "grad_norm", "num_updates")}
    weights = {f"bits/{name}": array.reshape(shape) for name, (array, shape) in bits.items()}
    masters = {f"fp32/{name}": array for name, array in master_weights(learner).items()}
    np.savez(
        f"{spec['out']}-{rank}.npz",
        allow_pickle=False,
        probe=probe,
        **columns,
        **weights,
        **masters,
        **gradient,
        **shown,
    )
    learner.close()
    left = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if any("gloo" in name for name in left):
        raise RuntimeError(f"close() left threads of gloo: {left}")


def begin_a_step(spec: dict[str, Any], rank: int) -> None:
    """A learner that is gone after the first part of a step."""
    from echo_planes.learning.learner import Learner

    config = Config.model_validate(spec["config"])
    store = meet(Path(f"{spec['out']}.port"), rank, spec["world_size"])
    learner = Learner(config, rank, spec["world_size"], store, Path(spec["out"]).parent / "failures")
    learner.start()
    learner.load(Path(spec["load_from"]))
    learner.train_part(parts_of(make_batch(spec["first_step"]), spec["parts"])[0])
    learner.close()


def watch_gradient(learner: Any) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The gradient of the learner's first update from now on, summed over ranks; empty until that is made."""
    from deepspeed.utils import safe_get_full_grad

    found: dict[str, Any] = {}
    engine = learner._engine
    step = engine.step

    def watched(rate: float) -> float:
        if not found:
            for name, parameter in engine._engine.module.named_parameters():
                own = parameter.grad if engine._config.zero_stage == 0 else safe_get_full_grad(parameter)
                found[f"gradient/{name}"] = own.detach().float().cpu().numpy().reshape(-1)
        return float(step(rate))

    engine.step = watched
    return found


def watch_weights(learner: Any) -> dict[str, np.ndarray[Any, np.dtype[np.uint16]]]:
    """The bits to publish after each of the learner's updates, by its number, as they are made."""
    found: dict[str, Any] = {}
    engine = learner._engine
    step, number = engine.step, itertools.count(learner.num_updates)

    def watched(rate: float) -> float:
        norm = float(step(rate))
        update = next(number)
        for name, (bits, shape) in engine.state_bits(lambda _: None).items():
            found[f"shown/{update}/{name}"] = bits.copy().reshape(shape)
        return norm

    engine.step = watched
    return found


def master_weights(learner: Any) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The fp32 weights that the optimizer keeps, whatever the ZeRO stage; of adapters the parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from echo_planes.learning.rounding import MasterAdamW

    result = {}
    engine = learner._engine._engine
    optimizer = learner._engine._optimizer
    own = getattr(optimizer, "optimizer", optimizer)  # beneath DeepSpeed's wrapper
    masters = {}
    if hasattr(engine.optimizer, "fp32_groups"):  # bf16 without ZeRO: DeepSpeed's wrapper, two parallel lists
        groups = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        masters = {id(p): m for half, full in groups for p, m in zip(half, full, strict=True)}
    for name, parameter in engine.module.named_parameters():
        if isinstance(own, MasterAdamW):
            full = own.state[parameter].get("master") if parameter in own.state else None
            full = safe_get_full_optimizer_state(parameter, "master") if full is None else full
        else:
            full = masters.get(id(parameter))
            full = safe_get_full_fp32_param(parameter) if full is None else full
        full = parameter if full is None else full
        result[name.removeprefix("model.")] = full.detach().float().cpu().numpy().reshape(-1)
    return result


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(each["out"], flush=True)  # which one it was, if it fails
        main(each, int(sys.argv[2]))
