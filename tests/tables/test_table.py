"""Tables: rows in and out, columns, storages, errors."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from children import run_script
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned_places import PINNED

import speedswap
from speedswap import Column, Table, init
from speedswap._machine import physical_bytes
from speedswap.errors import (
    DuplicateIdError,
    IdError,
    SpeedswapWarning,
    TableClosedError,
    TableTooLargeError,
)
from speedswap.kernels import _C
from speedswap.tables.record import RecordLayout

STORAGES = ["device", "pinned", "pageable", "disk"]


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _pinned_works_as_pageable_without_a_gpu(recwarn: pytest.WarningsRecorder) -> None:
    if not torch.cuda.is_available():
        import warnings

        warnings.filterwarnings("ignore", message="SW405", category=SpeedswapWarning)


def make(storage: str, tmp_path: Path, rows: int = 50, dim: int = 6, **kwargs: object) -> Table:
    path = tmp_path / "table" if storage == "disk" else None
    return Table.create(rows, dim, storage=storage, path=path, **kwargs)  # type: ignore[arg-type]


def test_rows_come_out_as_they_went_in(storage: str, tmp_path: Path, device: str) -> None:
    table = make(storage, tmp_path)
    rows = torch.tensor([3, 49, 0], device=device)
    values = torch.arange(18.0, device=device).view(3, 6)
    table.scatter(rows, values)
    block = table.gather(rows, device=device)
    assert block.weight.device.type == device
    assert torch.equal(block.weight, values)
    expected = torch.zeros(50, 6)
    expected[[3, 49, 0]] = values.cpu()
    assert torch.equal(table.read(), expected)
    table.close()


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_of_writes_equals_a_numpy_array(data: st.DataObject) -> None:
    rows, dim = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int8, torch.float64, torch.bool]))
    table = Table.create(rows, dim, dtype=dtype, storage="pageable")
    model = torch.zeros(rows, dim, dtype=dtype)
    for step in range(data.draw(st.integers(1, 5))):
        chosen = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows))
        ids = torch.tensor(chosen, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
        values = torch.randint(0, 2, (len(ids), dim), generator=torch.Generator().manual_seed(step)).to(dtype)
        if data.draw(st.booleans()):
            table.scatter(ids, values)
            model[ids.long()] = values
        else:
            start = data.draw(st.integers(0, rows - 1))
            table.write(start, values[: rows - start])
            model[start : start + len(values)] = values[: rows - start]
        assert torch.equal(table.gather(ids).weight, model[ids.long()])
    assert torch.equal(table.read(), model)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint16, torch.complex64, torch.bool]
)
def test_every_kind_of_item(dtype: torch.dtype, storage: str, tmp_path: Path) -> None:
    table = make(storage, tmp_path, dim=5, dtype=dtype)
    values = torch.randint(0, 2, (2, 5)).to(dtype)
    table.scatter(torch.tensor([7, 8]), values)
    assert torch.equal(table.read(7, 9), values)
    assert table.dtype == dtype
    table.close()


def test_several_columns_travel_together(storage: str, tmp_path: Path, device: str) -> None:
    table = make(storage, tmp_path, init=init.constant(2.0))
    table.add_columns(
        [
            Column("sum", (1,), torch.float32, init.constant(0.5)),
            Column("exp_avg", (6,), torch.float32, init.zeros()),
            Column("count", (), torch.int64, init.constant(3)),
        ]
    )
    rows = torch.tensor([4, 40], device=device)
    block = table.gather(rows, device=device)
    assert {name: tuple(tensor.shape) for name, tensor in block.columns.items()} == {
        "weight": (2, 6),
        "sum": (2, 1),
        "exp_avg": (2, 6),
        "count": (2,),
    }
    for name, value in {"weight": 2.0, "sum": 0.5, "exp_avg": 0.0, "count": 3}.items():
        assert bool((block[name] == value).all()), name
    table.scatter(rows, {"sum": torch.full((2, 1), 9.0, device=device), "count": torch.tensor([5, 6], device=device)})
    assert table.read(4, 5, column="count").tolist() == [5]
    assert table.read(column="sum")[[4, 40]].flatten().tolist() == [9.0, 9.0]
    assert bool((table.read() == 2.0).all())
    table.close()


def test_columns_added_before_the_first_write_share_the_record_and_later_ones_do_not(
    storage: str, tmp_path: Path
) -> None:
    table = make(storage, tmp_path, init=init.normal(), seed=4)
    start = table.read()
    table.add_columns([Column("early", (6,), torch.float32, init.uniform(1, 2))])
    if storage != "disk":
        assert len(table.store.groups) == 1
    assert torch.equal(table.read(), start)
    table.scatter(torch.tensor([1]), torch.ones(1, 6))
    written = table.read()
    table.add_columns(
        [
            Column("late", (6,), torch.float32, init.constant(7.0)),
            Column("copy", (6,), torch.float32, init.copy_of("weight")),
        ]
    )
    if storage != "disk":
        assert len(table.store.groups) == 2
    assert torch.equal(table.read(), written)
    assert torch.equal(table.read(column="copy"), written)
    assert bool((table.read(column="late") == 7.0).all())
    with pytest.raises(ValueError, match="'late' already exists"):
        table.add_columns([Column("late", (6,), torch.float32, init.zeros())])
    for change in (table.add_columns, table.reset_columns):
        with pytest.raises(TypeError, match=r"columns has a str; give speedswap\.Column"):
            change(["late"])
    table.close()


def test_a_view_is_the_tables_own_memory(storage: str, tmp_path: Path) -> None:
    table = make(storage, tmp_path)
    if storage == "disk":
        with table, pytest.raises(TypeError, match="are not in one memory"):
            table.view()
        return
    table.add_columns([Column("sum", (1,), torch.float32, init.zeros())])
    version = table.version
    table.view("sum")[7] = 3.0
    table.view()[7] = 2.0
    assert table.version > version
    assert table.read(7, 8).tolist() == [[2.0] * 6]
    assert table.read(column="sum").sum() == 3.0
    table.close()


# ---------------------------------------------------------------------------- errors


def test_bad_rows_and_values_are_refused_before_anything_is_written(storage: str, tmp_path: Path, device: str) -> None:
    table = make(storage, tmp_path, name="items", init=init.normal())
    before = table.read()
    ones = torch.ones(2, 6, device=device)

    def rows(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    for bad in (-1, 50, 2**40):
        with pytest.raises(IdError, match=rf"ids\[1\] is {bad}, but table 'items' has rows 0 to 49"):
            table.scatter(rows(3, bad), ones)
        with pytest.raises(IdError, match=rf"ids\[1\] is {bad}"):
            table.gather(rows(3, bad))
    with pytest.raises(DuplicateIdError, match=r"rows\[1\] is 3.*table 'items'"):
        table.scatter(rows(3, 3), ones)
    with pytest.raises(TypeError, match=r"float64, the table's are torch\.float32"):
        table.scatter(rows(3, 4), ones.double())
    with pytest.raises(ValueError, match=r"shape \(2, 5\); they must have \(2, 6\)"):
        table.scatter(rows(3, 4), ones[:, :5])
    with pytest.raises(ValueError, match="column 'sum' is not in table 'items'; it has weight"):
        table.scatter(rows(3, 4), {"sum": ones})
    with pytest.raises(TypeError, match="float32"):
        table.gather(torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*one-dimensional"):
        table.gather(rows(3, 4).view(1, 2))
    with pytest.raises(IdError, match="rows 49 to 50 were to be written"):
        table.write(49, ones)
    with pytest.raises(ValueError, match="column 'sum' is not in table"):
        table.read(column="sum")
    assert torch.equal(table.read(), before)
    table.close()


def test_a_closed_table_says_so(storage: str, tmp_path: Path) -> None:
    with make(storage, tmp_path, name="items") as table:
        assert not table.closed
    for use in (lambda: table.gather(torch.tensor([0])), table.read, table.flush, lambda: table.save(tmp_path / "x")):
        with pytest.raises(TableClosedError, match="'items' is closed"):
            use()
    assert "closed" in repr(table)
    table.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings is 0"),
        ({"embedding_dim": -2}, "embedding_dim is -2"),
        ({"num_embeddings": 2.5}, "num_embeddings is 2.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616; give a whole number from 0"),
        ({"seed": 1.5}, r"seed is 1\.5; give a whole number from 0 to 2\*\*64 - 1"),
        ({"seed": True}, "seed is True; give a whole number"),
        ({"seed": "a"}, "seed is 'a'; give a whole number"),
        ({"name": 5}, "name is 5; give a string"),
        ({"storage": "tape"}, "storage is 'tape'; choose one of auto, device, pinned, pageable, disk"),
        ({"storage": "disk"}, "path is None; give the directory"),
        ({"storage": "pageable", "path": "here"}, "only tables on disk have a path"),
        ({"zero_row": 10}, "zero_row is 10"),
        ({"zero_row": 1.5}, r"zero_row is 1\.5; give one of the table's rows, 0 to 9"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table.create(**{"num_embeddings": 10, "embedding_dim": 4, **arguments})  # type: ignore[arg-type]


def test_a_quantized_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.qint8.*use torch\.int8"):
        Table.create(3, 3, dtype=torch.qint8)


# Linux may be told to promise any amount (1).
OVERCOMMITS = Path("/proc/sys/vm/overcommit_memory")
PROMISES_ALL = OVERCOMMITS.exists() and OVERCOMMITS.read_text().strip() == "1"


@pytest.mark.parametrize(
    "rows",
    [
        2**50,
        pytest.param(
            2 * physical_bytes() // 4096, marks=pytest.mark.skipif(PROMISES_ALL, reason="the system promises anything")
        ),
    ],
)
def test_memory_that_cannot_be_had_is_said_before_anything_is_taken(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking memory until there is no more would end other processes first."""
    monkeypatch.setattr(_C, "prefault", lambda *args: pytest.fail("memory was taken"))
    with pytest.raises(TableTooLargeError, match=r"could not allocate .* GiB of pageable memory.*storage='disk'"):
        Table.create(rows, 1024, storage="pageable")


