"""Build, test, sanitize and measure speedswap on a machine with a GPU; run by ``make gpu-check``.

Needs no network and makes no virtual environment: the Python that runs this has torch, CuPy, pybind11,
scikit-build-core, pytest and hypothesis already, and an editable speedswap is installed into it.

Each part has a time limit, all of them together another. A part that fails or runs over does not stop the next one.
The findings lie under ``--out``: ``NAME-cuda.json`` from each ``benchmarks/bench_NAME.py``, and ``summary.json``,
which is rewritten after every part, so that a check that is cut short still tells what it found.

Exit status: 0 every part passed, 1 one did not, 2 there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 450.0
QUICK_BELOW_SECONDS = 45.0  # with less than this for a benchmark, it is asked to be quick
LEAST_SECONDS = 3.0  # with less than this left, a part is not begun
TAIL_LINES = 40
SANITIZER_ERRORS_EXIT = 86

# What the Python at hand has, asked of a child process: a broken CUDA installation can end a process.
PROBE = """
import importlib.metadata as metadata, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "numpy", "cupy", "cupy-cuda12x", "cupy-cuda13x", "pybind11", "scikit-build-core", "pytest"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
import torch
found["torch_cuda"] = torch.version.cuda
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    found["gpu"] = {"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1),
                    "sms": gpu.multi_processor_count, "capability": f"{gpu.major}.{gpu.minor}"}
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of the check.

    It may take ``limit_seconds``; earlier parts leave it ``kept_seconds``. ``unsupported``, where its output says so,
    means that it cannot run on this machine.
    """

    name: str
    command: Sequence[str]
    limit_seconds: float
    kept_seconds: float = 10.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    benchmark: bool = False
    unsupported: str | None = None


@dataclasses.dataclass
class Outcome:
    """What came of a part. ``status``: passed, failed, timed out, skipped (with its reason) or not begun."""

    name: str
    status: str
    command: str = ""
    rc: int | None = None
    seconds: float = 0.0
    result: str = ""
    tail: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped")


def run_part(part: Part, limit: float) -> Outcome:
    """Run one part, showing its output as it comes; end it and its children after ``limit`` seconds."""
    command = [*part.command]
    if part.benchmark and limit < QUICK_BELOW_SECONDS:
        command.append("--quick")
    outcome = Outcome(part.name, "not begun", without_places(" ".join(command)))
    if limit < LEAST_SECONDS:
        outcome.result = "no time was left"
        return outcome
    print(f"\n== {part.name} (at most {limit:.0f} s): {outcome.command}", flush=True)
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        outcome.status, outcome.result = "failed", str(error)
        return outcome
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    reader = threading.Thread(target=_show, args=(child, tail), daemon=True)
    reader.start()
    try:
        outcome.rc = child.wait(limit)
        outcome.status = "passed" if outcome.rc == 0 else "failed"
    except subprocess.TimeoutExpired:
        outcome.status = "timed out"
    except KeyboardInterrupt:
        _end(child)
        raise
    _end(child)
    reader.join(timeout=5)
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.tail = [*tail]
    outcome.result = closing_line(outcome.tail)
    if outcome.status == "failed" and part.unsupported and any(part.unsupported in line for line in outcome.tail):
        outcome.status, outcome.result = "skipped", f"it says {part.unsupported!r} here"
    return outcome


def _show(child: subprocess.Popen[str], tail: deque[str]) -> None:
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            print(line, end="", flush=True)
            tail.append(without_places(line.rstrip())[:400])


def without_places(text: str) -> str:
    """Leave out where on this machine things lie: the summary is for other machines' readers."""
    for place, word in ((sys.executable, "python"), (sys.prefix, "…"), (f"{ROOT}/", ""), (str(ROOT), ".")):
        text = text.replace(place, word)
    return text


