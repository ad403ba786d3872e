"""The calls of a step on the simulated GPU, and what the benchmark of its host time says about another checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_host_time
import pytest
import simulated_gpu

CALLS = {"plain": 549, "lookahead": 879}  # as measured
MORE = 1.15
LAUNCHES = {"plain": 10, "lookahead": 12}


@pytest.fixture(scope="module")
def measured() -> Any:
    if not simulated_gpu.is_on() and (reason := simulated_gpu.unavailable()):
        pytest.skip(reason)
    return bench_host_time.of_checkout(bench_host_time.ROOT, quick=True)


@pytest.mark.parametrize("kind", bench_host_time.KINDS)
def test_a_step_on_a_gpu_takes_hardly_more_calls_than_it_did(kind: str, measured: Any) -> None:
    found = measured[kind]
    assert found["python"] + found["c"] <= MORE * CALLS[kind], found
    assert (found["launches"], found["waits"]) == (LAUNCHES[kind], 1)


def test_another_checkout_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of the same run: twice the calls in three times the seconds."""
    ours = {"python": 10, "c": 20, "launches": 9, "waits": 1, "cpu_seconds": 0.5}
    other = {"python": 40, "c": 20, "launches": 2, "waits": 1, "cpu_seconds": 1.5}
    of = {bench_host_time.ROOT: ours, tmp_path.resolve(): other}
    asked = []

    def measured_there(root: Path, quick: bool) -> dict[str, Any]:
        asked.append(quick)
        return dict.fromkeys(bench_host_time.KINDS, of[root])

    monkeypatch.setattr(bench_host_time, "of_checkout", measured_there)
    monkeypatch.setattr(bench_host_time, "commit_of", lambda root: "abc")
    found = bench_host_time.measure(quick=True, against=tmp_path)
    assert found["ratios"] == {key: {"calls": 2.0, "cpu_seconds": 3.0} for key in bench_host_time.KINDS}
    assert found["against"]["commit"] == "abc"
    assert found["against"]["plain"] == other
    assert asked == [True, True]