# ---------------------------------------------------------------------------- what it says of itself


@pytest.mark.parametrize("name", ["disk", "memmap"])
def test_a_table_on_disk_says_so_by_either_name(name: str, tmp_path: Path) -> None:
    with Table.create(9, 3, storage=name, path=tmp_path / "rows") as table:
        assert table.storage == "disk"
        assert repr(table) == "Table('rows', 9 × 3 float32, disk, under 0.01 GiB)"


def test_repr_says_rows_dim_columns_storage_and_size() -> None:
    table = Table.create(2_000_000, 128, storage="pageable", name="items")
    assert repr(table) == "Table('items', 2,000,000 × 128 float32, pageable, 0.95 GiB)"
    assert len(table) == 2_000_000
    assert table.nbytes == 2_000_000 * 512
    small = Table.create(10, 3, storage="pageable")
    small.add_columns([Column("sum", (1,), torch.float32, init.zeros())])
    assert repr(small) == "Table('table', 10 × 3 float32 + sum, pageable, under 0.01 GiB)"


def test_numpy_integers_are_counts() -> None:
    assert Table.create(np.int64(3), np.int32(2), storage="pageable").read().shape == (3, 2)


# ---------------------------------------------------------------------------- records


def test_records_begin_on_lines_and_waste_at_most_an_eighth() -> None:
    def layout(*columns: tuple[int, torch.dtype]) -> RecordLayout:
        return RecordLayout.of([Column(f"c{i}", (w,), d, init.zeros()) for i, (w, d) in enumerate(columns)])

    single = torch.float32
    assert layout((128, single)).stride == 512
    assert layout((100, single)).stride == 448
    assert layout((3, single)).stride == 12
    assert layout((120, single)).stride == 512
    assert layout((128, single), (128, single), (128, single)).offsets == (0, 512, 1024)
    assert layout((6, single), (1, single)).offsets == (0, 24)
    assert layout((3, torch.int8), (1, torch.float64)).offsets == (0, 8)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([torch.int8, torch.float16, torch.float32, torch.float64])),
        min_size=1,
        max_size=6,
    )
)
def test_columns_never_overlap_and_are_aligned(columns: list[tuple[int, torch.dtype]]) -> None:
    layout = RecordLayout.of([Column(f"c{i}", (w,), d, init.zeros()) for i, (w, d) in enumerate(columns)])
    end = 0
    for column, offset in zip(layout.columns, layout.offsets, strict=True):
        assert offset >= end
        assert offset % column.dtype.itemsize == 0
        end = offset + column.row_bytes
    assert layout.stride >= end
    item_bytes = {dtype.itemsize for _, dtype in columns}
    assert layout.stride % max(item_bytes) == 0
    if len(item_bytes) == 1:
        payload = sum(column.row_bytes for column in layout.columns)
        assert (layout.stride - payload) * 8 <= layout.stride


