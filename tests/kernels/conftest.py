"""Shared fixtures of the kernels' tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import run_script

sys.path.insert(0, str(Path(__file__).parent))  # host_library.py and philox_reference.py are no tests


@pytest.fixture(scope="session")
def run_with_isa() -> Callable[[str, str], str]:
    """Run a program in a process limited to an instruction set (SPEEDSWAP_ISA), and return what it prints."""

    def run(isa: str, program: str) -> str:
        preface = f"import os, sys\nos.environ['SPEEDSWAP_ISA'] = {isa!r}\nsys.path[:] = {sys.path}\n"
        done = run_script(preface + program, imported=("torch",))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
