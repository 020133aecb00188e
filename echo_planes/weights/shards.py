"""Install of weights that several ranks of one engine hold in shards: on all of the ranks, or on none.

Every rank runs the same `ShardReceiver` over the same publication, in lockstep. Decisions depend only on data
that all ranks share, so all ranks decide alike: a step that fails on one rank fails on all. The first rank
puts whole tensors together from all shards, and digests them. Several ranks may hold copies of the same
elements: if the copies differ, the digest matches no publication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from echo_planes.errors import RunError, WeightsError
from echo_planes.types import ByteArray, TensorSpec
from echo_planes.weights.codec.entry import Applied, Change, IndexArray
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor, StateHasher
from echo_planes.weights.receiver import Receiver, Target, algorithm_of, digest_of_replaced

T = TypeVar("T")

_COPIES_DIFFER = "copies differ"  # digested instead of the dtype, so that the digest matches no publication


class Ranks(Protocol):
    """The processes of one engine. All of them make the same calls in the same order.

    Raises:
        RunError: another rank does not answer within the limit; every later call then fails at once.
    """

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        ...

    def tell(self, message: str) -> list[str]:
        """Send this rank's message to all ranks. Return every rank's message, in order of ranks."""
        ...

    def collect(self, part: ByteArray, sizes_bytes: Sequence[int]) -> list[ByteArray]:
        """Send this rank's bytes to the first rank.

        Args:
            part: this rank's bytes, shape (bytes,).
            sizes_bytes: size of every rank's part; only the first rank uses it.

        Returns:
            On the first rank every rank's bytes, in order of ranks; on the others an empty list.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a tensor that one rank holds: [start, stop) of each of `num_rows` rows of `row` elements.

    The tensor, and the shard, are flat and in C order.
    """

    num_rows: int
    row: int
    start: int
    stop: int

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, start: int, stop: int) -> Shard:
        """Return the shard [start, stop) of dimension `dim` of a tensor of this shape.

        Raises:
            WeightsError: the range lies outside the tensor.
        """
        if not 0 <= start <= stop <= shape[dim]:
            raise WeightsError(f"[{start}, {stop}) lies outside dimension {dim} of shape {tuple(shape)}")
        inner = math.prod(shape[dim + 1 :])
        return cls(math.prod(shape[:dim]), shape[dim] * inner, start * inner, stop * inner)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Shard:
        """Return the shard of all elements of a tensor of this shape."""
        elements = math.prod(shape)
        return cls(1, elements, 0, elements)

    @property
    def size(self) -> int:
        """Number of elements in the shard."""
        return self.num_rows * (self.stop - self.start)

    @property
    def elements(self) -> int:
        """Number of elements in the whole tensor."""
        return self.num_rows * self.row

    def cut(self, whole: BitArray) -> BitArray:
        """Return the shard's elements of a whole tensor, shape (size,), possibly as a view."""
        return whole.reshape(self.num_rows, self.row)[:, self.start : self.stop].reshape(-1)

    def paste(self, part: BitArray, whole: BitArray) -> None:
        """Write the shard's elements into a whole tensor."""
        rows = whole.reshape(self.num_rows, self.row)
        rows[:, self.start : self.stop] = part.reshape(self.num_rows, self.stop - self.start)

    def select(self, positions: IndexArray) -> slice | npt.NDArray[np.bool_]:
        """Return an index into `positions` that selects the ones in the shard.

        `positions` are flat positions in the whole tensor, strictly rising.
        """
        if self.num_rows == 1:
            first, last = np.searchsorted(positions, [self.start, self.stop])
            return slice(int(first), int(last))
        column = positions % self.row
        held: npt.NDArray[np.bool_] = (column >= self.start) & (column < self.stop)
        return held

    def local(self, positions: IndexArray) -> IndexArray:
        """Convert positions in the whole tensor, all in the shard, to positions in the shard; same dtype."""
        row, column = np.divmod(positions, self.row)
        at: IndexArray = row * (self.stop - self.start) + (column - self.start)
        return at


def check_cover(name: str, shards: Sequence[Shard]) -> None:
    """Check that shards cover their tensor, and that any two of them are equal or disjoint.

    Raises:
        WeightsError: they leave gaps or overlap.
    """
    parts = sorted({(shard.start, shard.stop) for shard in shards})
    ends = [0, *(stop for _, stop in parts)]
    rows = {(shard.num_rows, shard.row) for shard in shards}
    if len(rows) != 1 or ends[-1] != shards[0].row or [start for start, _ in parts] != ends[:-1]:
        raise WeightsError(f"the shards of tensor {name!r} leave gaps or overlap: {sorted(rows)}, {parts}")


