"""The plugin by which pytest runs on a machine with a GPU, tried on small tests."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

TOOLS = Path(__file__).resolve().parent.parent / "tools"

TESTS = """
import pytest

@pytest.mark.parametrize("case", ["one", "two"])
def test_plain(case):
    pass

@pytest.mark.parametrize("device", ["cuda"])
def test_on_the_gpu(device):
    pass

@pytest.mark.cuda_kernels
def test_marked():
    pass
"""
FAILING = """
def test_wrong():
    left = "a value to look at"
    assert left == 2

def test_right():
    pass
"""
SLOW = """
import time
import pytest

@pytest.mark.parametrize("number", range(50))
def test_slow(number):
    time.sleep(0.3)
"""
LOST = """
import sys, types

class Cuda:
    def is_initialized(self): return True
    def synchronize(self): raise RuntimeError("an illegal memory access was encountered")

def test_first():
    pass

def test_fatal():
    sys.modules["torch"] = types.SimpleNamespace(cuda=Cuda())
    raise RuntimeError("what it died of")

def test_after():
    pass
"""


def run(folder, text, *words, **environment):
    (folder / "test_small.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda_kernels: of the GPU\n")
    paths = os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")])
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # their imports take longer than these tests
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "gpu_tests", "--tb=no", "-p", "no:cacheprovider", *words, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        check=False,
        timeout=120,
    )


def order(done):
    return re.findall(r"::(test_\S+) PASSED", done.stdout)


def test_those_for_the_gpu_come_first(tmp_path):
    done = run(tmp_path, TESTS, "-v")
    assert order(done) == ["test_on_the_gpu[cuda]", "test_marked", "test_plain[one]", "test_plain[two]"]


def test_one_case_of_each_comes_first(tmp_path):
    done = run(tmp_path, SLOW.replace("0.3", "0").replace("50", "3") + TESTS, "-v")
    assert order(done)[:2] == ["test_on_the_gpu[cuda]", "test_marked"]
    assert order(done)[2:] == ["test_slow[0]", "test_plain[one]", "test_slow[1]", "test_slow[2]", "test_plain[two]"]


def test_what_others_rest_on_comes_first_and_what_is_slow_last(tmp_path):
    text = "import pytest\n\n@pytest.mark.slow\ndef test_long():\n    pass\n\ndef test_{0}():\n    pass\n"
    for area in ("apps", "swapping", "kernels", "tables"):
        (tmp_path / "tests" / area).mkdir(parents=True)
        (tmp_path / "tests" / area / f"test_of_{area}.py").write_text(text.format(area))
    (tmp_path / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'slow: long')\n"
    )
    found = order(run(tmp_path, "", "-v"))
    assert found == ["test_kernels", "test_tables", "test_swapping", "test_apps", *["test_long"] * 4]


def test_a_failure_is_shown_when_it_happens(tmp_path):
    done = run(tmp_path, FAILING, "-v")
    assert done.returncode == 1
    assert done.stdout.index("assert 'a value to look at' == 2") < done.stdout.index("test_right PASSED")
    (named,) = re.findall(r"^FAILED \S*test_small\.py::test_wrong \(call\) - (.*)$", done.stdout, re.MULTILINE)
    assert named.startswith("AssertionError: assert 'a value to look at' == 2")


def test_a_run_stops_by_itself_and_has_passed_if_nothing_failed(tmp_path):
    done = run(tmp_path, SLOW, GPU_CHECK_SECONDS="1")
    ran = re.search(r"stopped: the time is over; (\d+) of 50 tests were run", done.stdout)
    assert 0 < int(ran[1]) < 50
    assert done.returncode == 0
    done = run(tmp_path, FAILING + SLOW, GPU_CHECK_SECONDS="1")
    assert "stopped: the time is over" in done.stdout
    assert done.returncode != 0


def test_a_run_that_was_stopped_too_soon_has_shown_nothing(tmp_path):
    done = run(tmp_path, SLOW, GPU_CHECK_SECONDS="1", GPU_CHECK_LEAST="40")
    assert done.returncode != 0
    assert "tests were run: too few tests to mean anything" in done.stdout
    done = run(tmp_path, SLOW, GPU_CHECK_SECONDS="1", GPU_CHECK_LEAST="1")
    assert done.returncode == 0
    assert "too few" not in done.stdout


def test_without_the_gpu_the_run_ends(tmp_path):
    done = run(tmp_path, LOST)
    assert done.returncode != 0
    assert "what it died of" in done.stdout
    assert "the GPU no longer answers; 2 of 3 tests were run" in done.stdout


needs_xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")


@needs_xdist
def test_another_process_goes_on_where_one_has_lost_the_gpu(tmp_path):
    done = run(tmp_path, LOST, "-p", "xdist", "-n", "1")
    assert "1 failed, 2 passed" in done.stdout
    assert "what it died of" in done.stderr


@needs_xdist
def test_several_processes_stop_by_themselves(tmp_path):
    done = run(tmp_path, SLOW, "-p", "xdist", "-n", "2", GPU_CHECK_SECONDS="1")
    assert "stopped: the time is over" in done.stdout
    assert done.returncode == 0
