"""Plugin in vLLM's engine process: writes published weights into the live tensors and proves their digest.

vLLM imports this module inside the engine process by the dotted name that `VllmEngine` passes as
`worker_extension_cls`. That works from a checkout, from a Ray `working_dir` and from a wheel alike. The
`vllm.general_plugins` entry point, which exists only where the package is installed, does the same for
users who start vLLM themselves.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from echo_planes.cluster.process import die_with_parent
from echo_planes.cluster.scratch import name_shared_memory
from echo_planes.errors import WeightsError
from echo_planes.rollout.vllm.shards import GlooRanks, check_loaded, hugging_face_pieces, placed
from echo_planes.rollout.vllm.work_counter import WorkCounter
from echo_planes.types import Manifest, TensorSpec
from echo_planes.weights.codec.changes import exchange
from echo_planes.weights.codec.entry import Applied, Change
from echo_planes.weights.codec.kernels import upper_halves
from echo_planes.weights.codec.warm_up import warm_up_install
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor, bit_tensor
from echo_planes.weights.receiver import Receiver, Standing, open_staged
from echo_planes.weights.shards import ShardedTensors, ShardReceiver, together

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig
    from vllm.v1.core.sched.output import SchedulerOutput

BACKEND = "echo_planes"


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Initial information for the backend, which needs none."""


@dataclass
class InstallInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Location of the payload, and the manifest that it must match."""

    payload_path: str
    manifest: dict[str, Any]  # the fields of `Manifest`


class LiveTensors:
    """Tensors that a vLLM model computes with, as `weights.receiver.Target`: views, by Hugging Face name.

    A float32 tensor stands for the bfloat16 tensor that was published (every bfloat16 is a float32 whose
    low half is zero), so that an engine may compute in float32. A tensor whose low half is not zero is read
    as float32, and then no published digest matches.

    Raises:
        WeightsError: a parameter cannot be mapped; the message names it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._views = {piece.name: piece.view for piece in hugging_face_pieces(model)}
        self._specs = {name: _published_spec(name, view) for name, view in self._views.items()}

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> BitTensor:
        view = self._views[name]
        whole = start == 0 and stop is None
        live = bit_tensor(view if whole else view.view(-1)[start:stop])
        if live.dtype != "float32":
            return live
        upper = np.empty(live.bits.size, BIT_DTYPES["bfloat16"])
        exact = upper_halves(live.bits, upper) == 0
        return BitTensor(upper, "bfloat16", live.shape) if exact else live

    def exchange(self, change: Change) -> Applied:
        view, values = self._views[change.name], change.values
        narrow = values.dtype
        widened = narrow.itemsize < view.element_size()
        if widened:
            values = values.astype(np.uint32) << np.uint32(16)
        if view.device.type == "cpu":
            wide = Change(change.name, change.start, change.indices, values)
            replaced = exchange(wide, bit_tensor(view).bits).old
        else:
            replaced = self._exchange_on_device(view, change, values)
        return Applied(change, (replaced >> 16).astype(narrow) if widened else replaced)

    def _exchange_on_device(self, view: torch.Tensor, change: Change, values: BitArray) -> BitArray:
        integer = torch.int32 if view.element_size() == 4 else torch.int16
        new = torch.from_numpy(values).view(integer).to(view.device)
        flat = view.view(-1).view(integer)
        # Copy the old bits before writing any new one, because a copy may fail.
        if change.indices is None:
            run = flat[change.start : change.start + new.numel()]
            replaced = bit_tensor(run.clone().view(view.dtype)).bits
            run.copy_(new)
        else:
            where = torch.from_numpy(change.indices).to(view.device, torch.int64)
            replaced = bit_tensor(flat.index_select(0, where).view(view.dtype)).bits
            flat.index_copy_(0, where, new)
        return replaced


def _published_spec(name: str, view: torch.Tensor) -> TensorSpec:
    dtype = str(view.dtype).removeprefix("torch.")
    return TensorSpec(name, "bfloat16" if dtype == "float32" else dtype, tuple(view.shape))


