"""Initial values are a function of (seed, column, row, element) alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import speedswap
from speedswap import Column, Table, init


def test_literal_values() -> None:
    assert torch.equal(Table.create(3, 2).read(), torch.zeros(3, 2))
    assert torch.equal(Table.create(3, 2, init=init.constant(1.5)).read(), torch.full((3, 2), 1.5))
    ones = Table.create(3, 2, init=init.constant(1), dtype=torch.int32, zero_row=1).read()
    assert ones.tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("initial", [init.uniform(-0.5, 0.25), init.normal(1.0, 0.1)], ids=["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_same_bits_at_any_thread_count_and_in_any_storage(
    initial: init.Initializer, dtype: torch.dtype, tmp_path: Path
) -> None:
    def rows(threads: int, storage: str) -> torch.Tensor:
        speedswap.kernels.set_num_threads(threads)
        try:
            path = tmp_path / f"{threads}" if storage == "disk" else None
            with Table.create(70_001, 7, dtype=dtype, init=initial, seed=11, storage=storage, path=path) as table:
                return table.read()
        finally:
            speedswap.kernels.set_num_threads(None)

    expected = rows(1, "pageable")
    for threads, storage in [(2, "pageable"), (3, "disk"), (2, "device")]:
        found = rows(threads, storage)
        if storage == "device" and torch.cuda.is_available() and isinstance(initial, init.normal(0, 1).__class__):
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(found, expected, rtol=2 * ulp, atol=2 * ulp)
        else:
            assert torch.equal(found, expected)


def test_seed_column_and_row_each_matter() -> None:
    def column(seed: int, name: str) -> torch.Tensor:
        table = Table.create(100, 8, seed=seed)
        table.add_columns([Column(name, (8,), torch.float32, init.normal())])
        return table.read(column=name)

    first = column(1, "a")
    assert torch.equal(first, column(1, "a"))
    assert not torch.equal(first, column(2, "a"))
    assert not torch.equal(first, column(1, "b"))
    assert len(torch.unique(first)) > 790
    assert torch.equal(
        Table.create(50, 8, init=init.normal(), seed=1).read(),
        Table.create(100, 8, init=init.normal(), seed=1).read(0, 50),
    )


def test_distributions() -> None:
    from scipy import stats

    uniform = Table.create(100_000, 4, init=init.uniform(-2, 3), seed=1).read().flatten().double()
    assert -2 <= uniform.min()
    assert uniform.max() < 3
    assert stats.kstest(uniform.numpy(), stats.uniform(-2, 5).cdf).pvalue > 1e-3
    normal = Table.create(100_000, 4, init=init.normal(1, 2), seed=1).read().flatten().double()
    assert stats.kstest(normal.numpy(), stats.norm(1, 2).cdf).pvalue > 1e-3
    rows = normal.view(-1, 4)
    correlation = torch.corrcoef(rows.T) - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < 0.02
    assert abs(torch.corrcoef(torch.stack([rows[:-1, 0], rows[1:, 0]]))[0, 1]) < 0.02


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.init.normal_,
        torch.nn.init.uniform_,
        torch.nn.init.ones_,
        torch.nn.init.trunc_normal_,
        torch.nn.init.xavier_uniform_,
        torch.nn.init.xavier_normal_,
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.kaiming_normal_,
    ],
)
def test_torch_initializers_have_the_spread_of_the_whole_table(function: object) -> None:
    rows, dim = 150_000, 4
    ours = Table.create(rows, dim, init=function).read()  # type: ignore[arg-type]
    whole = torch.empty(rows, dim)
    function(whole)  # type: ignore[operator]
    assert torch.isclose(ours.std(), whole.std(), rtol=0.02, atol=1e-9)
    assert torch.isclose(ours.mean(), whole.mean(), rtol=0.02, atol=0.02)
    again = Table.create(rows, dim, init=function).read()  # type: ignore[arg-type]
    assert torch.equal(ours, again)
    first, second = ours[:65_536], ours[65_536 : 2 * 65_536]
    assert function is torch.nn.init.ones_ or not torch.equal(first, second)


def test_torch_initializers_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    Table.create(10, 4, init=init.from_torch(torch.nn.init.normal_, std=0.1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", [torch.nn.init.orthogonal_, torch.nn.init.eye_, torch.nn.init.sparse_])
def test_initializers_that_need_the_whole_matrix_are_refused(function: object) -> None:
    with pytest.raises(ValueError, match=r"needs all rows at once.*Table\.write"):
        Table.create(10, 4, init=function)  # type: ignore[arg-type]


def test_arguments_are_checked() -> None:
    for low, high in [(1, 1), (2, 1), (0, math.inf), (math.nan, 1)]:
        with pytest.raises(ValueError, match="low < high"):
            init.uniform(low, high)
    with pytest.raises(ValueError, match="std is -1"):
        init.normal(0, -1)
    with pytest.raises(TypeError, match=r"init is 'normal'; give one of speedswap\.init"):
        Table.create(3, 3, init="normal")  # type: ignore[arg-type]
    for given in (init.constant(1e39), init.uniform(0, 1e39)):
        with pytest.raises(ValueError, match=r"init is .*1e\+39.*, which has no values of torch\.float32"):
            Table.create(3, 3, init=given)


def test_initializers_survive_json() -> None:
    for initial in (init.zeros(), init.constant(2.5), init.uniform(-1, 1), init.normal(0, 2), init.copy_of("weight")):
        assert init.from_json(initial.to_json()) == initial
    assert init.from_json(init.from_torch(torch.nn.init.ones_).to_json()) is None


def test_columns_are_reset_to_their_initial_values() -> None:
    table = Table.create(20, 4)
    column = Column("sum", (4,), torch.float32, init.constant(0.5))
    table.add_columns([column])
    table.scatter(torch.tensor([3]), {"weight": torch.ones(1, 4), "sum": torch.ones(1, 4)})
    table.reset_columns([column])
    assert torch.equal(table.read(column="sum"), torch.full((20, 4), 0.5))
    assert torch.equal(table.read(3, 4), torch.ones(1, 4))
    table.add_columns([Column("late", (1,), torch.float32, init.zeros())])
    assert torch.equal(table.read(3, 4), torch.ones(1, 4))


def test_a_reset_of_a_fresh_table_is_not_undone_by_later_columns() -> None:
    table = Table.create(5, 3)
    table.reset_columns([Column("weight", (3,), torch.float32, init.constant(7.0))])
    table.add_columns([Column("m", (3,), torch.float32, init.zeros())])
    assert torch.equal(table.read(), torch.full((5, 3), 7.0))