def _end(child: subprocess.Popen[str]) -> None:
    """End the part's whole process group: compute-sanitizer and the tests start processes of their own."""
    for sent, grace_seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        try:
            os.killpg(child.pid, sent)
            child.wait(grace_seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def closing_line(tail: Sequence[str]) -> str:
    """What says how it went: the sanitizer's summary and pytest's counts where there are such, else the last line."""
    said = []
    for pattern in (r"((?:ERROR|RACECHECK) SUMMARY: .*)", r"^(?:=+ )?(\d+ [a-z]+.* in \d[\d.]*s\b.*?)(?: =+)?$"):
        found = [match for line in tail if (match := re.search(pattern, line))]
        if found:
            said.append(found[-1].group(1))
    return "; ".join(said) or next((line for line in reversed(tail) if line.strip()), "")


def find_cuda_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, or where CUDA_HOME, CUDA_PATH or /usr/local/cuda has its programs."""
    homes = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    folders = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda"))]
    return shutil.which(name, path=os.pathsep.join(folders))


def plan(
    python: str, out: Path, *, nvcc: str | None, sanitizer: str | None, benchmarks: Sequence[Path]
) -> list[Part | Outcome]:
    """The parts in their order: what is most worth knowing first. One that cannot run here is an Outcome already."""
    pytest = [python, "-m", "pytest", "-q"]
    kernel_tests = ["-m", "cuda_kernels", "tests"]
    cuda = os.environ.get("SPEEDSWAP_CUDA") or ("ON" if nvcc else "AUTO")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    parts: list[Part | Outcome] = [
        Part("build", [*pip, "--editable", "."], 150, env={"SPEEDSWAP_CUDA": cuda}),
        Part("info", [python, "-m", "speedswap", "info"], 30),
        Part("tests", [*pytest, "--durations=5", "tests", "speedswap"], 240, env={"SPEEDSWAP_TEST_DEVICE": "cuda"}),
        Part("kernel tests, NVRTC", [*pytest, *kernel_tests], 60, env={"SPEEDSWAP_CUDA_SOURCE": "nvrtc"}),
    ]
    for path in benchmarks:
        name = path.stem.removeprefix("bench_")
        command = [python, str(path), "--device", "cuda", "--json", str(out / f"{name}-cuda.json")]
        parts.append(Part(f"benchmark {name}", command, 75, kept_seconds=20, benchmark=True))
    for tool in ("memcheck", "racecheck"):
        if sanitizer is None:
            parts.append(Outcome(tool, "skipped", result="compute-sanitizer is not installed"))
            continue
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(SANITIZER_ERRORS_EXIT), "--print-limit", "20"]
        # Without torch's caching allocator each tensor is an allocation, and so has bounds that memcheck sees.
        bare = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command += [*pytest, *kernel_tests]
        parts.append(Part(tool, command, 90, kept_seconds=40, env=bare, unsupported="Device not supported"))
    return parts


def ask(command: Sequence[str], seconds: float = 60.0) -> str | None:
    """What a command prints, or None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_machine(python: str) -> dict[str, Any]:
    """Versions, GPU, driver, processor and commit, as far as they can be found."""
    probed = ask([python, "-c", PROBE])
    found: dict[str, Any] = json.loads(probed.splitlines()[-1]) if probed else {}
    found["driver"] = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["platform"] = platform.platform()
    found["commit"] = ask(["git", "rev-parse", "HEAD"])
    changes = ask(["git", "status", "--porcelain"])
    found["uncommitted_changes"] = None if changes is None else bool(changes)
    nvcc = find_cuda_tool("nvcc")
    release = re.search(r"release ([\d.]+)", (ask([nvcc, "--version"]) or "") if nvcc else "")
    found["nvcc"] = release[1] if release else None
    return found


def check(parts: Sequence[Part | Outcome], out: Path, machine: Mapping[str, Any], total_seconds: float) -> int:
    """Run the parts one after the other, keep ``summary.json`` up to date, and return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    outcomes: list[Outcome] = []
    kept = sum(part.kept_seconds for part in parts if isinstance(part, Part))
    for part in parts:
        if isinstance(part, Part):
            kept -= part.kept_seconds
            left = total_seconds - (time.monotonic() - began) - kept
            outcomes.append(run_part(part, min(part.limit_seconds, left)))
        else:
            outcomes.append(part)
        summary = {
            "started": started,
            "seconds": round(time.monotonic() - began, 1),
            "passed": len(outcomes) == len(parts) and all(outcome.ok for outcome in outcomes),
            "machine": dict(machine),
            "parts": [dataclasses.asdict(outcome) for outcome in outcomes],
        }
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n== summary ({summary['seconds']} s), also in {out / 'summary.json'}")
    for outcome in outcomes:
        print(f"{outcome.status:>9}  {outcome.name:<24} {outcome.seconds:6.1f} s  {outcome.result}")
    return 0 if summary["passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build, test, sanitize and measure speedswap on a machine with a GPU.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON files")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for the whole check")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    machine = describe_machine(sys.executable)
    if "torch" not in machine:
        print(
            f"gpu-check: {sys.executable} has no torch; name a Python that has: make gpu-check PYTHON=…",
            file=sys.stderr,
        )
        return 2
    if "gpu" not in machine:
        built = f"built for CUDA {machine['torch_cuda']}" if machine["torch_cuda"] else "built without CUDA"
        print(
            f"gpu-check: no GPU here: torch {machine['torch']} ({built}) of {sys.executable} finds no CUDA device, "
            f"and the NVIDIA driver is {machine['driver'] or 'not found'}. Everything else is checked by `make test`.",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(machine, indent=2))
    benchmarks = sorted((ROOT / "benchmarks").glob("bench_*.py"))
    sanitizer = find_cuda_tool("compute-sanitizer")
    parts = plan(sys.executable, out, nvcc=find_cuda_tool("nvcc"), sanitizer=sanitizer, benchmarks=benchmarks)
    return check(parts, out, machine, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