class Probe:
    """Real forward pass of a prompt of one token, without scheduler and caches, while generation is paused.

    A CPU multiplies one token by a float32 matrix twice as fast as eight, and a weight that is not finite
    shows in either.

    Args:
        model: the model that serves.
        vllm_config: vLLM's own settings.
        device: device of the model.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        self._model: Any = model
        self._config = vllm_config
        # Not one of the first tokens: the embedding of one for padding is all zeros, which no layer changes.
        token = vllm_config.model_config.get_vocab_size() // 2
        self._token_ids = torch.full((1,), token, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, dtype=torch.int64, device=device)
        self._attentions = [module for module in model.modules() if isinstance(module, Attention)]

    def __call__(self) -> None:
        """Compute the answer to the prompt.

        Raises:
            WeightsError: the logits are not finite.
        """
        hidden = self._forward()
        logits = None if hidden is None else self._model.compute_logits(hidden)
        if logits is not None and not bool(torch.isfinite(logits).all()):
            raise WeightsError("these weights do not serve: their answer to a probe is not finite")

    def check_computes_with_parameters(self) -> str:
        """Find a layer whose matrix computes with a copy of the memory that installs write to.

        Each layer's parameters are set to zero for a moment; its output for the probe must then be zero. All
        ranks zero the same layer at once and go through all layers, because they compute some together.

        Returns:
            The first layer that computes with a copy, in words; "": there is none.
        """
        inputs: dict[torch.nn.Module, tuple[Any, ...]] = {}

        def keep(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            inputs[module] = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)

        layers = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dim() == 2
        }
        with _hooked(module.register_forward_pre_hook(keep) for module in layers.values()):
            hidden = self._forward()
        copies = []
        for name, module in layers.items():
            with torch.inference_mode(), self._context(), _zeroed(module):
                answers = [module(*inputs[module])] if module in inputs else []
                if hidden is not None and module is getattr(self._model, "lm_head", None):
                    answers.append(self._model.compute_logits(hidden))
            # After a gather of logits only one rank has them; the others have None.
            parts = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
            if any(bool(part.any()) for part in parts if part is not None):
                copies.append(f"layer {name} computes with a copy of its weights")
        return next(iter(copies), "")

    def _forward(self) -> torch.Tensor | None:
        """Return the hidden states, shape (tokens, hidden size); None on ranks without the last layer."""
        stages = get_pp_group()
        hooks = (module.register_forward_hook(_attend) for module in self._attentions)
        with torch.inference_mode(), self._context(), _hooked(hooks):
            before = None
            if not stages.is_first_rank:
                before = IntermediateTensors(stages.recv_tensor_dict(all_gather_group=get_tp_group()))
            hidden = self._model(
                input_ids=self._token_ids, positions=self._positions, intermediate_tensors=before
            )
            if stages.is_last_rank:
                return hidden  # type: ignore[no-any-return]
            stages.send_tensor_dict(hidden.tensors, all_gather_group=get_tp_group())
        return None

    def _context(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = set_forward_context(
            None, self._config, num_tokens=1, skip_compiled=True
        )
        return context


@contextmanager
def _hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    held = list(hooks)
    try:
        yield
    finally:
        for hook in held:
            hook.remove()


@contextmanager
def _zeroed(module: torch.nn.Module) -> Iterator[None]:
    held = [(parameter.data, parameter.data.clone()) for parameter in module.parameters(recurse=False)]
    try:
        for live, _ in held:
            live.zero_()
        yield
    finally:
        for live, old in held:
            live.copy_(old)


def _attend(layer: Attention, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    # Without a scheduler's metadata vLLM's attention does not write its output, so this hook computes it.
    query, key, value = (
        x.reshape(1, count, -1).transpose(0, 1)
        for x, count in zip(args, (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), strict=True)
    )
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=layer.impl.scale, enable_gqa=True
    )
    return made.transpose(0, 1).reshape(output.shape)


class LiveWeightTransferEngine(WeightTransferEngine[NoInfo, InstallInfo]):  # type: ignore[misc]
    """vLLM's hook for weight updates: each update is one transaction of `weights.receiver.Receiver`."""

    init_info_cls = NoInfo
    update_info_cls = InstallInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        warm_up_install()
        self.probe = Probe(model, vllm_config, device)
        self.refusal = ""  # with several ranks: why the last update was not installed; "": it was
        if self.parallel_config.world_size == 1:
            self.receiver = Receiver(LiveTensors(model), self.probe)
            return
        pieces = list(hugging_face_pieces(model))
        where = placed(pieces)
        ranks = GlooRanks()
        together(ranks, lambda: check_loaded(Path(self.model_config.model), pieces, where))
        self.receiver = ShardReceiver(ShardedTensors(LiveTensors(model), where, ranks), self.probe)

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Do nothing: payloads come as files, so there is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` is the whole transaction."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has verified the live tensors."""

    def receive_weights(self, update_info: InstallInfo) -> None:
        """Install one publication from its staged file.

        With several ranks no rank raises; `refusal` has the reason. vLLM would read only the first rank's
        error, and take those of the other ranks for answers to its next call.

        Raises:
            WeightsError, RunError: see `Receiver.install`. The caller gets only their text, and calls
                `echo_planes_standing` before anything computes again.
        """
        manifest, path = Manifest(**update_info.manifest), Path(update_info.payload_path)
        if not isinstance(self.receiver, ShardReceiver):
            self.receiver.install(open_staged(manifest, path))
            return
        self.refusal = ""
        try:
            ranks = self.receiver.tensors.ranks
            self.receiver.install(together(ranks, lambda: open_staged(manifest, path)))
        except Exception as error:  # noqa: BLE001  vLLM would pass on nothing but the text either
            self.refusal = str(error) or repr(error)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


def enter_process() -> None:
    """Set up a process that vLLM started: it dies with its parent, and names its shared memory."""
    die_with_parent()
    name_shared_memory()


class OneRank(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor for one rank, whose process holds the model."""

    def _init_executor(self) -> None:
        enter_process()
        self._counter = WorkCounter.of_this_process()
        super()._init_executor()
        if self._counter is not None and current_platform.is_cpu():
            # There a single step may take a minute. On GPUs layers are compiled: hooks would be in the way.
            _count_layers(self.driver_worker.worker.get_model(), self._counter)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **named: Any) -> Any:
        if self._counter is not None:
            self._counter.add_tokens(scheduler_output.total_num_scheduled_tokens)
        return super().execute_model(scheduler_output, *args, **named)


class SeveralRanks(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor for several ranks. Its process holds no weights; the ranks are its children."""

    def _init_executor(self) -> None:
        enter_process()
        self._counter = WorkCounter.of_this_process()
        super()._init_executor()

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **named: Any) -> Any:
        if self._counter is not None:
            self._counter.add_tokens(scheduler_output.total_num_scheduled_tokens)
        return super().execute_model(scheduler_output, *args, **named)


def _count_layers(model: torch.nn.Module, counter: WorkCounter) -> None:
    """Have the entries of each list of modules, such as the layers, count their forward passes."""
    for modules in model.modules():
        if isinstance(modules, torch.nn.ModuleList):
            for layer in modules:
                layer.register_forward_pre_hook(lambda *_: counter.add_layer())


class WorkerExtension:
    """Mixin for vLLM's worker class, whose methods `collective_rpc` can call."""

    weight_transfer_engine: LiveWeightTransferEngine
    vllm_config: VllmConfig
    model_runner: Any

    def echo_planes_make_room(self) -> None:
        """Make the buffers for the input of a pipeline stage. Call before the first request.

        vLLM makes them in a warm-up that eager engines on CPUs skip.
        """
        runner = self.model_runner
        if current_platform.is_cpu() and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

    def echo_planes_live_digest(self) -> str:
        """Return the canonical digest of the live tensors, computed now."""
        return self.weight_transfer_engine.receiver.live_digest()

    def echo_planes_check_live(self) -> str:
        """Return a fault that `Probe.check_computes_with_parameters` found on any rank, or "".

        Call between requests.
        """
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            found = engine.probe.check_computes_with_parameters()
        if isinstance(engine.receiver, ShardReceiver):
            found = next(filter(None, engine.receiver.tensors.ranks.tell(found)), "")
        return found

    def echo_planes_refusal(self) -> str:
        """Return `LiveWeightTransferEngine.refusal` of the last update."""
        return self.weight_transfer_engine.refusal

    def echo_planes_standing(self) -> Standing:
        """Return `Receiver.standing`, as it is now."""
        return self.weight_transfer_engine.receiver.standing

    def echo_planes_digest_mismatches(self) -> int:
        """Return `Receiver.digest_mismatches` so far."""
        return self.weight_transfer_engine.receiver.digest_mismatches


@functools.cache
def register() -> None:
    """Register the weight-transfer backend with vLLM in this process. Further calls do nothing."""
    WeightTransferEngineFactory.register_engine(BACKEND, LiveWeightTransferEngine)
    if current_platform.is_cpu():
        _keep_linear_weights_live()
        _let_modules_be_scanned()


def _keep_linear_weights_live() -> None:
    # vLLM's CPU build packs linear weights when it loads a model and computes with the packed copies. The
    # parameters are then empty or stale. Without packing, the installed weights are those that compute.
    from vllm.model_executor.layers import utils

    def compute_with_live_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = compute_with_live_weight


def _let_modules_be_scanned() -> None:
    # At its start vLLM's CPU build reads `__dict__` of every object in every loaded module. llvmlite's
    # library object, which numba loads, answers any name with a C function, even this one.
    from llvmlite.binding.ffi import _lib_wrapper

    look_up = _lib_wrapper.__getattr__

    def look_up_function(library: object, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return look_up(library, name)

    _lib_wrapper.__getattr__ = look_up_function


if multiprocessing.parent_process() is not None:  # a process that vLLM started, not its parent
    enter_process()
register()
