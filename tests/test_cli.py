"""The command line: its output; a mistake is one line and exit status 2."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import speedswap
from speedswap.apps.info import cupy_problems, describe, installed_cupys, memory_limits
from speedswap.cli import main
from speedswap.kernels import _C


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "speedswap", *words], capture_output=True, text=True, check=False)


def test_info_says_what_was_built_and_found():
    done = run_module("info")
    assert done.returncode == 0, done.stderr
    for expected in (
        speedswap.__version__,
        platform.python_version(),
        torch.__version__,
        np.__version__,
        _C.isa(),
        "kernels",
        "GPU",
        "memory",
    ):
        assert expected in done.stdout


def test_info_names_the_gpu_or_says_that_there_is_none():
    report = describe()
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in report
    else:
        assert re.search(r"^  cuda +\S", report, flags=re.MULTILINE)


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about a torch without CUDA")
def test_info_advises_no_cupy_to_a_torch_that_cannot_use_it():
    """Nothing about the CPU is broken, and no install would change that."""
    (line,) = re.findall(r"^  CuPy +(.*)", describe(), flags=re.MULTILINE)
    assert "pip install" not in line


def test_script_and_module_are_the_same_command():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="speedswap")
    assert script.load() is main


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"speedswap {speedswap.__version__}\n"


@pytest.mark.parametrize("words", [[], ["no-such-command"]])
def test_without_a_known_command_usage_and_exit_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: speedswap" in capsys.readouterr().err


def test_mistake_is_one_line_on_stderr_and_exit_2():
    done = run_module("word2vec", "--dim", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "dim" in done.stderr


@pytest.mark.sweep(1)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_to_the_end_is_no_error(unbuffered):
    """``speedswap info | head -1``."""
    command, env = [sys.executable, "-m", "speedswap", "info"], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_cupy_that_fits_is_no_problem():
    assert cupy_problems(["cupy-cuda12x"], "12.6") == []
    assert cupy_problems(["cupy-cuda13x"], "13.0") == []


def test_no_cupy_is_no_problem_without_cuda():
    assert cupy_problems([], None) == []


@pytest.mark.parametrize("has_gpu", [False, True])
def test_no_cupy_is_a_problem_only_where_a_gpu_is(has_gpu, monkeypatch):
    monkeypatch.setattr("speedswap.apps.info.installed_cupys", list)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert ("CuPy, which launches the kernels, is missing" in describe()) == has_gpu


def test_no_cupy_for_a_torch_with_cuda_names_the_one_that_fits():
    (problem,) = cupy_problems([], "12.6")
    assert re.search(r"pip install 'cupy-cuda12x>=[\d.]+'$", problem)


def test_cupy_for_another_cuda_names_both_and_the_remedy():
    (problem,) = cupy_problems(["cupy-cuda12x"], "13.0")
    assert "cupy-cuda12x" in problem
    assert "torch (13.0)" in problem
    assert re.search(r"pip install 'cupy-cuda13x>=[\d.]+'$", problem)


def test_two_cupys_are_a_problem_whatever_torch_is():
    both = ["cupy-cuda12x", "cupy-cuda13x"]
    for torch_cuda in (None, "12.6", "13.0"):
        (problem,) = cupy_problems(both, torch_cuda)
        assert "pip uninstall cupy-cuda12x cupy-cuda13x" in problem


def test_cuda_that_no_cupy_is_known_for():
    (problem,) = cupy_problems(["cupy-cuda12x"], "11.8")
    assert problem.endswith("a torch for CUDA 12 or 13")


def test_installed_cupys_are_those_that_metadata_knows():
    for name in installed_cupys():
        assert importlib.metadata.version(name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc and /sys")
def test_memory_limits_are_the_systems_own():
    import resource

    limits = memory_limits()
    total = re.fullmatch(r"[\d.]+ [GM]iB of ([\d.]+) GiB", limits["available"])
    assert total is not None
    assert float(total[1]) == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, rel=0.02)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert (limits["locked at most"] == "no limit") == (soft == resource.RLIM_INFINITY)
    assert limits["pages"].startswith(f"{resource.getpagesize() // 1024} KiB; huge pages: ")
