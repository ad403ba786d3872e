"""Prefetch the next batch's rows during the current step."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from speedswap._words import a_kind, require_kind
from speedswap.collectives import of_all_ranks
from speedswap.errors import BatchError, IdMapFullError
from speedswap.swapping.prefetched import Announced, PrefetchedLookup, have_changed, prefetch_lookups
from speedswap.swapping.row_step import Loop
from speedswap.swapping.table_module import TableModule

Batch = TypeVar("Batch")


class LooksUp(Protocol):
    """A module that can announce its lookups: an embedding, or a collection."""

    def lookups_of(self, given: Any, /) -> Sequence[tuple[TableModule, Announced]]:
        """Return the lookups that a forward pass makes with the result of its batch's function."""

    def modules(self) -> Iterator[nn.Module]:
        """Return the module and all modules within it, as ``nn.Module`` does."""


Module = TypeVar("Module", bound=LooksUp)
GivenOf = Callable[[Batch], Any]


@of_all_ranks
def lookahead(loader: Iterable[Batch], ids: Mapping[Module, GivenOf[Batch]], *, depth: int = 1) -> Lookahead[Batch]:
    """Iterate over a loader's batches while prefetching the rows of the next ones.

    While a step computes, the next batch's ids are checked and deduplicated, and its rows gathered, weight and
    optimizer state together: on a separate stream for a GPU, by a background thread on the CPU. Rows that both batches
    share are forwarded on the device after the step, and the rows that the step changed are written to the table while
    the next step computes. Results are bitwise identical to the plain loop's.

    Batches are taken from the loader ``depth`` steps earlier than in the plain loop, so a loader that shares a random
    generator with the model's forward pass draws different numbers. After an exception, Ctrl-C or ``break`` the table
    holds every completed step; reading or changing it meanwhile waits for pending writes.

    If ranks own the rows (:class:`speedswap.Ranks`), all of them must iterate in the same way; ids go to the owners
    while a step computes, and rows come back (for a GPU, in their batch's turn). When the first rank's loader ends, all
    ranks stop, and ranks with more batches warn that they skip them. An error in one rank's loader or ids is raised on
    all ranks in its batch's turn.

    Keys are added to an embedding's id map ``depth`` steps earlier than in the plain loop, in batch order. Until a
    batch is looked up for training, all other users see the map without the batch's keys; if it never is, the keys are
    removed.

    Args:
        loader: any iterable of batches, e.g. a ``DataLoader``; each iteration iterates over it again.
        ids: for each :class:`speedswap.Embedding` or :class:`speedswap.EmbeddingBag`, a function from a batch to the
            ids that the model will look up: an int32 or int64 tensor, or a list with one per lookup; for each
            :class:`speedswap.EmbeddingBagCollection` or :class:`speedswap.EmbeddingCollection`, a function from a batch
            to its features. Other lookups work too, but are not prefetched. The ids must be on the lookup's device, or
            on the CPU with the module's ``weight`` on the lookup's device.
        depth: number of batches ahead; 0 for the plain loop, in which lookups in tables of ranks share rounds.

    Returns:
        An iterable of the loader's batches; it has a length if the loader has one.

    Raises:
        TypeError: ``loader`` is not iterable, or a key of ``ids``, or a function's result, has the wrong type.
        BatchError: in a batch's turn, if the loader has overwritten its ids with a later batch's; nothing was trained
            on it.
        ValueError: ``depth`` is negative, or differs between ranks that own the rows together; or ``ids`` is empty; or
            accelerate has prepared the loader to end a window of accumulated gradients with its last batch.

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
    """A batch that awaits its turn, or the error raised in its place."""

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
        window: Any = getattr(loader, "gradient_state", None)  # accelerate's
        if self.depth and getattr(window, "num_steps", 1) > 1 and window.sync_with_dataloader:
            raise ValueError(
                "loader was prepared by accelerate, which takes a step when the loader yields its last batch, but a "
                f"lookahead takes it early; give Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin("
                f"num_steps={window.num_steps}, sync_with_dataloader=False)), or depth=0"
            )
        self._loader = loader
        self._ids: dict[LooksUp, GivenOf[Batch]] = dict(ids.items())

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader the epoch's number, if it takes one: a resumed ``Trainer`` gets its order by that."""
        if (set_epoch := getattr(self._loader, "set_epoch", None)) is not None:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        modules = [each for module in self._ids for each in module.modules() if isinstance(each, TableModule)]
        if self.depth == 0:
            of_ranks = [
                (module, given_of)
                for module, given_of in self._ids.items()
                if any(isinstance(each, TableModule) and each._step.is_sharded for each in module.modules())
            ]
            for number, batch in enumerate(self._loader):
                self._begin_batch(modules, number)
                self._expect(batch, of_ranks)
                yield batch
            return
        loop = Loop()
        with ExitStack() as rest:  # ends the lookahead of every module, even if a pending write has failed
            for module in modules:
                module._begin_lookahead(loop, self.depth)
                rest.callback(module._end_lookahead, loop)
            try:
                yield from self._turns(modules, loop)
            except GeneratorExit:
                loop.is_left = True
                rest.pop_all()
                raise

    def _turns(self, modules: Sequence[TableModule], loop: Loop) -> Iterator[Batch]:
        source, number = iter(self._loader), 0
        waiting: deque[_Turn[Batch]] = deque()
        while True:
            # An error is raised in its batch's turn: earlier batches are trained on first.
            while len(waiting) <= self.depth and not (waiting and waiting[-1].error):
                waiting.append(self._next(source, modules))
            if (error := waiting[-1].error) is not None:  # every turn, since other ranks announce a batch every turn
                self._end_announcements(modules, failed=not isinstance(error, StopIteration))
            turn = waiting.popleft()
            if isinstance(turn.error, StopIteration):
                return
            if turn.error is not None:
                try:
                    raise turn.error
                finally:
                    del turn, error  # its traceback holds this frame and would keep the caller's objects alive
            if have_changed(lookup for lookups in turn.prefetched.values() for lookup in lookups):
                self._end_announcements(modules, failed=True)
                raise BatchError(
                    "the ids of a batch changed before its turn: the loader overwrote a tensor of the batch while its "
                    "rows were prefetched; yield new tensors (buffer.clone()), or give depth=0"
                )
            self._begin_batch(modules, number)
            has_turn = [module._begin_turn(loop, turn.prefetched[module]) for module in modules]
            if not all(has_turn):
                return  # another rank has no more batches
            yield cast(Batch, turn.batch)
            number += 1

    def _next(self, source: Iterator[Batch], modules: Sequence[TableModule]) -> _Turn[Batch]:
        try:
            batch = next(source)
            turn = _Turn(batch)
            announced: list[tuple[TableModule, Announced]] = []
            for module, given_of in self._ids.items():
                try:
                    announced += module.lookups_of(given_of(batch))
                except IdMapFullError:
                    continue  # its lookup in the batch's turn raises, if there is no room then either
            # Together, so one round trip to a GPU finds the rows of all tables.
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
    def _expect(batch: Batch, of_ranks: Sequence[tuple[LooksUp, GivenOf[Batch]]]) -> None:
        """Tell the steps of ranks' tables what the batch will look up, so its lookups share rounds."""
        announced = [each for module, given_of in of_ranks for each in module.lookups_of(given_of(batch))]
        lookups = [(module._step, lookup.ids) for module, lookup in announced]
        for step, _ in lookups:
            step.expect(lookups)

    @staticmethod
    def _begin_batch(modules: Sequence[TableModule], number: int) -> None:
        for module in modules:
            module._step.begin_batch(number)

    @staticmethod
    def _end_announcements(modules: Sequence[TableModule], *, failed: bool) -> None:
        for module in modules:
            module._step.end_announcements(failed=failed)


