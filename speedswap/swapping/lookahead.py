"""Prefetch the next batch's rows while this one is computed with."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from torch import nn

from speedswap._words import a_kind
from speedswap.collectives import of_all_ranks
from speedswap.swapping.prefetched import Announced, PrefetchedLookup, prefetch_lookups
from speedswap.swapping.table_module import TableModule

Batch = TypeVar("Batch")


class LooksUp(Protocol):
    """A module that can tell its lookups ahead: an embedding, or one that holds several."""

    def lookups_of(self, given: Any, /) -> Sequence[tuple[TableModule, Announced]]:
        """Return the lookups that a forward pass makes with what its batch's function returned."""

    def modules(self) -> Iterator[nn.Module]:
        """Return the module and all modules within it, as ``nn.Module`` does."""


Module = TypeVar("Module", bound=LooksUp)
GivenOf = Callable[[Batch], Any]


@of_all_ranks
def lookahead(loader: Iterable[Batch], ids: Mapping[Module, GivenOf[Batch]], *, depth: int = 1) -> Lookahead[Batch]:
    """Iterate over a loader's batches, with the rows of the next ones already prefetched.

    While a step computes, the rows of the batch after it are made unique, checked and gathered, weight and optimizer
    state together: on a stream of their own for a GPU, by a background thread on the CPU. Rows that both batches have
    are forwarded on the device when the step is done, and the rows that the step has changed are written to the table
    while the next one computes. Every result is, bit for bit, that of the loop without it.

    The batches are taken from the loader ``depth`` steps earlier than without, so a loader that draws from the same
    random generator as the model's forward pass draws other numbers. After an exception, Ctrl-C or ``break`` the table
    has every step that was completed; reading or changing it in between waits for pending writes.

    Where ranks own the rows (:class:`speedswap.Ranks`), all of them iterate alike; ids go to the owners and rows come
    back while a step computes, on the CPU. The ranks learn of the end of each other's batches one step early: with the
    first rank whose loader ends, all stop, and ranks with more batches warn that they leave them out. An error of one
    rank's loader or ids is raised on all ranks in the turn of its batch.

    An embedding's id map is given the keys ``depth`` steps earlier than without, in the order of the batches. Until a
    batch is looked up for training, everybody else sees the map without its keys; a batch that never is never came.

    Args:
        loader: any iterable of batches, such as a ``DataLoader``; iterated anew each time.
        ids: for each :class:`speedswap.Embedding` or :class:`speedswap.EmbeddingBag` a function from a batch to the
            ids that the model will look up with it: a tensor, int32 or int64, or one for each lookup; for an
            :class:`speedswap.EmbeddingBagCollection` or :class:`speedswap.EmbeddingCollection` one to the features that
            it is called with. Other lookups work too, but are not prefetched. The ids are on the device of the lookup,
            or on the CPU with the module's ``weight`` on the device of the lookup.
        depth: how many batches ahead; 0 for the plain loop.

    Returns:
        An iterable of the loader's batches; it has a length if the loader has one.

    Raises:
        TypeError: ``loader`` is not iterable, a key of ``ids`` is another object, or a function returns something else.
        ValueError: ``depth`` is negative, or not the same on all ranks that own the rows together; or ``ids`` is empty.

    Example:
        >>> import torch, speedswap
        >>> items = speedswap.Embedding(1000, 8)
        >>> optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
        >>> loader = [{"item": torch.randint(1000, (16,))} for _ in range(3)]
        >>> for batch in speedswap.lookahead(loader, {items: lambda batch: batch["item"]}):
        ...     items(batch["item"]).square().sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    return Lookahead(loader, ids, depth)


@dataclass
class _Turn(Generic[Batch]):
    """A batch that waits for its turn, or the error raised in its place."""

    batch: Batch | None = None
    prefetched: defaultdict[TableModule, list[PrefetchedLookup]] = field(default_factory=lambda: defaultdict(list))
    error: Exception | None = None


class Lookahead(Generic[Batch]):
    """The iterable that :func:`lookahead` returns."""

    def __init__(self, loader: Iterable[Batch], ids: Mapping[Module, GivenOf[Batch]], depth: int) -> None:
        if isinstance(loader, Mapping) and any(callable(getattr(key, "lookups_of", None)) for key in loader):
            raise TypeError(
                f"loader is a dict of embeddings, and ids {a_kind(ids)}; give lookahead(loader, ids), the batches first"
            )
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"loader is {a_kind(loader)}; give an iterable of batches")
        if not isinstance(ids, Mapping):
            raise TypeError(
                f"ids is {a_kind(ids)}; give a dict from each embedding to a function from a batch to its ids, such as "
                "{embedding: lambda batch: batch}"
            )
        if not ids:
            raise ValueError("ids is empty; give a function from a batch to its ids for each embedding")
        for module, function in ids.items():
            if not callable(getattr(module, "lookups_of", None)):
                raise TypeError(
                    f"a key of ids is {a_kind(module)}; give a speedswap.Embedding or EmbeddingBag, or a collection"
                )
            if not callable(function):
                raise TypeError(f"ids[{module}] is {a_kind(function)}; give a function from a batch to its ids")
        self.depth = operator.index(depth)
        if self.depth < 0:
            raise ValueError(f"depth is {depth}; give 0 or more")
        self._loader = loader
        self._ids: dict[LooksUp, GivenOf[Batch]] = dict(ids.items())

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        modules = [each for module in self._ids for each in module.modules() if isinstance(each, TableModule)]
        if self.depth == 0:
            for batch in self._loader:
                self._begin_step(modules)
                yield batch
            return
        with ExitStack() as rest:  # of every module, also where a pending write has failed
            for module in modules:
                module._step.begin_lookahead(self.depth)
                rest.callback(module.table.drain)
                rest.callback(module._end_lookahead)
            yield from self._turns(modules)

    def _turns(self, modules: Sequence[TableModule]) -> Iterator[Batch]:
        source = iter(self._loader)
        waiting: deque[_Turn[Batch]] = deque()
        while True:
            # An error is raised in its turn: the batches before it are trained on first.
            while len(waiting) <= self.depth and not (waiting and waiting[-1].error):
                waiting.append(self._next(source, modules))
            if (error := waiting[-1].error) is not None:  # in each turn, as other ranks announce a batch in each
                self._end_announcements(modules, failed=not isinstance(error, StopIteration))
            turn = waiting.popleft()
            if isinstance(turn.error, StopIteration):
                return
            if turn.error is not None:
                try:
                    raise turn.error
                finally:
                    del turn, error  # its traceback has this frame: with them the caller's objects would outlive it
            has_turn = [module._begin_turn(turn.prefetched[module]) for module in modules]
            if not all(has_turn):
                return  # another rank has no more batches
            self._begin_step(modules)
            yield cast(Batch, turn.batch)

    def _next(self, source: Iterator[Batch], modules: Sequence[TableModule]) -> _Turn[Batch]:
        try:
            batch = next(source)
            announced = [each for module, given_of in self._ids.items() for each in module.lookups_of(given_of(batch))]
            turn = _Turn(batch)
            # Together, so that the rows of all tables are known after one round trip to a GPU.
            prefetched = prefetch_lookups([lookup for _, lookup in announced])
            for (module, _), lookup in zip(announced, prefetched, strict=True):
                turn.prefetched[module].append(lookup)
        except StopIteration as end:
            return _Turn(error=end.with_traceback(None))
        except Exception as error:
            return _Turn(error=error)
        except BaseException:
            self._end_announcements(modules, failed=True)
            raise
        return turn

    @staticmethod
    def _begin_step(modules: Sequence[TableModule]) -> None:
        for module in modules:
            module._step.begin_step("a batch")

    @staticmethod
    def _end_announcements(modules: Sequence[TableModule], *, failed: bool) -> None:
        for module in modules:
            module._step.end_announcements(failed=failed)
