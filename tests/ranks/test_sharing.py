"""Lookups of separate tables of ranks share the rounds of one."""

from __future__ import annotations

import pytest
import sharing_scenarios as scenarios
import torch
from rank_pool import RankPool
from torch import nn

from speedswap.ranks.foreseen import ids_in_calls


@pytest.mark.parametrize("kind", ["columns", "one", "collection", "arguments", "told"])
def test_step_of_any_number_of_tables_takes_four_rounds(ranks: RankPool, kind: str) -> None:
    """Ids are columns of a batch, the same, arguments of a model or told by a lookahead; or those of a collection."""
    counts = (1, 3, 10)
    found = [ranks.run(scenarios.steady, 2, count, kind) for count in counts]
    assert [each[0][:2] for each in found] == [(4, 1)] * len(counts)
    assert all(rounds == found[0][0][0] for each in found for rounds, _, _ in each)


def test_rows_of_a_table_that_is_left_out_stop_coming(ranks: RankPool) -> None:
    without, left_out = (ranks.run(scenarios.steady, 2, *given) for given in ((3, "columns"), (4, "left out")))
    assert left_out == without


@pytest.mark.parametrize("how", ["columns", "arguments"])
def test_loops_that_change_their_ways_change_no_bit(ranks: RankPool, how: str) -> None:
    apart, shared = (ranks.run(scenarios.departing, 3, shares=shares, how=how) for shares in (False, True))
    for (rows, rounds), (rows_shared, rounds_shared) in zip(apart, shared, strict=True):
        assert all(map(torch.equal, rows, rows_shared))
        assert rounds[6] == 2 * 4 + 3
        assert rounds_shared[6] == 2 + 3
        assert rounds_shared == shared[0][1]


@pytest.mark.parametrize("how", ["id", "exception"])
def test_failure_between_lookups_that_share_rounds(ranks: RankPool, how: str) -> None:
    """All ranks raise, no table changes, and all go on together."""
    found = ranks.run(scenarios.failing, 3, how)
    for rank, (raised, steps, rows) in enumerate(found):
        own, others = (["IdError"], ["PeerError"]) if how == "id" else (["ValueError", "PeerError"], ["PeerError"] * 2)
        assert raised == (own if rank == 1 else others)
        assert steps == (6 if how == "id" else 5)
        assert all(map(torch.equal, rows, found[0][2]))


def test_ids_are_found_among_the_arguments_of_calls() -> None:
    """Outermost first, by place and by name, within dicts, lists and tuples; no floats, scalars or lists of text."""

    class Inner(nn.Module):
        def forward(self, ids, scale):
            return ids_in_calls()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
            self.inner.register_forward_pre_hook(lambda *_: None)

        def forward(self, scale, batch, *, more):
            return self.inner(more, scale=scale)

    a, b, floats = torch.arange(3), torch.arange(4).int(), torch.zeros(2)
    batch = {"a": a, "words": ["w"] * 3, "floats": floats, "nested": (b, [a]), "count": torch.tensor(3)}
    found = Outer()(2, batch, more=b)
    assert [*map(id, found)] == [*map(id, [a, b, a, b, b])]
    assert ids_in_calls() == []