# ---------------------------------------------------------------------------- gather_rows and scatter_rows


def test_functions_take_tables_as_they_take_tensors(device: str) -> None:
    table = Table.create(10, 3, storage="pageable", init=init.normal())
    tensor = table.read()
    ids = torch.tensor([4, 4, 9], device=device)
    assert torch.equal(speedswap.gather_rows(table, ids).cpu(), tensor[[4, 4, 9]])
    out = torch.empty(3, 3)
    assert speedswap.gather_rows(table, ids, out=out) is out
    assert torch.equal(out, tensor[[4, 4, 9]])
    assert out._version > 0  # autograd sees the write
    strided = torch.empty(3, 6)[:, ::2]
    assert torch.equal(speedswap.gather_rows(table, ids, out=strided), tensor[[4, 4, 9]])
    with pytest.raises(ValueError, match=r"out has shape \(2, 3\), but \(3, 3\) is needed"):
        speedswap.gather_rows(table, ids, out=torch.empty(2, 3))
    with pytest.raises(DuplicateIdError):
        speedswap.scatter_rows(table, ids, torch.zeros(3, 3, device=device))
    values = torch.arange(9.0, device=device).view(3, 3)
    speedswap.scatter_rows(table, ids, values, duplicates="last")
    tensor[4], tensor[9] = values[1].cpu(), values[2].cpu()
    assert torch.equal(table.read(), tensor)
    with pytest.raises(ValueError, match="duplicates is 'sum'"):
        speedswap.scatter_rows(table, ids, values, duplicates="sum")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"out is torch\.float64"):
        speedswap.gather_rows(table, ids, out=torch.empty(3, 3, dtype=torch.float64))


