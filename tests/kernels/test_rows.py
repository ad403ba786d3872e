"""gather_rows and scatter_rows of tensors: any dtype, shape, strides and device, against torch and NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap.errors import DuplicateIdError, IdError
from speedswap.kernels import _C, gather_rows, scatter_rows

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch's own

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str
)  # fmt: skip
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def numbers(rows: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Return a tensor of random bytes, read as dtype; whole bytes of 0 and 1 for bool."""
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (rows * dim * item_bytes,), dtype=torch.uint8)
    return values.view(dtype).view(rows, dim).to(device)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits: NaN equals itself, and dtypes that NumPy lacks can be compared."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.view(len(tensor), tensor.shape[1] * tensor.element_size()).numpy()


def numpy_scatter(target: np.ndarray, ids: list[int], values: np.ndarray) -> np.ndarray:
    target = target.copy()
    for i, row in zip(ids, values, strict=True):
        target[i] = row
    return target


# ---- small cases to read ---------------------------------------------------------------------------------------------


@pytest.mark.cuda_kernels
def test_gather_three_rows(device: str):
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    rows = gather_rows(source, torch.tensor([2, 0, 2], device=device))
    assert rows.tolist() == [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    assert rows.device == source.device


@pytest.mark.cuda_kernels
def test_scatter_two_rows(device: str):
    target = torch.zeros(3, 2, device=device)
    scatter_rows(target, torch.tensor([2, 0], device=device), torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device))
    assert target.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]


# ---- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda_kernels
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(device: str, dtype: torch.dtype, ids_dtype: torch.dtype):
    source = numbers(50, 7, dtype, device)
    ids = torch.randperm(50)[:20].to(device, ids_dtype)
    order = ids.tolist()
    rows = gather_rows(source, ids)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(raw(rows), raw(source)[order])
    values = numbers(20, 7, dtype, device)
    expected = numpy_scatter(raw(source), order, raw(values))
    scatter_rows(source, ids, values)
    np.testing.assert_array_equal(raw(source), expected)


@pytest.mark.cuda_kernels
@pytest.mark.parametrize("dim", [*range(1, 40), 63, 64, 65, 127, 129, 255, 257, 1000, 1023])
def test_every_width(device: str, dim: int):
    for dtype in (torch.uint8, torch.int16, torch.float32, torch.float64):
        source = numbers(40, dim, dtype, device)
        ids = torch.randperm(40)[:31]
        rows = gather_rows(source, ids.to(device))
        np.testing.assert_array_equal(raw(rows), raw(source)[ids.tolist()])
        target = numbers(40, dim, dtype, device)
        expected = numpy_scatter(raw(target), ids.tolist(), raw(rows))
        scatter_rows(target, ids.to(device), rows)
        np.testing.assert_array_equal(raw(target), expected)


