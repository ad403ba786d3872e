"""The rounds of a training step over embeddings that ranks own, in every order of its parts."""

from __future__ import annotations

import pytest
import rounds_scenarios as scenarios
import torch
from rank_pool import RankPool

# What a step does, its passes, and its rounds for any number of tables, besides two per pass.
LOOPS = [
    ("zero forward backward step", 1, 2),
    ("forward zero backward step", 1, 2),
    ("forward zero_in_place backward step", 1, 2),
    ("forward zero_model backward step", 1, 2),
    ("forward none backward step", 1, 2),
    ("forward look backward step", 1, 2),
    ("forward backward step zero", 1, 2),
    ("forward backward step zero_in_place", 1, 2),
    ("zero_in_place forward backward step", 1, 2),
    ("forward backward zero forward backward zero_model forward backward step", 3, 2),
    ("zero forward backward step step", 1, 4),
    ("zero forward backward step zero_in_place step", 1, 4),
    ("zero forward backward clip step", 1, 3),
    ("forward zero backward clip step", 1, 3),
    ("forward zero backward norms_by_hand step", 1, 5),
    ("forward zero_in_place backward clip clip_value step", 1, 3),
    ("zero forward backward forward backward step", 2, 5),
    ("zero forward backward clip forward backward clip step", 2, 5),
    ("zero forward forward backward clip step", 2, 6),
    ("forward forward zero backward step", 2, 5),
    ("forward zero backward idle clip step", 2, 6),
    ("forward backward zero forward backward step", 2, 2),
    ("forward backward none forward backward step zero", 2, 2),
]


@pytest.mark.parametrize(
    ("kind", "ignoring"),
    [("apart", None), ("collection", None), ("apart", 1)],
    ids=["separate tables", "a collection", "a rank whose loss ignores the rows"],
)
def test_rounds_of_a_step(ranks: RankPool, kind: str, ignoring: int | None) -> None:
    """Two per pass for a collection, or for each separate table, and the same for the rest of a step.

    Tables and norms equal those of one process.
    """
    counts = (1, 3) if ignoring is None else (3,)
    size, cases = 2, [(count, kind, parts, ignoring) for count in counts for parts, _, _ in LOOPS]
    expected = scenarios.all_trained(None, size, cases)
    of_parts = {parts: (lookups, others) for parts, lookups, others in LOOPS}
    for found in ranks.run(scenarios.all_trained, size, size, cases):
        wrong = {}
        for (count, _, parts, _), (rounds, *values), (_, *wanted) in zip(cases, found, expected, strict=True):
            lookups, others = of_parts[parts]
            of_lookups = 2 * lookups * (count if kind == "apart" else 1)
            if ignoring is None and rounds != of_lookups + others:
                wrong[parts, count] = rounds - of_lookups, others
            if not all(torch.allclose(*both, rtol=1e-7, atol=0) for both in zip(values, wanted, strict=True)):
                wrong[parts, count] = values, wanted
        assert wrong == {}
