"""Tables that store float32 columns as float16, bfloat16 or int8."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import speedswap
from speedswap import Column, Table, kernels
from speedswap.errors import TableFormatError
from speedswap.tables.record import RecordLayout

HALVES = [torch.float16, torch.bfloat16]
STORED = [*HALVES, torch.int8]


@pytest.fixture(params=["device", "pageable", "disk", *(["pinned"] if torch.cuda.is_available() else [])])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of Table.create for a table in a storage."""
    return {"storage": request.param, **({"path": tmp_path / "t"} if request.param == "disk" else {})}


def through(values: Tensor, stored: torch.dtype) -> Tensor:
    """Return values after being stored, by torch's own conversions."""
    if stored != torch.int8:
        return values.to(stored).float()
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    return torch.where(scale > 0, (values / scale).round(), 0.0).to(torch.int8).float() * scale


def random_rows(n: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def test_a_tiny_table(device: str) -> None:
    """Ones survive in any form; a thousandth more does not in bfloat16, whose next number is 1.0078125."""
    with Table.create(3, 2, stored_dtype=torch.bfloat16) as table:
        table.scatter(torch.tensor([2, 0]), torch.tensor([[1.0, 1.001], [-2.0, 1.0078125]], device=device))
        assert table.gather(torch.arange(3), device=device).weight.tolist() == [[-2, 1.0078125], [0, 0], [1, 1]]
        assert table.view().dtype == torch.bfloat16
        assert table.dtype == torch.float32
        assert table.nbytes == 12
        assert repr(table) == "Table('table', 3 × 2 float32 as bfloat16, " + f"{table.storage}, under 0.01 GiB)"


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_rows_come_out_as_torch_would_round_them(stored: torch.dtype, place: dict[str, Any], device: str) -> None:
    table = Table.create(500, 24, stored_dtype=stored, **place)
    expected = torch.zeros(500, 24)
    for turn in range(4):
        rows = torch.randperm(500)[:200]
        values = random_rows(200, 24, turn)
        table.scatter(rows.to(device), values.to(device))
        expected[rows] = through(values, stored)
    assert torch.equal(table.gather(torch.arange(500), device=device).weight.cpu(), expected)
    assert torch.equal(table.read(), expected)
    assert torch.equal(table.read(7, 7), expected[7:7])
    assert torch.equal(table.read(490), expected[490:])
    table.write(100, random_rows(50, 24, 9).to(device))
    expected[100:150] = through(random_rows(50, 24, 9), stored)
    assert torch.equal(table.read(), expected)
    if table.path is not None:
        with pytest.raises(TypeError, match="are not in one memory"):
            table.view()
    elif stored == torch.int8:
        with pytest.raises(TypeError, match="'weight' is stored as int8 with a scale per row and has no view"):
            table.view()
    else:
        view = table.view()
        assert torch.equal(view.float().cpu(), expected)
        view[3] = 5
        assert table.read(3, 4).tolist() == [[5.0] * 24]
    table.close()


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(
    "init", [speedswap.init.normal(std=3), speedswap.init.uniform(-1, 2), speedswap.init.constant(0.1), None]
)
def test_initial_values_are_float32s_rounded_to_nearest(stored: torch.dtype, init: Any, place: dict[str, Any]) -> None:
    with Table.create(70_000, 6, init=init, seed=5) as plain:
        expected = through(plain.read(), stored)
    expected[11] = 0
    # The order of columns in the record does not matter.
    with Table.create(70_000, 6, init=init, seed=5, stored_dtype=stored, zero_row=11, **place) as table:
        table.add_columns([Column("other", (3,), torch.float64, speedswap.init.constant(2))])
        assert torch.equal(table.read(), expected)
        table.scatter(torch.arange(10), {"weight": torch.ones(10, 6), "other": torch.zeros(10, 3).double()})
        table.reset_columns([table.columns["weight"]])
        assert torch.equal(table.read(), expected)


def test_functions_of_torch_and_copies_fill_compact_columns() -> None:
    init = speedswap.init.from_torch(torch.nn.init.xavier_uniform_)
    with Table.create(100, 8, init=init, seed=1) as plain:
        values = plain.read()
    with Table.create(100, 8, init=init, seed=1, stored_dtype=torch.bfloat16) as table:
        assert torch.equal(table.read(), values.bfloat16().float())
        shape, copied = (8,), speedswap.init.copy_of("weight")
        table.add_columns(
            [
                Column("small", shape, torch.float32, copied, stored=torch.int8),
                Column("same", shape, torch.float32, copied),
            ]
        )
        assert torch.equal(table.read(column="same"), values.bfloat16().float())
        assert torch.equal(table.read(column="small"), through(values.bfloat16().float(), torch.int8))


def test_columns_of_several_forms_travel_together(place: dict[str, Any], device: str) -> None:
    """As weight, momentum and squares of an optimizer; late columns are in a separate record."""
    table = Table.create(300, 10, **place)
    form = {"init": speedswap.init.zeros(), "dtype": torch.float32, "row_shape": (10,)}
    table.add_columns([Column("first", stored=torch.bfloat16, **form), Column("second", stored=torch.float16, **form)])
    assert table.nbytes == 300 * (40 + 24 + 24)  # of three columns of 10, each at the next multiple of 8
    rows = torch.randperm(300)[:64]
    values = {name: random_rows(64, 10, seed) for seed, name in enumerate(("weight", "first", "second"))}
    table.scatter(rows.to(device), {name: value.to(device) for name, value in values.items()})
    table.add_columns([Column("late", stored=torch.int8, **form)])
    values["late"] = random_rows(64, 10, 9)
    table.scatter(rows, {"late": values["late"]})
    block = table.gather(rows.to(device), device=device)
    for name, stored in (("weight", None), ("first", torch.bfloat16), ("second", torch.float16), ("late", torch.int8)):
        expected = values[name] if stored is None else through(values[name], stored)
        assert torch.equal(block[name].cpu(), expected), name
    table.close()


# ---------------------------------------------------------------------------- stochastic rounding


def test_a_scatter_draws_by_seed_column_and_number_of_the_write(device: str) -> None:
    """The same rows at the same write give the same bits, in any order and from any device; another write others."""
    make = lambda: Table.create(1000, 12, stored_dtype=torch.bfloat16, rounding="stochastic", seed=4)  # noqa: E731
    with make() as one, make() as two:
        rows, values = torch.arange(1000), random_rows(1000, 12)
        order = torch.randperm(1000)
        one.scatter(rows, values)
        two.scatter(order.to(device), values[order].to(device))
        assert (one.writes, two.writes) == (1, 1)
        assert torch.equal(one.read(), two.read())
        expected = values.clone()
        key = kernels.rounding_key(4, one.columns["weight"].key, 0)
        kernels.round_rows(expected, rows, kernels.Stored(torch.bfloat16, key))
        assert torch.equal(one.read(), expected)
        one.scatter(rows, values)
        assert not torch.equal(one.read(), expected)
        one.write(0, values)
        assert torch.equal(one.read(), values.bfloat16().float()), "write rounds to nearest"


def test_a_reopened_table_goes_on_with_its_writes(tmp_path: Path) -> None:
    arguments = {"stored_dtype": torch.float16, "rounding": "stochastic", "seed": 8}
    kept = Table.create(50, 7, **arguments)
    table = Table.create(50, 7, path=tmp_path / "t", **arguments)
    for step in range(6):
        for one in (kept, table):
            one.scatter(torch.arange(step, 50), random_rows(50 - step, 7, step))
        if step == 2:
            table.close()
            table = Table.open(tmp_path / "t")
        if step == 4:
            table.save(tmp_path / "copy")
            table.close()
            table = Table.open(tmp_path / "copy")
    column = table.columns["weight"]
    assert (column.stored, column.rounding, table.writes) == (torch.float16, "stochastic", 6)
    assert torch.equal(table.read(), kept.read())
    for one in (table, kept):
        one.close()


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_rows_that_pass_through_a_small_cache_are_the_same(stored: torch.dtype, tmp_path: Path) -> None:
    rounding = "nearest" if stored == torch.int8 else "stochastic"
    arguments = {"stored_dtype": stored, "rounding": rounding, "seed": 2}
    with (
        Table.create(400, 9, **arguments) as plain,
        Table.create(400, 9, storage=speedswap.Disk(tmp_path / "t", cache_bytes=1), **arguments) as table,
    ):
        for step in range(3):
            rows = torch.randperm(400)[:200]
            for one in (plain, table):
                one.scatter(rows, random_rows(200, 9, step))
        assert torch.equal(table.read(), plain.read())


# ---------------------------------------------------------------------------- arguments, layout, files


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stored_dtype": torch.int16}, TypeError, "is torch.float32 and was to be stored as torch.int16"),
        ({"stored_dtype": torch.bfloat16, "dtype": torch.float64}, TypeError, "is torch.float64 and was to be stored"),
        ({"stored_dtype": torch.bfloat16, "rounding": "up"}, ValueError, "rounding is 'up'; choose one of nearest, st"),
        ({"stored_dtype": torch.int8, "rounding": "stochastic"}, ValueError, "int8 is rounded to 'nearest' only"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Table.create(10, 4, **arguments)


def test_stored_as_it_is_needs_no_conversion() -> None:
    with Table.create(10, 4, stored_dtype=torch.float32) as table:
        assert not table.columns["weight"].compact
        assert table.nbytes == 160
    with Table.create(10, 4, dtype=torch.int8, stored_dtype=torch.int8) as table:
        assert table.view().dtype == torch.int8
        assert table.nbytes == 40


@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.sampled_from([None, *STORED]), st.sampled_from([torch.float32])),
        min_size=1,
        max_size=6,
    )
)
def test_columns_never_overlap_and_are_aligned(columns: list[tuple[int, torch.dtype | None, torch.dtype]]) -> None:
    layout = RecordLayout.of(
        [
            Column(f"c{i}", (width,), dtype, speedswap.init.zeros(), stored=stored)
            for i, (width, stored, dtype) in enumerate(columns)
        ]
    )
    end = 0
    for column, offset, (width, stored, _) in zip(layout.columns, layout.offsets, columns, strict=True):
        nbytes = {None: 4 * width, torch.int8: 4 + width}.get(stored, 2 * width)
        assert column.row_bytes == nbytes
        assert offset >= end
        assert offset % (4 if stored in (None, torch.int8) else 2) == 0
        end = offset + nbytes
    assert layout.stride >= end


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((path / "MANIFEST").read_bytes().partition(b"\n")[2])
    change(body)
    data = json.dumps(body).encode()
    (path / "MANIFEST").write_bytes(b"%08x\n" % zlib.crc32(data) + data)


