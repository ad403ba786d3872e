"""Initial values: a function of (seed, column, row, element), the same bits everywhere, with the right distribution."""

from __future__ import annotations

import math
from pathlib import Path

import mpmath
import numpy as np
import philox_reference as reference
import pytest
import torch
from host_build import build, compiler
from host_library import HostKernels
from hypothesis import given
from hypothesis import strategies as st

from speedswap import kernels

NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
NAME = {torch.float32: "f32", torch.float64: "f64"}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def uniform(rows, width, low=0.0, high=1.0, *, seed=1, column_key=2, dtype=torch.float32, device="cpu", first=0):
    matrix = torch.full((rows, width), torch.nan, dtype=dtype, device=device)
    kernels.fill_uniform(matrix, range(first, first + rows), low, high, seed=seed, column_key=column_key)
    return matrix


def normal(rows, width, mean=0.0, std=1.0, *, seed=1, column_key=2, dtype=torch.float32, device="cpu", first=0):
    matrix = torch.full((rows, width), torch.nan, dtype=dtype, device=device)
    kernels.fill_normal(matrix, range(first, first + rows), mean, std, seed=seed, column_key=column_key)
    return matrix


@pytest.fixture(scope="module")
def on_host() -> HostKernels:
    """The CUDA kernels, run by the host."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler: set CXX or install g++")
    return HostKernels(build())


# ---- the generator ---------------------------------------------------------------------------------------------------

# Random123's known answers for philox4x32-10 (Salmon et al. 2011, kat_vectors).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_known_answers(on_host: HostKernels, counter: list[int], key: list[int], words: list[int]):
    assert reference.philox4x32_10(counter, key) == words
    assert on_host.philox(counter, key) == words


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_is_the_reference_for_any_counter(on_host: HostKernels, words: list[int]):
    assert on_host.philox(words[:4], words[4:]) == reference.philox4x32_10(words[:4], words[4:])


# ---- uniform ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda_kernels
def test_uniform_is_the_reference_scaled(device: str):
    """Row 2**33 + 7 of a table: its low and high words both count."""
    row, seed, column = 7, 2**63 + 5, 2**40 + 9
    for dtype, units in ((torch.float32, reference.units32), (torch.float64, reference.units53)):
        drawn = uniform(1, 11, -2.0, 6.0, seed=seed, column_key=column, dtype=dtype, device=device, first=row)
        expected = np.array([[-2.0 + 8.0 * unit for unit in units(seed, column, row, 11)]]).astype(NUMPY[dtype])
        np.testing.assert_array_equal(drawn.cpu().numpy(), expected)


def test_rows_beyond_32_bits_have_values_of_their_own():
    row, width = 2**33 + 7, 6
    chunk = torch.empty(1, width)
    kernels.fill_uniform(chunk, range(row, row + 1), 0.0, 1.0, seed=1, column_key=2)
    expected = np.array(reference.units32(1, 2, row, width), np.float32)
    np.testing.assert_array_equal(chunk[0].numpy(), expected)


@pytest.mark.cuda_kernels
@dtypes
@pytest.mark.parametrize(
    "low, high", [(0.0, 1.0), (-0.05, 0.05), (1.0, 1.0 + 2**-20), (1e30, 1.0000001e30), (3.0, 3.0)]
)
def test_uniform_stays_below_high(device: str, dtype: torch.dtype, low: float, high: float):
    """Also where few numbers lie between the bounds, and rounding would reach the upper one every few draws."""
    drawn = uniform(1000, 64, low, high, dtype=dtype, device=device)
    low, high = (torch.tensor(bound, dtype=dtype).item() for bound in (low, high))
    assert drawn.min().item() >= low
    assert drawn.max().item() < high or low == high
    if low == 1.0 and dtype is torch.float32:
        counts = np.bincount(((drawn.cpu().numpy().ravel() - 1.0) * 2**23).astype(int))
        assert len(counts) == 8
        assert (abs(counts - 8000) < 5 * math.sqrt(8000)).all()


@dtypes
def test_uniform_is_uniform(dtype: torch.dtype):
    drawn = uniform(4000, 100, -1.0, 3.0, dtype=dtype).numpy().astype(np.float64).ravel()
    n = drawn.size
    assert abs(drawn.mean() - 1.0) < 5 * 4 / math.sqrt(12 * n)
    assert abs(drawn.std() - 4 / math.sqrt(12)) < 0.01
    assert kolmogorov_smirnov(drawn, lambda x: (x + 1) / 4) < 1.95 / math.sqrt(n)  # 1 in 1000
    np.testing.assert_allclose(np.corrcoef(drawn[:-1], drawn[1:])[0, 1], 0, atol=5 / math.sqrt(n))


# ---- normal ----------------------------------------------------------------------------------------------------------


@dtypes
def test_normal_is_normal(dtype: torch.dtype):
    drawn = normal(4000, 100, 2.0, 0.5, dtype=dtype).numpy().astype(np.float64).ravel()
    n = drawn.size
    standard = (drawn - 2.0) / 0.5
    assert abs(standard.mean()) < 5 / math.sqrt(n)
    assert abs(standard.std() - 1) < 5 / math.sqrt(2 * n)
    assert abs((standard**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((standard**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert kolmogorov_smirnov(standard, np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))) < 1.95 / math.sqrt(
        n
    )
    pairs = standard.reshape(-1, 2)
    assert abs(np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1]) < 5 / math.sqrt(n / 2)


def kolmogorov_smirnov(sample: np.ndarray, cdf) -> float:
    expected = cdf(np.sort(sample))
    steps = np.arange(len(sample) + 1) / len(sample)
    return max((steps[1:] - expected).max(), (expected - steps[:-1]).max())


def ideal_normals(numbers: list[float], bits: int) -> list[mpmath.mpf]:
    """Box and Muller's values of pairs of units, to 40 digits."""
    with mpmath.workdps(40):
        normals = []
        for radius, turns in zip(numbers[0::2], numbers[1::2], strict=True):
            length = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(radius) + mpmath.mpf(2) ** -bits))
            normals += [length * mpmath.cospi(2 * mpmath.mpf(turns)), length * mpmath.sinpi(2 * mpmath.mpf(turns))]
        return normals


