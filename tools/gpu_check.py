"""Build, test, sanitize and measure speedswap on a machine with a GPU; run by ``make gpu-check``, or by itself:

    python3 tools/gpu_check.py --part first --out $OUT --commit HASH     # then --part second

Needs no network, no git and no make, and makes no virtual environment: the Python that runs this has torch, CuPy,
pybind11, pytest and hypothesis already, with CMake beside it, which builds speedswap in place.

There are two calls of ten minutes in all, ``first`` and ``second``, each of use by itself; without ``--part`` they
follow each other. Three more, of less than eight minutes, are made if they are named: ``tests``, ``tables`` and
``applications``. Each of a call's parts (tools/gpu_parts.py) has a time limit, and leaves later ones the time kept for
them. A part that fails or runs over does not stop the next one. ``--part`` also names single parts.

``--out`` gets at most eight files: ``page.txt``, which ends the output too; ``summary.json``, the figures that matter
most, the picture of a step, ``running.log`` of the part that runs, and ``more.tar.gz`` with everything else that was
measured and printed. All are renewed after every part.

Exit status: 0 every part passed, 1 one did not, 2 there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
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
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_machine import ask, describe, find_cuda_tool
from gpu_page import page
from gpu_parts import CALLS, REHEARSAL_SECONDS, USUAL, Part, Place, plan

ROOT = Path(__file__).resolve().parent.parent
LEAST_SECONDS = 3.0  # with less than this left, a part is not begun
ENDING_SECONDS = 12.0  # before its limit, a part should have ended
TAIL_LINES = 40
MOST_FAILURES = 200
LONGEST_LOG = 2 << 20
LARGEST_FILE = 15 << 20
PROGRAMS = {"nvcc": "nvcc", "sanitizer": "compute-sanitizer"}
REHEARSED = "A REHEARSAL ON A SIMULATED GPU: sizes are small, and no time or ratio means anything."


@dataclasses.dataclass
class Outcome:
    """The outcome of a part.

    ``status``: passed, failed, timed out, not run (it has shown nothing), not begun, or skipped (not needed).
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
    added = {"PYTHONPATH": (ROOT, ROOT / "tools"), "PATH": (Path(sys.executable).parent,)}  # which may have CMake
    paths = {name: ":".join(map(str, [*some, os.environ.get(name, "")])).rstrip(":") for name, some in added.items()}
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "GPU_CHECK_SECONDS": seconds, **paths, **part.env}
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    began = time.monotonic()
    try:
        child = subprocess.Popen(command, cwd=ROOT, env=env, text=True, errors="replace", start_new_session=True, **how)
    except OSError as error:
        outcome.status = "not run" if isinstance(error, FileNotFoundError) else "failed"
        outcome.result = str(error)
        return outcome
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    reader = threading.Thread(target=_show, args=(child, tail, outcome.failures, log), daemon=True)
    try:
        reader.start()
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
    for words in part.not_run_if:
        if outcome.status == "failed" and any(words in line for line in outcome.tail):
            outcome.status, outcome.result = "not run", f"it says {words!r}; {outcome.result}"
            break
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
    finding = r"={9} (?!COMPUTE-SANITIZER|\w* ?SUMMARY: 0)\S"
    return re.match(rf"(FAILED|ERROR) \S+\.py\b|[\w.]*Error: |{finding}", line) is not None


def without_places(text: str) -> str:
    """Remove paths of this machine: the summary is read elsewhere."""
    for place, word in ((sys.executable, "python"), (sys.prefix, "…"), (f"{ROOT}/", "")):
        text = text.replace(place, word)
    return re.sub(re.escape(str(ROOT)) + r"(?![\w-])", ".", text)


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
    """Return the calls and parts of the given names, after the parts that build; the usual calls without a name.

    For a part that is named by itself no time is kept.

    Raises:
        ValueError: a name is of neither.
    """
    known = {*CALLS, *(part.name for part in parts if part.call != "build")}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"part has {', '.join(unknown)}; choose among {', '.join(sorted(known))}")
    found = []
    for part in parts:
        if part.call == "build" or part.call in (names or USUAL):
            found.append(part)
        elif part.name in names:
            found.append(dataclasses.replace(part, kept_seconds=0.0))
    return found


