"""The runner behind ``make gpu-check``, tried on small commands: its time limits and its verdict need no GPU."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu_machine
import gpu_memcheck
import gpu_tests
import pytest
from gpu_check import check, chosen, closing_line, main, names_failure, no_driver, pack, run_part
from gpu_page import LONGEST
from gpu_parts import CALLS, USUAL, Part, Place, plan

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parent.parent


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
    assert run_part(Part("near", python(f"print({root!r} + '-out', {root!r})"), 60), 60).result == f"{root}-out ."


def test_part_that_exits_with_an_error_fails_and_keeps_its_words():
    outcome = run_part(Part("bad", python("import sys; print('why', file=sys.stderr); sys.exit(3)"), 60), 60)
    assert (outcome.status, outcome.rc, outcome.result, outcome.ok) == ("failed", 3, "why", False)


def test_a_check_that_is_ended_ends_its_part(tmp_path: Path):
    """A command that runs past its limit is ended so, and a part left over would slow the next one down."""
    begun = tmp_path / "begun"
    check = f"""
import gpu_check
from gpu_parts import Part
command = ["sh", "-c", "echo $$ > {begun}; echo it runs; exec sleep 60"]
gpu_check.plan = lambda place: [Part("long", command, 60, call="first")]
gpu_check.describe = lambda python: {{"gpus": [], "packages": {{}}}}
gpu_check.main(["--rehearse", "--out", {str(tmp_path)!r}])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    with subprocess.Popen(python(check), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        assert child.stdout is not None
        assert any(line == b"it runs\n" for line in child.stdout)
        child.terminate()
        child.wait(60)
    assert not _is_running(int(begun.read_text()))


def test_part_whose_program_is_missing_was_not_run():
    outcome = run_part(Part("absent", ["/no/such/program"], 60), 60)
    assert (outcome.status, outcome.ok) == ("not run", False)
    assert "/no/such/program" in outcome.result


def test_part_that_has_shown_nothing_was_not_run_and_keeps_what_it_said():
    code = python("import sys; print('Error: Device not supported.'); sys.exit(1)")
    outcome = run_part(Part("memcheck", code, 60, not_run_if=("too few", "not supported")), 60)
    assert (outcome.status, outcome.ok) == ("not run", False)
    assert outcome.result == "it says 'not supported'; Error: Device not supported."
    assert run_part(Part("tests", code, 60), 60).status == "failed"


def test_too_few_tests_under_memcheck_are_no_check_of_memory():
    (memcheck,) = (part for part in make_plan(Path("out")) if part.name == "memcheck")
    assert int(memcheck.env["GPU_CHECK_LEAST"]) >= 20
    assert gpu_tests.TOO_FEW in memcheck.not_run_if


def test_memcheck_runs_in_several_processes_and_leaves_out_what_it_cannot_run(tmp_path):
    (memcheck,) = (part for part in make_plan(tmp_path, has=("pytest-timeout",)) if part.name == "memcheck")
    _, script, sanitizer, processes, seconds = memcheck.command[:5]
    assert (script, sanitizer, seconds) == ("tools/gpu_memcheck.py", "/opt/compute-sanitizer", "{seconds}")
    assert int(processes) >= 2
    assert gpu_memcheck.ABSENT in memcheck.not_run_if
    left_out = memcheck.command[memcheck.command.index("--deselect") + 1]
    file, _, test = left_out.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()
    timeouts = [word for word in memcheck.command if word.startswith("--timeout=")]
    assert timeouts[-1] == "--timeout=0"
    assert not any(word.startswith("--timeout") for part in make_plan(tmp_path) for word in part.command)


def test_part_that_crashes_says_by_what_signal():
    code = python("import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    outcome = run_part(Part("crash", code, 60), 60)
    assert (outcome.status, outcome.rc, outcome.result) == ("failed", -11, "ended by SIGSEGV; so far")


def test_part_over_its_time_is_ended_with_its_children(tmp_path):
    """The child ignores SIGTERM and has a child, which holds the same pipe."""
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
    """Return True if a process runs; a zombie does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.strip().startswith("Z")


@pytest.mark.parametrize(
    ("tail", "result"),
    [
        (
            ["noise", "===== 3 failed, 12 passed in 4.56s ====", ""],
            "3 failed, 12 passed in 4.56s",
        ),
        (["12 passed in 4.56s", "========= ERROR SUMMARY: 0 errors"], "ERROR SUMMARY: 0 errors; 12 passed in 4.56s"),
        (
            ["stopped: the time is over; 7 of 9 tests were run", "7 passed in 4.56s"],
            "stopped: the time is over; 7 of 9 tests were run; 7 passed in 4.56s",
        ),
        (["first", "last", "  "], "last"),
        ([], ""),
    ],
)
def test_closing_line_finds_what_counts(tail, result):
    assert closing_line(tail) == result


def test_a_part_is_told_its_time():
    code = python("import os, sys; print(sys.argv[1:], os.environ['GPU_CHECK_SECONDS'])")
    assert run_part(Part("timed", [*code, "--seconds", "{seconds}"], 60), 60).result == "['--seconds', '48'] 48"


def test_parts_find_the_tools_and_the_package():
    code = python("import gpu_tests, speedswap; print(speedswap.__file__)")
    assert run_part(Part("paths", code, 60), 60).result.endswith("speedswap/__init__.py")


def test_failures_are_named_and_all_is_logged(tmp_path):
    code = """
print("FAILED tests/test_x.py::test_y - assert 1 == 2")
print("a line of no matter")
print("========= Invalid __global__ read of size 4 bytes")
print("========= ERROR SUMMARY: 0 errors")
print("========= COMPUTE-SANITIZER")
for number in range(100):
    print(number)
"""
    outcome = run_part(Part("tests", python(code), 60), 60, tmp_path / "log")
    assert outcome.failures == [
        "FAILED tests/test_x.py::test_y - assert 1 == 2",
        "========= Invalid __global__ read of size 4 bytes",
    ]
    assert len(outcome.tail) == 40
    logged = (tmp_path / "log").read_text().splitlines()
    assert (len(logged), logged[1], logged[-1]) == (105, "a line of no matter", "99")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("ERROR tests/test_x.py::test_y - RuntimeError", True),
        ("ERROR tests/test_x.py - ImportError", True),
        ("FAILED tests/test_x.py::test_y[one two] (call) - RuntimeError", True),
        ("ImportError: no such module", True),
        ("torch.OutOfMemoryError: CUDA out of memory", True),
        ("========= ERROR SUMMARY: 0 errors", False),
        ("ERROR: pip says so", False),
        ("12 passed", False),
    ],
)
def test_what_names_a_failure(line, names):
    assert names_failure(line) == names


FAILS = python("import sys; sys.exit(1)")
PASSES = python("print('fine')")


def run_check(parts, folder, total_seconds=120):
    """Return the status and the summary's parts by name."""
    seconds = collections.defaultdict(lambda: total_seconds)  # of a call of any name
    status = check(parts, folder / "out", {"gpu": ["none"]}, seconds, folder / "more")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["passed"] is (status == 0)
    assert summary["machine"] == {"gpu": ["none"]}
    return status, {part["name"]: part["status"] for part in summary["parts"]}


def test_check_goes_on_after_a_failure_and_writes_it_down(tmp_path, capsys):
    parts = [Part("bad", FAILS, 60), Part("good", PASSES, 60)]
    assert run_check(parts, tmp_path) == (1, {"bad": "failed", "good": "passed"})
    assert "FAILED  bad" in capsys.readouterr().out
    with tarfile.open(tmp_path / "out" / "more.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["logs/bad.log", "logs/good.log"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["more.tar.gz", "page.txt", "summary.json"]


def test_check_has_not_passed_when_a_part_was_not_run(tmp_path):
    unsupported = Part("memcheck", python("print('not supported'); exit(1)"), 60, not_run_if=("not supported",))
    assert run_check([unsupported, Part("good", PASSES, 60)], tmp_path) == (
        1,
        {"memcheck": "not run", "good": "passed"},
    )


def test_check_keeps_time_for_the_parts_to_come_and_fails_what_it_could_not_begin(tmp_path):
    """Of 30 seconds, 27 are kept for the second part: the first is not begun, the second is."""
    parts = [Part("slow", PASSES, 60), Part("kept", PASSES, 60, kept_seconds=27)]
    assert run_check(parts, tmp_path, 30) == (1, {"slow": "not begun", "kept": "passed"})


def test_each_call_has_its_own_time_and_the_first_one_pays_for_the_build(tmp_path):
    """Of 30 seconds, 27 are kept in the first call: neither its build nor its slow part is begun."""
    parts = [Part("make", PASSES, 60, call="build"), Part("slow", PASSES, 60, call="tests")]
    parts += [Part("kept", PASSES, 60, 28, call="tests"), Part("next", PASSES, 60, call="tables")]
    found = run_check(parts, tmp_path, 30)
    assert found == (1, {"make": "not begun", "slow": "not begun", "kept": "passed", "next": "passed"})


def test_builds_are_tried_until_one_passes(tmp_path):
    """The first may need nvcc, the second works without."""
    for first, status, others in ((FAILS, 1, ["passed", "skipped"]), (PASSES, 0, ["skipped", "skipped"])):
        parts = [Part("a", first, 60), Part("b", PASSES, 60, only_after="a"), Part("c", FAILS, 60, only_after="b")]
        found = run_check(parts, tmp_path)
        assert (found[0], [found[1][name] for name in "bc"]) == (status, others)


def test_what_the_running_part_says_can_be_read_if_all_is_cut_short(tmp_path):
    log = tmp_path / "out" / "running.log"
    code = python(f"import time; print('so far'); time.sleep(1); print(open({str(log)!r}).read() == 'so far\\n')")
    assert run_check([Part("cut", code, 60)], tmp_path)[0] == 0
    assert not log.exists()
    with tarfile.open(tmp_path / "out" / "more.tar.gz") as archive:
        assert archive.extractfile("logs/cut.log").read() == b"so far\nTrue\n"


def test_an_archive_that_cannot_be_written_costs_no_part(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("gpu_check.pack", fails)
    parts = [Part("first", PASSES, 60), Part("second", PASSES, 60)]
    assert run_check(parts, tmp_path) == (0, {"first": "passed", "second": "passed"})
    assert "gpu-check: no space left on device" in capsys.readouterr().err


def test_the_end_of_the_output_names_what_failed(tmp_path, capsys):
    """It is what a lent machine's answer shows."""
    code = python("for i in range(30): print(f'FAILED tests/test_x.py::test_{i} - why'); \nraise SystemExit(1)")
    assert run_check([Part("tests", code, 60)], tmp_path)[0] == 1
    end = capsys.readouterr().out.partition("PARTS")[2]
    assert [f"test_{i} - why" in end for i in (0, 11, 12)] == [True, True, False]
    assert (tmp_path / "out" / "page.txt").read_text().endswith(end)


def test_a_page_that_cannot_be_written_costs_no_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpu_check.page", lambda *_: 1 / 0)
    assert run_check([Part("first", PASSES, 60), Part("second", PASSES, 60)], tmp_path)[0] == 0
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_archive_takes_traces_and_leaves_out_what_is_too_large(tmp_path, monkeypatch):
    out, more = tmp_path / "out", tmp_path / "more"
    (more / "logs").mkdir(parents=True)
    out.mkdir()
    (out / "tables-trace.json.gz").write_bytes(b"trace")
    (more / "logs" / "tests.log").write_text("said")
    (more / "large").write_bytes(os.urandom(5000))
    monkeypatch.setattr("gpu_check.LARGEST_FILE", 4000)
    for _ in range(2):
        pack(out, more)
        assert [path.name for path in out.iterdir()] == ["more.tar.gz"]
        with tarfile.open(out / "more.tar.gz") as archive:
            assert sorted(archive.getnames()) == ["logs/tests.log", "tables-trace.json.gz"]


def make_plan(folder, *, nvcc=None, sanitizer="/opt/compute-sanitizer", has=(), rehearsal=False):
    return plan(Place("python3", folder, folder / "more", nvcc, sanitizer, has, rehearsal))


def test_plan_has_what_is_worth_most_first(tmp_path):
    parts = make_plan(tmp_path)
    assert [[part.name for part in parts if part.call == call] for call in ("build", *CALLS)] == [
        ["build", "build without nvcc", "info"],
        ["probe", "pages", "SGD", "Adam with hot rows", "Adam", "Adam in bfloat16"],
        ["tests of what changed", "word2vec", "profile", "managed"],
        ["promises", "tests", "tests that failed", "memcheck", "kernel tests by NVRTC"],
        ["Adam on the GPU", "SGD with hot rows", "fits in hot rows", "ceilings"],
        ["recoveries", "ncf", "dlrm", "digits", "speedtorch", "step", "transfer", "many_tables",
         "ncf of large tables", "batching"],
    ]  # fmt: skip
    assert [part.call for part in parts] == sorted((part.call for part in parts), key=["build", *CALLS].index)
    assert len({part.name for part in parts}) == len(parts)
    assert not [part.name for part in parts if "," in part.name]  # so that each can be asked for
    for part in parts:
        for word in part.command:
            if word.startswith(("benchmarks/", "tools/", "tests/")):
                assert (ROOT / word.partition("::")[0]).exists()


def test_each_call_fits_and_leaves_its_parts_their_time(tmp_path):
    """A build takes up to its limit and one minute more is gone before it: the most telling part still has its time."""
    parts = make_plan(tmp_path)
    kept = {call: sum(part.kept_seconds for part in parts if part.call == call) for call in CALLS}
    assert sum(CALLS[call] for call in USUAL) <= 570
    least = {"SGD": 30, "tests of what changed": 60, "tests": 150, "ceilings": 110, "recoveries": 90}
    for name, seconds in least.items():
        (part,) = (part for part in parts if part.name == name)
        build = 180 if part.call not in USUAL else 100  # which the second call finds done, on the same machine
        assert CALLS[part.call] - build - kept[part.call] + part.kept_seconds >= seconds
        assert part.limit_seconds >= part.kept_seconds
    assert all(part.limit_seconds < CALLS.get(part.call, 470) for part in parts)
    (memcheck,) = (part for part in parts if part.name == "memcheck")
    assert memcheck.kept_seconds >= 90


def test_the_check_can_be_read_in_one_go():
    names = ("gpu_check.py", "gpu_machine.py", "gpu_parts.py", "gpu_page.py")
    assert sum(len((ROOT / "tools" / name).read_text().splitlines()) for name in names) < 860


def test_plan_writes_no_more_files_than_can_come_back(tmp_path):
    """Eight: page, summary, archive, the running part's log, the picture, and the figures of three benchmarks."""
    written = {word for part in make_plan(tmp_path) for word in part.command if word.startswith(f"{tmp_path}/")}
    figures = {word for word in written if not word.startswith(f"{tmp_path}/more")}
    assert figures == {f"{tmp_path}/{name}-cuda.json" for name in ("tables", "ceilings", "word2vec")}


def test_plan_builds_with_nvcc_then_without(tmp_path):
    for nvcc, expected in ((None, "AUTO"), ("/opt/nvcc", "ON")):
        build, without, _ = make_plan(tmp_path, nvcc=nvcc)[:3]
        assert [part.env["SPEEDSWAP_CUDA"] for part in (build, without)] == [expected, "OFF"]
        assert build.command == without.command


def test_a_build_asks_for_nothing_but_cmake_pybind11_and_a_compiler(tmp_path):
    """Of the words of its script, those at the start of a command: a lent machine has no scikit-build-core."""
    _, _, script, python = make_plan(tmp_path)[0].command
    assert python == "python3"
    commands = [each.split()[0] for each in script.split(" && ")]
    assert commands == ["cmake", "echo", "cmake", "cmake", '"$0"']
    assert "pip" not in script.split()
    assert script.endswith('"$0" -c "import speedswap.kernels"')  # else it has failed


@pytest.mark.slow
def test_sources_are_configured_by_the_command_of_the_build(tmp_path):
    """The first of its commands, with and without Ninja; what follows is the compiler's work."""
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake")
    script = make_plan(tmp_path)[0].command[2].partition(" && cmake --build")[0]
    part = Part("configure", ["sh", "-c", script.replace("build/gpu-check", str(tmp_path)), sys.executable], 60)
    outcome = run_part(dataclasses.replace(part, env={"SPEEDSWAP_CUDA": "OFF"}), 60)
    assert outcome.ok, outcome.tail
    assert (tmp_path / "CMakeCache.txt").exists()


def test_tests_take_the_plugins_that_are_named_and_no_warning_for_an_error(tmp_path):
    """A machine may have other plugins, and versions that warn where others did not."""
    run = [part for part in make_plan(tmp_path, has=("pytest-timeout",)) if "pytest" in part.command]
    assert len(run) == 5
    for part in run:
        assert part.env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
        assert part.command[part.command.index("-W") + 1] == "default"
        assert "--timeout-method=thread" in part.command  # a signal does not end a call that waits in the driver
        assert "--continue-on-collection-errors" in part.command  # a file that cannot be imported ends no others


def test_tests_of_the_processor_alone_are_left_to_other_machines(tmp_path):
    run = [part for part in make_plan(tmp_path) if "pytest" in part.command]
    assert all("--gpu-only" in part.command and part.env["SPEEDSWAP_TEST_DEVICE"] == "cuda" for part in run)


def test_plan_uses_what_is_there(tmp_path):
    without, with_them = (
        next(part.command for part in make_plan(tmp_path, has=has) if part.name == "tests")
        for has in ((), ("pytest-xdist", "pytest-timeout"))
    )
    assert not {"-n", "--timeout=90"} & set(without)
    assert {"-n", "--timeout=90"} <= set(with_them)


def test_parts_are_chosen_by_call_and_name_after_those_that_build(tmp_path):
    builds = ["build", "build without nvcc", "info"]
    parts = make_plan(tmp_path)
    assert chosen(parts, []) == [part for part in parts if part.call in ("build", *USUAL)]
    tables = chosen(parts, ["tables"])
    assert tables == [part for part in parts if part.call in ("build", "tables")]
    found = chosen(parts, ["memcheck", "SGD"])
    assert [part.name for part in found] == [*builds, "SGD", "memcheck"]
    assert [(part.limit_seconds, part.kept_seconds) for part in found[3:]] == [(70, 0), (150, 0)]
    assert found[0].limit_seconds == 150
    with pytest.raises(ValueError, match=r"part has nonsense; choose among .*memcheck.*tables"):
        chosen(parts, ["nonsense"])


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "benchmarks").glob("bench_*.py")))
def test_every_benchmark_takes_the_options_that_it_is_given(name, tmp_path, monkeypatch):
    """A wrong option would cost a part its time on the machine."""
    given = [part.command for part in make_plan(tmp_path) if f"benchmarks/{name}" in part.command]
    if not given:
        pytest.skip("is not part of the check")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(name.removesuffix(".py"))
    parsed = []

    def parse(parser, argv=None):
        parsed.append(real(parser, argv))
        raise SystemExit

    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for command in given:
        monkeypatch.setattr(sys, "argv", [word.replace("{seconds}", "60") for word in command[1:]])
        with pytest.raises(SystemExit):
            module.main()
    assert [options.device for options in parsed] == ["cuda"] * len(given)


def test_promises_of_pinned_memory(device, capsys):
    """As on a GPU's machine, with a smaller table."""
    if device != "cuda":
        pytest.skip("needs a GPU, or the simulated one")
    import gpu_promises

    assert gpu_promises.main(["--rows", "40001"]) == 0
    assert "pinned memory keeps its promises" in capsys.readouterr().out


def test_memory_is_measured_where_the_system_tells_no_kinds_of_it_apart(tmp_path):
    """As in gVisor."""
    import gpu_promises

    status = tmp_path / "status"
    status.write_text("Name:\tpython: 3\nVmRSS:\t    5120 kB\n")
    assert gpu_promises.anonymous_bytes(status) == 5 << 20
    status.write_text("VmRSS:\t    5120 kB\nRssAnon:\t    4096 kB\nRssFile:\t    1024 kB\n")
    assert gpu_promises.anonymous_bytes(status) == 4 << 20


def test_what_a_probe_said_before_it_ended_is_kept(monkeypatch):
    """A broken CUDA installation may end the process that asks it."""
    said = """
import os, sys
print("a warning on the wrong side")
print('{"python": "3.12", "packages": {"pytest": "9"}}', flush=True)
print('{"python": "3.12", "packages": {"pytest": "9"}, "torch": "2.11", "torch_cuda": "13.0"}', flush=True)
print("no driver", file=sys.stderr, flush=True)
os.abort()
"""
    monkeypatch.setattr(gpu_machine, "PROBE", said)
    machine = gpu_machine.describe(sys.executable)
    assert (machine["torch"], machine["packages"], machine["stopped"]) == ("2.11", {"pytest": "9"}, ["no driver"])
    assert any("MemTotal" in line for line in machine["says"])


def test_a_question_that_is_not_answered_is_given_up():
    said, complaint = gpu_machine.ask(["sleep", "600"], 0.1)
    assert (said, complaint) == ("", "\nit was ended after 0 s")
    assert gpu_machine.ask(["/no/such/program"], 1)[0] == ""


@pytest.mark.parametrize("gpus", [[], ["GPU 0: NVIDIA H200"]])
def test_the_check_goes_on_where_the_driver_shows_a_gpu_that_torch_does_not(gpus, tmp_path, monkeypatch):
    """The parts say why; nothing else would be known of the machine."""
    machine = {"packages": {}, "torch": "2.11", "torch_cuda": "13.0", "gpus": gpus, "stopped": ["why"], "says": []}
    monkeypatch.setattr("gpu_check.no_driver", lambda: None)
    monkeypatch.setattr("gpu_check.describe", lambda python: machine)
    monkeypatch.setattr("gpu_check.plan", lambda place: [Part("info", PASSES, 60, call="build")])
    for name in ("CUPY_CACHE_DIR", "SPEEDSWAP_COMMIT"):  # it sets them
        monkeypatch.setenv(name, "")
    assert main(["--out", str(tmp_path / "out"), "--commit", "abc"]) == (0 if gpus else 2)
    if gpus:
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["machine"]["stopped"] == ["why"]
        assert os.environ["SPEEDSWAP_COMMIT"] == "abc"


def run_tool(*words, **environment):
    tool = Path(__file__).parent.parent / "tools" / "gpu_check.py"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(tool), *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return done, time.monotonic() - began


def test_without_a_gpu_the_check_says_so_and_exits_2(tmp_path):
    done, took = run_tool("--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: no GPU here: ")
    assert "Everything else is checked by `make test`." in done.stderr
    assert not (tmp_path / "out").exists()
    if no_driver() is not None:  # then nothing is asked of torch
        assert took < 2


@pytest.mark.slow
def test_parts_of_each_kind_rehearsed(tmp_path):
    """On the simulated GPU, from the command to the page; ``--rehearse`` without ``--part`` rehearses all."""
    import simulated_gpu

    if reason := simulated_gpu.unavailable():
        pytest.skip(reason)
    out = tmp_path / "out"
    parts = "promises,memcheck,probe,pages,managed,Adam,Adam on the GPU"
    done, _ = run_tool("--rehearse", "--part", parts, "--commit", "abc", "--out", str(out))
    summary = json.loads((out / "summary.json").read_text())
    statuses = {part["name"]: part["status"] for part in summary["parts"]}
    assert statuses.pop("memcheck") == "not run"  # there is no sanitizer for it
    assert [*statuses] == ["info", "probe", "pages", "Adam", "managed", "promises", "Adam on the GPU"]
    assert set(statuses.values()) == {"passed"}, done.stdout[-LONGEST:]
    page = (out / "page.txt").read_text()
    assert done.stdout.endswith(page)
    assert len(page) < LONGEST
    assert "A REHEARSAL ON A SIMULATED GPU" in page
    assert "abc" in page.splitlines()[0]
    for said in (
        "registered memory, rows of 512 B", "managed memory", "a staged move", "zero_copy", "adam-gpu",
        "speedswap, one table, lookahead", "asked ≤ 14 ms (computed: 9.4), reached", "in smaller tables",
    ):  # fmt: skip
        assert said in page
    assert len([*out.iterdir()]) <= 8
