"""Lengths of answers: a pure function of seed, prompt and sample."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK_PROMPTS = 1024  # prompts drawn together
MAX_BLOCKS = 64  # blocks kept: about 22 MiB with 8 samples a prompt
_WORDS = npt.NDArray[np.uint64]


class LengthModel:
    """Lognormal lengths of answers, in tokens, cut off at a cap.

    Args:
        seed: of the scenario.
        num_samples: samples in a group (n).
        median_tokens: median length before the cap.
        sigma: standard deviation of the logarithm; 0: all answers have the median length.
        max_tokens: longest answer.
    """

    def __init__(
        self, seed: int, *, num_samples: int, median_tokens: float, sigma: float, max_tokens: int
    ) -> None:
        self._seed = seed
        self._num_samples = num_samples
        self._median = median_tokens
        self._sigma = sigma
        self._max = max_tokens
        self._blocks: OrderedDict[int, list[list[int]]] = OrderedDict()

    @property
    def mean_tokens(self) -> float:
        """Expected tokens of an answer, the cap included."""
        if self._sigma == 0:
            return min(self._median, float(self._max))
        z = (math.log(self._max) - math.log(self._median)) / self._sigma
        below = self._median * math.exp(self._sigma**2 / 2) * _normal_cdf(z - self._sigma)
        return below + self._max * (1 - _normal_cdf(z))

    def tokens(self, prompt_index: int) -> Sequence[int]:
        """Return the lengths of the answers to one prompt, by sample; at least 1."""
        number, row = divmod(prompt_index, BLOCK_PROMPTS)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._draw(number)
            if len(self._blocks) > MAX_BLOCKS:
                self._blocks.popitem(last=False)
        return block[row]

    def _draw(self, number: int) -> list[list[int]]:
        prompts = np.arange(number * BLOCK_PROMPTS, (number + 1) * BLOCK_PROMPTS, dtype=np.uint64)
        samples = np.arange(self._num_samples, dtype=np.uint64)
        key = mix(mix(np.array([[self._seed]], np.uint64)) + prompts[:, None]) + samples
        # Box-Muller: two uniform numbers in (0, 1] and [0, 1) make one normal number.
        radius = np.sqrt(-2 * np.log(1 - uniform(mix(key))))
        normal = radius * np.cos(2 * np.pi * uniform(mix(~key)))
        tokens = self._median * np.exp(self._sigma * normal)
        lengths: list[list[int]] = np.clip(np.rint(tokens), 1, self._max).astype(np.int64).tolist()
        return lengths


def mix(words: _WORDS) -> _WORDS:
    """Mix 64-bit words bijectively, so that outputs look unrelated (finalizer of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniform(words: _WORDS) -> npt.NDArray[np.float64]:
    """Convert words to numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))
