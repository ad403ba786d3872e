"""Tests under memcheck in several processes, tried with small tests and a stand-in for compute-sanitizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import gpu_memcheck
import pytest
from gpu_check import closing_line, run_part
from gpu_parts import Part

pytestmark = pytest.mark.release

TOOLS = Path(__file__).resolve().parent.parent / "tools"

# As compute-sanitizer does, it runs a command, says how many errors it has found, and exits with 86 if there are any.
SANITIZER = """#!{0}
import os, subprocess, sys
print("========= COMPUTE-SANITIZER", flush=True)
status = subprocess.call(sys.argv[1 + {1}:])
found = int(os.environ.get("GPU_CHECK_SHARE") == os.environ.get("FINDS"))
print(f"========= ERROR SUMMARY: {{found}} error" + "s" * (found != 1))
sys.exit(86 if found and os.environ.get("SAYS_SO") != "no" else status)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(10))
def test_one(number):
    print("ran", number)

def test_other():
    pass
"""


def run(folder, text, *words, processes=3, seconds=60, **environment):
    (folder / "test_small.py").write_text(text)
    sanitizer = folder / "sanitizer"
    sanitizer.write_text(SANITIZER.format(sys.executable, len(gpu_memcheck.OPTIONS)))
    sanitizer.chmod(0o755)
    paths = os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")])
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_tests", "-p", "no:cacheprovider", *words, str(folder)]
    return subprocess.run(
        [sys.executable, str(TOOLS / "gpu_memcheck.py"), str(sanitizer), str(processes), str(seconds), *tests],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        check=False,
        timeout=120,
    )


def test_every_test_runs_in_one_of_the_processes(tmp_path):
    """Of eleven, one is left out by its name."""
    done = run(tmp_path, TESTS, "-rP", "-k", "test_one")
    assert done.returncode == 0, done.stdout
    assert sorted(map(int, re.findall(r"^ran (\d+)$", done.stdout, re.MULTILINE))) == list(range(10))
    assert sorted(re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE))[:4] == ["10", "3", "3", "4"]
    said = closing_line(done.stdout.splitlines())
    assert re.fullmatch(r"ERROR SUMMARY: 0 of 3 processes have findings; 10 passed in [\d.]+s", said)


@pytest.mark.parametrize("says_so", ["yes", "no"], ids=["by its exit status", "by its words alone"])
def test_a_finding_in_one_process_counts(tmp_path, says_so):
    done = run(tmp_path, TESTS, FINDS="1/3", SAYS_SO=says_so)
    assert done.returncode == gpu_memcheck.FOUND
    assert "========= ERROR SUMMARY: 1 of 3 processes have findings" in done.stdout
    assert "11 passed" in done.stdout


@pytest.mark.parametrize("wrong", ["assert False", "import os; os._exit(0)", "import os; os.abort()"])
def test_a_test_that_fails_or_ends_its_process_counts(tmp_path, wrong):
    done = run(tmp_path, f"{TESTS}\ndef test_wrong():\n    {wrong}\n")
    assert done.returncode == 1
    assert "ERROR SUMMARY: 0 of 3" in done.stdout


LONG = TESTS + "\ndef test_long():\n    import time\n    {0}\n    time.sleep(60)\n"


def test_a_test_that_takes_too_long_is_ended_and_the_others_count(tmp_path):
    began = time.monotonic()
    done = run(tmp_path, LONG.format("pass"), seconds=4, GPU_CHECK_LEAST="5")
    assert time.monotonic() - began < 30
    assert done.returncode == 0, done.stdout
    assert "stopped: the time is over in 1 of 3 processes" in done.stdout
    few = run(tmp_path, LONG.format("pass"), seconds=4, GPU_CHECK_LEAST="12")
    assert few.returncode == 1
    assert gpu_memcheck.TOO_FEW in few.stdout


def test_a_finding_counts_in_a_process_that_is_ended(tmp_path):
    finding = "import os; os.write(1, b'========= Invalid __global__ read of size 4 bytes\\\\n')"
    done = run(tmp_path, LONG.format(finding), "-s", seconds=4)
    assert done.returncode == gpu_memcheck.FOUND, done.stdout


def test_without_the_sanitizer_nothing_has_run():
    command = [sys.executable, str(TOOLS / "gpu_memcheck.py"), "/no/such/program", "3", "{seconds}", "pytest"]
    outcome = run_part(Part("memcheck", command, 60, not_run_if=(gpu_memcheck.ABSENT,)), 60)
    assert outcome.status == "not run"
    assert "/no/such/program cannot be run" in outcome.result
