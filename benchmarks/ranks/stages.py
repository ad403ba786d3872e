"""The parts of a step over ranks: seconds by stage, and what the ranks send each other."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from ranks.trainers import Dense
from speedswap import kernels
from speedswap.collectives import Lane
from speedswap.tables import Table
from speedswap.tables.owners import Owners

__all__ = ["Sent", "recorded", "timed_stages"]

# The calls that belong to each stage; a call nested in another stage's counts only for its own.
_STAGES: dict[str, list[tuple[Any, str]]] = {
    "rounds": [(Lane, "exchange_lines")],
    "payload": [(Lane, "exchange_rows")],
    "ids": [(Owners, "of"), (Owners, "places"), (kernels, "unique"), (kernels, "find_rows")],
    "gather": [(Table, "gather"), (Table, "lease")],
    "sums": [(kernels, "sum_rows")],
    "scatter": [(Table, "scatter"), (Table, "give_back")],
    "dense": [(Dense, "run")],
}


@contextmanager
def timed_stages() -> Iterator[Counter[str]]:
    """Count the seconds of each stage; rounds include waiting for the slowest rank.

    Work of other threads is not counted, so the loop should be one without lookahead.
    """
    seconds: Counter[str] = Counter()
    inner = [0.0]

    def timing(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                seconds[stage] += took - inner.pop()
                inner[-1] += took

        return timed

    with ExitStack() as stack:
        for stage, calls in _STAGES.items():
            for owner, name in calls:
                stack.enter_context(mock.patch.object(owner, name, timing(stage, getattr(owner, name))))
        yield seconds


class Sent(NamedTuple):
    """An exchange between ranks, as one of them sees it.

    Attributes:
        ahead: True if it belongs to a lookup, which may run ahead of its step.
        row_bytes: of a row of it; of a line of a round.
        sent, received: rows to and from each rank; empty for a round.
        is_apart: False for rows that go along with the next round.
        is_lean: True for a round that carries nothing but lines.
    """

    ahead: bool
    row_bytes: int
    sent: list[int]
    received: list[int]
    is_apart: bool = True
    is_lean: bool = False

    @property
    def is_round(self) -> bool:
        return not self.sent


@contextmanager
def recorded() -> Iterator[list[Sent]]:
    """Note what this process exchanges with others, from the first lookup of a step on, which shows what those are."""
    found: list[Sent] = []
    kinds: list[int] = []
    lines, rows = Lane.exchange_lines, Lane.exchange_rows

    def exchange_lines(lane: Lane, line: Any, *counts: Any) -> Any:
        kinds.append(line[0])
        agreed = lane.sheet.agreed
        is_lean = agreed is None and (not counts or counts[0] is None)
        found.append(Sent(kinds[-1] == kinds[0], lane.sheet.line_bytes, [], [], is_lean=is_lean))
        if agreed is not None:
            found.append(Sent(kinds[-1] == kinds[0], agreed.row_bytes, list(agreed.sent), list(agreed.received), False))
        return lines(lane, line, *counts)

    def exchange_rows(*args: Any) -> None:
        given = inspect.signature(rows).bind(*args).arguments
        sent, received = list(given["sent"]), list(given["received"])
        found.append(Sent(kinds[-1] == kinds[0], given["rows"].shape[1], sent, received))
        rows(*args)

    with (
        mock.patch.object(Lane, "exchange_lines", exchange_lines),
        mock.patch.object(Lane, "exchange_rows", exchange_rows),
    ):
        yield found
