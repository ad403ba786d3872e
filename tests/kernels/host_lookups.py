"""Runs the kernels of lookups.cuh on the host, in many sizes and shapes, against NumPy: a part of host_moves.py."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from host_library import HostKernels

# As in csrc/lookups.cuh.
_FEATURE = "ids narrow per_bag stride inner_stride base limit outside offsets narrow_offsets closed"
FEATURE = np.dtype([(name, "i8") for name in _FEATURE.split()])

RNG = np.random.default_rng(7)
LAUNCHES = [(1, 1), (1, 32), (3, 64), (9, 256)]
NARROW, WIDE = np.int32, np.int64


def check_lookups(kernels: HostKernels, shapes: ModuleType) -> None:
    """Check every kernel of lookups.cuh.

    Args:
        kernels: the library.
        shapes: the module with their structures.
    """
    for case in range(60):
        grid, block = LAUNCHES[case % len(LAUNCHES)]
        check_merge(kernels, shapes, case, grid, block)
        check_join(kernels, shapes, case, grid, block)
        check_keys(kernels, shapes, case, grid, block)
        check_places(kernels, shapes, case, grid, block)


def features_of(shapes: ModuleType, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return features of these numbers of ids, without ids, and the position of each one's first id."""
    features = np.zeros(len(sizes), FEATURE)
    features["per_bag"] = features["stride"] = 1
    return features, np.cumsum([0, *sizes])


def check_merge(kernels: HostKernels, shapes: ModuleType, case: int, grid: int, block: int) -> None:
    """Check features of one and two dimensions, of both widths, with gaps between ids and rows; some are empty."""
    bags = [int(size) for size in RNG.integers(0, [1, 40][case % 2] + 1, 1 + case % 7)]
    widths = [int(width) for width in RNG.integers(1, 4, len(bags))]
    features, starts = features_of(shapes, [bag * width for bag, width in zip(bags, widths, strict=True)])
    limit, gap, begins = 50, 1 + case % 2, RNG.integers(0, 3, len(bags)) if case % 3 == 0 else None
    expected, kept = [], []
    for f, (bag, width) in enumerate(zip(bags, widths, strict=True)):
        first = 0 if begins is None else int(begins[f])
        held = RNG.integers(-3, limit + 3, (bag + first + 1, width * gap + case % 3)).astype([NARROW, WIDE][f % 2])
        ids = held[:, : width * gap : gap].reshape(-1)[first:][: bag * width].astype(WIDE)
        features[f]["ids"], features[f]["narrow"] = held.ctypes.data, held.dtype == NARROW
        features[f]["per_bag"], features[f]["stride"], features[f]["inner_stride"] = width, held.shape[1], gap
        features[f]["base"], features[f]["limit"], features[f]["outside"] = 1000 * f, limit, -1 - f
        expected.append(np.where((ids >= 0) & (ids < limit), ids + 1000 * f, -1 - f))
        kept.append(held)
    whole, dtype = np.concatenate(expected), [NARROW, WIDE][case % 2]
    for wrong in (0, 1):
        rows, indices = np.full(len(whole), -9, dtype), np.full(len(whole), -9, WIDE)
        kernels.lookup(
            "merge", 8 * rows.itemsize, grid, block, features, len(features), starts, 1, begins,
            int(begins is not None), np.array([wrong]), rows, indices, len(whole),
        )  # fmt: skip
        if wrong:
            np.testing.assert_array_equal(rows, np.repeat(features["outside"], np.diff(starts)))
            assert not indices.any()
            continue
        np.testing.assert_array_equal(rows, whole)
        own = [np.arange(size) + (0 if begins is None else begins[f]) for f, size in enumerate(np.diff(starts))]
        np.testing.assert_array_equal(indices, np.concatenate(own))


