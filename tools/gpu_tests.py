"""A pytest plugin for machines with a GPU, where time is short: ``-p gpu_tests``.

The tests that use the GPU come first. A failure is shown when it happens, so that a run that is cut short has told what
it found. A run stops before its time is over, and a process whose GPU no longer answers exits: under
pytest-xdist another process runs the remaining tests.

The environment says what is wanted: ``GPU_CHECK_SECONDS``, after which no test is begun; ``GPU_CHECK_SPREAD=1``, for
one case of every test before the second of any, where only some can be run; ``GPU_CHECK_EXAMPLES``, of a property.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

STOPPED = "stopped: the time is over"
LOST = "the GPU no longer answers"
LONGEST = 6000  # characters of a failure that are shown

_began = time.monotonic()
_ran: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if examples := os.environ.get("GPU_CHECK_EXAMPLES"):
        from hypothesis import settings

        settings.register_profile("few", settings.get_profile("speedswap"), max_examples=int(examples))
        settings.load_profile("few")
    items.sort(key=lambda item: not uses_gpu(item))
    if os.environ.get("GPU_CHECK_SPREAD"):
        before: Counter[str] = Counter()
        place = {}
        for item in items:
            test = item.nodeid.partition("[")[0]
            place[item] = before[test]
            before[test] += 1
        items.sort(key=place.__getitem__)


def uses_gpu(item: pytest.Item) -> bool:
    """Return whether a test is for a GPU, by its name, its case or its mark."""
    return "cuda" in item.nodeid.lower() or item.get_closest_marker("cuda_kernels") is not None


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_session] = session


_session = pytest.StashKey[pytest.Session]()


class _Watch:
    """Shows failures and keeps the time; in the process that collects what the others report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            _ran[report.outcome] += 1
        if report.failed:
            text = report.longreprtext
            shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 3]}\n…\n{text[-2 * LONGEST // 3 :]}"
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", text).partition("\n")[0]
            print(f"\nFAILED {report.nodeid} ({report.when}) - {why}\n{shown}\n", flush=True)
        seconds = float(os.environ.get("GPU_CHECK_SECONDS", "inf"))
        if time.monotonic() - _began > seconds:
            self._config.stash[_session].shouldstop = STOPPED
            distributed: Any = self._config.pluginmanager.get_plugin("dsession")
            if distributed is not None:
                distributed.shouldstop = STOPPED


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Watch(config))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a run that stopped in time pass if no test failed."""
    if session.shouldstop == STOPPED and not _ran["failed"]:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash.get(_session, None)
    if session is not None and session.shouldstop:
        total = session.testscollected
        terminalreporter.write_line(f"{session.shouldstop}; {sum(_ran.values())} of {total or 'the'} tests were run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and not gpu_answers():
        if hasattr(item.config, "workerinput"):
            print(f"\n__ {item.nodeid}: {LOST}\n{report.longreprtext[-LONGEST:]}\n", file=sys.stderr, flush=True)
            os._exit(1)
        item.session.shouldstop = LOST
    return report


def gpu_answers() -> bool:
    """Return whether this process can still use the GPU, if it has used it: some errors are sticky."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