class _Asked(BaseException):
    """The end of a function whose lookup is known; not an error that it could handle."""


@torch.no_grad()
def asked(embedding: nn.Module, function: Callable[[], Any]) -> Tensor:
    """Return the ids of the first lookup that a function makes in an embedding.

    For :func:`speedswap.lookahead`, where a model computes the ids of its memory itself, e.g. as hashes of tokens. The
    function ends at the lookup, which reads nothing.

    Args:
        embedding: a :class:`speedswap.Embedding`, or another module whose first argument is ids.
        function: calls the part of the model that looks up.

    Raises:
        ValueError: it returned without a lookup.

    Example:
        >>> import torch, speedswap
        >>> items = speedswap.Embedding(1000, 16)
        >>> hashed = lambda tokens: items(tokens * 31 % 1000)
        >>> speedswap.asked(items, lambda: hashed(torch.tensor([7, 900])))
        tensor([217, 900])
    """
    require_kind("embedding", embedding, nn.Module, "the embedding or collection that function uses")
    found: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(given[0] if given else next(iter(named.values())))
        raise _Asked

    with embedding.register_forward_pre_hook(note, with_kwargs=True):
        try:
            function()
        except _Asked:
            return found[0]
    raise ValueError(
        f"function looked nothing up in {embedding}; let it call the part of the model that uses the embedding"
    )
