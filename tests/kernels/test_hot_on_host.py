"""The cache's admission kernels, run by the host: the rows that they swap; no row's bytes change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from host_build import build, compiler
from host_library import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap.kernels.cuda import hot

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: set CXX or install g++")

SLOT, ONE = hot.MOST_SLOTS, hot.MOST_SLOTS + 1
ENOUGH, MOST = 8, 255  # as in csrc/hot.cuh


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    return HostKernels(build())


def test_the_state_has_the_size_that_python_allocates(kernels: HostKernels) -> None:
    assert kernels.hot_state_bytes == 8 * hot._STATE


class Cache:
    """Words, slots and records of a table, and what its rows hold wherever they are."""

    def __init__(self, counts: npt.NDArray[np.uint32], slots: int, stride: int) -> None:
        generator = np.random.default_rng(len(counts))
        self.words, self.slots = counts.astype(np.uint32) * np.uint32(ONE), slots
        self.records = generator.integers(0, 256, (len(counts), stride), np.uint8)
        self.arena = np.zeros((slots, stride), np.uint8)
        self.state, self.row_of = np.zeros(hot._STATE, np.int64), np.full(slots, -1)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return (self.words // ONE).astype(np.int64)

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        return (self.words & SLOT) > 0

    def rows(self) -> npt.NDArray[np.uint8]:
        """Return the records' bytes from where the words say that they are."""
        slot = (self.words & SLOT).astype(np.int64)
        return np.where(self.held[:, None], self.arena[slot - 1], self.records)

    def write(self, rows: npt.NDArray[np.int64], generator: np.random.Generator) -> None:
        """Overwrite rows where they are, and count them, as a scatter does."""
        for row in rows:
            slot = int(self.words[row] & SLOT)
            where = self.arena[slot - 1] if slot else self.records[row]
            where[:] = generator.integers(0, 256, len(where), np.uint8)
            self.words[row] += ONE if self.words[row] // ONE < MOST else 0


def expected_swaps(counts: npt.NDArray[np.int64], held: npt.NDArray[np.bool_], slots: int, limit: int) -> int:
    """Return how many rows move in, if the hottest at home are paired with empty slots, then the least hot in slots."""
    coming = sorted((count for count in counts[~held] if count), reverse=True)
    going = [-1] * (slots - int(held.sum())) + sorted(counts[held])
    pairs = zip(coming[:limit], going, strict=False)
    return next((n for n, (new, old) in enumerate(pairs) if new <= 2 * old), min(len(coming), len(going), limit))


def admit(kernels: HostKernels, cache: Cache, limit: int, grid: int = 2, block: int = 64, word: int = 4) -> None:
    """Run an admission, and check everything about it."""
    counts, held, rows = cache.counts, cache.held, cache.rows()
    moved = cache.state[6:8].copy()
    kernels.admission(
        grid, block, cache.words, cache.state, cache.slots, limit, word, cache.records, cache.arena, 4, cache.row_of
    )
    np.testing.assert_array_equal(cache.rows(), rows)
    swaps = expected_swaps(counts, held, cache.slots, limit)
    came, went = cache.held & ~held, held & ~cache.held
    assert came.sum() == swaps
    assert went.sum() == max(0, swaps - (cache.slots - held.sum()))
    assert sorted(counts[came]) == sorted(counts[~held])[len(counts[~held]) - swaps :]
    assert sorted(counts[went]) == sorted(counts[held])[: went.sum()]
    assert (cache.state[6:8] - moved).tolist() == [came.sum(), went.sum()]
    slots = (cache.words[cache.held] & SLOT).astype(np.int64) - 1
    assert sorted(slots) == list(range(cache.held.sum()))
    np.testing.assert_array_equal(cache.row_of[slots], np.flatnonzero(cache.held))
    hottest = np.sort(counts)[::-1]
    halved = len(counts) >= cache.slots and hottest[cache.slots - 1] >= ENOUGH
    np.testing.assert_array_equal(cache.counts, counts // 2 if halved else counts)


def test_the_hottest_rows_fill_the_slots(kernels: HostKernels) -> None:
    """A tiny case to read: six rows, three slots."""
    cache = Cache(np.array([0, 3, 1, 0, 7, 2]), 3, 8)
    admit(kernels, cache, 3)
    assert np.flatnonzero(cache.held).tolist() == [1, 4, 5]
    cache.words[[0, 2]] += 4 * ONE
    admit(kernels, cache, 3)
    assert np.flatnonzero(cache.held).tolist() == [1, 2, 4], "5 is more than twice 2; 4 is not more than twice 3"


def test_counts_are_halved_once_the_slots_are_full_of_rows_with_eight(kernels: HostKernels) -> None:
    cache = Cache(np.array([8, 255, 7, 9, 1]), 3, 8)
    admit(kernels, cache, 3)
    assert cache.counts.tolist() == [4, 127, 3, 4, 0]


@pytest.mark.parametrize("word, stride", [(16, 48), (4, 12), (4, 300), (1, 7)])
def test_records_of_any_words(kernels: HostKernels, word: int, stride: int) -> None:
    generator = np.random.default_rng(stride)
    cache = Cache(generator.integers(0, 5, 200), 40, stride)
    for _ in range(6):
        admit(kernels, cache, 11, word=word)
        cache.write(generator.permutation(200)[:60], generator)


@settings(max_examples=60)
@given(
    counts=st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 8, 20, 255]), min_size=1, max_size=60),
    share=st.integers(1, 60), limit=st.integers(1, 60), grid=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_counts(kernels: HostKernels, counts: list[int], share: int, limit: int, grid: int, seed: int) -> None:
    """Three admissions with writes in between, each checked against NumPy."""
    generator = np.random.default_rng(seed)
    cache = Cache(np.array(counts), min(share, len(counts)), 8)
    for _ in range(3):
        admit(kernels, cache, min(limit, cache.slots), grid)
        cache.write(generator.permutation(len(counts))[: 1 + len(counts) // 3], generator)


def test_rows_to_come_count_once_up_to_the_most(kernels: HostKernels) -> None:
    words = np.array([5, 255 * ONE + 3, 254 * ONE, 0], np.uint32)
    kernels.expect(1, 32, words, np.array([1, 2, 3]))
    assert words.tolist() == [5, 255 * ONE + 3, 255 * ONE, ONE]