def last_level_cache() -> int:
    """Return its bytes, or 32 MiB where they are not known, as the loops do."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(size.read_text().strip().removesuffix("K")) << 10 if size.exists() else 32 << 20


@pytest.mark.sweep(3)
@pytest.mark.parametrize("row_bytes", [16, 100, 128, 200, 512, 516, 1000, 2048, 2052, 4096, 5000])
def test_outputs_larger_than_the_cache(row_bytes: int):
    """Written past the cache, in whole lines where the rows allow and through scratch memory where not."""
    rows = min(int(0.6 * last_level_cache()), 80_000_000) // row_bytes  # as much is read as is written
    source = torch.randint(0, 256, (rows // 4, row_bytes), dtype=torch.uint8)
    ids = torch.randint(0, rows // 4, (rows,))
    gathered = gather_rows(source, ids)
    np.testing.assert_array_equal(gathered.numpy(), source.numpy()[ids.numpy()])
    for shift in (0, 12):  # a target that begins inside a line
        memory = torch.zeros(rows * row_bytes + 64, dtype=torch.uint8)
        target = memory[shift : shift + rows * row_bytes].view(rows, row_bytes)
        order = torch.randperm(rows)
        scatter_rows(target, order, gathered)
        np.testing.assert_array_equal(target.numpy()[order.numpy()], gathered.numpy())
        assert not memory[:shift].any()
        assert not memory[shift + rows * row_bytes :].any()


@pytest.mark.parametrize("row_bytes", [16, 100, 512, 516, 2052])
def test_a_scatter_that_is_part_of_a_large_one(row_bytes: int):
    """Few rows are written past the cache if those of the whole move exceed it."""
    values = torch.randint(0, 256, (50, row_bytes), dtype=torch.uint8)
    target, ids = torch.zeros(100, row_bytes, dtype=torch.uint8), torch.randperm(100)[:50]
    part = (values.data_ptr(), 0, row_bytes, row_bytes)
    _C.scatter(target.data_ptr(), row_bytes, ids.data_ptr(), 50, [part], 2, rows_moved=1 << 40)
    assert torch.equal(target[ids], values)
    assert target.any(1).sum() <= 50


@pytest.mark.cuda_kernels
def test_every_stride(device: str):
    """Rows apart, items apart, transposed, one row repeated: of source, out, values and ids."""
    base = numbers(60, 60, device=device)
    views = {
        "rows apart": base[::3, :16],
        "items apart": base[:20, 4:52:3],
        "both apart": base[::3, ::2][:, :16],
        "transposed": base.t()[:20, :16],
        "repeated": base[:1, :16].expand(20, 16),
        "from the middle": base[7:27, 3:19],
    }
    ids = torch.randperm(20, device=device)[:10]
    every_other = torch.randint(0, 20, (10, 3), device=device)[:, 1]
    for name, source in views.items():
        for some in (ids, every_other):
            expected = raw(source)[some.tolist()]
            np.testing.assert_array_equal(raw(gather_rows(source, some)), expected, err_msg=name)
            zeros = torch.zeros(32, 32, device=device)
            for out in (zeros[:20:2, :16], zeros[12:22, ::2], zeros.t()[22:, :16]):
                assert gather_rows(source, some, out=out) is out
                np.testing.assert_array_equal(raw(out), expected, err_msg=name)
    for name, view in views.items():
        if name == "repeated":
            continue
        for values in (
            numbers(10, 16, device=device),
            numbers(16, 10, device=device).t(),
            base.clone()[:20:2, ::3][:, :16],
        ):
            target = torch.empty_strided(view.shape, view.stride(), device=device)
            target.copy_(view)
            expected = numpy_scatter(raw(target), ids.tolist(), raw(values))
            scatter_rows(target, ids, values)
            np.testing.assert_array_equal(raw(target), expected, err_msg=name)


@settings(max_examples=60)
@given(data=st.data())
def test_any_gather_and_scatter(data: st.DataObject):
    rows, dim = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 50))
    dtype = data.draw(st.sampled_from(DTYPES))
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=80))
    chosen = torch.tensor(ids, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    source = numbers(rows, dim, dtype)
    np.testing.assert_array_equal(raw(gather_rows(source, chosen)), raw(source)[ids])
    values = numbers(len(ids), dim, dtype)
    expected = numpy_scatter(raw(source), ids, raw(values))
    scatter_rows(source, chosen, values, duplicates="last")
    np.testing.assert_array_equal(raw(source), expected)


# ---- nothing to do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, dim, count", [(5, 3, 0), (0, 3, 0), (5, 0, 4), (0, 0, 0)])
def test_empty(device: str, rows: int, dim: int, count: int):
    source = torch.ones(rows, dim, device=device)
    ids = torch.arange(count, device=device)
    assert gather_rows(source, ids).shape == (count, dim)
    scatter_rows(source, ids, torch.zeros(count, dim, device=device))
    assert (source == 1).all()


# ---- out and devices -------------------------------------------------------------------------------------------------


@pytest.mark.cuda_kernels
def test_out_is_filled_and_returned(device: str):
    source, out = numbers(9, 5, device=device), torch.empty(3, 5, device=device)
    version = out._version
    assert gather_rows(source, torch.tensor([8, 8, 1], device=device), out=out) is out
    np.testing.assert_array_equal(raw(out), raw(source)[[8, 8, 1]])
    assert out._version > version


def test_autograd_notices_a_scatter(device: str):
    target = torch.ones(4, 2, device=device)
    weight = torch.ones(2, device=device, requires_grad=True)
    product = (target * weight).sum()
    scatter_rows(target, torch.tensor([1], device=device), torch.zeros(1, 2, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.cuda_kernels
def test_the_result_is_on_the_ids_device_for_a_host_source(device: str):
    source = numbers(100, 12)
    ids = torch.tensor([3, 99, 3])
    rows = gather_rows(source, ids.to(device))
    assert rows.device.type == device
    np.testing.assert_array_equal(raw(rows), raw(source)[[3, 99, 3]])


@pytest.mark.cuda_kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("dim", [1, 3, 32, 128, 1000])
def test_between_host_and_gpu(pinned: bool, dim: int):
    source = numbers(5000, dim)
    source = source.pin_memory() if pinned else source
    ids = torch.randperm(5000)[:3000]
    for where in ("cpu", "cuda"):
        expected = raw(source)[ids.tolist()]
        np.testing.assert_array_equal(raw(gather_rows(source, ids.to(where))), expected)
        out = torch.empty(3000, dim, device="cuda")
        np.testing.assert_array_equal(raw(gather_rows(source, ids.to(where), out=out)), expected)
        values = numbers(3000, dim, device="cuda")
        wanted = numpy_scatter(raw(source), ids.tolist(), raw(values))
        scatter_rows(source, ids.to(where), values)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(raw(source), wanted)
        np.testing.assert_array_equal(
            raw(gather_rows(source.cuda(), ids.to(where), out=torch.empty(3000, dim))), wanted[ids]
        )
        on_gpu = source.cuda()
        scatter_rows(on_gpu, ids.to(where), numbers(3000, dim).zero_())
        assert not on_gpu[ids.cuda()].any()


# ---- duplicates ------------------------------------------------------------------------------------------------------


def test_duplicates_are_refused_before_anything_is_written(device: str):
    target = torch.zeros(5, 2, device=device)
    with pytest.raises(DuplicateIdError, match=r"ids\[2\] is 1, which occurs before it .* duplicates=\"last\""):
        scatter_rows(target, torch.tensor([1, 4, 1, 4], device=device), torch.ones(4, 2, device=device))
    assert not target.any()


@pytest.mark.cuda_kernels
def test_the_last_of_duplicates_wins(device: str):
    ids = torch.randint(0, 30, (500,))
    values = numbers(500, 3, device=device)
    target = torch.zeros(30, 3, device=device)
    expected = numpy_scatter(raw(target), ids.tolist(), raw(values))
    for _ in range(3):
        scatter_rows(target.zero_(), ids.to(device), values, duplicates="last")
        np.testing.assert_array_equal(raw(target), expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids, text", [([0, 5], r"ids\[1\] is 5"), ([0, 1, -1], r"ids\[2\] is -1")])
def test_ids_out_of_range(device: str, ids: list[int], text: str):
    matrix, out = torch.zeros(5, 2, device=device), torch.full((len(ids), 2), 7.0, device=device)
    remedy = r", but {} has rows 0 to 4; map unknown ids to a padding row \(padding_idx=\) before the lookup"
    chosen = torch.tensor(ids, device=device)
    with pytest.raises(IdError, match=text + remedy.format("source")):
        gather_rows(matrix, chosen, out=out)
    with pytest.raises(IdError, match=text + remedy.format("target")):
        scatter_rows(matrix, chosen, torch.ones(len(ids), 2, device=device))
    assert (out == 7).all()
    assert not matrix.any()


SOURCE, IDS = torch.zeros(5, 2), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "source, ids, out, error, message",
    [
        ([[1.0]], IDS, None, TypeError, "source is a list; pass a tensor"),
        (torch.zeros(5), IDS, None, ValueError, r"source has shape \(5,\); pass one of shape \(rows, dim\)"),
        (torch.zeros(5, 2, 2), IDS, None, ValueError, r"source has shape \(5, 2, 2\)"),
        (SOURCE.to_sparse(), IDS, None, TypeError, r"source has layout torch.sparse_coo; .*to_dense"),
        (SOURCE.to("meta"), IDS, None, TypeError, "source is on meta"),
        (torch.zeros(5, 2, dtype=torch.complex64).conj(), IDS, None, ValueError, "lazily conjugated .*resolve_conj"),
        (SOURCE, [0, 1], None, TypeError, "ids is a list; pass a tensor"),
        (SOURCE, IDS.float(), None, TypeError, "ids has dtype torch.float32; convert it to torch.int64"),
        (SOURCE, IDS.to(torch.uint8), None, TypeError, "ids has dtype torch.uint8"),
        (SOURCE, IDS.view(1, 2), None, ValueError, r"ids has shape \(1, 2\); pass ids.reshape\(-1\)"),
        (SOURCE, IDS, torch.zeros(2, 2, dtype=torch.float64), TypeError, "out has dtype torch.float64, but source has"),
        (SOURCE, IDS, torch.zeros(3, 2), ValueError, r"out has shape \(3, 2\); it must be \(2, 2\)"),
        (SOURCE, IDS, SOURCE[:2], ValueError, r"out shares memory with source; pass out.clone\(\)"),
        (SOURCE, IDS, torch.zeros(1, 2).expand(2, 2), ValueError, "out's rows overlap"),
    ],
)
def test_gather_refuses(source, ids, out, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        gather_rows(source, ids, out=out)


@pytest.mark.parametrize(
    "target, ids, values, duplicates, error, message",
    [
        (SOURCE, IDS, torch.zeros(2, 3), "error", ValueError, r"values has shape \(2, 3\); it must be \(2, 2\)"),
        (SOURCE, IDS, torch.zeros(2, 2).half(), "error", TypeError, "values has dtype torch.float16, but target has"),
        (SOURCE, IDS, [[0.0, 0.0]], "error", TypeError, "values is a list"),
        (SOURCE, IDS, SOURCE[1:3], "error", ValueError, r"values shares memory with target; pass values.clone\(\)"),
        (SOURCE, IDS, torch.zeros(2, 2), "first", ValueError, "duplicates is 'first'; choose"),
        (torch.zeros(1, 2).expand(5, 2), IDS, torch.zeros(2, 2), "error", ValueError, "target's rows overlap"),
    ],
)
def test_scatter_refuses(target, ids, values, duplicates: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        scatter_rows(target, ids, values, duplicates=duplicates)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_rows_are_refused(dtype: torch.dtype):
    source = torch.quantize_per_tensor(torch.zeros(5, 2), 0.1, 0, dtype)
    with pytest.raises(TypeError, match=f"dtype is {dtype}, whose scales are not in the rows"):
        gather_rows(source, IDS)
