"""The processes that train a model together: one alone, replicas, or shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from speedswap.batching.elastic import even_sizes
from speedswap.batching.gradients import keeper_of
from speedswap.collectives import OwnPace, RankGroup, is_distributed
from speedswap.errors import BatchError, PeerError

__all__ = ["AGAIN", "BEGIN", "END", "LOSS", "READY", "TOTAL", "VOTE", "Peers", "Ranks", "ranks_of"]

# The stages of a batch at which ranks exchange numbers.
BEGIN, AGAIN, TOTAL, VOTE, END, READY, LOSS = range(7)


class Ranks:
    """The processes that train a model together, seen from one of them; by default it is alone.

    Attributes:
        parameters: those whose gradients :meth:`reduce` sums; the batch's are kept apart from earlier ones.
        may_be_empty: whether a rank may have no samples, because others have some.
        in_step: whether all ranks run their passes side by side, so that only ``backward`` can be split.
    """

    parameters: Sequence[Tensor] = ()
    may_be_empty = False
    in_step = False

    @property
    def may_differ(self) -> bool:
        """True if this rank may call a loss function more often than others, unless the function communicates."""
        # Not in a job of unknown kind: where parameters are gathered in a forward pass, all ranks have to run it.
        return not is_distributed()

    def together(self, task: str) -> AbstractContextManager[None]:
        """Surround one batch; a failure inside is reported to the ranks that wait for this one."""
        return nullcontext()

    def begin(self, size: int, batch_size: int) -> int:
        """Agree on the micro-batch size that a batch begins with, before the first pass."""
        return size

    def passes(self) -> AbstractContextManager[None]:
        """Surround passes that leave no gradient."""
        return nullcontext()

    def attempt(self, size: int) -> AbstractContextManager[None]:
        """Surround one attempt at a batch."""
        return nullcontext()

    def sizes(self, batch_size: int, size: int) -> list[int]:
        """Return the sizes of this rank's micro-batches, none above ``size``; 0 for a pass only other ranks need."""
        return even_sizes(batch_size, -(-batch_size // size)) if batch_size else []

    def samples(self, batch_size: int) -> float:
        """Return the number of samples of the batch over all ranks."""
        return batch_size

    def total(self, count: float) -> float:
        """Return the sum of the ranks' counts: the number that the batch's loss averages over."""
        return count

    def micro_batch(self) -> AbstractContextManager[None]:
        """Surround the forward and backward pass of one micro-batch."""
        return nullcontext()

    def without_effect(self) -> AbstractContextManager[None]:
        """Surround a forward pass that adds nothing on this rank; where ``in_step``, a backward pass follows it."""
        return nullcontext()

    def end(self, size: int, batch_size: int, gives_aux: bool) -> tuple[int, bool]:
        """Agree, after the last pass, that all ranks have succeeded, and on the size for the next batch.

        Returns:
            That size, and whether any rank's loss function returned an aux: a rank without samples cannot tell.
        """
        return size, gives_aux

    def reduce(self, loss: Tensor, *, average: bool) -> Tensor:
        """Sum the ranks' gradients of this batch, and their losses.

        Args:
            loss: this rank's loss; summed only where it is one number.
            average: divide by the number of ranks.

        Returns:
            The loss of the whole batch.
        """
        return loss


class Peers(Ranks):
    """Several processes that exchange sizes and counts.

    Args:
        ranks: the processes, as torch.distributed numbers them.
        owners: the same processes, where they own rows together.
    """

    def __init__(self, ranks: Sequence[int], owners: RankGroup | None) -> None:
        self._owners = owners
        self._exchange = OwnPace.of(ranks) if owners is None else owners.own_pace
        self._samples = 0.0

    def _agree(self, stage: int, size: int, batch_size: int) -> tuple[int, float, list[float]]:
        """Exchange sizes; return the size to use, the smallest limit of any rank, and each rank's batch size."""
        lines = self._exchange.round(stage, _limit(size, batch_size), batch_size, len(self.parameters))
        if any(line[2] != lines[0][2] for line in lines):
            raise PeerError("the ranks train different numbers of parameters; freeze the same ones everywhere")
        limit, batch_sizes = min(line[0] for line in lines), [line[1] for line in lines]
        self._samples = sum(batch_sizes)
        return _at_most(size, limit), limit, batch_sizes

    def samples(self, batch_size: int) -> float:
        return self._samples

    def end(self, size: int, batch_size: int, gives_aux: bool) -> tuple[int, bool]:
        lines = self._exchange.round(END, _limit(size, batch_size), float(gives_aux))
        return _at_most(size, min(line[0] for line in lines)), any(line[1] for line in lines)

    def _give_rows(self, average: bool) -> None:
        """Give the gradients of rows to their owners, who add them up."""
        if self._owners is not None:
            assert self._owners.main.pending is not None
            self._owners.main.pending.add_up_shares(average=average)

    def _complete(self, kinds: list[int], fill: Callable[[int, int], None]) -> list[int]:
        """Return the kind that each parameter's gradient has on any rank.

        Args:
            kinds: those on this rank; 0 for none.
            fill: called with the position of a gradient that is missing here alone, and its kind: makes it zero.
        """
        everywhere, some_lack = self._exchange.anywhere(kinds)
        if some_lack:
            for place, (kind, here) in enumerate(zip(everywhere, kinds, strict=True)):
                if kind and not here:
                    fill(place, kind)
            self._exchange.round(READY)  # fails on all ranks if memory has run out on one
        return everywhere


def _limit(size: int, batch_size: int) -> float:
    return size if size < batch_size else math.inf


def _at_most(size: int, limit: float) -> int:
    return size if size <= limit else int(limit)


def ranks_of(modules: Sequence[nn.Module]) -> Ranks:
    """Return the processes that train these modules together; every rank has to ask, in the same order.

    Raises:
        BatchError: a module is replicated or sharded in a way that cannot be split.
    """
    if not is_distributed():
        return Ranks()
    # Imported here, since they need a torch that was built with distributed.
    from speedswap.batching.ranks.replicated import Replicated, replicas
    from speedswap.batching.ranks.sharded import Sharded, shard_roots

    wrapped, roots, group = replicas(modules), shard_roots(modules), _owners(modules)
    if wrapped and roots:
        raise BatchError("the modules are partly replicated and partly sharded; give each kind its own splitter")
    if roots:
        return Sharded(roots, group)
    return Replicated(wrapped, modules, group) if wrapped or group is not None else Ranks()


def _owners(modules: Sequence[nn.Module]) -> RankGroup | None:
    """Return the ranks that own rows of these modules' embeddings together, if any do."""
    keepers = [keeper_of(parameter) for module in modules for parameter in module.parameters()]
    groups = {keeper.group: None for keeper in keepers if keeper is not None and keeper.group is not None}
    if len(groups) > 1:
        raise BatchError("embeddings have different process groups; give those of each group their own splitter")
    return next(iter(groups), None)
