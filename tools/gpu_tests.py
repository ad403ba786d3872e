"""A pytest plugin for machines with a GPU, where time is short: ``-p gpu_tests``.

The most telling tests come first, since time may end before they do: those that use the GPU; one case of every test
before the others; kernels before tables, tables before training; slow ones last. A failure is shown when it happens, so
that a run that is cut short has told what it found. A run stops before its time is over, and a process whose GPU no
longer answers exits: under pytest-xdist another process runs the remaining tests.

The environment says what is wanted: ``GPU_CHECK_SECONDS``, after which no test is begun; ``GPU_CHECK_LEAST``, the
number of tests below which a run that was stopped has shown nothing, and fails; ``GPU_CHECK_EXAMPLES``, of a property;
``GPU_CHECK_SHARE``, such as 2/12: the tests from place 2 on, every twelfth, for one of several runs at a time.
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
TOO_FEW = "too few tests to mean anything"
AREAS = ("kernels", "tables", "swapping", "ranks")  # what the others rest on; then the others
LOST = "the GPU no longer answers"
LONGEST = 6000  # characters of a failure that are shown

_began = time.monotonic()
_ran: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if examples := os.environ.get("GPU_CHECK_EXAMPLES"):
        from hypothesis import settings

        settings.register_profile("few", settings.get_profile("speedswap"), max_examples=int(examples))
        settings.load_profile("few")
    cases: Counter[str] = Counter()
    worth = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        area = next((place for place, name in enumerate(AREAS) if f"tests/{name}/" in test), len(AREAS))
        slow = item.get_closest_marker("slow") is not None
        worth[item] = not uses_gpu(item), slow, cases[test] > 0, area
        cases[test] += 1
    items.sort(key=worth.__getitem__)


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)  # after -m and --deselect
def pytest_take_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := os.environ.get("GPU_CHECK_SHARE"):
        place, runs = map(int, share.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % runs != place])
        items[:] = items[place::runs]


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
    """Let a run that stopped in time pass if no test and no import of a file failed, and enough were run."""
    if session.shouldstop == STOPPED and not session.testsfailed and not _too_few():
        session.exitstatus = pytest.ExitCode.OK


def _too_few() -> bool:
    return _ran["passed"] + _ran["failed"] < int(os.environ.get("GPU_CHECK_LEAST", "0"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash.get(_session, None)
    if session is not None and session.shouldstop:
        total = session.testscollected
        few = f": {TOO_FEW}" if _too_few() else ""
        terminalreporter.write_line(
            f"{session.shouldstop}; {sum(_ran.values())} of {total or 'the'} tests were run{few}"
        )


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