def check(
    parts: Sequence[Part],
    out: Path,
    machine: Mapping[str, Any],
    seconds: Mapping[str, float],
    more: Path,
    note: str = "",
) -> int:
    """Run the parts one after the other, keep page, summary and archive up to date, and return the exit status.

    Args:
        parts: those that build belong to the first call of the others.
        out, more: as for :class:`gpu_parts.Place`.
        machine: what is known of it.
        seconds: for the parts of each call, by its name.
        note: for the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    (more / "logs").mkdir(parents=True, exist_ok=True)
    began, clock, outcomes, log = time.monotonic(), time.time(), dict[str, Outcome](), out / "running.log"
    first = next((part.call for part in parts if part.call != "build"), "build")
    said = ""
    for call, group in itertools.groupby(parts, lambda part: first if part.call == "build" else part.call):
        of_call = list(group)
        ends, kept = time.monotonic() + seconds[call], sum(part.kept_seconds for part in of_call)
        for part in of_call:
            kept -= part.kept_seconds
            before = outcomes.get(part.only_after)
            if part.only_after and (before is None or before.ok or before.status == "not begun"):
                outcomes[part.name] = Outcome(part.name, "skipped", result="not needed")
            else:
                left = ends - time.monotonic() - kept
                outcomes[part.name] = run_part(part, min(part.limit_seconds, left), log)
            summary = {
                **({"note": note} if note else {}),
                "began": clock,
                "seconds": round(time.monotonic() - began, 1),
                "passed": len(outcomes) == len(parts) and all(outcome.ok for outcome in outcomes.values()),
                "machine": dict(machine),
                "parts": [dataclasses.asdict(outcome) for outcome in outcomes.values()],
            }
            said = write_down(summary, out, more, part.name)
    print(f"\n{said}")
    return 0 if summary["passed"] else 1


def write_down(summary: Mapping[str, Any], out: Path, more: Path, name: str) -> str:
    """Renew page, summary and archive after the part of a name; return the page."""
    try:
        said = page(summary, [out, more])
    except Exception:  # the files have what it would say, and the other parts matter more
        said = traceback.format_exc()
    try:
        log = out / "running.log"
        if log.exists():
            shutil.move(log, more / "logs" / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.log")
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        (out / "page.txt").write_text(said + "\n")
        pack(out, more)
    except OSError as error:  # from a leftover process, or a full disk
        print(f"gpu-check: {error}", file=sys.stderr)
    return said


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


def no_driver() -> str | None:
    """Return why there can be no GPU here, without asking torch; None if there may be one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if shutil.which("nvidia-smi") is None:
            return f"there is no NVIDIA driver ({error}), and no nvidia-smi. Everything else is checked by `make test`."
    return None


def refused(machine: Mapping[str, Any]) -> str | None:
    """Return why a machine without a GPU cannot be checked; None if torch, or at least the driver, shows one."""
    if "gpu" in machine or machine["gpus"]:
        return None
    if "torch" not in machine:
        return f"{sys.executable} has no torch; name another: make gpu-check PYTHON=…"
    built = f"built for CUDA {machine['torch_cuda']}" if machine["torch_cuda"] else "built without CUDA"
    return (
        f"no GPU here: torch {machine['torch']} ({built}) of {sys.executable} finds no CUDA device. Everything else is "
        "checked by `make test`."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for what was found")
    parser.add_argument("--seconds", type=float, help="time for each call, if it is to be another")
    parser.add_argument("--part", default="", help=f"{', '.join(CALLS)}, or single parts; commas between several")
    parser.add_argument("--commit", default="", help="of these files, where they are no repository")
    parser.add_argument("--rehearse", action="store_true", help="on a simulated GPU, in small sizes; nothing is built")
    args = parser.parse_args(argv)
    began, out = time.monotonic(), args.out.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part that runs is ended as well
    why = None if args.rehearse else no_driver()
    if why is not None:
        print(f"gpu-check: no GPU here: {why}", file=sys.stderr)
        return 2
    machine = describe(sys.executable)
    machine["stopped"] = [without_places(line) for line in machine.get("stopped", [])]
    machine["commit"] = args.commit or ask(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], 10)[0]
    why = None if args.rehearse else refused(machine)
    if why is not None:
        print(f"gpu-check: {why}", *machine["stopped"], sep="\n", file=sys.stderr)
        return 2
    print(json.dumps(machine, indent=1))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        more = Path(folder, "more")
        os.environ["CUPY_CACHE_DIR"] = str(Path(folder, "cupy"))  # home may be read-only
        if args.commit:
            os.environ["SPEEDSWAP_COMMIT"] = args.commit
        tools = {name: find_cuda_tool(program) for name, program in PROGRAMS.items()}
        place = Place(sys.executable, out, more, **tools, has=[*machine["packages"]], rehearsal=args.rehearse)
        names = [name.strip() for name in args.part.split(",") if name.strip()]
        try:
            parts = chosen(plan(place), names)
        except ValueError as error:
            parser.error(str(error))
        each = len(parts) * REHEARSAL_SECONDS if args.rehearse else args.seconds
        seconds = {call: each or own for call, own in {**CALLS, "build": 150.0}.items()}
        seconds[next((part.call for part in parts if part.call != "build"), "build")] -= time.monotonic() - began
        return check(parts, out, machine, seconds, more, REHEARSED if args.rehearse else "")


if __name__ == "__main__":
    sys.exit(main())
