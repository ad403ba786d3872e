"""Build, test, sanitize and measure speedswap on a machine with a GPU; run by ``make gpu-check``.

Needs no network and makes no virtual environment: the Python that runs this has torch, CuPy, pybind11,
scikit-build-core, pytest and hypothesis already, and an editable speedswap is installed into it.

Each part (tools/gpu_parts.py) has a time limit, and so has the whole run. A part that fails or runs over does not
stop the next one. ``--parts`` names some, which then have all the time. ``--out`` gets at most eight files:
``summary.json``, the figures that matter most, the picture of a step, ``running.log`` of the part that runs, and
``more.tar.gz`` with everything else that was measured and printed, renewed after every part.

Exit status: 0 every part passed, 1 one did not, 2 there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_machine import describe, find_cuda_tool
from gpu_parts import Part, plan

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 470.0
LEAST_SECONDS = 3.0  # with less than this left, a part is not begun
ENDING_SECONDS = 12.0  # before its limit, a part should have ended
TAIL_LINES = 40
MOST_FAILURES = 200
FAILURES_SHOWN = 10
LONGEST_LOG = 2 << 20
LARGEST_FILE = 15 << 20


@dataclasses.dataclass
class Outcome:
    """The outcome of a part. ``status``: passed, failed, timed out, skipped (with its reason) or not begun.

    ``failures`` are the lines that name what failed, ``tail`` is the end of its output.
    """

    name: str
    status: str
    command: str = ""
    rc: int | None = None
    seconds: float = 0.0
    result: str = ""
    failures: list[str] = dataclasses.field(default_factory=list)
    tail: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped")


def run_part(part: Part, limit: float, log: Path | None = None) -> Outcome:
    """Run one part, showing its output as it comes; end it and its children after ``limit`` seconds.

    Args:
        part: the command.
        limit: seconds.
        log: a file for all that it prints.
    """
    seconds = f"{max(1.0, limit - ENDING_SECONDS):.0f}"
    command = [word.replace("{seconds}", seconds) for word in part.command]
    outcome = Outcome(part.name, "not begun", without_places(" ".join(command)))
    if limit < LEAST_SECONDS:
        outcome.result = "no time was left"
        return outcome
    print(f"\n== {part.name} (at most {limit:.0f} s): {outcome.command}", flush=True)
    paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(path for path in paths if path)
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "GPU_CHECK_SECONDS": seconds, **part.env}
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    began = time.monotonic()
    try:
        child = subprocess.Popen(command, cwd=ROOT, env=env, text=True, errors="replace", start_new_session=True, **how)
    except OSError as error:
        outcome.status, outcome.result = "failed", str(error)
        return outcome
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    reader = threading.Thread(target=_show, args=(child, tail, outcome.failures, log), daemon=True)
    reader.start()
    try:
        outcome.rc = child.wait(limit)
        outcome.status = "passed" if outcome.rc == 0 else "failed"
    except subprocess.TimeoutExpired:
        outcome.status = "timed out"
    finally:
        _end(child)
    reader.join(timeout=5)
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.tail = [*tail]
    outcome.result = closing_line(outcome.tail)
    if outcome.rc is not None and outcome.rc < 0:
        outcome.result = f"ended by {signal.Signals(-outcome.rc).name}; {outcome.result}"
    if outcome.status == "failed" and part.unsupported and any(part.unsupported in line for line in outcome.tail):
        outcome.status, outcome.result = "skipped", f"it says {part.unsupported!r} here"
    return outcome


def _show(child: subprocess.Popen[str], tail: deque[str], failures: list[str], log: Path | None) -> None:
    """Print a part's output, and keep its end, the lines that name failures, and up to a log's worth of the rest."""
    assert child.stdout is not None
    left = LONGEST_LOG
    with child.stdout as lines, open(log or os.devnull, "w", encoding="utf-8", buffering=1) as file:
        for line in lines:
            print(line, end="", flush=True)
            said = without_places(line.rstrip())
            tail.append(said[:400])
            if names_failure(said) and len(failures) < MOST_FAILURES:
                failures.append(said[:400])
            if left > 0:
                file.write(said + "\n")
                left -= len(said) + 1


def names_failure(line: str) -> bool:
    """Return whether a line is pytest's about a failed test, or a finding of the sanitizer."""
    return (
        re.match(r"(FAILED|ERROR) \S+\.py\b|\w*Error: |={9} (?!COMPUTE-SANITIZER|\w* ?SUMMARY: 0)\S", line) is not None
    )


def without_places(text: str) -> str:
    """Remove paths of this machine: the summary is read elsewhere."""
    for place, word in ((sys.executable, "python"), (sys.prefix, "…"), (f"{ROOT}/", ""), (str(ROOT), ".")):
        text = text.replace(place, word)
    return text


