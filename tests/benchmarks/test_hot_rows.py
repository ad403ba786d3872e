"""The benchmark of hot rows counts what the kernels do, and finds nearly the best choice of rows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from bench_hot_rows import RECORDS, ZIPF_EXPONENT, Cache, Plan, measure

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from host_build import build, compiler
from host_library import HostKernels

from speedswap.kernels.cuda import hot

pytestmark = pytest.mark.release


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: set CXX or install g++")
def test_admissions_are_those_of_the_kernels() -> None:
    """Rows with the same scatters may be chosen differently; how many there are of each may not."""
    kernels, generator, rows = HostKernels(build()), np.random.default_rng(0), 500
    cache = Cache(1, rows, 0.1)
    words, state = np.zeros(rows, np.uint32), np.zeros(hot._STATE, np.int64)
    records, arena, row_of = np.zeros((rows, 4), np.uint8), np.zeros((cache.slots, 4), np.uint8), np.zeros(50, np.int64)
    cache.limit = 20
    for _ in range(30):
        drawn = np.unique(generator.zipf(1.3, 60).clip(1, rows) - 1)
        cache.count(drawn)
        kernels.expect(1, 32, words, drawn)
        kernels.admission(1, 64, words, state, cache.slots, cache.limit, 4, records, arena, 1, row_of)
        cache.admit()
        held, scatters = (words & hot.MOST_SLOTS) > 0, words // (hot.MOST_SLOTS + 1)
        np.testing.assert_array_equal(scatters, cache.scatters)
        assert sorted(scatters[held]) == sorted(cache.scatters[cache.held])
        words = (scatters * np.uint32(hot.MOST_SLOTS + 1)).astype(np.uint32)  # the same rows from here on
        words[cache.held] += np.arange(1, cache.used + 1, dtype=np.uint32)
    assert cache.evicted == state[7] > 0
    assert cache.admitted == state[6]


def test_bytes_are_nearly_those_of_the_best_choice_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Within five percent of a cache that knows the frequencies, at each size."""
    plan = Plan.of(quick=True)
    found = measure(plan)
    frequencies = np.arange(1, plan.rows + 1) ** -ZIPF_EXPONENT
    present = -np.expm1(plan.lookups * np.log1p(-frequencies / frequencies.sum()))
    for share, cache in found["caches"].items():
        best = plan.tables * present[int(float(share) * plan.rows) :].sum()
        for name, nbytes in RECORDS.items():
            assert best * 0.95 < cache["bytes"][name]["out"] / nbytes < best * 1.05
    assert "hits" in capsys.readouterr().out
