"""Share of the weights that an update changes, per layer, beside the share that their magnitudes predict.

In bf16 an update below about |w| / 256 is absorbed, and Adam moves a weight by about the learning rate, so
weights with |w| < 256 lr are the ones expected to change in a step (PULSE section 3 and appendix A.2,
equations 4 and 5). A large share means large patches: the learning rate is high for these weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_planes.errors import WeightsError
from echo_planes.weights.digest import BitArray, BitTensor
from echo_planes.weights.store.paths import Entry, cheapest_steps, way_to
from echo_planes.weights.store.reading import Store
from echo_planes.weights.store.replay import State, apply_stored, copied

STEPS = (1, 2, 4, 8)  # k: versions between the two states compared
ALL = "all"  # the row over all layers
_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # the leading one included
_SLICE = 1 << 22  # elements processed at once
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class SparsityRow:
    """One layer. Shares are fractions of its elements, from 0 to 1."""

    layer: str
    num_elements: int
    predicted_share: float | None  # |w| < 2^(significand bits) lr, so 256 lr in bf16; None: lr is unknown
    changed_shares: tuple[float | None, ...]  # after k = 1, 2, 4, 8 versions; None: no such pair of versions


def changed_share(base: Mapping[str, BitTensor], new: Mapping[str, BitTensor]) -> dict[str, float]:
    """Return the fraction of each tensor's elements whose bits differ; 0 for an empty tensor.

    Raises:
        WeightsError: names, dtypes or shapes differ.
    """
    return {name: count / max(1, base[name].bits.size) for name, count in changed_elements(base, new).items()}


def changed_elements(base: Mapping[str, BitTensor], new: Mapping[str, BitTensor]) -> dict[str, int]:
    """Return the number of each tensor's elements whose bits differ: -0.0 and 0.0 do, equal NaNs do not.

    Raises:
        WeightsError: names, dtypes or shapes differ.
    """
    odd = {name for name in base.keys() | new.keys() if _spec(base, name) != _spec(new, name)}
    if odd:
        raise WeightsError(f"the two states differ in names, dtypes or shapes: {', '.join(sorted(odd)[:3])}")
    return {name: sum(_differing(base[name].bits, new[name].bits)) for name in base}


def predicted_share(tensors: Mapping[str, BitTensor], learning_rate: float) -> dict[str, float]:
    """Return the fraction of each tensor's elements that a step is expected to change: |w| < 256 lr in bf16.

    PULSE section A.2, equation 5. With p significand bits the bound is 2^p lr; bf16 has p = 8.
    """
    return {
        name: _count_below(tensor, learning_rate * 2.0 ** _SIGNIFICAND_BITS[tensor.dtype])
        / max(1, tensor.bits.size)
        for name, tensor in tensors.items()
    }


class KStepSparsity:
    """Mean number of elements that change over k versions, for each k of `STEPS`, from states in order.

    Windows of one k do not overlap. Memory: one copy of the state per k.
    """

    def __init__(self) -> None:
        self._from: dict[int, tuple[int, State]] = {}  # k -> version and state its window begins with
        self._changed: dict[int, dict[str, int]] = {k: {} for k in STEPS}
        self.num_windows = dict.fromkeys(STEPS, 0)

    def add(self, version: int, state: State) -> None:
        """Add the next published state, which the caller may change afterwards."""
        snapshot: State | None = None
        for k in STEPS:
            start = self._from.get(k)
            if start is not None and version < start[0] + k:
                continue
            if start is not None and version == start[0] + k:
                self.num_windows[k] += 1
                for name, count in changed_elements(start[1], state).items():
                    self._changed[k][name] = self._changed[k].get(name, 0) + count
            if snapshot is None:
                snapshot = copied(state)
            self._from[k] = (version, snapshot)

    def mean_changed(self, k: int) -> dict[str, float] | None:
        """Return the changed elements of each tensor, mean over windows; None if there was no window."""
        num = self.num_windows[k]
        return {name: count / num for name, count in self._changed[k].items()} if num else None


def sparsity_table(
    store: Store, learning_rate: float | None, lineage: str | None = None
) -> list[SparsityRow]:
    """Return the table of a run: a row over all layers, then one per layer in model order.

    Args:
        store: the run's store, from which every version is rebuilt.
        learning_rate: of its steps; None if it is not known.
        lineage: of the versions to compare; the newest one by default.

    Raises:
        WeightsError: no version can be rebuilt, or the store is damaged.
    """
    way = _longest_way(store.index(), lineage)
    k_steps = KStepSparsity()
    predicted: dict[str, float] = {}
    state: State | None = None
    for entry in way:
        state = apply_stored(store.open(entry), state)
        if not predicted and learning_rate is not None:
            predicted = predicted_share(state, learning_rate)
        k_steps.add(entry.manifest.version, state)
    if state is None:
        raise WeightsError("the store has no version that can be rebuilt")
    sizes = {name: tensor.bits.size for name, tensor in state.items()}
    layers: dict[str, list[str]] = {ALL: sorted(sizes, key=_natural)}
    for name in layers[ALL]:
        layers.setdefault(layer_of(name), []).append(name)
    changed = [k_steps.mean_changed(k) for k in STEPS]
    return [_row(layer, names, sizes, predicted, changed) for layer, names in layers.items()]


def layer_of(name: str) -> str:
    """Return a tensor's layer: "model.layers.3"; outside the layers, the tensor's name without ".weight"."""
    found = _LAYER.match(name)
    return found[1] if found else name.removesuffix(".weight")


def _row(
    layer: str,
    names: Sequence[str],
    sizes: Mapping[str, int],
    predicted: Mapping[str, float],
    changed: Sequence[Mapping[str, float] | None],
) -> SparsityRow:
    total = sum(sizes[name] for name in names)
    return SparsityRow(
        layer=layer,
        num_elements=total,
        predicted_share=sum(predicted[n] * sizes[n] for n in names) / max(1, total) if predicted else None,
        changed_shares=tuple(
            None if counts is None else sum(counts[name] for name in names) / max(1, total)
            for counts in changed
        ),
    )


def _longest_way(entries: Iterable[Entry], lineage: str | None) -> list[Entry]:
    """Return the entries from the earliest snapshot, through the most patches, to the newest version."""
    entries = list(entries)
    if lineage is None and entries:
        lineage = max(entries, key=lambda entry: entry.sequence).manifest.lineage
    ours = [entry for entry in entries if entry.manifest.lineage == lineage]

    def early_and_slow(entry: Entry) -> float:
        # The earliest snapshot and then the most patches lead through the most versions.
        return float(entry.manifest.version) if entry.is_snapshot else -(2.0**-20)

    steps = cheapest_steps(ours, early_and_slow)
    goal = max(steps, key=lambda position: position.version, default=None)
    return way_to(steps, goal) if goal else []


def _spec(state: Mapping[str, BitTensor], name: str) -> object:
    return state[name].spec(name) if name in state else None


def _differing(old: BitArray, new: BitArray) -> Iterable[int]:
    for start in range(0, old.size, _SLICE):
        yield int(np.count_nonzero(old[start : start + _SLICE] != new[start : start + _SLICE]))


def _count_below(tensor: BitTensor, bound: float) -> int:
    with np.errstate(invalid="ignore"):  # NaNs are below nothing
        return sum(
            int(np.count_nonzero(np.abs(_values(tensor, start, start + _SLICE)) < bound))
            for start in range(0, tensor.bits.size, _SLICE)
        )


def _values(tensor: BitTensor, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Return elements [start, stop) as float32, shape (elements,)."""
    bits = tensor.bits[start:stop]
    if tensor.dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16 if tensor.dtype == "float16" else np.float32).astype(np.float32)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts "layers.10" after "layers.9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
