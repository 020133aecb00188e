"""Check, made once before the first batch, that the layout of a batch does not change a sequence's logprobs.

A model's settings do not prove that its code treats rows of several trajectories, or padding, correctly. The
probe therefore puts a few short sequences of random tokens through the model, once in the learner's layout
and once one by one, and requires the same logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echo_planes.errors import ModelError
from echo_planes.learning import packing
from echo_planes.learning.layer_kinds import layer_kinds
from echo_planes.learning.packing import Layout, MicroBatch
from echo_planes.learning.policy_model import PolicyModel, layers_of
from echo_planes.types import IntArray, TrainBatch

MAX_TOKENS = 32  # of a sequence: the forwards of the probe then hold under 200 tokens in all
# Largest mean difference that rounding may cause, nats. A token that attends to a wrong one is off by tenths.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def settle_layout(
    models: Sequence[PolicyModel], forward: Callable[[MicroBatch], Tensor], *, longest: int
) -> None:
    """Check the layout of the first of `models`; give all a row for each trajectory if that is what is right.

    The code of some models does not hand a row's forest on to its attention. Collective, as `probe_layout`.

    Args:
        models: the policy, which `forward` runs, and others that get its batches.

    Raises:
        ModelError: rows of one trajectory are not right either, or ranks share them.
    """
    try:
        probe_layout(models[0], forward, longest=longest)
    except ModelError:
        if models[0].apart or models[0].sequence is not None:
            raise
        for model in models:
            model.keep_apart("the code of this model")
        probe_layout(models[0], forward, longest=longest)


@torch.no_grad()
def probe_layout(model: PolicyModel, forward: Callable[[MicroBatch], Tensor], *, longest: int) -> None:
    """Compare logprobs of sequences together and alone. Collective: all ranks use the same sequences.

    Args:
        model: the model that `forward` runs.
        forward: returns the logprobs (M,) of a micro-batch.
        longest: most tokens that a trajectory may have.

    Raises:
        ModelError: the logprobs differ; names the model's type, and the first layer whose outputs differ.
    """
    settings = model.model.config.get_text_config()
    batch = _sequences(min(longest, MAX_TOKENS), int(settings.vocab_size))
    inputs = packing.find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = packing.make_units(batch, inputs, len(batch.token_ids) if model.packs else 0)
    lengths = [unit.length for unit in units]
    numbers = range(len(units))
    row_len = partial(packing.rounded_up, multiple=model.sequence.size if model.sequence else 1)
    together = (
        Layout(row_len(sum(lengths)), (tuple(numbers),))
        if model.packs
        else Layout(row_len(max(lengths)), tuple((n,) for n in numbers))
    )
    single = packing.make_units(batch, inputs, 0)
    alone = [Layout(row_len(unit.length), ((number,),)) for number, unit in enumerate(single)]
    found = _run(model, forward, [packing.build(together, units, batch, inputs)])
    with model.rows_of_one():
        expected = _run(model, forward, [packing.build(layout, single, batch, inputs) for layout in alone])
    limit = LIMITS[next(model.parameters()).dtype]
    difference = float((found[-1] - expected[-1]).abs().mean())
    if difference <= limit:
        return
    kinds = layer_kinds(settings)
    where = ", parting at none of its layers, so after the last" if model.sequence is None else ""
    for layer, (one, other) in enumerate(zip(found[:-1], expected[:-1], strict=model.sequence is None)):
        if float((one - other).norm() / other.norm()) > limit:
            where = f", parting at layer {layer} ('{kinds[layer % len(kinds)]}')"
            break
    layout = "packed into one row" if model.packs else "in padded rows"
    layout += " shared by ranks" if model.sequence is not None else ""
    raise ModelError(
        f"the model is not supported: {settings.model_type} gives sequences {layout} other logprobs than "
        f"alone ({difference:.2g} nats on average, {limit:g} allowed){where}; take another model"
    )


def _sequences(longest: int, vocab_size: int) -> TrainBatch:
    """Return two answers to one prompt and one to another, of different lengths; equal on all ranks."""
    first, second, third = longest, max(longest * 3 // 4, 2), max(longest // 2, 2)
    lengths = np.array([first, second, third])
    prompts = np.maximum([second // 3, second // 3, third // 3], 1)
    # Leave out the ends of the vocabulary, where most special tokens are.
    low = vocab_size // 4
    ids = np.random.default_rng(0).integers(low, max(vocab_size - low, low + 1), int(lengths.sum()))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids[first : first + prompts[1]] = ids[: prompts[0]]
    places = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    count = len(lengths)
    return TrainBatch(
        step=0,
        trajectory_ids=("",) * count,
        token_ids=ids,
        offsets=offsets,
        loss_mask=places >= np.repeat(prompts, lengths),
        sampler_logprobs=np.zeros(len(ids), np.float32),
        rewards=np.zeros(count, np.float32),
        advantage_groups=np.zeros(count, np.int64),
        advantages=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        correct=np.zeros(count, np.bool_),
        token_versions=np.zeros(len(ids), np.int64),
        cut_off=np.zeros(count, np.bool_),
    )


def _run(
    model: PolicyModel, forward: Callable[[MicroBatch], Tensor], micros: list[MicroBatch]
) -> list[Tensor]:
    """Return every layer's outputs (M, hidden) at the predictors, then logprobs (M,), in token order.

    Ranks that share the rows hold no layer's whole outputs; then there are the logprobs alone.
    """
    parts: list[list[Tensor]] = []
    for micro in micros:
        with _outputs(model) as outputs:
            logprobs = forward(micro)
        at = torch.from_numpy(micro.predictors).to(logprobs.device)
        parts.append([*(out.flatten(0, 1)[at].float() for out in outputs), logprobs])
    order: IntArray = np.argsort(np.concatenate([micro.columns for micro in micros]))
    index = torch.from_numpy(order).to(parts[0][-1].device)
    return [torch.cat(column)[index] for column in zip(*parts, strict=True)]


@contextmanager
def _outputs(model: PolicyModel) -> Iterator[list[Tensor]]:
    """Collect the outputs of the layers as they run; none where no module list has as many entries."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    layers = layers_of(model.model) if model.sequence is None else ()
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
