"""The exchange between ranks on hosts, flat and in two levels: who sends how many messages and bytes to whom.

Of each hop a matrix: what each rank, a row, sends to each other one, a column. A test holds them to what ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ranks.simulator import Protocol
from speedswap.collectives.messages import Line
from speedswap.tables.owners import Owners

__all__ = ["Asked", "Hop", "Hosts", "asked_of", "expected_asked"]

_NUMBER_BYTES = 8
LINE_BYTES = _NUMBER_BYTES * len(Line._fields)


class Hop(NamedTuple):
    """Messages and bytes from each rank to each other one, shape (ranks, ranks), with zeros for itself."""

    messages: Tensor
    bytes: Tensor

    @classmethod
    def total(cls, hops: Sequence[Hop]) -> Hop:
        """Return the sums over some hops."""
        return cls(*(sum(each[1:], each[0]) for each in zip(*hops, strict=True)))


class Asked(NamedTuple):
    """Distinct rows that each rank asks of each owner, shape (ranks, ranks); and each host, shape (hosts, ranks)."""

    by_rank: Tensor
    by_host: Tensor


def asked_of(owners: Owners, ids: Sequence[Tensor], per_host: int) -> Asked:
    """Return what ranks ask of owners, given each rank's ids; ``per_host`` ranks are a host."""
    ranks = len(ids)

    def counts(some: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.bincount(owners.of(each.unique()), minlength=ranks) for each in some])

    return Asked(counts(ids), counts([torch.cat([*ids[at : at + per_host]]) for at in range(0, ranks, per_host)]))


def expected_asked(owner: Tensor, ranks: int, chance: Tensor, per_host: int) -> Asked:
    """Return the expectation of what ranks ask of owners.

    Args:
        owner: of each row.
        ranks: their number, a multiple of ``per_host``.
        chance: that a rank asks for a row, for each row, the same on all ranks.
        per_host: ranks of a host.
    """

    def counts(chances: Tensor, number: int) -> Tensor:
        return torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, chances).expand(number, -1)

    on_host = -torch.expm1(per_host * torch.log1p(-chance.clamp(max=1 - 1e-12)))
    return Asked(counts(chance, ranks), counts(on_host, ranks // per_host))


class Hosts:
    """Ranks on hosts.

    Args:
        ranks: their number.
        per_host: ranks of a host, in order; the last may have fewer.
        in_levels: False for a flat exchange.
        spreads: True if all ranks of a host carry what passes to a few others, as with NCCL.
    """

    def __init__(self, ranks: int, per_host: int, *, in_levels: bool, spreads: bool = False) -> None:
        self.ranks, self.per_host, self.in_levels = ranks, per_host, in_levels
        self.host = torch.arange(ranks) // per_host
        self.sizes = self.host.bincount()
        fewest = int(self.sizes.min())
        self._carriers = fewest if spreads and len(self.sizes) <= fewest else 1
        self._is_near = self.host.unsqueeze(1) == self.host
        self._is_other = ~torch.eye(ranks, dtype=torch.bool)

    def _carrier(self, host: Tensor, other: Tensor, owner: Tensor) -> Tensor:
        """Return the rank of a host that carries what passes between it and another for an owner's rows."""
        if self._carriers > 1:
            return self.per_host * host + owner % self.per_host % self._carriers
        return self.per_host * host + (other - (other > host).long()) % self.sizes[host]

    def hops(self, asked: Asked, row_bytes: float, *, to_owners: bool = True) -> list[Hop]:
        """Return the hops of rows, or of numbers, from those that ask for them to their owners, or back."""
        if not self.in_levels:
            return [self._hop(asked.by_rank if to_owners else asked.by_rank.T, row_bytes, self._is_other)]
        owner = torch.arange(self.ranks)
        here = self.host.unsqueeze(1).expand(-1, self.ranks)
        via = torch.where(self._is_near, owner, self._carrier(here, self.host, owner))
        first = torch.zeros_like(asked.by_rank).scatter_add_(1, via, asked.by_rank)
        from_host = torch.arange(len(self.sizes)).unsqueeze(1).expand_as(asked.by_host)
        to_host = self.host.expand_as(asked.by_host)
        sender, taker = self._carrier(from_host, to_host, owner), self._carrier(to_host, from_host, owner)
        away = asked.by_host * (from_host != to_host)
        second, third = (
            torch.zeros_like(asked.by_rank).index_put_(places, away, accumulate=True)
            for places in ((sender, taker), (taker, owner.expand_as(away)))
        )
        hops = [first, second, third] if to_owners else [third.T, second.T, first.T]
        near = self._is_near & self._is_other
        return [self._hop(rows, row_bytes, near if place != 1 else rows > 0) for place, rows in enumerate(hops)]

    def _hop(self, rows: Tensor, row_bytes: float, messages: Tensor) -> Hop:
        return Hop(messages.to(rows.dtype), rows * self._is_other * row_bytes)

    def round(self, line_bytes: int) -> list[Hop]:
        """Return the hops of a round: a line from every rank to every other one, of which none are merged."""
        every = torch.ones(self.ranks, self.ranks, dtype=torch.int64)
        return self.hops(Asked(every, self.sizes.unsqueeze(1).expand(-1, self.ranks).contiguous()), line_bytes)

    def lean_round(self) -> list[Hop]:
        """Return the hops of a round that carries lines alone, flat: each passes on the lines that have come so far."""
        held, hops, rank = 1, [], torch.arange(self.ranks)
        while held < self.ranks:
            messages = torch.zeros(self.ranks, self.ranks, dtype=torch.int64)
            messages[rank, (rank - held) % self.ranks] = 1
            hops.append(Hop(messages, messages * min(held, self.ranks - held) * LINE_BYTES))
            held += held
        return hops

    def heads(self) -> list[Hop]:
        """Return the hops of what precedes a table's ids in two levels: how many come."""
        if not self.in_levels:
            return []
        near = self._is_near & self._is_other
        one = Asked(
            torch.zeros(self.ranks, self.ranks, dtype=torch.int64), torch.ones(len(self.sizes), self.ranks).long()
        )
        return [
            Hop(near.long(), near * self.ranks * _NUMBER_BYTES),
            self.hops(one, _NUMBER_BYTES)[1],
            Hop(near.long(), near * len(self.sizes) * _NUMBER_BYTES),
        ]

    def step(self, protocol: Protocol, asked: Asked, dim: int) -> Hop:
        """Return all that a step without lookahead sends, after the first ones.

        Args:
            protocol: of the step, with rows as messages apart from rounds.
            asked: the rows.
            dim: the width of a row of float32.
        """
        lean = 0 if self.in_levels else sum(protocol.lean)
        found = (sum(protocol.rounds) - lean) * self.round(protocol.line_bytes)
        if lean:
            found += lean * self.lean_round()
        for one in (message for part in protocol.messages for message in part):
            row_bytes = one.row_bytes * (dim if one.is_row else 1)
            found += self.hops(asked, row_bytes, to_owners=one.to_owners)
            if not one.is_row:
                found += self.heads()
        return Hop.total(found)
