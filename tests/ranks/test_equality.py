"""Ranks that train one table together equal one process that trains on all their batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality_scenarios import OPTIMIZERS, Case, train, train_all, train_without_optimizer
from rank_pool import RankPool

UNEVEN = ((5, 2, 7, 1, 4), (0, 6, 2, 3, 1), (3, 0, 0, 8, 0), (0, 0, 0, 0, 0))
CASES_ON_HOSTS = [
    Case("adam", sizes=UNEVEN, passes=3, clip={"norm_type": 2.0}),
    Case("adam", model="bag mean ragged", sizes=UNEVEN),
    Case("momentum", ignoring=((2, 1), (3, 0), (3, 2), (4, -1))),
    Case("adagrad", rows=3, padding_idx=None, sizes=UNEVEN),
]

CASES = {
    2: [
        *(Case(optimizer) for optimizer in [*OPTIMIZERS, "rowwise"]),
        Case("adam", dense="compiled"),
        Case("adam", model="sum", sizes=((1, 4), (1, 1)), passes=2, clip={"norm_type": 2.0}),
    ],
    3: [
        *(Case("adam", clip={"norm_type": norm, "foreach": foreach}) for norm, foreach in (
            (1.0, None), (1.0, False), (2.0, None), (2.0, True), (2.0, False), (float("inf"), None))),
        Case("momentum", clip={"value": 0.01}),
        Case("adam", clip={"norm_type": 2.0, "error_if_nonfinite": True}, sizes=UNEVEN),
        Case("adamw", scaler=True, clip={"norm_type": 2.0}),
        Case("fused", scaler=True),
        Case("adagrad", closure=True),
        Case("adam", closure=True, sizes=UNEVEN),
        Case("momentum", scheduled=True),
        *(Case("adam", model=f"bag {kind}", sizes=UNEVEN) for kind in (
            "sum", "mean", "max", "sum weighted", "sum ragged", "mean ragged", "max ragged")),
    ],
    4: [
        *(Case(optimizer, sizes=UNEVEN, passes=passes) for optimizer in ("momentum", "adam", "rowwise")
          for passes in (1, 3)),
        *(Case("adam", rows=rows, padding_idx=None) for rows in (1, 2, 3)),
        Case("adam", ids="owned"),
        Case("adam", ids="same", model="one"),
        Case("adam", sizes=((4, 0, 4, 4),)),
        Case("adam", ignoring=((2, 1), (3, 0), (3, 2), (4, -1))),
        Case("adam", model="one", ignoring=((2, 1), (3, 0), (3, 2), (4, -1)), clip={"norm_type": 2.0}),
        Case("momentum", dense="manual", reduction="sum", sizes=UNEVEN),
        # A rank that ignores the rows waits for the others' dense gradients, not in the exchange of those of rows.
        Case("adam", dense="manual", ignoring=((2, 1), (3, 0), (3, 3)), passes=2, clip={"norm_type": float("inf")}),
        Case("adagrad", dense="manual", rows=2, padding_idx=None, sizes=UNEVEN[:3], clip={"norm_type": float("inf")}),
    ],
    5: [Case("adam", rows=rows, padding_idx=None, sizes=UNEVEN, clip={"norm_type": 2.0}) for rows in (1, 3, 700)],
}  # fmt: skip


def assert_as_one_process(case: Case, found: list[Any], expected: Any = None) -> None:
    """Compare a run of ranks with one of a single process: rows, state, other layers, norms, the scale of the loss."""
    columns, dense, norms, scale = expected or train(case, world_size=len(found))
    bound = 1e-12 if case.device == "cpu" else 1e-8  # another processor rounds otherwise
    seen = torch.zeros(case.rows)

    def assert_close(values: Any, expected: Any, what: str) -> None:
        bounds = {"rtol": bound, "atol": bound, "equal_nan": True}
        torch.testing.assert_close(values, expected, **bounds, msg=lambda text: f"{what} of {case}: {text}")

    for own, own_dense, own_norms, own_scale in found:
        ids = own.pop("ids")
        seen[ids] += 1
        assert own.keys() == columns.keys(), case
        for name, values in own.items():
            assert_close(values, columns[name][ids], name)
        assert_close(own_dense, dense, "dense layers")
        assert_close(own_norms, norms, "norms")
        assert own_scale == scale, case
    assert (seen == 1).all()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("world_size", CASES)
def test_ranks_train_as_one_process(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(train_all, world_size, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        assert_as_one_process(case, [each[number] for each in found])


def test_run_equals_itself(ranks: RankPool) -> None:
    """Bit for bit, although ranks meet in any order."""
    case = Case("adam", sizes=UNEVEN, passes=2, clip={"norm_type": 2.0}, dtype=torch.float32)
    for once, again in ranks.run(train_all, 4, [case, case]):
        assert all(torch.equal(values, again[0][name]) for name, values in once[0].items())
        assert all(map(torch.equal, once[1] + once[2], again[1] + again[2]))


def test_gradient_that_no_optimizer_takes_is_an_error_on_all_ranks(ranks: RankPool) -> None:
    """As on one process: in the next training forward pass, once another optimizer has stepped."""
    for said in ranks.run(train_without_optimizer, 3):
        assert "is in no optimizer, so its gradient reaches no table" in said