def _end(child: subprocess.Popen[str]) -> None:
    """End the part's whole process group: compute-sanitizer and the tests start child processes."""
    for sent, grace_seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):  # which also ends leftover children
        try:
            os.killpg(child.pid, sent)
            child.wait(grace_seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def closing_line(tail: Sequence[str]) -> str:
    """Return the lines that tell the outcome: the sanitizer's summary and pytest's counts, or else the last line."""
    said = []
    counts = r"^(?:=+ )?(\d+ [a-z]+.* in \d[\d.]*s\b.*?)(?: =+)?$"
    for pattern in (r"(ERROR SUMMARY: .*)", r"^(stopped: .*|the GPU no longer .*)", counts):
        found = [match for line in tail if (match := re.search(pattern, line))]
        if found:
            said.append(found[-1].group(1))
    return "; ".join(said) or next((line for line in reversed(tail) if line.strip()), "")


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Return the parts of the given names or groups, with all the time for them, after the parts that build.

    Raises:
        ValueError: a name is neither.
    """
    known = {name for part in parts for name in (part.name, part.group)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"parts has {', '.join(unknown)}; choose among {', '.join(sorted(known))}")
    wanted = [part for part in parts if part.group == "build" or {part.name, part.group} & set(names)]
    unlimited = [dataclasses.replace(part, limit_seconds=float("inf"), kept_seconds=0.0) for part in wanted]
    return [part if part.group == "build" else free for part, free in zip(wanted, unlimited, strict=True)]


def check(parts: Sequence[Part], out: Path, machine: Mapping[str, Any], total_seconds: float, more: Path) -> int:
    """Run the parts one after the other, keep summary and archive up to date, and return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    (more / "logs").mkdir(parents=True, exist_ok=True)
    began, outcomes = time.monotonic(), dict[str, Outcome]()
    kept, log = sum(part.kept_seconds for part in parts), out / "running.log"
    for part in parts:
        kept -= part.kept_seconds
        before = outcomes.get(part.only_after)
        if part.only_after and (before is None or before.ok or before.status == "not begun"):
            outcomes[part.name] = Outcome(part.name, "skipped", result="not needed")
        else:
            left = total_seconds - (time.monotonic() - began) - kept
            outcomes[part.name] = run_part(part, min(part.limit_seconds, left), log)
            if log.exists():
                shutil.move(log, more / "logs" / f"{re.sub('[^a-zA-Z0-9]+', '-', part.name)}.log")
        summary = {
            "seconds": round(time.monotonic() - began, 1),
            "passed": len(outcomes) == len(parts) and all(outcome.ok for outcome in outcomes.values()),
            "machine": dict(machine),
            "parts": [dataclasses.asdict(outcome) for outcome in outcomes.values()],
        }
        try:
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            pack(out, more)
        except OSError as error:  # from a leftover process: the other parts matter more than an archive
            print(f"gpu-check: {error}", file=sys.stderr)
    print(f"\n== summary ({summary['seconds']} s), also in {out / 'summary.json'}")
    for outcome in outcomes.values():
        print(f"{outcome.status:>9}  {outcome.name:<24} {outcome.seconds:6.1f} s  {outcome.result[:150]}")
        for failure in outcome.failures[:FAILURES_SHOWN]:
            print(f"           {failure[:150]}")
    return 0 if summary["passed"] else 1


def pack(out: Path, more: Path) -> None:
    """Put all of ``more`` into one file of ``out``, and the traces with it; what is too large is left out."""
    for trace in out.glob("*-trace.json.gz"):
        shutil.move(trace, more / trace.name)
    unfinished = out / "more.part"
    with tarfile.open(unfinished, "w:gz") as archive:
        for path in sorted(more.rglob("*"), key=lambda path: path.stat().st_size):
            if path.is_file() and unfinished.stat().st_size + path.stat().st_size < LARGEST_FILE:
                archive.add(path, path.relative_to(more))
    unfinished.replace(out / "more.tar.gz")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build, test, sanitize and measure speedswap on a machine with a GPU.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for what was found")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for the whole check")
    parser.add_argument("--parts", default="", help="some of them alone, by name or group, separated by commas")
    parser.add_argument("--commit", default="", help="of these files, where they are no repository")
    args = parser.parse_args(argv)
    began, out = time.monotonic(), args.out.resolve()
    machine = describe(sys.executable)
    stopped = [without_places(line) for line in machine.get("stopped", [])]
    if "gpu" not in machine and not machine["gpus"]:
        if "torch" in machine:
            built = f"built for CUDA {machine['torch_cuda']}" if machine["torch_cuda"] else "built without CUDA"
            why = f"no GPU here: torch {machine['torch']} ({built}) of {sys.executable} finds no CUDA device. "
            why += "Everything else is checked by `make test`."
        else:
            why = f"{sys.executable} has no torch; name another: make gpu-check PYTHON=…"
        print(f"gpu-check: {why}", *stopped, sep="\n", file=sys.stderr)
        return 2
    machine["stopped"] = stopped
    print(json.dumps(machine, indent=1))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        more = Path(folder, "more")
        os.environ["CUPY_CACHE_DIR"] = str(Path(folder, "cupy"))  # home may be read-only
        if args.commit:
            os.environ["SPEEDSWAP_COMMIT"] = args.commit
        nvcc, sanitizer = find_cuda_tool("nvcc"), find_cuda_tool("compute-sanitizer")
        parts = plan(sys.executable, out, more, nvcc=nvcc, sanitizer=sanitizer, has=[*machine["packages"]])
        names = [name.strip() for name in args.parts.split(",") if name.strip()]
        left = args.seconds - (time.monotonic() - began)
        try:
            return check(chosen(parts, names) if names else parts, out, machine, left, more)
        except ValueError as error:
            parser.error(str(error))
        finally:
            print(subprocess.getoutput("grep -E 'MemTotal|MemAvailable' /proc/meminfo"))


if __name__ == "__main__":
    sys.exit(main())