def test_columns_are_gathered_into_tensors_that_fit(storage: str, tmp_path: Path, device: str) -> None:
    with make(storage, tmp_path, init=init.normal()) as table:
        table.add_columns([Column("sum", (1,), torch.float32, init.constant(0.5))])
        rows, out = torch.tensor([5, 2, 5], device=device), torch.zeros(3, 6, device=device)
        block = table.gather(rows, out={"weight": out})
        assert block.weight is out
        assert torch.equal(out.cpu(), table.read()[[5, 2, 5]])
        assert block["sum"].flatten().tolist() == [0.5] * 3
        for wrong, error in [
            (torch.zeros(2, 6, device=device), ValueError),
            (torch.zeros(3, 6, device=device, dtype=torch.float64), TypeError),
            (torch.zeros(6, 3, device=device).T, ValueError),
            (torch.zeros(3, 6, device="meta"), TypeError),
        ]:
            with pytest.raises(error):
                table.gather(rows, out={"weight": wrong})
        if storage != "disk":
            with pytest.raises(ValueError, match="not a view of the table"):
                table.gather(torch.arange(50), out={"sum": table.view("sum")[:50]})


def test_tensors_that_take_rows_know_that_they_were_written(device: str) -> None:
    table = Table.create(5, 3, storage="pageable", init=init.normal())
    rows, out = torch.tensor([4, 0], device=device), torch.zeros(2, 3, device=device)
    before = out._version
    table.gather(rows, out={"weight": out})
    assert out._version > before


