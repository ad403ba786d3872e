"""A model of a training step over ranks: what they send each other, and how long a step takes.

The rows that each owner is asked for come from the package's own assignment; rounds and messages from a step that was
recorded. Times are linear in these, with constants that are fitted to measured steps, or stated for another machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ranks.balance import asked
from ranks.stages import Sent
from speedswap.tables.owners import Owners

__all__ = ["Costs", "Load", "Message", "Protocol", "Protocols", "expected_load", "features", "load_of", "payload"]


class Message(NamedTuple):
    """One exchange of rows.

    Attributes:
        to_owners: True from the ranks that ask to the owners, False from these to those.
        is_row: True for a row of weights or their gradient, False for one number, such as an id.
        row_bytes: of a number; of one element of a row.
        is_apart: False if it goes along with a round.
    """

    to_owners: bool
    is_row: bool
    row_bytes: int
    is_apart: bool = True


@dataclass(frozen=True)
class Protocol:
    """The exchanges of a training step, on any number of ranks; ``ahead``: what belongs to its lookup.

    Attributes:
        rounds: of the lookup, and of the rest of the step.
        line_bytes: that a rank sends to each other one in a round.
        messages: of the lookup, and of the rest.
        lean: rounds that carry nothing but lines, of the lookup and of the rest.
    """

    rounds: tuple[int, int]
    line_bytes: int
    messages: tuple[list[Message], list[Message]]
    lean: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, sent: Sequence[Sent], dim: int, asked_of: Sequence[int]) -> Protocol:
        """Return the protocol of a step that was recorded.

        Args:
            sent: all of its exchanges.
            dim: the width of a row of float32, other than 2.
            asked_of: how many rows this rank asks of each owner; other numbers than those asked of it.

        Raises:
            ValueError: a message has other rows than those.
        """
        messages: tuple[list[Message], list[Message]] = [], []
        for one in sent:
            if one.is_round:
                continue
            to_owners = one.sent == list(asked_of)
            if not to_owners and one.received != list(asked_of):
                raise ValueError(f"a message to {one.sent} and from {one.received} has other rows than {asked_of}")
            is_row = one.row_bytes == 4 * dim
            messages[not one.ahead].append(Message(to_owners, is_row, 4 if is_row else one.row_bytes, one.is_apart))
        rounds = [one for one in sent if one.is_round]
        parts = [[one for one in rounds if one.ahead is ahead] for ahead in (True, False)]
        lookup, rest = (sum(one.is_lean for one in part) for part in parts)
        return cls((len(parts[0]), len(parts[1])), rounds[0].row_bytes, messages, (lookup, rest))

    def to_json(self) -> dict[str, Any]:
        lookup, rest = ([message._asdict() for message in some] for some in self.messages)
        return {
            "line_bytes": self.line_bytes,
            "lookup": {"rounds": self.rounds[0], "lean": self.lean[0], "messages": lookup},
            "rest": {"rounds": self.rounds[1], "lean": self.lean[1], "messages": rest},
        }


class Protocols(NamedTuple):
    """The exchanges of steps, by the size of their lookups.

    Attributes:
        few: with ids that fit into a round's messages next to its lines.
        many: with more ids, which take a separate message.
        room: ids that fit next to a round's lines, over all ranks.
    """

    few: Protocol
    many: Protocol
    room: int

    def of(self, load: Load) -> Protocol:
        """Return the protocol of a step."""
        return self.few if load.pair <= self.room // load.ranks else self.many

    def to_json(self) -> dict[str, Any]:
        return {"few": self.few.to_json(), "many": self.many.to_json(), "room": self.room}


class Load(NamedTuple):
    """The rows of a step, on the busiest rank of each kind, or on one rank.

    Attributes:
        ranks: their number.
        lookups: ids of the batch.
        asked, asked_away: distinct rows that a rank asks for; of others.
        lent, lent_away: rows that a rank is asked for; by others.
        union: distinct rows that a rank is asked for.
        pair: the most rows that any rank asks of another, or of itself.
        again: the share of the rows asked for that the step before has changed on any rank.
    """

    ranks: int
    lookups: float
    asked: float
    asked_away: float
    lent: float
    lent_away: float
    union: float
    pair: float = 0.0
    again: float = 0.0


def load_of(owners: Owners, ids: Sequence[Tensor]) -> list[Load]:
    """Return each rank's load.

    Args:
        owners: of the table.
        ids: each rank's, shape (n,).
    """
    distinct = [some.unique() for some in ids]
    ranks = len(ids)
    rank_of = [owners.of(some) for some in distinct]
    matrix = torch.stack([torch.bincount(some, minlength=ranks) for some in rank_of])
    union = torch.bincount(owners.of(torch.cat(distinct).unique()), minlength=ranks)
    own = matrix.diagonal()
    return [
        Load(ranks, len(ids[r]), *(float(x) for x in (a, a - o, lent, lent - o, u, matrix.max())))
        for r, (a, lent, o, u) in enumerate(
            zip(matrix.sum(1).tolist(), matrix.sum(0).tolist(), own.tolist(), union.tolist(), strict=True)
        )
    ]


@functools.cache
def expected_load(rows: int, ranks: int, lookups: int, exponent: float) -> Load:
    """Return the expected load, of the busiest rank in each respect.

    Args:
        rows: of the table, the most frequent first, by Zipf's law with this exponent.
        ranks: their number.
        lookups: of each rank.
    """
    chance = asked(rows, lookups, exponent)
    anywhere = -torch.expm1(ranks * torch.log1p(-chance.clamp(max=1 - 1e-12)))
    owner = Owners(rows, ranks).of(torch.arange(rows))

    def of_owners(weights: Tensor) -> Tensor:
        return torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, weights)

    each, union = of_owners(chance), of_owners(anywhere)  # that one rank asks of each owner; that all of them ask
    total, fewest, most = float(each.sum()), float(each.min()), float(each.max())
    again = float((chance * anywhere).sum()) / total
    return Load(
        ranks, lookups, total, total - fewest, most * ranks, most * (ranks - 1), float(union.max()), most, again
    )


def payload(messages: Iterable[Message], load: Load, dim: int) -> float:
    """Return the bytes that a rank sends to others."""
    rows = {True: load.asked_away, False: load.lent_away}
    return sum(rows[one.to_owners] * one.row_bytes * (dim if one.is_row else 1) for one in messages)


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step, an exchange, a peer in it and a byte to others; and of work on rows.

    Attributes:
        step: of a step, whatever it does.
        exchange: of a round or a message, and what a rank does around it.
        meeting: of one with others, however many.
        peer: of each other rank in one; in a round of lines alone, of each that a rank sends to.
        sent_byte: of payload.
        lookup: of an id looked up.
        asked_byte: of the weights of the rows that a rank asks for, each time that they are moved.
        lent_byte: of the weights of the rows that it is asked for, each time that they are moved or summed.
        record_byte: of a record, weight and state, that is gathered, stepped and scattered.
    """

    step: float = 0.0
    exchange: float = 0.0
    meeting: float = 0.0
    peer: float = 0.0
    sent_byte: float = 0.0
    lookup: float = 0.0
    asked_byte: float = 0.0
    lent_byte: float = 0.0
    record_byte: float = 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def fitted(cls, rows: Sequence[Costs], seconds: Sequence[float]) -> Costs:
        """Return the constants, none below 0, that explain measured steps best: least squares of relative errors.

        Args:
            rows: :func:`features` of each step.
            seconds: of each step.
        """
        names = [field.name for field in fields(cls)]
        measured = torch.tensor(seconds, dtype=torch.float64)
        matrix = torch.tensor([[getattr(row, name) for name in names] for row in rows], dtype=torch.float64)
        matrix = matrix / measured.unsqueeze(1)
        scale = matrix.norm(dim=0).clamp(min=1e-300)
        found = _non_negative(matrix / scale, torch.ones(len(rows), dtype=torch.float64)) / scale
        return cls(**dict(zip(names, found.tolist(), strict=True)))

    def seconds(self, row: Costs) -> float:
        """Return the seconds of what :func:`features` has counted."""
        return sum(getattr(self, field.name) * getattr(row, field.name) for field in fields(self))


