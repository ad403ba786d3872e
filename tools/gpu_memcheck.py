"""Run tests under compute-sanitizer's memcheck, in several processes at once, each with a share of the tests:

    python3 tools/gpu_memcheck.py SANITIZER PROCESSES SECONDS COMMAND...

COMMAND runs pytest with the plugin gpu_tests, which takes the process's share from ``GPU_CHECK_SHARE``. Each process
has its own sanitizer, so that nothing depends on how one of them follows many. No test is begun in the last
``LAST_TEST_SECONDS``; a process whose test has not ended in time is ended, and counts for nothing but its findings.

Exit status: 0 every share passed, 86 something was found, 1 a test failed, a process crashed, or fewer tests than
``GPU_CHECK_LEAST`` were run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpu_tests import STOPPED, TOO_FEW

LAST_TEST_SECONDS = 30.0
ENDING_SECONDS = 3.0
FOUND = 86
ABSENT = "cannot be run"
OPTIONS = ["--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "20", "--launch-timeout", "120"]
OPTIONS += ["--report-api-errors", "no"]  # tests have calls refused on purpose
# A process that was ended has no summary.
_FINDING = re.compile(r"^=+ (?:\w+ SUMMARY: [1-9]|Invalid |Misaligned |Fatal )", re.MULTILINE)
_COUNTS = re.compile(r"^(?:=+ )?(\d+ [a-z]+\b.*) in \d[\d.]*s\b", re.MULTILINE)


def run(sanitizer: str, processes: int, seconds: float, command: Sequence[str]) -> int:
    """Run the shares, print what each has printed, and return the exit status."""
    command = [sanitizer, *OPTIONS, *command]
    began, counts, stopped, findings, wrong = time.monotonic(), Counter[str](), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="gpu-memcheck-") as folder:
        files = [Path(folder, str(number)) for number in range(processes)]
        try:
            children = [_begin(command, f"{number}/{processes}", seconds, file) for number, file in enumerate(files)]
        except FileNotFoundError as error:
            print(f"{sanitizer} {ABSENT}: {error}")
            return 1
        for number, (child, file) in enumerate(zip(children, files, strict=True)):
            was_ended = not _ends(child, began + seconds)
            said = file.read_text(errors="replace")
            shown = _COUNTS.findall(said)
            outcomes = re.findall(r"(\d+) ([a-z]+)", shown[-1] if shown else "")
            counts.update({word: int(count) for count, word in outcomes if word != "deselected"})
            stopped += was_ended or STOPPED in said
            findings += _FINDING.search(said) is not None
            wrong += not was_ended and (child.returncode != 0 or not shown)
            how = "ended in a test" if was_ended else f"exit status {child.returncode}"
            print(f"{said}\n-- {number + 1} of {processes} processes: {how}", flush=True)
    few = counts["passed"] + counts["failed"] < int(os.environ.get("GPU_CHECK_LEAST", "0"))
    print(f"========= ERROR SUMMARY: {findings} of {processes} processes have findings")
    if stopped or few:
        print(f"{STOPPED} in {stopped} of {processes} processes" + (f": {TOO_FEW}" if few else ""))
    print(", ".join(f"{count} {word}" for word, count in counts.items()), f"in {time.monotonic() - began:.1f}s")
    return FOUND if findings else 1 if wrong or few else 0


def _begin(command: Sequence[str], share: str, seconds: float, file: Path) -> subprocess.Popen[bytes]:
    """Begin a process in this process group, with which it is ended."""
    until = max(1.0, seconds - LAST_TEST_SECONDS)
    env = {**os.environ, "GPU_CHECK_SHARE": share, "GPU_CHECK_SECONDS": str(until), "GPU_CHECK_LEAST": "0"}
    with file.open("wb") as output:  # not a pipe, which children of the tests may hold open
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)


def _ends(child: subprocess.Popen[bytes], until: float) -> bool:
    """Wait for a process; end it and return False if it has not ended by then."""
    try:
        child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return False
    return True


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