def together(ranks: Ranks, step: Callable[[], T]) -> T:
    """Take a step on every rank. If it fails on any rank, it fails on all.

    Raises:
        WeightsError: it failed on some rank; the message names the first such rank.
    """
    done: list[T] = []
    failure = ""
    try:
        done.append(step())
    except Exception as error:  # noqa: BLE001  a device may raise anything; it becomes an error on all ranks
        failure = _text(error)
    _fail_together(ranks.tell(failure))
    return done[0]


def _fail_together(failures: Sequence[str]) -> None:
    for rank, failure in enumerate(failures):
        if failure:
            raise WeightsError(f"rank {rank}: {failure}")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"


class ShardedTensors:
    """The whole tensors of an engine, as `weights.receiver.Target` on each of its ranks.

    `Applied.old` of `exchange` holds only this rank's bits. No rank has a whole tensor to `read`.

    Args:
        local: this rank's shards, under the names of the whole tensors.
        placed: by name, the spec of the whole tensor, and the part of it that this rank holds.
        ranks: all ranks of the engine.

    Raises:
        WeightsError: the shards of all ranks do not make up whole tensors, or differ in kind.
    """

    def __init__(self, local: Target, placed: Mapping[str, tuple[TensorSpec, Shard]], ranks: Ranks) -> None:
        self._local = local
        self._ranks = ranks
        told = ranks.tell(
            json.dumps([[spec.name, spec.dtype, spec.shape, astuple(at)] for spec, at in placed.values()])
        )
        self._specs: dict[str, TensorSpec] = {}
        self._held: list[dict[str, Shard]] = []  # by rank
        for message in told:
            held: dict[str, Shard] = {}
            for name, dtype, shape, fields in json.loads(message):
                spec = TensorSpec(name, dtype, tuple(shape))
                if self._specs.setdefault(name, spec) != spec:
                    raise WeightsError(f"ranks differ in tensor {name!r}: {self._specs[name]} and {spec}")
                held[name] = Shard(*fields)
            self._held.append(held)
        self._mine = self._held[ranks.rank]
        for name, spec in self._specs.items():
            shards = [held[name] for held in self._held if name in held]
            check_cover(name, shards)
            if shards[0].elements != math.prod(spec.shape):
                raise WeightsError(f"the shards of tensor {name!r} do not make up its shape {spec.shape}")

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @property
    def local(self) -> Target:
        """This rank's shards."""
        return self._local

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the specs of the whole tensors, by name."""
        return self._specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> BitTensor:
        """Refuse to read: no rank holds whole tensors, and no installable codec needs a base.

        Raises:
            WeightsError: always.
        """
        raise WeightsError(f"tensor {name!r} was to be read whole, but lies in shards on several ranks")

    def exchange(self, change: Change) -> Applied:
        """Exchange as `Target.exchange` does. All ranks write their part, or none does.

        Raises:
            WeightsError: a rank could not write.
        """
        done: list[BitArray] = []
        failure = ""
        try:
            done.append(self._write(change))
        except Exception as error:  # noqa: BLE001  a device may raise anything; it becomes an error on all ranks
            failure = _text(error)
        failures = self._ranks.tell(failure)
        if any(failures) and done:
            self._write(change, done[0])
        _fail_together(failures)
        return Applied(change, done[0])

    def put_back(self, done: Sequence[Applied]) -> None:
        """Undo exchanges, given in the order in which they were made.

        Raises:
            WeightsError: a rank did not take its old bits.
        """
        together(self._ranks, lambda: self._put_back(done))

    def digest(self, algorithm: str) -> str:
        """Digest the present whole tensors. The result is the same on every rank.

        Raises:
            WeightsError: a rank cannot read its tensors.
        """
        hasher = StateHasher(algorithm)
        unread: list[str] = []
        for name in sorted(self._specs):
            spec = self._specs[name]
            itemsize = BIT_DTYPES[spec.dtype].itemsize
            sizes = [held[name].size * itemsize if name in held else 0 for held in self._held]
            parts = self._ranks.collect(_bytes(self._part(name, unread)), sizes)
            if parts:
                bits = np.empty(math.prod(spec.shape), BIT_DTYPES[spec.dtype])
                copies_differ = self._put_together(name, parts, bits)
                hasher.begin(name, _COPIES_DIFFER if copies_differ else spec.dtype, spec.shape)
                hasher.update(bits)
        _fail_together(self._ranks.tell("; ".join(unread[:1])))
        return self._ranks.tell(hasher.digest())[0]

    def digest_of_replaced(self, done: Sequence[Applied]) -> str:
        """Return `receiver.digest_of_replaced` of whole changes, from every rank's old bits; on all ranks."""
        return self._ranks.tell(digest_of_replaced(self._replaced(done)))[0]

    # --- the first rank --------------------------------------------------------------------------

    def _put_together(self, name: str, parts: Sequence[ByteArray], whole: BitArray) -> bool:
        """Fill a tensor from its shards. Return whether copies of one shard differ."""
        seen: dict[Shard, BitArray] = {}
        differ = False
        for held, part in zip(self._held, parts, strict=True):
            if name not in held:
                continue
            bits, shard = part.view(whole.dtype), held[name]
            if shard not in seen:
                seen[shard] = bits
                shard.paste(bits, whole)
            differ |= not np.array_equal(seen[shard], bits)
        return differ

    def _replaced(self, done: Sequence[Applied]) -> Iterator[BitArray]:
        """Yield the bits that each change replaced, each followed by copies that differ from them.

        Ranks other than the first send their part, and yield nothing.
        """
        for applied in done:
            change, positions = applied.change, _positions(applied.change)
            shards = [held.get(change.name) for held in self._held]
            chosen = [shard.select(positions) if shard else slice(0, 0) for shard in shards]
            sizes = [applied.old.itemsize * positions[at].size for at in chosen]
            parts = self._ranks.collect(_bytes(applied.old), sizes)
            if not parts:
                continue
            whole = np.empty_like(change.values)
            seen: dict[Shard, BitArray] = {}
            differing: list[BitArray] = []
            for shard, at, part in zip(shards, chosen, parts, strict=True):
                if shard is not None:
                    whole[at] = old = part.view(whole.dtype)
                    if not np.array_equal(seen.setdefault(shard, old), old):
                        differing.append(old)
            yield whole
            yield from differing

    # --- one rank --------------------------------------------------------------------------------

    def _here(self, change: Change, old: BitArray | None = None) -> Change | None:
        """Return this rank's part of a change, at positions in its shard; None if the change misses it.

        `old`, if given, takes the place of the change's new bits.
        """
        shard = self._mine.get(change.name)
        if shard is None:
            return None
        if change.indices is None and (change.start, change.values.size) == (0, shard.elements):
            return Change(change.name, 0, None, shard.cut(change.values) if old is None else old)
        positions = _positions(change)
        chosen = shard.select(positions)
        local = shard.local(positions[chosen])
        if not local.size:
            return None
        return Change(change.name, int(local[0]), local, change.values[chosen] if old is None else old)

    def _write(self, change: Change, old: BitArray | None = None) -> BitArray:
        here = self._here(change, old)
        return self._local.exchange(here).old if here else change.values[:0]

    def _put_back(self, done: Sequence[Applied]) -> None:
        for applied in reversed(done):
            self._write(applied.change, applied.old)
        for applied in done:
            here = self._here(applied.change, applied.old)
            if here is None:
                continue
            bits = self._local.read(here.name).bits
            if not np.array_equal(bits if here.indices is None else bits[here.indices], applied.old):
                raise RunError(f"tensor {here.name!r} did not take its old bits")

    def _part(self, name: str, unread: list[str]) -> BitArray:
        shard, dtype = self._mine.get(name), BIT_DTYPES[self._specs[name].dtype]
        if shard is None:
            return np.empty(0, dtype)
        try:
            bits = self._local.read(name).bits
            if bits.size == shard.size and bits.dtype == dtype:
                return bits
            unread.append(f"tensor {name!r} reads as {bits.size} elements of {bits.dtype}")
        except Exception as error:  # noqa: BLE001  the other ranks wait for this part: fail after it
            unread.append(_text(error))
        return np.zeros(shard.size, dtype)


def _positions(change: Change) -> IndexArray:
    if change.indices is not None:
        return change.indices
    return np.arange(change.start, change.start + change.values.size)


def _bytes(bits: BitArray) -> ByteArray:
    return np.ascontiguousarray(bits).view(np.uint8)


class ShardReceiver(Receiver):
    """`Receiver` on one of several ranks. All ranks install the same publications in the same order.

    Args:
        tensors: whole tensors in shards on all ranks.
        probe: as for `Receiver`. It runs on all ranks at once; if it fails on one, it fails on all.
    """

    def __init__(self, tensors: ShardedTensors, probe: Callable[[], None] = lambda: None) -> None:
        super().__init__(tensors, lambda: together(tensors.ranks, probe))
        self.tensors = tensors

    def live_digest(self, algorithm: str | None = None) -> str:
        if algorithm is None:
            algorithm = algorithm_of(self.installed.digest) if self.installed else "xxh3"
        return self.tensors.digest(algorithm)

    def _digest_of_replaced(self, done: Sequence[Applied]) -> str:
        return self.tensors.digest_of_replaced(done)

    def _restore(self, done: Sequence[Applied]) -> None:
        self.tensors.put_back(done)
