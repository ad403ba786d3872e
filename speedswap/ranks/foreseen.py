"""Lookups of a step that are known before the program makes them, and so share the rounds of one that comes first."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MOST_FAILURES = 3
_CALL = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)  # without it, no call is found


def ids_in_calls() -> list[Tensor]:
    """Return tensors in host memory that may be ids: arguments of this thread's calls of modules, outermost first."""
    given: list[tuple[Any, ...]] = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _CALL:
            given.append((*frame.f_locals["args"], *frame.f_locals["kwargs"].values()))
    return [ids for arguments in reversed(given) for each in arguments for ids in _ids_in(each)]


def _ids_in(value: Any) -> Iterator[Tensor]:
    if type(value) is Tensor:
        if value.dtype in (torch.int32, torch.int64) and value.dim() and not value.is_cuda:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _ids_in(each)
    elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], (str, bytes, int, float)):
        for each in value:
            yield from _ids_in(each)


class View(NamedTuple):
    """A view of a tensor's memory along with it, such as another column of a batch of ids.

    Attributes:
        offset: the items between their first ones.
        shape, strides: of the dimensions after the first, which both have in common; None for those of the tensor.
    """

    offset: int
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()

    @classmethod
    def between(cls, first: Tensor, other: Tensor) -> View | None:
        """Return how another tensor lies in the memory of the first; None if it does not."""
        if other is first:
            return cls(0)
        is_along = (
            min(first.dim(), other.dim(), first.numel(), other.numel()) > 0
            and first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and (first.dtype, first.shape[0], first.stride(0)) == (other.dtype, other.shape[0], other.stride(0))
        )
        offset = int(other.storage_offset() - first.storage_offset())
        return cls(offset, tuple(other.shape[1:]), other.stride()[1:]) if is_along else None

    def of(self, first: Tensor) -> Tensor | None:
        """Return the view along another first tensor; None if that has no such memory."""
        if self.shape is None:
            return first
        offset = int(first.storage_offset()) + self.offset
        try:
            return first.as_strided((len(first), *self.shape), (first.stride(0), *self.strides), offset)
        except RuntimeError:
            return None


class Foreseen:
    """The lookups whose ids are known at an earlier lookup, as learnt from earlier steps.

    They lie in the memory of its ids, or of the arguments of a module around it, such as a model's batch.
    All ranks learn the same, or notice that they have not where they would use it; then they learn again.

    Attributes:
        expected: the lookups of the next pass, if the program has told them: the tables and the ids.
    """

    def __init__(self) -> None:
        self.expected: list[tuple[int, Tensor]] = []
        # Lookups of this pass that have met the other ranks, with their ids and those around them.
        self._first: dict[int, Sequence[Tensor]] = {}
        # What follows each of them, in program order: the table, and the place and view of its ids.
        self._after: dict[int, list[tuple[int, int, View]]] = {}
        self._failures: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()  # how often a lookup has not followed

    def begin_pass(self) -> None:
        """Forget the lookups so far."""
        self._first = {}

    def note(self, number: int, known: Sequence[Tensor]) -> None:
        """Learn from a lookup in a table that has met the other ranks.

        Args:
            number: the number of the table's training step.
            known: its ids, and others that are known with them; not modified within the pass.
        """
        ids = known[0]
        for first, around in self._first.items():
            if first == number or self._failures[first] >= _MOST_FAILURES:
                continue
            views = ((place, View.between(some, ids)) for place, some in enumerate(around))
            if (found := next(((number, place, view) for place, view in views if view), None)) is not None:
                after = self._after.setdefault(first, [])
                after += [] if found in after else [found]
                return
        self._first.setdefault(number, known)

    def after(self, number: int, known: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the lookups that follow one: the numbers of the tables' training steps, and the ids."""
        if number in self._first:
            self.begin_pass()
        expected, self.expected = self.expected, []
        for place, (other, ids) in enumerate(expected):
            if other == number and ids.dtype == known[0].dtype and torch.equal(ids, known[0]):
                return expected[:place] + expected[place + 1 :]
        after = [each for each in self._after.get(number, []) if each[1] < len(known)]
        found = [(other, view.of(known[place])) for other, place, view in after]
        return [(other, some) for other, some in found if some is not None and self._left_out[other] < _MOST_FAILURES]

    def leave_out(self, number: int) -> None:
        """Record that a lookup did not follow, so that its rows came for nothing."""
        self._left_out[number] += 1

    @property
    def followers(self) -> set[int]:
        """The numbers of the tables whose lookups are known to follow others."""
        return {number for after in self._after.values() for number, *_ in after}

    def forget(self, number: int) -> None:
        """Forget what follows a lookup: ranks have learnt other things, or its ids were others."""
        self._failures[number] += self._after.pop(number, None) is not None

    def forget_follower(self, number: int) -> None:
        """Forget what precedes a lookup, whose ids were others."""
        for first in [first for first, after in self._after.items() if number in {other for other, *_ in after}]:
            self.forget(first)
