"""Rows that ranks own, through every interface: equal to one process with the same calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reach_scenarios as scenarios
import torch
from rank_pool import RankPool

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("kind", ["bags", "embeddings", "given"])
def test_collections(ranks: RankPool, kind: str) -> None:
    """Initial values are the first rank's, bit for bit; training agrees with one process."""
    expected = scenarios.train_collection(None, kind)
    for before, after, found in ranks.run(scenarios.train_collection, 3, kind):
        assert all(torch.equal(before[name], values) for name, values in expected[0].items())
        torch.testing.assert_close(after, expected[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, expected[2], rtol=1e-5, atol=1e-6)


def test_initial_values(ranks: RankPool) -> None:
    cases: list[tuple[Any, ...]] = [
        *((name, dtype) for name in scenarios.INITS for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *(("normal", torch.float32, stored) for stored in (torch.bfloat16, torch.float16)),
        ("normal", torch.float32, None, 70_000),
        ("xavier", torch.float32, None, 70_000),
        ("xavier", torch.float32, None, 1),
    ]
    expected = scenarios.initial_rows_of_all(None, cases)
    for found in ranks.run(scenarios.initial_rows_of_all, 3, cases):
        for case, values, wanted in zip(cases, found, expected, strict=True):
            assert torch.equal(values, wanted), case


@pytest.mark.parametrize("freeze", [True, False])
def test_given_rows(ranks: RankPool, freeze: bool) -> None:
    expected = scenarios.given_rows(None, freeze)
    found = ranks.run(scenarios.given_rows, 4, freeze)
    for items, bags, _, _ in found:
        assert torch.equal(items, expected[0])
        assert torch.equal(bags, expected[1])
    for place in (2, 3):
        assert torch.equal(torch.cat([each[place] for each in found]), expected[place])


def test_filled_and_written_rows(ranks: RankPool) -> None:
    expected = scenarios.filled_rows(None)
    for found in ranks.run(scenarios.filled_rows, 3):
        assert all(map(torch.equal, found, expected))


def test_arguments_that_do_not_fit(ranks: RankPool) -> None:
    for said in ranks.run(scenarios.refused, 2):
        local = "local_to_rank is True, but the ranks own the rows"
        wanted = ["reduction is 'max'", local, "storage is Ranks(", "num_embeddings", "copied"]
        assert all(word in text for word, text in zip(wanted, said, strict=True)), said


@pytest.mark.parametrize(
    ("storage", "settings"),
    [
        ("pageable", {"stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}),
        ("pageable", {"stored_dtype": torch.float16, "rounding": "nearest"}),
        ("disk", {"stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}),
        ("disk", {"stored_dtype": torch.bfloat16}),
        ("disk", {}),
    ],
)
def test_bits_of_rows_in_any_storage(ranks: RankPool, tmp_path: Path, storage: str, settings: dict[str, Any]) -> None:
    """Sums are exact here, so that rounding, by the rows' ids and the number of the step, is all that is left."""
    folder = None if storage == "pageable" else str(tmp_path)
    expected, _ = scenarios.train_compact(None, folder, storage, settings)
    for found, ids in ranks.run(scenarios.train_compact, 3, folder, storage, settings):
        for name, values in expected.items():
            assert torch.equal(found[name], values[ids]), name


def test_switchers(ranks: RankPool, tmp_path: Path) -> None:
    """Of rows that several ranks write the last rank's stays, as the last in one process's batch does."""
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    whole, state, _ = scenarios.train_switched(None, str(tmp_path / "one"))
    for own, own_state, said in ranks.run(scenarios.train_switched, 3, str(tmp_path / "three")):
        np.testing.assert_array_equal(own, whole)
        assert said == 2
        for name, values in state.items():
            np.testing.assert_array_equal(own_state[name], values)


@pytest.mark.parametrize("clips", [{}, {"norm_type": 2.0}, {"norm_type": 1.0, "foreach": False}])
def test_fully_sharded_layers_beside_them(ranks: RankPool, clips: dict[str, Any]) -> None:
    expected = scenarios.train_under_fully_shard(None, clips)
    for found in ranks.run(scenarios.train_under_fully_shard, 2, clips):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_models_in_turn(ranks: RankPool) -> None:
    expected = scenarios.train_two_models(None)
    for found in ranks.run(scenarios.train_two_models, 3):
        torch.testing.assert_close(found, expected, **CLOSE)
