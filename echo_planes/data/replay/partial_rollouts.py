"""Partial rollouts: the tokens sampled so far for prompts that are not finished (RLBoost, section 4.2).

Tokens are kept as they arrive. When a worker is lost, leaves or is overloaded, another worker continues its
prompts from their last token. Each token keeps its sampler's logprob and version, so training does not depend
on how many workers an answer came from.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from echo_planes.data.replay.leases import ENOUGH_COMPLETIONS, RECENT_COMPLETIONS
from echo_planes.errors import LeaseError
from echo_planes.types import Lease, LeaseTokens, PartialRollout, Sample, is_whole, joined


class LeasePartials:
    """The partial rollouts of one lease, as its worker streams them.

    Args:
        partials: partial rollouts that the lease was issued with.
    """

    def __init__(self, partials: tuple[PartialRollout, ...] = ()) -> None:
        self._contexts = [partial.context for partial in partials]
        self._pieces: list[list[Sample]] = [[partial.sample] for partial in partials]
        self._lengths = [len(partial.sample.token_ids) for partial in partials]

    def add(self, tokens: LeaseTokens) -> None:
        """Enter a message. A piece that does not begin at the present end of its call is left out: it came
        twice, or an earlier piece is missing. So the kept tokens are always a prefix of the sampled ones.

        Raises:
            LeaseError: a piece is not whole, or continues a finished call ("malformed"). Then nothing of the
                message is entered.
        """
        lengths, ended = list(self._lengths), [bool(pieces[-1].finish_reason) for pieces in self._pieces]
        kept: list[tuple[int, PartialRollout]] = []
        for number, piece in tokens.pieces:
            if not is_whole(piece.sample) or number < 0:
                raise LeaseError("malformed")
            if number == len(lengths) and piece.first == 0 and piece.context:
                lengths.append(0)
                ended.append(False)
            elif number >= len(lengths) or piece.first != lengths[number]:
                continue
            elif ended[number]:
                raise LeaseError("malformed")
            lengths[number] += len(piece.sample.token_ids)
            ended[number] = bool(piece.sample.finish_reason)
            kept.append((number, piece))
        for number, piece in kept:
            if number == len(self._pieces):
                self._contexts.append(piece.context)
                self._pieces.append([])
            self._pieces[number].append(piece.sample)
        self._lengths = lengths

    def partials(self, published: Mapping[int, str]) -> tuple[PartialRollout, ...]:
        """Return the partial rollouts that another worker can continue.

        Args:
            published: digest of every version of this lineage; calls with other tokens are left out.
        """
        partials = [PartialRollout(c, joined(p)) for c, p in zip(self._contexts, self._pieces, strict=True)]
        return made_under([partial for partial in partials if partial.sample.token_ids], published)

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def prefill_tokens(self) -> int:
        """Tokens another worker must prefill: context and answer of every unfinished call.

        If all calls are finished (the episode is between two turns), those of the longest call.
        """
        lengths = [len(c) + n for c, n in zip(self._contexts, self._lengths, strict=True)]
        unfinished = [n for n, p in zip(lengths, self._pieces, strict=True) if not p[-1].finish_reason]
        return sum(unfinished) or max(lengths, default=0)


class Partials:
    """The partial rollouts of live leases, and those that wait for another worker.

    Args:
        waiting: waiting partial rollouts of a checkpoint, by prompt index.
    """

    def __init__(self, waiting: Mapping[int, tuple[PartialRollout, ...]]) -> None:
        self._books: dict[str, LeasePartials] = {}  # by lease
        self._waiting = dict(waiting)  # by prompt index
        self._finished: deque[int] = deque(maxlen=RECENT_COMPLETIONS)  # sampled tokens of accepted groups

    def open(self, lease: Lease) -> None:
        """Begin a lease with its partial rollouts."""
        self._books[lease.lease_id] = LeasePartials(lease.partials)

    def add(self, tokens: LeaseTokens) -> None:
        """Enter tokens of a live lease. Raises what `LeasePartials.add` does."""
        self._books[tokens.lease_id].add(tokens)

    def close(self, lease_id: str) -> int:
        """Forget a lease that ended with a result. Return how many tokens it began with or streamed."""
        return self._books.pop(lease_id).num_tokens

    def finished(self, group_tokens: int) -> None:
        """Record the number of tokens sampled for an accepted group."""
        self._finished.append(group_tokens)

    def prefill_tokens(self, lease: Lease) -> int:
        """Return the tokens that another worker would compute before it continues a live lease."""
        return self._books[lease.lease_id].prefill_tokens or len(lease.prompt.token_ids)

    def is_far(self, lease: Lease) -> bool:
        """Return whether a live lease has more tokens than half the median of recently accepted groups.

        Its own worker finishes such a lease sooner. False while too few groups are finished.
        """
        if len(self._finished) < ENOUGH_COMPLETIONS:
            return False
        return self._books[lease.lease_id].num_tokens > statistics.median(self._finished) / 2

    def shelve(self, lease: Lease, published: Mapping[int, str]) -> int:
        """Keep the partial rollouts of a lease that ended without a result, for the prompt's next worker.

        Return how many of its tokens cannot be continued.
        """
        book = self._books.pop(lease.lease_id)
        partials = book.partials(published)
        if partials:
            self._waiting[lease.prompt.index] = partials
        return book.num_tokens - num_tokens(partials)

    def take(self, prompt_index: int) -> tuple[PartialRollout, ...]:
        """Remove and return the waiting partial rollouts of a prompt."""
        return self._waiting.pop(prompt_index, ())

    def state(
        self, live: Iterable[Lease], published: Mapping[int, str], oldest: int
    ) -> tuple[dict[int, tuple[PartialRollout, ...]], int]:
        """Return the partial rollouts that a resume can continue: waiting ones, and those of live leases.

        Args:
            live: the live leases.
            published: as for `LeasePartials.partials`.
            oldest: oldest version that is still trained.

        Returns:
            Partial rollouts by prompt index, and how many tokens were left out.
        """
        partials = dict(self._waiting)
        total = sum(num_tokens(waiting) for waiting in partials.values())
        for lease in live:
            book = self._books[lease.lease_id]
            total += book.num_tokens
            partials[lease.prompt.index] = book.partials(published)
        kept = {index: mine for index, mine in partials.items() if mine and oldest_version(mine) >= oldest}
        return kept, total - sum(num_tokens(mine) for mine in kept.values())


def made_under(
    partials: Iterable[PartialRollout], published: Mapping[int, str]
) -> tuple[PartialRollout, ...]:
    """Return the partial rollouts whose tokens were all sampled under a published version and digest."""
    return tuple(
        partial
        for partial in partials
        if all(published.get(span.version) == span.digest for span in partial.sample.spans)
    )


def oldest_version(partials: tuple[PartialRollout, ...]) -> int:
    """Return the oldest version that any of their tokens was sampled under."""
    return min(span.version for partial in partials for span in partial.sample.spans)


def num_tokens(partials: tuple[PartialRollout, ...]) -> int:
    """Return the number of sampled tokens in all of them."""
    return sum(len(partial.sample.token_ids) for partial in partials)
