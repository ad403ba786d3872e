"""Lookups of a step that are known before the program makes them, and so share the rounds of one that comes first."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

_MOST_FAILURES = 3


class View(NamedTuple):
    """A view of a tensor's memory along with it, such as another column of a batch of ids.

    Attributes:
        offset: the items between their first ones.
        shape, strides: of the dimensions after the first, which both have in common.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def between(cls, first: Tensor, other: Tensor) -> View | None:
        """Return how another tensor lies in the memory of the first; None if it does not."""
        is_along = (
            min(first.dim(), other.dim(), first.numel(), other.numel()) > 0
            and first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and (first.dtype, first.shape[0], first.stride(0)) == (other.dtype, other.shape[0], other.stride(0))
        )
        offset = int(other.storage_offset() - first.storage_offset())
        return cls(offset, tuple(other.shape[1:]), other.stride()[1:]) if is_along else None

    def of(self, first: Tensor) -> Tensor | None:
        """Return the view along another first tensor; None if that has no such memory."""
        offset = int(first.storage_offset()) + self.offset
        try:
            return first.as_strided((len(first), *self.shape), (first.stride(0), *self.strides), offset)
        except RuntimeError:
            return None


class Foreseen:
    """The lookups whose ids lie in the memory of another lookup's, as learnt from earlier steps.

    All ranks learn the same, or notice that they have not where they would use it; then they learn again.
    """

    def __init__(self) -> None:
        self._first: dict[int, Tensor] = {}  # lookups of this pass that have met the other ranks, with their ids
        self._after: dict[int, list[tuple[int, View]]] = {}  # what follows each of them, in program order
        self._failures: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()  # how often a lookup has not followed

    def begin_pass(self) -> None:
        """Forget the lookups so far."""
        self._first = {}

    def note(self, number: int, ids: Tensor) -> None:
        """Learn from a lookup in a table that has met the other ranks.

        Args:
            number: the number of the table's training step.
            ids: the ids, not modified within the pass.
        """
        for first, its_ids in self._first.items():
            if first == number or self._failures[first] >= _MOST_FAILURES:
                continue
            if (view := View.between(its_ids, ids)) is not None:
                known = self._after.setdefault(first, [])
                known += [] if (number, view) in known else [(number, view)]
                return
        self._first.setdefault(number, ids)

    def after(self, number: int, ids: Tensor) -> list[tuple[int, Tensor]]:
        """Return the lookups that follow one: the numbers of the tables' training steps, and the ids."""
        if number in self._first:
            self.begin_pass()
        found = [(other, view.of(ids)) for other, view in self._after.get(number, [])]
        return [(other, some) for other, some in found if some is not None and self._left_out[other] < _MOST_FAILURES]

    def leave_out(self, number: int) -> None:
        """Record that a lookup did not follow, so that its rows came for nothing."""
        self._left_out[number] += 1

    @property
    def followers(self) -> set[int]:
        """The numbers of the tables whose lookups are known to follow others."""
        return {number for known in self._after.values() for number, _ in known}

    def forget(self, number: int) -> None:
        """Forget what follows a lookup: ranks have learnt other things, or its ids were others."""
        self._failures[number] += self._after.pop(number, None) is not None

    def forget_follower(self, number: int) -> None:
        """Forget what precedes a lookup, whose ids were others."""
        for first in [first for first, known in self._after.items() if number in dict(known)]:
            self.forget(first)