def manifest_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / "MANIFEST").read_bytes().partition(b"\n")[2])
    return body


def change_column(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["columns"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_column(stored="float64"), "is stored as 'float64'"),
        (change_column(stored=7), "is stored as 7"),
        (change_column(stored=["bfloat16"]), "TypeError"),
        (change_column(rounding="down"), "has rounding 'down'"),
        (change_column(rounding=None), "has rounding None"),
        (change_column(stored="int8"), "is 'stochastic'; int8 is rounded"),
        (change_column(dtype="float64"), "is torch.float64 and was to be stored"),
        (change_column(stored=None), "does not fit its record"),
        (lambda m: m.update(version=6), "version is 6; this speedswap reads 1"),
        (lambda m: m.update(version=True), "version is True"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    Table.create(10, 4, path=tmp_path / "t", stored_dtype=torch.bfloat16, rounding="stochastic").close()
    rewrite(tmp_path / "t", change)
    with pytest.raises(TableFormatError, match=message):
        Table.open(tmp_path / "t")


# ---------------------------------------------------------------------- values out of range


def of_row_70000(value: float) -> Tensor:
    rows = torch.zeros(70_001, 2)
    rows[70_000, 1] = value
    return rows


def converted(rows: Tensor, stored: torch.dtype) -> None:
    speedswap.convert(torch.nn.Embedding(*rows.shape, _weight=rows), 1, stored_dtype=stored)


def loaded(rows: Tensor, stored: torch.dtype, way: str) -> None:
    items = speedswap.Embedding(*rows.shape, stored_dtype=stored, init=speedswap.init.zeros())
    try:
        if way == "write":
            items.table.write(0, rows)
        elif way == "copy_":
            items.weight.data.copy_(rows)
        elif way == "fill_":
            items.weight.data.fill_(float(rows[-1, 1]))
        else:
            items.load_state_dict({"weight": rows})
    finally:
        assert torch.equal(items.read(), torch.zeros_like(rows))  # also the rows before


WAYS: dict[str, Callable[[Tensor, torch.dtype], object]] = {
    "from_pretrained": lambda rows, stored: speedswap.Embedding.from_pretrained(rows, stored_dtype=stored),
    "convert": converted,
    **{
        way: lambda rows, stored, way=way: loaded(rows, stored, way)  # type: ignore[misc]
        for way in ("write", "copy_", "fill_", "load_state_dict")
    },
}


@pytest.mark.parametrize(
    ("stored", "value"), [(torch.float16, 1e6), (torch.float16, -65520.0), (torch.bfloat16, 3.4e38)]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_would_become_infinite_is_refused(way: str, stored: torch.dtype, value: float) -> None:
    with pytest.raises(ValueError, match=rf"row \d+ of column 'weight' has the value .*, but is stored as {stored}"):
        WAYS[way](of_row_70000(value), stored)


def test_an_initial_value_that_would_become_infinite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"init is .*1000000.*, which has no values of torch\.float16"):
        speedswap.Embedding(5, 2, stored_dtype=torch.float16, init=speedswap.init.constant(1e6))


@pytest.mark.parametrize("stored", STORED)
def test_the_largest_values_and_infinite_ones_are_stored_as_torch_stores_them(stored: torch.dtype) -> None:
    largest = torch.finfo(stored).max if stored != torch.int8 else 3e38
    rows = torch.tensor([[largest, -1.0], [-largest, 0.0]])
    assert torch.equal(speedswap.Embedding.from_pretrained(rows, stored_dtype=stored).read(), through(rows, stored))
    if stored != torch.int8:
        rows[0, 0], rows[1, 0] = torch.inf, torch.nan
        found = speedswap.Embedding.from_pretrained(rows, stored_dtype=stored).read()
        torch.testing.assert_close(found, rows.to(stored).float(), rtol=0, atol=0, equal_nan=True)


def test_an_import_of_a_value_that_would_become_infinite_is_refused(tmp_path: Path) -> None:
    rows = of_row_70000(1e6)
    with Table.create(70_001, 2) as table:
        table.write(0, rows)
        table.export(tmp_path / "rows.safetensors")
    with pytest.raises(TableFormatError, match=r"row 70000: 'weight' has a value that is not finite, as torch.float16"):
        Table.from_file(tmp_path / "rows.safetensors", stored_dtype=torch.float16, path=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert torch.equal(
        Table.from_file(tmp_path / "rows.safetensors", stored_dtype=torch.bfloat16).read(), rows.bfloat16()
    )
