"""Columns that records hold as float16, bfloat16 or int8 while their blocks are float32."""

from __future__ import annotations

import hashlib

import compact_reference as reference
import numpy as np
import philox_reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import _C, Part, Records, Stored, gather_records, round_rows, rounding_key, scatter_records

HALVES = [torch.float16, torch.bfloat16]
pytestmark = pytest.mark.cuda_kernels


@pytest.fixture(autouse=True)
def _restore_threads():
    yield
    kernels.set_num_threads(None)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def records_over(memory: Tensor, stride: int) -> Records:
    """Return bytes as records, on their own device."""
    return Records(memory.data_ptr(), stride, memory.numel() // stride, memory.device, False, memory)


def stored_rows(values: Tensor, stored: Stored, ids: Tensor | None = None, *, device: str = "cpu") -> Tensor:
    """Return the bytes that a scatter writes to records of one column, shape (n, bytes)."""
    width = kernels.stored_bytes(stored.dtype, values.shape[1])
    stride = -(-width // 4) * 4  # a GPU reads scales at multiples of four bytes
    ids = torch.arange(len(values)) if ids is None else ids
    memory = torch.full(((int(ids.max()) + 1) * stride,), 0xA5, dtype=torch.uint8, device=device)
    scatter_records(records_over(memory, stride), ids, [Part(0, values.to(device), stored)])
    return memory.view(-1, stride)[ids, :width].cpu()


def gathered(memory: Tensor, stored: Stored, items: int, *, device: str = "cpu") -> Tensor:
    """Return the block that a gather reads from all records of one column."""
    near = torch.zeros(len(memory), -(-memory.shape[1] // 4) * 4, dtype=torch.uint8, device=device)
    near[:, : memory.shape[1]] = memory.to(device)
    records = records_over(near.flatten(), near.shape[1])
    block = torch.full((len(memory), items), 7.0, device=device)
    gather_records(records, torch.arange(len(memory)), [Part(0, block, stored)])
    return block.cpu()


def awkward_values() -> Tensor:
    """Return floats of every exponent with mantissas around each rounding boundary, and a million random ones."""
    exponents = np.arange(256, dtype=np.uint32) << 23
    edges = [0, 1, 2, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001]
    edges += [(1 << k) + d for k in range(1, 23) for d in (-1, 0, 1)] + [(3 << k) for k in range(1, 21)]
    edges += [(odd << 16) + low for odd in (4, 5) for low in (0x7FFF, 0x8000, 0x8001)]
    edges += [(odd << 13) + low for odd in (4, 5) for low in (0xFFF, 0x1000, 0x1001)]
    bits = (exponents[:, None] | np.array(edges, np.uint32)[None]).flatten()
    bits = np.concatenate([bits, bits | np.uint32(1 << 31)])
    random = np.random.default_rng(1).integers(0, 2**32, 2**20 - len(bits) % 8, np.uint32)
    bits = np.concatenate([bits, random])
    return torch.from_numpy(bits[: len(bits) // 8 * 8].view(np.float32).reshape(-1, 8).copy())


# ---- to nearest ------------------------------------------------------------------------------------------------------


def test_a_few_values_to_read(device: str):
    """Ties to even, a carry into the exponent, the largest number, overflow, subnormal numbers, and no number."""
    values = torch.tensor([[1.00390625, 1.01171875, 1.99999, -0.0, 3.3e38, 3.4e38, 1e-40, float("-inf")]])
    halves = stored_rows(values, Stored(torch.bfloat16), device=device).view(torch.int16)
    expected = [0x3F80, 0x3F82, 0x4000, 0x8000, 0x7F78, 0x7F80, 0x0001, 0xFF80]
    assert [half & 0xFFFF for half in halves[0].tolist()] == expected

    values = torch.tensor([[1.00048828125, 1.00146484375, 65504.0, 65519.9, 65520.0, 6e-8, -2.9e-8, 6.1e-5]])
    halves = stored_rows(values, Stored(torch.float16), device=device).view(torch.int16)
    expected = [0x3C00, 0x3C02, 0x7BFF, 0x7BFF, 0x7C00, 0x0001, 0x8000, 0x03FF]
    assert [half & 0xFFFF for half in halves[0].tolist()] == expected


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_rounding_is_torchs(dtype: torch.dtype, device: str):
    values = awkward_values()
    ours = stored_rows(values, Stored(dtype), device=device).view(torch.int16)
    theirs = values.to(dtype).view(torch.int16)
    numbers = ~values.isnan()
    assert torch.equal(ours[numbers], theirs[numbers])
    assert ours.view(dtype)[~numbers].isnan().all()
    assert torch.equal(ours[~numbers] < 0, values.view(torch.int32)[~numbers] < 0), "NaN keeps its sign"


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_every_half_widens_as_in_torch(dtype: torch.dtype, device: str):
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(-1, 16)
    ours = gathered(halves.view(torch.uint8), Stored(dtype), 16, device=device)
    theirs = halves.view(dtype).float()
    numbers = ~theirs.isnan()
    assert torch.equal(ours.view(torch.int32)[numbers], theirs.view(torch.int32)[numbers])
    assert ours[~numbers].isnan().all()
    # Gathered values scattered again do not change, under any rounding.
    for key in (None, 5):
        again = stored_rows(ours, Stored(dtype, key), device=device).view(torch.int16)
        assert torch.equal(again[numbers], halves[numbers])


@pytest.mark.parametrize("form", [*HALVES, torch.int8], ids=name)
def test_flushing_of_subnormal_numbers_changes_nothing(form: torch.dtype):
    kernels.set_num_threads(1)
    values = awkward_values()[:5000].nan_to_num()
    usual = stored_rows(values, Stored(form))
    back = gathered(usual, Stored(form), 8)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(stored_rows(values, Stored(form)), usual)
        again = gathered(usual, Stored(form), 8)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(again.view(torch.int32), back.view(torch.int32))


# ---- rows, widths, columns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=name)
@pytest.mark.parametrize("stored", [*HALVES, torch.int8], ids=name)
@pytest.mark.parametrize("key", [None, 2**63 + 12345])
def test_any_width_beside_other_columns(stored: torch.dtype, ids_dtype: torch.dtype, key: int | None, device: str):
    """Records with a plain column on each side, which must not be touched."""
    if stored is torch.int8 and key is not None:
        key = None
    for items in (*range(1, 36), 63, 64, 100, 128, 129, 300, 1500):
        form = Stored(stored, key)
        width = kernels.stored_bytes(stored, items)
        begin = 4 if items % 2 else 16
        stride = -(-(begin + width + 8) // 4) * 4
        memory = torch.randint(0, 256, (50, stride), dtype=torch.uint8)
        near = memory.to(device)
        ids = torch.randperm(50)[:33].to(ids_dtype)
        values, left = torch.randn(33, items), torch.randn(33, 1)
        parts = [Part(0, left.to(device)), Part(begin, values.to(device), form)]
        scatter_records(records_over(near.flatten(), stride), ids.to(device), parts)
        if stored is torch.int8:
            scale, integers = reference.int8_rows(values.numpy())
            expected = np.concatenate([scale.view(np.uint8), integers.view(np.uint8)], 1)
        else:
            expected = reference.narrow(name(stored), values.numpy(), key, ids.numpy()).view(np.uint8)
        memory[ids.long(), begin : begin + width] = torch.from_numpy(expected)
        memory[ids.long(), :4] = left.view(torch.uint8)
        assert torch.equal(near.cpu(), memory), items
        back = torch.empty(33, items, device=device)
        gather_records(records_over(near.flatten(), stride), ids.to(device), [Part(begin, back, form)])
        if stored is torch.int8:
            np.testing.assert_array_equal(back.cpu().numpy(), scale * integers.astype(np.float32))
        else:
            halves = np.ascontiguousarray(expected).view(np.uint16)
            np.testing.assert_array_equal(back.cpu().numpy(), reference.widen(name(stored), halves))
            round_rows(parts[1].block, ids.to(device), form)
            assert torch.equal(parts[1].block.view(torch.int32), back.view(torch.int32)), items


@pytest.mark.sweep(1)
@pytest.mark.parametrize("key", [None, 31])
@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_more_than_the_cache_holds(dtype: torch.dtype, key: int | None):
    """Blocks and records that are written past the cache, in whole lines and not."""
    for items in (128, 300, 3000):
        values = torch.randn(150_000 * 128 // items, items)
        ids = torch.randperm(len(values))
        rows = stored_rows(values, Stored(dtype, key), ids)
        if key is None:
            expected = values.to(dtype).float()
        else:
            expected = values
            round_rows(expected, ids, Stored(dtype, key))  # which has separate tests
        assert torch.equal(rows.view(dtype).float(), expected)
        assert torch.equal(gathered(rows, Stored(dtype), items), expected)


def test_records_of_a_pageable_table_and_blocks_elsewhere(device: str):
    """As an optimizer's record: a float32 weight, two columns of bfloat16, one of them stochastic, in one pass."""
    stride, n = 64 + 32 + 32, 2000
    memory = torch.zeros(5000, stride, dtype=torch.uint8)
    ids = torch.randperm(5000)[:n]
    weight, first, second = torch.randn(n, 16), torch.randn(n, 16), torch.rand(n, 16)
    parts = [
        Part(0, weight.to(device)),
        Part(64, first.to(device), Stored(torch.bfloat16)),
        Part(96, second.to(device), Stored(torch.bfloat16, 99)),
    ]
    scatter_records(records_over(memory.flatten(), stride), ids, parts)
    assert torch.equal(memory[ids, :64].view(torch.float32), weight)
    assert torch.equal(memory[ids, 64:96].view(torch.bfloat16), first.bfloat16())
    expected = reference.narrow("bfloat16", second.numpy(), 99, ids.numpy())
    np.testing.assert_array_equal(memory[ids, 96:].numpy().view(np.uint16), expected)
    blocks = [part._replace(block=torch.empty_like(part.block)) for part in parts]
    gather_records(records_over(memory.flatten(), stride), ids, blocks)
    assert torch.equal(blocks[0].block.cpu(), weight)
    assert torch.equal(blocks[1].block.cpu(), first.bfloat16().float())
    np.testing.assert_array_equal(blocks[2].block.cpu().numpy(), reference.widen("bfloat16", expected))


def test_no_rows_and_no_values_do_nothing(device: str):
    empty = torch.empty(0, 4, device=device)
    round_rows(empty, torch.empty(0, dtype=torch.int64), Stored(torch.bfloat16))
    memory = torch.full((4, 8), 3, dtype=torch.uint8, device=device)
    part = Part(0, torch.empty(2, 0, device=device), Stored(torch.bfloat16))
    scatter_records(records_over(memory.flatten(), 8), torch.tensor([0, 1]), [part])
    assert (memory == 3).all()


@pytest.mark.parametrize(
    "block, stored", [(torch.zeros(1, 2, dtype=torch.float64), torch.bfloat16), (torch.zeros(1, 2), torch.int8)]
)
def test_round_rows_refuses_what_it_cannot_round(block: Tensor, stored: torch.dtype):
    with pytest.raises(TypeError, match=f"block is {block.dtype} and stored is {stored}"):
        round_rows(block, torch.tensor([0]), Stored(stored))


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def test_philox_with_seven_rounds_is_the_papers():
    """The reference's reference: the paper's test vectors for ten rounds, and ours in plain integers for seven."""
    for counter in ([0, 0, 0, 0], [1, 2, 3, 4], [2**32 - 1] * 4):
        key = [7, 2**32 - 9]
        ours = reference.philox4x32([np.array(word) for word in counter], key[0] | key[1] << 32, 10)
        assert [int(word) for word in ours] == philox_reference.philox4x32_10(counter, key)


def test_the_key_depends_on_seed_column_and_write():
    counter = [5, 6, 0x6E756F72, 0x676E6964]
    words = philox_reference.philox4x32_10(counter, philox_reference.stream_key(2**40 + 1, 3))
    assert rounding_key(2**40 + 1, 3, 5 | 6 << 32) == words[0] | words[1] << 32
    keys = {rounding_key(seed, column, write) for seed in (0, 1) for column in (0, 2**63) for write in range(100)}
    assert len(keys) == 400


@pytest.mark.parametrize("dtype", HALVES, ids=name)
def test_stochastic_rounding_is_exact_arithmetic(dtype: torch.dtype, device: str):
    """Every value goes where its random bits say, to either of its neighbours: against exact arithmetic in NumPy."""
    values = awkward_values()
    values = values[~values.isnan().any(dim=1)]
    ids = torch.arange(len(values)) + 2**31  # rows beyond 32 bits too
    rounded = values.clone().to(device)
    round_rows(rounded, ids, Stored(dtype, 77))
    expected = reference.narrow(name(dtype), values.numpy(), 77, ids.numpy())
    np.testing.assert_array_equal(
        rounded.cpu().numpy().view(np.uint32), reference.widen(name(dtype), expected).view(np.uint32)
    )


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("value", [1.0003, 0.3, -1.7e-3, 2.5e-7, 4.4e-8, 1e-9, 31234.5])
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype, value: float, device: str):
    """A million draws: the mean is the value within five standard errors, and both neighbours occur as they should."""
    exact = float(torch.tensor(value))
    rounded = torch.full((10_000, 100), exact, device=device)
    round_rows(rounded, torch.arange(10_000), Stored(dtype, rounding_key(1, 2, 3)))
    levels, counts = rounded.cpu().double().unique(return_counts=True)
    nearest = torch.tensor(exact).to(dtype).double().item()
    assert nearest in levels
    assert len(levels) <= 2
    assert levels.min() <= exact <= levels.max()
    spread = (levels.max() - levels.min()).item()
    chance = (exact - levels.min().item()) / spread
    error = spread * (chance * (1 - chance) / 1e6) ** 0.5
    assert abs(rounded.double().mean().item() - exact) <= 5 * error
    # A row as a whole, and a place in all rows, are unbiased too.
    for dim in (0, 1):
        means = rounded.double().mean(dim)
        allowed = 6 * spread * (max(chance * (1 - chance), 0.05) / rounded.shape[dim]) ** 0.5
        assert (means - exact).abs().max() <= allowed
    assert counts.sum() == 10**6


def test_draws_are_independent_of_each_other():
    """Neighbours in a row, rows, writes and columns do not go up together: correlations within five standard errors."""
    value = 1 + 2**-8  # half-way between two bfloat16

    def ups(key: int) -> Tensor:
        rows = torch.full((4096, 256), value)
        round_rows(rows, torch.arange(4096), Stored(torch.bfloat16, key))
        return (rows > value).double() * 2 - 1

    one, later, other = ups(rounding_key(1, 1, 0)), ups(rounding_key(1, 1, 1)), ups(rounding_key(1, 2, 0))
    pairs = [(one[:, k:], one[:, :-k]) for k in (1, 2, 7, 8, 16)] + [(one[k:], one[:-k]) for k in (1, 2, 32)]
    for a, b in [*pairs, (one, later), (one, other)]:
        assert abs((a * b).mean().item()) <= 5 / a.numel() ** 0.5


def test_a_small_sum_keeps_growing():
    """1000 steps of 0.001 on 1 reach 2 in the mean; rounded to nearest they never leave 1."""
    ids = torch.arange(2000)
    stochastic, nearest = torch.ones(2000, 8), torch.ones(2000, 8)
    for step in range(1000):
        stochastic += 0.001
        round_rows(stochastic, ids, Stored(torch.bfloat16, rounding_key(0, 0, step)))
        nearest += 0.001
        round_rows(nearest, ids, Stored(torch.bfloat16))
    assert abs(stochastic.mean().item() - 2) < 0.005
    assert (nearest == 1).all()


def digest(seed: int) -> str:
    """Return one hash of all rounded bits, to compare numbers of threads and instruction sets."""
    hashed = hashlib.sha256()
    generator = torch.Generator().manual_seed(seed)
    values = awkward_values()
    for stored in (torch.float16, torch.bfloat16, torch.int8):
        for key in (None, 17):
            if stored is torch.int8 and key is not None:
                continue
            for items in (1, 7, 24, 100, 1025):
                rows = values.flatten()[: values.numel() // items * items].view(-1, items)[:4000]
                ids = torch.randperm(len(rows), generator=generator)
                held = stored_rows(rows, Stored(stored, key), ids)
                hashed.update(held.numpy().tobytes())
                hashed.update(gathered(held, Stored(stored, key), items).numpy().tobytes())
                if stored is not torch.int8:
                    again = rows.clone()
                    round_rows(again, ids, Stored(stored, key))
                    hashed.update(again.numpy().tobytes())
    return hashed.hexdigest()


def test_the_same_bits_with_every_instruction_set_and_any_number_of_threads(run_with_isa):
    program = """
import test_compact
from speedswap import kernels
kernels.set_num_threads({threads})
print(test_compact.digest(1))
kernels.set_num_threads(None)
"""
    kernels.set_num_threads(1)
    ours = digest(1)
    for isa, threads in (("sse2", 2), ("avx2", 3)):
        assert run_with_isa(isa, program.format(threads=threads)).strip() == ours, isa
    kernels.set_num_threads(3)
    assert digest(1) == ours


# ---- int8 ------------------------------------------------------------------------------------------------------------


def test_an_int8_row_to_read(device: str):
    """The largest value is 127 of the scale; a half goes to the even integer; zeros need no scale."""
    values = torch.tensor([[254.0, -127.0, 1.0, 3.0], [0.0, 0.0, -0.0, 0.0]])
    rows = stored_rows(values, Stored(torch.int8), device=device)
    assert rows[:, :4].contiguous().view(torch.float32).tolist() == [[2.0], [0.0]]
    assert rows[:, 4:].view(torch.int8).tolist() == [[127, -64, 0, 2], [0, 0, 0, 0]]
    back = gathered(rows, Stored(torch.int8), 4, device=device)
    assert back.tolist() == [[254.0, -128.0, 0.0, 4.0], [0.0] * 4]


def test_int8_rows_without_a_scale(device: str):
    """NaN and infinity make their row NaN; values below 2**-100 make it zero; the largest numbers are held."""
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([[1.0, float("nan")], [1.0, float("-inf")], [1e-32, -1e-44], [largest, -1.0]])
    back = gathered(stored_rows(values, Stored(torch.int8), device=device), Stored(torch.int8), 2, device=device)
    assert back[:2].isnan().all()
    assert back[2].tolist() == [0.0, 0.0]
    assert back[3, 0] == pytest.approx(largest, rel=1e-6)
    assert back[3, 1] == 0


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    scale=st.sampled_from([1.0, 1e-20, 1e8]),
)
def test_int8_is_off_by_at_most_half_a_scale(values: list[float], scale: float):
    row = torch.tensor([values]) * scale
    back = gathered(stored_rows(row, Stored(torch.int8)), Stored(torch.int8), len(values))
    largest = row.abs().max().item()
    assert (back - row).abs().max().item() <= largest / 127 * 0.5 * (1 + 1e-5) + 2.0**-100


@pytest.mark.parametrize("stored, begin, stride", [(torch.int8, 2, 12), (torch.int8, 4, 10), (torch.bfloat16, 1, 8)])
def test_columns_that_no_gpu_can_read_are_refused(stored: torch.dtype, begin: int, stride: int, device: str):
    """The GPU's error would fail all later calls; tables lay columns out so that it never occurs."""
    memory = torch.zeros(3 * stride, dtype=torch.uint8, device=device)
    part = Part(begin, torch.ones(1, 2, device=device), Stored(stored))
    if device == "cpu":
        scatter_records(records_over(memory, stride), torch.tensor([1]), [part])
        return
    with pytest.raises(ValueError, match=rf"a column of {stored} begins {begin} bytes into records .*{stride} bytes"):
        scatter_records(records_over(memory, stride), torch.tensor([1]), [part])
    assert not memory.any()


# ---- properties ------------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=5, unique=True),
    dtype=st.sampled_from(HALVES),
    key=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
)
def test_rounded_rows_are_neighbours_and_stay(values: list[float], ids: list[int], dtype: torch.dtype, key: int | None):
    block = torch.tensor([values]).repeat(len(ids), 1)
    before = block.clone()
    round_rows(block, torch.tensor(ids), Stored(dtype, key))
    expected = reference.widen(name(dtype), reference.narrow(name(dtype), before.numpy(), key, np.array(ids)))
    np.testing.assert_array_equal(block.numpy().view(np.uint32), expected.view(np.uint32))
    again = block.clone()
    round_rows(again, torch.tensor(ids), Stored(dtype, 1))
    assert torch.equal(again.view(torch.int32), block.view(torch.int32))


@pytest.mark.parametrize(
    "part, message",
    [
        ((0, 0, 4, 8, 9, False, 0), "form is 9, not 1, 2 or 3"),
        ((0, 0, 3, 8, 1, False, 0), "width is 3, not that of a row"),
        ((0, 0, 3, 8, 3, False, 0), "width is 3, not that of a row"),
    ],
)
def test_the_cpu_loops_refuse_invalid_parts(part, message: str):
    with pytest.raises(ValueError, match=message):
        _C.scatter(0, 4, 0, 0, [part], 1)
    with pytest.raises(ValueError, match="form is 3, not 1 or 2"):
        _C.round_rows(0, 0, (0, 0, 8, 16, 3, False, 0), 1)