def features(protocol: Protocol, load: Load, dim: int, record_bytes: int, slower: float) -> Costs:
    """Return how often each constant counts in a step.

    Args:
        protocol: of the step.
        load: of the rank that has most to do.
        dim: the width of a row of float32.
        record_bytes: of weight and state.
        slower: how many times longer everything takes than in one process, where ranks share cores and memory.
    """
    messages = [*protocol.messages[0], *protocol.messages[1]]
    exchanges, lean = sum(protocol.rounds) + sum(one.is_apart for one in messages), sum(protocol.lean)
    peers, peers_of_lean = load.ranks - 1, math.ceil(math.log2(load.ranks))
    return Costs(
        step=slower,
        exchange=slower * exchanges,
        meeting=slower * exchanges * (load.ranks > 1),
        peer=slower * ((exchanges - lean) * peers + lean * peers_of_lean),
        sent_byte=slower * payload(messages, load, dim),
        lookup=slower * load.lookups,
        asked_byte=slower * load.asked * 4 * dim,
        lent_byte=slower * load.lent * 4 * dim,
        record_byte=slower * load.union * record_bytes,
    )


def _non_negative(matrix: Tensor, wanted: Tensor) -> Tensor:
    """Return the least-squares solution without negative entries (Lawson and Hanson 1974)."""
    solution = torch.zeros(matrix.shape[1], dtype=torch.float64)
    passive = torch.zeros(matrix.shape[1], dtype=torch.bool)
    for _ in range(10 * matrix.shape[1]):
        gradient = matrix.T @ (wanted - matrix @ solution)
        gradient[passive] = -1
        if float(gradient.max()) <= 1e-10:
            break
        passive[gradient.argmax()] = True
        while True:
            trial = torch.zeros_like(solution)
            trial[passive] = torch.linalg.lstsq(matrix[:, passive], wanted.unsqueeze(1)).solution.squeeze(1)
            below = passive & (trial <= 0)
            if not below.any():
                break
            step = (solution[below] / (solution[below] - trial[below])).min()
            solution += step * (trial - solution)
            passive &= solution > 1e-14
            solution[~passive] = 0
        solution = trial
    return solution
