"""The runner behind ``make gpu-check``, tried on small commands: its time limits and its verdict need no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_check import Outcome, Part, check, closing_line, plan, run_part


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_part_that_succeeds_passes_with_its_last_line():
    outcome = run_part(Part("hello", python("print('one'); print('two')"), 60), 60)
    assert (outcome.status, outcome.rc, outcome.tail, outcome.result) == ("passed", 0, ["one", "two"], "two")


def test_part_sees_its_environment():
    part = Part("env", python("import os; print(os.environ['ANSWER'])"), 60, env={"ANSWER": "42"})
    assert run_part(part, 60).result == "42"


def test_what_is_written_down_has_no_places_of_this_machine():
    root = str(Path(__file__).resolve().parent.parent)
    outcome = run_part(Part("where", python(f"print({root!r} + '/tests', {sys.prefix!r} + '/lib')"), 60), 60)
    assert outcome.result == "tests …/lib"
    assert sys.prefix not in outcome.command


def test_part_that_exits_with_an_error_fails_and_keeps_its_words():
    outcome = run_part(Part("bad", python("import sys; print('why', file=sys.stderr); sys.exit(3)"), 60), 60)
    assert (outcome.status, outcome.rc, outcome.result, outcome.ok) == ("failed", 3, "why", False)


def test_part_whose_program_is_missing_fails():
    outcome = run_part(Part("absent", ["/no/such/program"], 60), 60)
    assert outcome.status == "failed"
    assert "/no/such/program" in outcome.result


def test_part_that_is_unsupported_on_the_machine_is_skipped_with_what_it_said():
    code = python("import sys; print('Error: Device not supported.'); sys.exit(1)")
    outcome = run_part(Part("memcheck", code, 60, unsupported="Device not supported"), 60)
    assert (outcome.status, outcome.result) == ("skipped", "it says 'Device not supported' here")
    assert run_part(Part("tests", code, 60), 60).status == "failed"


def test_part_over_its_time_is_ended_with_its_children(tmp_path):
    """The child ignores SIGTERM and has a child of its own, which holds the same pipe."""
    pid_file = tmp_path / "pid"
    code = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(pid_file)!r}).write_text(str(sleeper.pid))
print("begun", flush=True)
time.sleep(600)
"""
    began = time.monotonic()
    outcome = run_part(Part("stuck", python(code), 4), 4)
    assert (outcome.status, outcome.rc, outcome.tail) == ("timed out", None, ["begun"])
    assert time.monotonic() - began < 20
    assert not _is_running(int(pid_file.read_text()))


def _is_running(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.strip().startswith("Z")


def test_benchmark_with_little_time_is_asked_to_be_quick():
    part = Part("benchmark", python("import sys; print(sys.argv[1:])"), 75, benchmark=True)
    assert run_part(part, 60).result == "[]"
    assert run_part(part, 30).result == "['--quick']"


@pytest.mark.parametrize(
    ("tail", "result"),
    [
        (
            ["noise", "===== 3 failed, 12 passed in 4.56s ====", ""],
            "3 failed, 12 passed in 4.56s",
        ),
        (["12 passed in 4.56s", "========= ERROR SUMMARY: 0 errors"], "ERROR SUMMARY: 0 errors; 12 passed in 4.56s"),
        (
            ["12 passed, 3 warnings in 61.00s (0:01:01)", "===== RACECHECK SUMMARY: 1 hazard displayed (1 error)"],
            "RACECHECK SUMMARY: 1 hazard displayed (1 error); 12 passed, 3 warnings in 61.00s (0:01:01)",
        ),
        (["first", "last", "  "], "last"),
        ([], ""),
    ],
)
def test_closing_line_finds_what_counts(tail, result):
    assert closing_line(tail) == result


def test_check_goes_on_after_a_failure_and_writes_it_down(tmp_path, capsys):
    parts = [
        Part("bad", python("import sys; sys.exit(1)"), 60),
        Outcome("memcheck", "skipped", result="compute-sanitizer is not installed"),
        Part("good", python("print('fine')"), 60),
    ]
    assert check(parts, tmp_path / "out", {"gpu": "none"}, total_seconds=120) == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(part["name"], part["status"]) for part in summary["parts"]] == [
        ("bad", "failed"),
        ("memcheck", "skipped"),
        ("good", "passed"),
    ]
    assert summary["passed"] is False
    assert summary["machine"] == {"gpu": "none"}
    assert "compute-sanitizer is not installed" in capsys.readouterr().out


def test_check_passes_when_every_part_passed_or_was_skipped(tmp_path):
    parts = [Outcome("memcheck", "skipped"), Part("good", python("pass"), 60)]
    assert check(parts, tmp_path, {}, total_seconds=120) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["passed"] is True


def test_check_keeps_time_for_the_parts_to_come_and_fails_what_it_could_not_begin(tmp_path):
    """Of 30 seconds, 27 are kept for the second part: the first is not begun, the second is."""
    parts = [Part("slow", python("pass"), 60), Part("kept", python("pass"), 60, kept_seconds=27)]
    assert check(parts, tmp_path, {}, total_seconds=30) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [part["status"] for part in summary["parts"]] == ["not begun", "passed"]


def test_plan_runs_everything_within_its_time(tmp_path):
    benchmarks = [Path("benchmarks/bench_rows.py"), Path("benchmarks/bench_step.py")]
    parts = plan("python3", tmp_path, nvcc=None, sanitizer="/opt/compute-sanitizer", benchmarks=benchmarks)
    assert [part.name for part in parts] == [
        "build",
        "info",
        "tests",
        "kernel tests, NVRTC",
        "benchmark rows",
        "benchmark step",
        "memcheck",
        "racecheck",
    ]
    assert all(isinstance(part, Part) for part in parts)
    assert sum(part.kept_seconds for part in parts) < 300
    rows = parts[4].command
    assert rows[rows.index("--json") + 1] == str(tmp_path / "rows-cuda.json")


def test_plan_insists_on_the_fatbin_where_nvcc_is(tmp_path, monkeypatch):
    monkeypatch.delenv("SPEEDSWAP_CUDA", raising=False)
    for nvcc, expected in ((None, "AUTO"), ("/opt/nvcc", "ON")):
        build = plan("python3", tmp_path, nvcc=nvcc, sanitizer=None, benchmarks=[])[0]
        assert build.env["SPEEDSWAP_CUDA"] == expected


def test_plan_without_the_sanitizer_says_so(tmp_path):
    parts = plan("python3", tmp_path, nvcc=None, sanitizer=None, benchmarks=[])
    assert [(part.status, part.result) for part in parts if isinstance(part, Outcome)] == [
        ("skipped", "compute-sanitizer is not installed")
    ] * 2


def test_without_a_gpu_the_check_says_so_and_exits_2(tmp_path):
    tool = Path(__file__).parent.parent / "tools" / "gpu_check.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: no GPU here: torch ")
    assert not (tmp_path / "out").exists()
