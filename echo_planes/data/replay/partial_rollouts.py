"""Partial rollouts: the tokens sampled so far for prompts that are not finished (RLBoost, section 4.2).

Tokens are kept as they arrive, so that a prompt whose worker is lost, leaves or has too much to do goes on
elsewhere from its last token. The sampler's logprobs and the version of every token are kept with it: to the
learner it makes no difference how many workers an answer has seen.
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
        partials: what the lease began with.
    """

    def __init__(self, partials: tuple[PartialRollout, ...] = ()) -> None:
        self._contexts = [partial.context for partial in partials]
        self._pieces: list[list[Sample]] = [[partial.sample] for partial in partials]
        self._lengths = [len(partial.sample.token_ids) for partial in partials]

    def add(self, tokens: LeaseTokens) -> None:
        """Enter a message. What does not begin where its call ends here is left out: it came twice, or
        something before it did not come. What is kept is always the beginning of what was sampled.

        Raises:
            LeaseError: a piece is not whole, or goes on after its call's end ("malformed"). Then nothing of
                the message is entered.
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
        """Partial rollouts that another worker can go on from.

        Args:
            published: digest of every version of this lineage. What was made under anything else is left out.
        """
        partials = [PartialRollout(c, joined(p)) for c, p in zip(self._contexts, self._pieces, strict=True)]
        return made_under([partial for partial in partials if partial.sample.token_ids], published)

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def prefill_tokens(self) -> int:
        """Tokens another worker computes before it samples on: context and answer of every unfinished call.

        Where all are finished (an episode is between two turns), those of the longest.
        """
        lengths = [len(c) + n for c, n in zip(self._contexts, self._lengths, strict=True)]
        unfinished = [n for n, p in zip(lengths, self._pieces, strict=True) if not p[-1].finish_reason]
        return sum(unfinished) or max(lengths, default=0)


class Partials:
    """The partial rollouts of live leases, and those that wait for another worker.

    Args:
        waiting: of a checkpoint, by prompt index.
    """

    def __init__(self, waiting: Mapping[int, tuple[PartialRollout, ...]]) -> None:
        self._books: dict[str, LeasePartials] = {}  # by lease
        self._waiting = dict(waiting)  # by prompt index
        self._finished: deque[int] = deque(maxlen=RECENT_COMPLETIONS)  # tokens of accepted groups

    def open(self, lease: Lease) -> None:
        """A lease begins, with its partial rollouts."""
        self._books[lease.lease_id] = LeasePartials(lease.partials)

    def add(self, tokens: LeaseTokens) -> None:
        """Tokens of a live lease. Raises what `LeasePartials.add` does."""
        self._books[tokens.lease_id].add(tokens)

    def close(self, lease_id: str) -> int:
        """A lease ended with a result. Returns how many tokens were streamed for it."""
        return self._books.pop(lease_id).num_tokens

    def finished(self, group_tokens: int) -> None:
        """A group was accepted: so many tokens were sampled for it."""
        self._finished.append(group_tokens)

    def prefill_tokens(self, lease: Lease) -> int:
        """Tokens that another worker would compute before it goes on with a live lease."""
        return self._books[lease.lease_id].prefill_tokens or len(lease.prompt.token_ids)

    def is_far(self, lease: Lease) -> bool:
        """Whether more was streamed of a live lease than half of what recent groups came to (their median).

        Such a one is sooner finished where it is. While few groups are finished, none is said to be far.
        """
        if len(self._finished) < ENOUGH_COMPLETIONS:
            return False
        return self._books[lease.lease_id].num_tokens > statistics.median(self._finished) / 2

    def shelve(self, lease: Lease, published: Mapping[int, str]) -> int:
        """A lease ended without a result: keep its partial rollouts for whoever is next.

        Returns how many of its tokens nobody can go on from.
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
        """Partial rollouts that a resume can go on from: waiting ones, those of live leases as if ended.

        Args:
            live: the live leases.
            published: as for `LeasePartials.partials`.
            oldest: version below which nothing is trained any more.

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
    """Those of which every token was made under a published version."""
    return tuple(
        partial
        for partial in partials
        if all(published.get(span.version) == span.digest for span in partial.sample.spans)
    )


def oldest_version(partials: tuple[PartialRollout, ...]) -> int:
    """The oldest version any of their tokens was made under."""
    return min(span.version for partial in partials for span in partial.sample.spans)


def num_tokens(partials: tuple[PartialRollout, ...]) -> int:
    """Tokens in all of them."""
    return sum(len(partial.sample.token_ids) for partial in partials)