def test_float64_normals_are_within_3_ulp_of_the_ideal():
    for row, drawn in enumerate(normal(20, 128, dtype=torch.float64).tolist()):
        for value, ideal in zip(drawn, ideal_normals(reference.units53(1, 2, row, 128), 53), strict=True):
            assert abs(value - ideal) <= 3 * math.ulp(float(ideal))


def test_float32_normals_are_the_ideal_rounded():
    """Computed in double precision, a float is the nearest one but for a tie in a hundred million."""
    for row, drawn in enumerate(normal(20, 128).tolist()):
        ideals = ideal_normals(reference.units32(1, 2, row, 128), 32)
        for value, ideal in zip(drawn, ideals, strict=True):
            spacing = float(np.spacing(np.float32(abs(float(ideal)))))
            assert abs(value - ideal) <= 0.5000001 * spacing


def test_logarithm_and_circle_are_within_their_bounds(on_host: HostKernels):
    """1 ulp and 1.5 ulp; at the ends, where the exponent changes and around the quarters, too."""
    rng = np.random.default_rng(1)
    integers = np.concatenate(
        [rng.integers(1, 2**53, 3000), 2**53 - np.arange(300), 1 + np.arange(300), rng.integers(6.2e15, 6.5e15, 500)]
    )
    units = integers / 2.0**53
    eighths = np.arange(9)[:, None] / 8 + np.arange(-20, 21) * 2.0**-53
    turns = np.concatenate([units, eighths[(eighths >= 0) & (eighths <= 1)]])
    with mpmath.workdps(40):
        for unit, log in zip(units.tolist(), on_host.natural_log(units).tolist(), strict=True):
            ideal = mpmath.log(mpmath.mpf(unit))
            assert abs(log - ideal) <= math.ulp(float(ideal))
        cosines, sines = on_host.cosine_sine(turns)
        for turn, cosine, sine in zip(turns.tolist(), cosines.tolist(), sines.tolist(), strict=True):
            for value, ideal in (
                (cosine, mpmath.cospi(2 * mpmath.mpf(turn))),
                (sine, mpmath.sinpi(2 * mpmath.mpf(turn))),
            ):
                assert abs(value - ideal) <= 1.5 * math.ulp(float(ideal))


# ---- the same bits everywhere ----------------------------------------------------------------------------------------