def test_lazily_negated_tensors_take_the_rows_themselves(device: str) -> None:
    table = Table.create(5, 3, storage="pageable", init=init.normal())
    rows, memory = torch.tensor([4, 0], device=device), torch.zeros(2, 6, dtype=torch.complex64, device=device)
    negated = torch._neg_view(memory.real.contiguous()[:, :3].contiguous())
    with pytest.raises(ValueError, match="cannot take the rows"):
        table.gather(rows, out={"weight": negated})
    assert torch.equal(speedswap.gather_rows(table, rows, out=negated).cpu(), table.read()[[4, 0]])


def test_ids_that_would_be_overwritten_are_refused(device: str) -> None:
    table = Table.create(5, 1, dtype=torch.int64, storage="pageable")
    rows = torch.tensor([4, 0], device=device)
    with pytest.raises(ValueError, match="shares memory with rows"):
        table.gather(rows, out={"weight": rows.view(2, 1)})


@pytest.mark.parametrize("way", PINNED)
def test_a_copy_has_storage_and_shares_of_its_table(way: str) -> None:
    """Also those that serve only pinned memory, which does not exist without a GPU."""
    table = Table.create(5, 3, storage=PINNED[way], init=init.normal())
    copied = copy.deepcopy(table)
    assert (copied.storage, copied.store.facts.shares) == (table.storage, PINNED[way].shares)
    assert torch.equal(copied.read(), table.read())


def test_rows_gathered_into_the_tables_own_memory_are_those_from_before() -> None:
    """Each row would otherwise be read after it was overwritten."""
    table = Table.create(4, 2, storage="pageable")
    table.write(0, torch.arange(8.0).view(4, 2))
    ids = torch.tensor([3, 0, 1, 2])
    wanted = table.read()[ids]
    speedswap.gather_rows(table, ids, out=table.view())
    assert torch.equal(table.read(), wanted)


# ---------------------------------------------------------------------------- memory


def run_alone(code: str) -> str:
    """Run code in a separate process and return what it printed."""
    result = run_script(code, seconds=300.0)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("storage", ["pageable", "pinned"])
def test_memory_is_taken_exactly(storage: str) -> None:
    printed = run_alone(f"""
        import warnings
        warnings.simplefilter("ignore")
        import torch, speedswap
        from speedswap import init

        def resident():
            fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
            return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024

        speedswap.Table.create(1000, 128, storage={storage!r}, init=init.normal()).read()  # what is loaded at first use
        before, _ = resident()
        table = speedswap.Table.create(300_003, 128, storage={storage!r}, init=init.normal())
        table.scatter(torch.tensor([5]), torch.ones(1, 128))
        after, peak = resident()
        print(table.nbytes, after - before, peak - before)
    """)
    nbytes, taken, peak = map(int, printed.split())
    assert nbytes == 300_003 * 512  # which a pool would round up to 256 MiB
    assert nbytes <= taken + 2**20
    assert taken <= 1.02 * nbytes + 32 * 2**20
    assert peak <= 1.02 * nbytes + 32 * 2**20


