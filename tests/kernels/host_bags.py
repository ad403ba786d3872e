"""Runs the kernels of bags.cuh on the host in many shapes, against sums that NumPy adds one after the other.

A separate program, as host_moves.py is: ``host_bags.py LIBRARY``. Results are compared to the bit.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compact_reference as reference
from host_library import HostKernels, bags_argument
from host_moves import misaligned, shapes

RNG = np.random.default_rng(11)
STORED = {"float32": np.float32, "float64": np.float64, "float16": np.uint16, "bfloat16": np.uint16}
LAUNCHES = [(1, 1), (3, 32), (2, 1024)]


def as_added(kind: str) -> type[np.floating]:
    return np.float64 if kind == "float64" else np.float32


def widened(kind: str, stored: np.ndarray) -> np.ndarray:
    return reference.widen(kind, stored) if stored.dtype == np.uint16 else stored


def narrowed(kind: str, values: np.ndarray) -> np.ndarray:
    if STORED[kind] is not np.uint16:
        return values
    return reference.narrow(kind, values, None, np.arange(len(values)))


def some(kind: str, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """Return values as stored, whose memory ends with them and starts ``offset`` past a multiple of 16."""
    values = narrowed(kind, RNG.standard_normal((shape[0], int(np.prod(shape[1:])))).astype(as_added(kind)))
    held = misaligned(values.nbytes, offset).view(STORED[kind]).reshape(shape)
    held[:] = values.reshape(shape)
    return held


class Case:
    """Bags of several features, with a few rows in most of them."""

    def __init__(self, kind: str, mode: str, width: int, features: int, samples: int, offset: int) -> None:
        self.kind, self.mode, self.width, self.features, self.samples = kind, mode, width, features, samples
        self.num_bags = features * samples
        sizes = RNG.integers(0, 5, self.num_bags)
        sizes[0] = 70
        self.offsets = np.concatenate([[0], sizes.cumsum()])
        self.entries = int(self.offsets[-1])
        self.num_rows = 12
        self.local = np.minimum(RNG.geometric(0.5, self.entries) - 1, self.num_rows - 2)  # and one row without entries
        self.rows = some(kind, (self.num_rows, width), offset)
        self.factors = some(kind, (self.entries, 1), offset)[:, 0] if mode == "weighted" else None
        self.counts = RNG.random(self.entries) < 0.8 if mode == "padded" else None
        self.is_mean = np.arange(features) % 2 == 0 if mode == "some means" else None
        self.bag_of = np.repeat(np.arange(self.num_bags), sizes)
        self.wide = some(kind, (samples, features * width + (0 if offset else 2 * width)), offset)
        self.grad = self.wide[:, : features * width]
        divided = mode in ("mean", "padded") or self.is_mean is not None
        means = self.is_mean if self.is_mean is not None else np.full(features, divided)
        counted = np.ones(self.entries, bool) if self.counts is None else self.counts
        self.counted = counted
        sizes = np.bincount(self.bag_of[counted], minlength=self.num_bags)
        self.divisors = np.where(np.repeat(means, samples), np.maximum(sizes, 1), 1).astype(as_added(kind))
        self.means = divided and self.is_mean is None

    def place(self, bag: int) -> tuple[int, slice]:
        """Return a bag's sample and columns in the output."""
        feature, sample = divmod(bag, self.samples)
        return sample, slice(feature * self.width, (feature + 1) * self.width)

    def factor(self, k: int) -> np.floating:
        return as_added(self.kind)(1) if self.factors is None else widened(self.kind, self.factors[k : k + 1])[0]

    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected output, and the entry that gave each item of a maximum."""
        rows = widened(self.kind, self.rows)
        out = np.zeros((self.samples, self.features * self.width), rows.dtype)
        taken = np.full(out.shape, -1)
        for k in np.flatnonzero(self.counted):
            sample, columns = self.place(self.bag_of[k])
            row, item, entry = rows[self.local[k]], out[sample, columns], taken[sample, columns]
            if self.mode == "max":
                greater = (entry < 0) | (row > item)
                item[greater], entry[greater] = row[greater], k
            else:
                item += row if self.factors is None else self.factor(k) * row
        for bag in range(self.num_bags):
            out[self.place(bag)] /= self.divisors[bag]
        return narrowed(self.kind, out), taken

    def gradient(self, taken: np.ndarray) -> np.ndarray:
        """Return the expected gradient of the rows: chunk after chunk, each added from zero."""
        grad = widened(self.kind, self.grad)
        out = np.zeros((self.num_rows, self.width), grad.dtype)
        for row in range(self.num_rows):
            mine = np.flatnonzero(self.local == row)
            for begin in range(0, len(mine), shapes.CHUNK):
                chunk = np.zeros(self.width, grad.dtype)
                for k in mine[begin : begin + shapes.CHUNK]:
                    if not self.counted[k]:
                        continue
                    place = self.place(self.bag_of[k])
                    item = grad[place]
                    if self.mode == "max":
                        item = np.where(taken[place] == k, item, 0)
                    elif self.factors is not None or self.means or self.is_mean is not None:
                        item = self.factor(k) / self.divisors[self.bag_of[k]] * item
                    chunk += item
                out[row] = chunk if begin == 0 else out[row] + chunk
        return narrowed(self.kind, out)

    def dots(self) -> np.ndarray:
        """Return the expected gradient of the factors, as float64."""
        rows, grad = widened(self.kind, self.rows).astype(float), widened(self.kind, self.grad).astype(float)
        return np.array([rows[self.local[k]] @ grad[self.place(self.bag_of[k])] for k in range(self.entries)])


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def check(kernels: HostKernels, case: Case, launch: tuple[int, int]) -> None:
    kind, width, item_bytes = case.kind, case.width, case.rows.itemsize
    offset = case.rows.ctypes.data % 16
    whole = offset == 0 and width * item_bytes % 16 == 0
    out = some(kind, case.grad.shape, offset)
    places, taken = np.full(case.entries, 9), np.full(out.shape, 9)
    scales = None if case.mode in ("sum", "max") else np.full(case.entries, np.nan, as_added(kind))
    order, starts = np.argsort(case.local, kind="stable"), np.full(case.num_rows + 1, 9)
    partial = np.full((2 * -(-case.entries // shapes.CHUNK), width), np.nan, as_added(kind))
    to_rows = some(kind, case.rows.shape, offset)
    common = {
        "local": address(case.local), "places": address(places), "scales": address(scales),
        "taken": address(taken) if case.mode == "max" else 0, "entries": case.entries, "features": case.features,
        "width": width, "whole": whole,
    }  # fmt: skip
    forward = bags_argument(
        shapes.BAGS, **common, rows=address(case.rows), offsets=address(case.offsets), factors=address(case.factors),
        counts=address(case.counts), is_mean=address(case.is_mean), out=address(out), num_bags=case.num_bags,
        samples=case.samples, means=case.means,
    )  # fmt: skip
    kernels.bags(f"pool{'_max' if case.mode == 'max' else ''}_{kind}", *launch, forward)
    expected, expected_taken = case.pooled()
    what = f"{kind} {case.mode} width {width}, {case.features} features, {launch}"
    np.testing.assert_array_equal(out, expected, err_msg=what)
    assert (places >= 0).tolist() == case.counted.tolist(), what
    if case.mode == "max":
        np.testing.assert_array_equal(taken, expected_taken, err_msg=what)
    backward = bags_argument(
        shapes.BAGS, **common, order=address(order), starts=address(starts), partial=address(partial),
        out=address(to_rows), grad=address(case.grad), grad_stride=case.wide.shape[1], num_rows=case.num_rows,
        row_bytes=width * item_bytes,
    )  # fmt: skip
    for kernel in ("find_starts", f"sum_chunks_{kind}", f"join_chunks_{kind}"):
        kernels.bags(kernel, *launch, backward)
    np.testing.assert_array_equal(starts, np.searchsorted(case.local[order], np.arange(case.num_rows + 1)))
    np.testing.assert_array_equal(to_rows, case.gradient(expected_taken), err_msg=what)
    if case.mode == "weighted":
        to_factors = some(kind, (case.entries, 1))
        products = bags_argument(
        shapes.BAGS, **common, rows=address(case.rows), out=address(to_factors), grad=address(case.grad),
            grad_stride=case.wide.shape[1],
        )  # fmt: skip
        kernels.bags(f"dot_bags_{kind}", *launch, products)
        tolerance = {"float64": 1e-12, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[kind]
        np.testing.assert_allclose(widened(kind, to_factors[:, 0]), case.dots(), rtol=tolerance, atol=tolerance * width)


def main() -> None:
    kernels, count = HostKernels(Path(sys.argv[1])), 0
    for kind, mode in itertools.product(STORED, ("sum", "mean", "max", "weighted", "padded", "some means")):
        item_bytes = np.dtype(STORED[kind]).itemsize
        for number, width in enumerate((1, 3, 8, 16, 24)):
            features, samples = ((1, 40), (3, 40), (4, 9), (2, 1))[number % 4]
            case = Case(kind, mode, width, features, samples, item_bytes if number % 2 and item_bytes < 16 else 0)
            for launch in LAUNCHES:
                check(kernels, case, launch)
                count += 1
    print(f"{count} cases of bags")


if __name__ == "__main__":
    main()
