"""Shared fixtures of the kernels' tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import simulated_gpu
import torch
from children import run_script

from speedswap.kernels.cuda import engines
from speedswap.kernels.cuda.engines import Ring

sys.path.insert(0, str(Path(__file__).parent))  # host_library.py, row_log_model.py and others are no tests

from row_log_model import Log


@pytest.fixture(scope="session")
def run_with_isa() -> Callable[[str, str], str]:
    """Run a program in a process limited to an instruction set (SPEEDSWAP_ISA), and return what it prints."""

    def run(isa: str, program: str) -> str:
        preface = f"import os, sys\nos.environ['SPEEDSWAP_ISA'] = {isa!r}\nsys.path[:] = {sys.path}\n"
        done = run_script(preface + program, imported=("torch",))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log of 1,000 rows of 200 bytes: half of them written, and committed."""
    log = Log(tmp_path, 1000, 200, journal=True)
    for rows in torch.arange(0, 1000, 2).split(16):
        log.put(rows, int(rows[0]) % 250)
    log.commit()
    log.log.journal()
    yield log
    log.close()


@pytest.fixture
def gpu(device: str) -> torch.device:
    if device != "cuda":
        pytest.skip("is about a GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def simulation() -> None:
    if not simulated_gpu.is_on():
        pytest.skip("needs the simulated GPU: SPEEDSWAP_TEST_DEVICE=simulated")


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings with buffers of a page, so that a few rows go through all of them many times."""
    monkeypatch.setattr(engines, "_BUFFER_BYTES", 4096)
    monkeypatch.setattr(engines, "_LEAST_BYTES", 512)
    rings: dict[tuple[int, str], Ring] = {}
    monkeypatch.setattr(engines, "ring", lambda *key: rings.setdefault(key, Ring(*key)))