def test_a_forked_child_may_look_but_not_write() -> None:
    printed = run_alone("""
        import os, warnings
        warnings.simplefilter("ignore")
        import torch, speedswap
        from speedswap.errors import TableClosedError

        table = speedswap.Table.create(100, 4, storage="pageable", init=speedswap.init.normal(), name="items")
        before = table.read()
        pid = os.fork()
        if pid == 0:
            assert torch.equal(table.gather(torch.arange(100)).weight, before)
            try:
                table.scatter(torch.tensor([1]), torch.ones(1, 4))
            except TableClosedError as error:
                assert "belongs to process" in str(error)
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        table.scatter(torch.tensor([1]), torch.ones(1, 4))
        print(os.waitstatus_to_exitcode(status), torch.equal(table.read(2), before[2:]))
    """)
    assert printed.split() == ["0", "True"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinned_without_a_gpu_works_as_pageable_and_says_so_once() -> None:
    printed = run_alone("""
        import warnings
        import torch, speedswap

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tables = [speedswap.Table.create(10, 4, storage="pinned") for _ in range(3)]
        tables[0].scatter(torch.tensor([1]), torch.ones(1, 4))
        print(len(caught), tables[0].pinned, caught[0].message)
    """)
    assert printed.startswith("1 False SW405: storage 'pinned' works as 'pageable' here")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_is_registered_and_given_back() -> None:
    from cupy.cuda import runtime

    table = Table.create(1000, 128, storage="pinned")
    pointer = table.view().data_ptr()
    assert table.pinned
    assert runtime.pointerGetAttributes(pointer).devicePointer == pointer
    table.close()
    fresh = Table.create(1000, 128, storage="pinned")
    fresh.view()
    assert fresh.pinned


def test_interpreter_exit_with_open_tables_is_silent(tmp_path: Path) -> None:
    result = run_script(
        """
        import sys, warnings, speedswap
        warnings.simplefilter("ignore")
        tables = [speedswap.Table.create(10, 4, storage=s) for s in ("pageable", "pinned", "device")]
        tables.append(speedswap.Table.create(10, 4, path=sys.argv[1]))
        """,
        tmp_path / "t",
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_registration_that_fails_leaves_a_working_pageable_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from speedswap.kernels.cuda import pinning
    from speedswap.tables import memory as storage

    def fails(pointer: int, nbytes: int) -> str:
        return "cudaErrorMemoryAllocation: out of memory"

    monkeypatch.setattr(pinning, "pin", fails)
    monkeypatch.setattr(storage.kernels, "cuda_ready", lambda: (True, ""))
    monkeypatch.setattr("speedswap._words._said", set())
    table = Table.create(100, 4, storage="pinned", init=init.normal())
    with pytest.warns(SpeedswapWarning, match="could not be registered with CUDA.*cudaErrorMemoryAllocation"):
        table.view()
    assert not table.pinned
    table.scatter(torch.tensor([5]), torch.ones(1, 4))
    assert torch.equal(table.gather(torch.tensor([5])).weight, torch.ones(1, 4))


@pytest.mark.parametrize("storage", ["auto", "pageable", "device"])
def test_a_saved_table_is_loaded_into_memory(storage: str, tmp_path: Path) -> None:
    """Every column, compact ones and late ones, the attributes and the number of writes."""
    rows = torch.arange(50)
    with Table.create(50, 3, init=init.normal(), stored_dtype=torch.bfloat16, rounding="stochastic") as table:
        table.scatter(rows, torch.randn(50, 3))
        table.add_columns([Column("late", (2,), torch.float64, init.constant(0.5))])
        table.attributes["step"] = 7
        table.save(tmp_path / "saved")
        with Table.load(tmp_path / "saved", storage=storage) as loaded:
            assert loaded.path is None
            assert loaded.columns == table.columns
            assert loaded.attributes == {"step": 7}
            for values in (None, torch.randn(50, 3)):  # and the next write rounds as the table's would
                for each in (table, loaded):
                    if values is not None:
                        each.scatter(rows, values)
                for name in table.columns:
                    assert torch.equal(loaded.read(column=name), table.read(column=name))


def test_a_table_whose_columns_were_interrupted_twice_says_that_its_rows_are_gone():
    """Ctrl-C while columns are added, and again while the old ones are put back, leaves no table to crash in."""
    interrupts = iter([False, True, True])

    def fill(tensor: torch.Tensor) -> None:
        tensor.zero_()
        if next(interrupts):
            raise KeyboardInterrupt

    table = speedswap.Table.create(10, 4, storage="pageable", init=speedswap.init.from_torch(fill))
    with pytest.raises(KeyboardInterrupt):
        table.add_columns([Column("more", (4,), torch.float32, speedswap.init.zeros())])
    for use in (lambda: table.gather(torch.tensor([1])), table.read, lambda: table.write(0, torch.ones(1, 4))):
        with pytest.raises(TableClosedError, match="make it again"):
            use()
    table.close()
