"""DeepSpeed behind a small interface: one model, AdamW with fp32 masters, ZeRO 0 to 3.

No other file imports deepspeed.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from echo_planes.cluster.gpu_driver import driver_problem_here
from echo_planes.config.schema import LearnerConfig
from echo_planes.errors import ClusterError, ConfigError, DataError, RunError
from echo_planes.learning.adapters import A, Adapters, B
from echo_planes.learning.device_scan import DeviceMirror, host_copy, leaves_room
from echo_planes.learning.meeting import MEETING_LIMIT
from echo_planes.learning.model_files import Place
from echo_planes.learning.policy_model import PolicyModel, layers_of
from echo_planes.learning.rounding import PUBLISHED, MasterAdamW
from echo_planes.weights.digest import BitArray, bit_tensor

StateBits = dict[str, tuple[BitArray, tuple[int, ...]]]
TAG = "engine"  # DeepSpeed's files lie in <checkpoint>/engine
ABOUT = "engine.json"
ADAPTER = "adapter"  # folder in a checkpoint, in PEFT's format


def pick_device(rank: int) -> torch.device:
    """Return the GPU of this rank (under Ray, the only visible one), or the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def check_gpu(amount: float) -> None:
    """Check that torch can use the GPU that Ray gave this rank.

    Args:
        amount: GPUs of one rank.

    Raises:
        ClusterError: torch was built for CPUs, or the driver is too old or does not answer.
    """
    if not torch.cuda.is_available():
        why = driver_problem_here() or "it needs a build of torch for CUDA, and a driver (docs/gpus.md)"
        raise ClusterError(
            f"learner.resources has GPU: {amount:g}, but torch {torch.__version__} finds none: {why}; or "
            "train on CPUs with learner.resources='{CPU: 1}'"
        )


def saved_dtype(folder: Path) -> Literal["bf16", "fp32"] | None:
    """Return the compute type of the checkpoint in `folder`; None: it cannot be read."""
    try:
        dtype = json.loads((folder / ABOUT).read_text())["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # `load` says why
    return "bf16" if dtype == "bf16" else "fp32"


@contextmanager
def joined(device: torch.device, rank: int, world_size: int, store: Store) -> Iterator[None]:
    """Join the ranks' group, in which the other ranks wait; leave it if what is done in it fails.

    Args:
        device: of this rank.
        rank, world_size: place among the ranks, and their number.
        store: store of the group (`meeting`).
    """
    _set_environment(device, rank, world_size)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # On a CPU the first init would spend a minute compiling a shared-memory collective. gloo needs none.
    __compatible_ops__["deepspeed_shm_comm"] = False
    # ZeRO-3 calls collectives by deprecated names, and torch would warn of them at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    # Keep DeepSpeed's errors, without its progress report on standard output.
    deepspeed.logger.setLevel("ERROR")
    backend = "nccl" if device.type == "cuda" else "gloo"
    # DeepSpeed uses a group that exists already. One that it made itself would listen on all addresses.
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=MEETING_LIMIT
    )
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=MEETING_LIMIT)
    try:
        yield
    except BaseException:
        deepspeed.comm.destroy_process_group()
        raise


def keeping_shares(config: LearnerConfig, dtype: torch.dtype) -> Place | None:
    """Return a function that divides the parameters of a module among the ranks (ZeRO-3); else None.

    Rank 0's values count. Each rank has its share on its device afterwards, or in host memory where weights
    are offloaded.
    """
    if config.zero_stage < 3:
        return None
    import deepspeed

    settings = _settings(config, dtype)
    return lambda module: deepspeed.zero.Init(module=module, config_dict_or_path=settings, dtype=dtype)


def _divide(model: PolicyModel, keep_share: Place, device: torch.device) -> None:
    """Prepare a model for ZeRO-3, which divides it by layers."""
    import deepspeed

    keep_share(model)  # adapters, and what was loaded whole
    for buffer in model.buffers():  # DeepSpeed moves those of whole models only
        buffer.data = buffer.data.to(device)
    for parameter in model.head.borrowed:
        deepspeed.zero.register_external_parameter(model.head, parameter)
    # Gather a layer whole. Otherwise one that runs again in the backward pass would release the weights of
    # its parts at the end of that, before their gradients are computed.
    for layer in layers_of(model.model):
        deepspeed.utils.set_z3_leaf_module(layer, True)


