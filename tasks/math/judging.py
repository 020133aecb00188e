"""Verdict on an answer beside the right one: exact where it can be, math-verify's algebra elsewhere."""

from __future__ import annotations

from .clean import (
    as_interval,
    clean,
    has_same_words,
    is_interval,
    same_in_base,
    same_letter,
    same_letters,
    same_share,
    without_unit,
)
from .grade import as_fraction, compare_exactly
from .stated import Listed, is_equation, is_value_or_named, listed, unnamed, values
from .verifier import Verdict, Verifier


class MathJudge:
    """Judge of answers.

    Args:
        timeout_s: time for one symbolic comparison, seconds.
        max_answer_chars: longer answers are "unparsable".

    Example:
        >>> MathJudge(3.0, 256).verdict("(3,-7)", "x=3, y=-7")
        'correct'
    """

    def __init__(self, timeout_s: float, max_answer_chars: int) -> None:
        self._verifier = Verifier(timeout_s, max_answer_chars)
        self._max_answer_chars = max_answer_chars

    def verdict(self, gold: str, answer: str | None) -> Verdict:
        """Compare an answer, as a box or a tag holds it, with the right one."""
        if not answer or len(answer) > self._max_answer_chars:
            return "unparsable"
        gold, answer = clean(gold), clean(answer)
        if (letter := same_letter(gold, answer)) is not None:
            return _verdict(letter)
        if compare_exactly(gold, answer) or has_same_words(gold, answer):
            return "correct"
        if (shares := same_share(gold, answer)) is not None:
            return _verdict(shares)
        if (based := same_in_base(gold, answer)) is not None:
            return _verdict(based)
        if (found := self._lists(gold, answer)) is not None:
            return found
        return self._one(gold, answer)

    def close(self) -> None:
        """End the verifier's process."""
        self._verifier.close()

    def _lists(self, gold: str, answer: str) -> Verdict | None:
        """Compare lists of which one has named values; None: there are no such lists."""
        right, said = listed(gold), listed(answer)
        if right is None or said is None or (right.names is None and said.names is None):
            return None
        if len(right.items) != len(said.items):
            return "wrong"
        several = [one.names is not None and len(set(one.names)) == len(one.names) for one in (right, said)]
        if all(several):
            return self._in_order(_by_name(right), _by_name(said))
        if right.names and said.names and set(right.names) != set(said.names):
            return "wrong"
        if any(several) and (right.is_ordered or said.is_ordered):
            return self._in_order(_by_name(right), _by_name(said))
        return self._in_any_order(right.items, said.items)

    def _in_order(self, right: list[tuple[str, str]], said: list[tuple[str, str]]) -> Verdict:
        for (name, one), (other_name, other) in zip(right, said, strict=True):
            if name and other_name and name != other_name:
                return "wrong"
            if (found := self._one(one, other)) != "correct":
                return found
        return "correct"

    def _in_any_order(self, right: tuple[str, ...], said: tuple[str, ...]) -> Verdict:
        left = list(said)
        for one in right:
            found: Verdict = "wrong"
            for other in left:
                if (found := self._one(one, other)) == "correct":
                    left.remove(other)
                    break
            else:
                return found
        return "correct"

    def _one(self, gold: str, answer: str) -> Verdict:
        """Compare single statements."""
        if as_fraction(number := without_unit(gold) or gold) is not None:
            bare = without_unit(unnamed(answer))
            if bare is None:
                return "unparsable"
            gold, answer = number, clean(bare)
        elif is_interval(gold) and (interval := as_interval(answer)):
            answer = interval
        elif (interval := as_interval(gold)) and is_interval(answer):
            gold = interval
        elif interval and same_letters(gold, answer) and (stated := as_interval(answer)):
            gold, answer = interval, stated
        said = self._compare(gold, answer)
        if said != "correct" or compare_exactly(gold, answer):
            return said
        sides = values(gold, answer)
        if sides is None:
            return "unparsable"
        if is_equation(gold) and answer.count("=") == 1:
            return said
        # All values that the answer states must be the right one: `33=34` does not count as 34. Where the
        # right answer is an equation itself, they must be equal.
        right = gold if is_value_or_named(gold) else (sides or [answer])[-1]
        return next((other for value in sides if (other := self._compare(right, value)) != said), said)

    def _compare(self, gold: str, answer: str) -> Verdict:
        settled = compare_exactly(gold, answer)
        return self._verifier.verify(gold, answer) if settled is None else _verdict(settled)


def _verdict(is_right: bool) -> Verdict:
    return "correct" if is_right else "wrong"


def _by_name(values: Listed) -> list[tuple[str, str]]:
    """Return values in the order of their names; those without a name are in order already."""
    if values.names is None:
        return [("", item) for item in values.items]
    return sorted(zip(values.names, values.items, strict=True))