def check_join(kernels: HostKernels, shapes: ModuleType, case: int, grid: int, block: int) -> None:
    """Check offsets that ascend, and ones with a single fault in any place."""
    bags, count = 1 + case % 9, 1 + case % 4
    sizes = [int(size) for size in RNG.integers(0, 30, count)]
    features, starts = features_of(shapes, sizes)
    kept, expected, faulty = [], [], case % 3 == 0
    for f, size in enumerate(sizes):
        offsets = np.sort(RNG.integers(0, size + 1, bags + 1)).astype([NARROW, WIDE][(case + f) % 2])
        offsets[0], offsets[-1] = 0, size
        closed = (case + f) % 2
        if faulty and f == count - 1:
            offsets[int(RNG.integers(0, bags + closed))] = [-1, size + 1][case % 2]
        offsets = offsets[: bags + closed].copy()
        features[f]["offsets"], features[f]["narrow_offsets"] = offsets.ctypes.data, offsets.dtype == NARROW
        features[f]["closed"] = closed
        kept.append(offsets)
        expected.append(offsets[:bags].astype(WIDE) + starts[f])
    joined, wrong = np.full(count * bags + 1, -9), np.zeros(1, WIDE)
    kernels.lookup("join", grid, block, features, count, starts, bags, joined, wrong)
    np.testing.assert_array_equal(joined, [*np.concatenate(expected), starts[-1]])
    assert bool(wrong[0]) == faulty


def check_keys(kernels: HostKernels, shapes: ModuleType, case: int, grid: int, block: int) -> None:
    """Check several lookups, some empty, or one without features; pieces begin and end in and between them."""
    dtype = [NARROW, WIDE][case % 2]
    limit = [3, 100, 10_000][case % 3]
    most = 40_000 if case % 7 == 6 else [3, 20, 200][case % 3]  # more pieces than ranges
    sizes = [int(size) for size in RNG.integers(0, most, 1 + case % 5)]
    sizes[-1] += 1
    is_plain = len(sizes) == 1 and case % 2
    features, starts = features_of(shapes, sizes)
    features["base"] = (limit + 1) * np.arange(len(sizes))
    ids = [RNG.integers(0, limit, size) for size in sizes]
    keys = np.concatenate([each + base for each, base in zip(ids, features["base"], strict=True)]).astype(dtype)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    pieces = -(-len(keys) // shapes.KEYS_PER_THREAD)
    counts, totals = np.full(pieces, -9), np.full(shapes.RANGES, -9)
    kernels.lookup("count", 8 * keys.itemsize, grid, block, ordered, len(keys), counts)
    kernels.lookup("sum_counts", grid, block, counts, pieces, totals)
    found, local, answers = np.full(len(keys), -9), np.full(len(keys), -9), np.full((len(sizes), 4), -9)
    kernels.lookup(
        "number", 8 * keys.itemsize, grid, block, ordered, order, len(keys), counts, totals,
        None if is_plain else features, None if is_plain else starts, len(sizes), found, local, answers,
    )  # fmt: skip
    for each, start, base, (first, last, low, high) in zip(ids, starts, features["base"], answers, strict=False):
        if not len(each):
            continue
        rows, places = np.unique(each, return_inverse=True)
        np.testing.assert_array_equal(found[first : last + 1], rows)
        np.testing.assert_array_equal(local[start : start + len(each)], places)
        assert (low, high) == (rows[0] + base, rows[-1] + base)


def check_places(kernels: HostKernels, shapes: ModuleType, case: int, grid: int, block: int) -> None:
    """Check as many batches as fit, some without rows."""
    rows = np.unique(RNG.integers(0, 60, 1 + case))
    others = [np.unique(RNG.integers(0, 60, int(size))) for size in RNG.integers(0, 30, 1 + case % 8)]
    places = [np.full(len(rows), -9) for _ in others]
    batches = shapes.batches_argument(
        [(other.ctypes.data, len(other), into.ctypes.data) for other, into in zip(others, places, strict=True)]
    )
    before, rest = rows + 7, np.full(len(rows), -9)
    kernels.lookup("find_places", grid, block, rows, len(rows), batches, before, rest if case % 3 else None)
    for other, into in zip(others, places, strict=True):
        wanted = [int(np.searchsorted(other, row)) if row in other else -1 for row in rows]
        np.testing.assert_array_equal(into, wanted)
    is_shared = np.isin(rows, np.concatenate(others))
    np.testing.assert_array_equal(rest, np.where(is_shared, -1, before) if case % 3 else -9)