@given(
    width=st.integers(1, 70),
    rows=st.integers(1, 50),
    first=st.integers(0, 30),
    seed=st.integers(0, 2**64 - 1),
    column_key=st.integers(0, 2**64 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_gpu_and_the_cpu_loops_give_the_same_bits(
    on_host: HostKernels, width, rows, first, seed, column_key, dtype
):
    for kind, fill, a, b in (("uniform", uniform, -0.3, 0.7), ("normal", normal, 0.1, 0.02)):
        ours = fill(rows, width, a, b, seed=seed, column_key=column_key, dtype=dtype, first=first).numpy()
        theirs = np.full((rows, width), np.nan, NUMPY[dtype])
        on_host.fill(f"fill_{kind}_{NAME[dtype]}", 2, 64, theirs, first, a, b, seed, column_key)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.cuda_kernels
@dtypes
@pytest.mark.parametrize("scale", [1.0, 1e-39], ids=["ordinary", "subnormal"])
def test_devices_give_the_same_bits(device: str, dtype: torch.dtype, scale: float):
    for fill, a, b in ((uniform, -0.3 * scale, 0.7 * scale), (normal, 0.1 * scale, 0.02 * scale)):
        here, there = (fill(300, 37, a, b, dtype=dtype, device=where, first=5) for where in ("cpu", device))
        np.testing.assert_array_equal(there.cpu().numpy(), here.numpy())


@dtypes
def test_threads_and_pieces_do_not_change_a_bit(dtype: torch.dtype):
    whole = normal(5000, 61, dtype=dtype)
    for threads in (1, 2, 3, 4):
        kernels.set_num_threads(threads)
        try:
            assert torch.equal(normal(5000, 61, dtype=dtype), whole)
            pieces = torch.full_like(whole, torch.nan)
            for first, stop in ((0, 1), (1, 1700), (1700, 5000)):
                kernels.fill_normal(pieces[first:stop], range(first, stop), 0.0, 1.0, seed=1, column_key=2)
            assert torch.equal(pieces, whole)
        finally:
            kernels.set_num_threads(None)


def test_instruction_sets_give_the_same_bits(run_with_isa, tmp_path: Path):
    program = """
import torch
from speedswap import kernels
from speedswap.kernels import _C
drawn = []
for dtype in (torch.float32, torch.float64):
    for fill in (kernels.fill_uniform, kernels.fill_normal):
        matrix = torch.empty(500, 37, dtype=dtype)
        fill(matrix, range(500), 0.1, 0.7, seed=3, column_key=4)
        drawn.append(matrix)
torch.save([_C.isa(), *drawn], r"{path}")
"""
    found = {}
    for isa in ("sse2", "avx2", "avx512"):
        path = tmp_path / f"{isa}.pt"
        run_with_isa(isa, program.replace("{path}", str(path)))
        name, *drawn = torch.load(path)
        found[name] = drawn
    assert "sse2" in found or "generic" in found
    first, *others = found.values()
    for drawn in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, drawn, strict=True))


# ---- where the values go ---------------------------------------------------------------------------------------------


@pytest.mark.cuda_kernels
def test_only_the_column_is_written(device: str):
    """Column of 3 doubles at byte 8 of records of 40 bytes; rows 2 to 4 of 6."""
    records = torch.full((6, 5), -1.0, dtype=torch.float64, device=device)
    kernels.fill_uniform(records[2:5, 1:4], range(2, 5), 0.0, 1.0, seed=1, column_key=2)
    expected = torch.full((6, 5), -1.0, dtype=torch.float64)
    expected[2:5, 1:4] = uniform(5, 3, dtype=torch.float64)[2:]
    assert torch.equal(records.cpu(), expected)


def test_streams_differ():
    drawn = [uniform(4, 8, seed=seed, column_key=key) for seed in (0, 1, 2**63) for key in (0, 1, 2**63)]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert not (one == other).any()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"dtype": torch.float16}, TypeError, "dtype is torch.float16; fill float32 or float64 and convert"),
        ({"low": 2.0}, ValueError, "low is 2.0 and high is 1.0"),
        ({"low": -math.inf}, ValueError, "must be finite"),
        ({"high": math.nan}, ValueError, "must be finite"),
        ({"low": -3e38, "high": 3e38}, ValueError, "must be finite"),
        ({"rows": range(3, 5)}, ValueError, r"rows is range\(3, 5\) for 4 rows; give each its number"),
        ({"rows": range(-1, 3)}, ValueError, r"rows is range\(-1, 3\) for 4 rows"),
        ({"seed": -1}, ValueError, r"seed is -1; it must be 0 to 2\*\*64 - 1"),
        ({"column_key": 2**64}, ValueError, "column_key is 18446744073709551616"),
    ],
)
def test_what_cannot_be_filled_is_refused(changes: dict, error: type[Exception], message: str):
    matrix = torch.full((4, 3), -1.0, dtype=changes.get("dtype"))
    arguments = {"rows": range(4), "low": 0.0, "high": 1.0, "seed": 1, "column_key": 2, **changes}
    arguments.pop("dtype", None)
    with pytest.raises(error, match=message):
        kernels.fill_uniform(matrix, **arguments)
    assert (matrix == -1.0).all()


@pytest.mark.parametrize("mean, std", [(math.nan, 1.0), (0.0, -1.0), (0.0, math.inf)])
def test_normal_refuses_what_is_no_distribution(mean: float, std: float):
    with pytest.raises(ValueError, match="both must be finite, and std 0 or more"):
        normal(2, 2, mean, std)
