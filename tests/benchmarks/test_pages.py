"""Kinds of host memory, numbers of multiprocessors and shares, measured on the simulated GPU."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import bench_pages
import pytest
from machine import memories

from speedswap.kernels.cuda import driver


def test_every_kind_of_memory_is_measured(device: str, tmp_path: Path) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")
    file = tmp_path / "pages.json"
    assert bench_pages.main(["--device", "cuda", "--quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["results"]
    assert found["left_out"] == []
    assert [*found["memory"]] == ["registered", "allocated", "managed"]
    for by_width in found["memory"].values():
        for by_number in by_width.values():
            assert [*by_number] == ["4", "8", "16", "32"]
            assert all({*rates} == {"to_device", "from_device", "both_each"} for rates in by_number.values())
    assert all([*found["shares"][width]["from_device"]] == ["0.0", "0.2", "0.5", "1.0"] for width in ("512", "1536"))
    assert len(found["staged"]["512"]) == 4


def test_a_kind_that_a_driver_lacks_leaves_the_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")
    runtime, freed = driver.cupy().cuda.runtime, list[int]()
    free = runtime.free

    def refused(*how: object) -> None:
        raise runtime.CUDARuntimeError(1)

    monkeypatch.setattr(runtime, "memAdvise", refused)
    monkeypatch.setattr(runtime, "free", lambda pointer: (freed.append(pointer), free(pointer)))
    found = bench_pages.measure("cuda", quick=True, kinds=[*memories.KINDS], gib=1, seconds=60)
    assert [*found["memory"]] == ["registered", "allocated"]
    assert [line.partition(":")[0] for line in found["left_out"]] == ["managed"]
    assert len(freed) == 1


@pytest.mark.parametrize("status", [0, 1])
def test_managed_memory_is_advised_by_the_driver_where_cupy_cannot(
    status: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")
    runtime, given = driver.cupy().cuda.runtime, list[tuple[object, ...]]()

    def refused(*how: object) -> None:
        raise runtime.CUDARuntimeError(1)

    class Driver:
        def cuMemAdvise(self, pointer: ctypes.c_uint64, nbytes: ctypes.c_size_t, advice: int, device: int) -> int:
            given.append((nbytes.value, advice, device))
            return status

    monkeypatch.setattr(runtime, "memAdvise", refused)
    monkeypatch.setattr(memories.ctypes, "CDLL", lambda name: Driver())
    if status:
        with pytest.raises(RuntimeError, match="cuMemAdvise: error 1"):
            memories.KINDS["managed"](4096)
    else:
        memories.KINDS["managed"](4096).close()
        assert given == [(4096, 3, -1), (4096, 5, 0)]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_pages.main(["--device", "cpu"]) != 0
    assert "measures the bus" in capsys.readouterr().err
    assert bench_pages.main(["--device", "cpu", "--kinds", "registered,paged"]) != 0
    assert "kinds has 'paged'; choose of registered" in capsys.readouterr().err
    assert [*memories.KINDS][-1] == "managed"  # which can hang a GPU, and so comes last