class Frozen:
    """Model that is not trained: on each rank, or divided among the ranks as the policy is (ZeRO-3).

    Args:
        model: the reference of the KL term.
        config: `learner` settings.
        device: of this rank.
        dtype: of the model's parameters.
    """

    def __init__(
        self, model: PolicyModel, config: LearnerConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model: Any = model.eval().requires_grad_(False)
        keep_share = keeping_shares(config, dtype)
        if keep_share is None:
            self._model.to(device)
            return
        import deepspeed

        _divide(model, keep_share, device)
        self._model, *_ = deepspeed.initialize(
            model=model, config=_settings(config, dtype), dist_init_required=False
        )
        self._model.eval()

    def logprobs(self, **inputs: Any) -> Tensor:
        """Return the log-probabilities of `PolicyModel.forward`. Collective, as all of the policy's calls."""
        logprobs: Tensor = self._model(**inputs)[0]
        return logprobs

    def close(self) -> None:
        """Drop the model, before the policy's engine leaves the group."""
        if not isinstance(self._model, PolicyModel):
            self._model.destroy()
            _empty(self._model)
        del self._model


def _empty(engine: Any) -> None:
    """Empty the objects of a DeepSpeed engine, which its hooks keep alive for good."""
    optimizer = engine.optimizer
    owners = [getattr(optimizer, "parameter_offload", None), optimizer, engine]
    for owner in [*engine.module.parameters(), *owners]:
        if owner is not None:
            vars(owner).clear()


class DeepSpeedEngine:
    """One data-parallel rank that has joined its group. Every method is collective: all ranks call it alike.

    Args:
        model: the policy, its parameters in `dtype`.
        config: `learner` settings.
        adapters: of `model`, if it has any: then only they are trained and saved.
    """

    def __init__(
        self,
        model: PolicyModel,
        config: LearnerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rank: int,
        world_size: int,
        adapters: Adapters | None = None,
    ) -> None:
        self.device = device
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._dtype = dtype
        import deepspeed

        self._mirror: DeviceMirror | None = None
        self._adapters = adapters
        self._trained = False  # whether this engine has made an update: its peak of memory is then known
        self._deepspeed = deepspeed
        self._masters_apart = dtype == torch.bfloat16 or config.zero_stage > 0
        # A tied lm_head is one parameter with two names. It is listed, and saved, under the first one.
        self._names = [name.removeprefix("model.") for name, _ in model.named_parameters()]
        # DeepSpeed keeps masters in bf16 alone. Adapters are not published themselves, so they need none.
        keeps_masters = dtype == torch.float32 and adapters is None
        optimizer = (MasterAdamW if keeps_masters else torch.optim.AdamW)(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=0.0,  # set at every step
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if keep_share := keeping_shares(config, dtype):
            _divide(model, keep_share, device)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_settings(config, dtype), dist_init_required=False
        )
        if world_size == 1 and config.zero_stage == 0:
            # The sum over one rank copies all gradients, up to 2 GB at once, and changes none.
            self._engine.enable_backward_allreduce = False

    @property
    def apart(self) -> str:
        """`PolicyModel.apart`."""
        why: str = self._engine.module.apart
        return why

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Run `PolicyModel.forward` on this rank's model."""
        result: tuple[Tensor, Tensor] = self._engine(**inputs)
        return result

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, summed over ranks, to the update's. `last`: the update is complete."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; the factor makes a sum of it.
        self._engine.backward(loss * self._world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, make one optimizer update and return the norm before clipping.

        Must follow a `backward(..., last=True)`. A norm that is not finite means that no update was made:
        weights and moments are unchanged.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm: Any = None
        if not self._masters_apart:
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(norm):  # DeepSpeed skips such an update only where it keeps masters
                self._engine.zero_grad()
                return float(norm)
        self._engine.step()
        self._trained = True
        return float(self._engine.get_global_grad_norm() if norm is None else norm)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum `values` over ranks, in place, and return them; of those that share sequences one counts."""
        if self._world_size > 1:
            torch.distributed.all_reduce(values)
            values /= self._config.sequence_ranks  # those hold the same values
        return values

    def state_bits(self, tell: Callable[[str], None]) -> StateBits:
        """Return the weights' bf16 bits: {Hugging Face name: (uint16 (elements,), shape)} on rank 0, else {}.

        They are the weights that `forward` computes with, bit for bit. Names and order are those of
        `save_pretrained`; a tied lm_head appears once. The next call may write to the same arrays: copy them
        to keep them. From a GPU with room for a `DeviceMirror` only changed bits are copied. `tell` is called
        with each name before its weights are collected.

        Raises:
            RunError: a weight that `forward` computes with is no bf16 value, so no worker could serve it.
        """
        bits: StateBits = {}
        mirror = self._mirror_if_room()
        parameters = dict(zip(self._names, self._engine.module.parameters(), strict=True))
        sharded = self._config.zero_stage == 3
        for name, parameter in parameters.items():
            layer, _, kind = name.rpartition(".")
            if kind in (A, B):
                continue
            tell(name)
            pair = [parameters[f"{layer}.{one}"] for one in (A, B) if f"{layer}.{one}" in parameters]
            pair = pair if kind == "weight" else []
            with self._deepspeed.zero.GatheredParameters([parameter, *pair], enabled=sharded):
                if self._rank == 0:
                    if pair and self._adapters is not None:
                        half = self._adapters.merged(parameter, *pair)
                    else:
                        half = parameter.detach().to(PUBLISHED)
                        if not torch.equal(half.to(parameter.dtype), parameter.detach()):
                            raise RunError(f"the learner computes with a {name!r} that is not in bf16")
                    if half.device.type == "cpu" and half.dtype != parameter.dtype:
                        host = bit_tensor(half)  # a copy of the weights already
                    else:
                        host = host_copy(half) if mirror is None else mirror.bits(name, half)
                    bits[name] = (host.bits, host.shape)
        return bits

    def _mirror_if_room(self) -> DeviceMirror | None:
        """Return rank 0's mirror, or None; a publication after the first update makes it if there is room.

        There is no mirror under ZeRO-3, which is for weights of which one device cannot hold a whole copy.
        """
        whole = self._rank == 0 and self._config.zero_stage < 3
        if self._mirror is None and whole and self._trained and self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            num_weights = sum(p.numel() for p in self._engine.module.parameters())
            if leaves_room(free, total, reserved, peak, num_weights * torch.bfloat16.itemsize):
                self._mirror = DeviceMirror()
        return self._mirror

    def save(self, folder: Path, counters: dict[str, Any]) -> None:
        """Write weights, masters, moments, RNG and `counters` to an empty folder, made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        torch.save(rng, folder / f"rng-{self._rank}.pt")
        self._engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self._adapters is not None
        )
        if self._adapters is not None:
            self._write_adapters(self._adapters, folder / ADAPTER)
        if self._rank == 0:
            (folder / ABOUT).write_text(json.dumps(self._layout() | counters, indent=2))
        self._barrier()

    def _write_adapters(self, adapters: Adapters, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self._names, self._engine.module.parameters(), strict=True):
            if name.rpartition(".")[2] in (A, B):
                with self._deepspeed.zero.GatheredParameters(parameter, enabled=self._config.zero_stage == 3):
                    if self._rank == 0:
                        tensors[name] = parameter.detach().cpu().clone()
        if self._rank == 0:
            adapters.write(folder, tensors)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from `save`, bit for bit, and return its counters.

        Raises:
            DataError: there is no checkpoint in `folder`.
            ConfigError: the checkpoint has another number of ranks, ZeRO stage or compute type.
        """
        try:
            about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"no learner checkpoint in {folder}: {error}") from error
        for key, now in self._layout().items():
            if about.pop(key, None) != now:
                raise ConfigError(f"the checkpoint in {folder} was not made with learner.{key}={now}")
        path, _ = self._engine.load_checkpoint(
            str(folder), tag=TAG, load_module_strict=self._adapters is None
        )
        if path is None:
            raise DataError(f"the learner checkpoint in {folder} is incomplete")
        rng = torch.load(folder / f"rng-{self._rank}.pt", weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        return about

    def close(self) -> None:
        """Leave the process group. The engine cannot be used afterwards.

        Gloo's threads end with the last reference to their group. A thread that releases a tensor while the
        interpreter ends aborts the process, so this method leaves no reference.
        """
        self._engine.destroy()
        # DeepSpeed's own call also drops its cached groups, so that another engine can start in this process.
        self._deepspeed.comm.destroy_process_group()
        _empty(self._engine)
        del self._engine, self._optimizer
        gc.collect()

    def _layout(self) -> dict[str, Any]:
        dtype = "bf16" if self._dtype == torch.bfloat16 else "fp32"
        return {"num_ranks": self._world_size, "zero_stage": self._config.zero_stage, "dtype": dtype}

    def _barrier(self) -> None:
        if self._world_size > 1:
            torch.distributed.barrier()


def _set_environment(device: torch.device, rank: int, world_size: int) -> None:
    """Set the environment variables that torchrun would have set."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(device.index or 0),
    )
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"


def _settings(config: LearnerConfig, dtype: torch.dtype) -> dict[str, Any]:
    settings: dict[str, Any] = {
        # DeepSpeed requires a batch size, but here `backward(last=...)` controls accumulation.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": config.zero_stage},
    }
    if config.offload_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's runs there too, and needs no compiler
    if config.offload_weights:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
        settings["communication_data_type"] = "fp32"
        # A sum of many micro-batches in bf16 would lose small gradients. Stage 0 offers no fp32 sums.
        if config.zero_stage > 0:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
