"""Fixtures of all tests: the available devices, signals, processes."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the tests' helper modules

import simulated_gpu
from rank_pool import RankPool
from torture.ctrl_c import ctrl_c_at

_PACKAGE = str(Path(str(find_spec("speedswap").origin)).parent)  # not imported: the simulated GPU comes first

# Machines are shared and noisy: an example may take its time. Where a change is judged, the examples are the same ones.
settings.register_profile("speedswap", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("speedswap")

wanted = os.environ.get("SPEEDSWAP_TEST_DEVICE", "")  # only one, if there is no time for all
if wanted == "simulated":  # "cuda" on a machine without one: simulated_gpu/
    if reason := simulated_gpu.unavailable():
        raise pytest.UsageError(f"SPEEDSWAP_TEST_DEVICE is 'simulated', but {reason}")
    # such as "ahead", or "random:7" with a seed
    policy, _, seed = os.environ.get("SPEEDSWAP_SIMULATED_POLICY", "late").partition(":")
    simulated_gpu.switch_on(policy, int(seed or 0))
    wanted = "cuda"

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
if wanted:
    DEVICES = [device for device in DEVICES if device == wanted]
    if not DEVICES:
        raise pytest.UsageError(f"SPEEDSWAP_TEST_DEVICE is {wanted!r}, which this machine does not have")


_num_frozen_modules = 0


@pytest.fixture(autouse=True)
def _imported_modules_are_not_scanned() -> None:
    """Exempt the objects of imported modules from garbage collections, one of which follows each out-of-memory."""
    global _num_frozen_modules
    if len(sys.modules) > _num_frozen_modules + 50:
        _num_frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _rows_stay_in_host_memory() -> Iterator[None]:
    """Keep the tests' tables pinned where storage is left open: all of them are small for a GPU."""
    if "cuda" in DEVICES:
        from speedswap.tables import memory

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "_NEAR_SHARE", 0)
            yield
    else:
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The compute device: the CPU, and a GPU if the machine has one."""
    return str(request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-only", action="store_true", help="only tests that ask for a device, or need a GPU")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files that know no device unread where only tests on a GPU are asked for: importing them takes long."""
    if not config.getoption("--gpu-only") or not collection_path.name.startswith("test_"):
        return None
    return True if re.search(r"\bdevice\b|needs a GPU", collection_path.read_text()) is None else None


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_cases_to_releases(items)
    if not config.pluginmanager.has_plugin("gpu_tests"):  # which has its own order
        # Slow tests run first, so that several processes end together.
        items.sort(key=lambda item: not _is_slow(item))
    if config.getoption("--gpu-only"):
        chosen, others = [], []
        for item in items:
            (chosen if _uses_gpu(item) else others).append(item)
        items[:] = chosen
        config.hook.pytest_deselected(items=others)


def _leave_cases_to_releases(items: list[pytest.Item]) -> None:
    """Mark the cases of a sweep as release tests, except for a number to keep, spread evenly."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        marker = each[0].get_closest_marker("sweep")
        assert marker is not None
        kept = {round((place + 0.5) * len(each) / marker.args[0] - 0.5) for place in range(marker.args[0])}
        for place, item in enumerate(each):
            if place not in kept:
                item.add_marker("release")


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or item.path.suffix == ".ipynb"


def _uses_gpu(item: pytest.Item) -> bool:
    needed = (mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))
    fixtures = getattr(item, "fixturenames", ())
    return "device" in fixtures or any(reason.startswith("needs a GPU") for reason in needed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip tests of features the simulated GPU lacks, and fail tests whose errors on it went unnoticed."""
    try:
        yield
        if simulated_gpu.is_on():
            simulated_gpu.synchronize()
    except NotImplementedError as error:
        lacks = "the simulated GPU has no" in str(error) or "'SparseCUDA' backend" in str(error)
        if not (simulated_gpu.is_on() and lacks):
            raise
        pytest.skip(str(error).partition(" with arguments")[0])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two GPUs in place of those that the machine has: :class:`two_gpus.TwoGpus`."""
    from two_gpus import TwoGpus

    from speedswap.kernels.cuda import driver

    yield TwoGpus(monkeypatch)
    for cache in (driver._process, driver._load):
        cache.cache_clear()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Python's own handlers, for the test and what it starts, wherever the tests are run: a shell's background and
    ``nohup`` ignore some of these."""
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.fixture
def interrupted_at(usual_signals: None) -> Callable[..., AbstractContextManager[list[str]]]:
    """Raise Ctrl-C inside a block after a number of calls and lines of speedswap or a folder; yield where."""

    @contextmanager
    def interrupted_at(line: int, folder: str = "") -> Iterator[list[str]]:
        with ctrl_c_at(line, str(Path(_PACKAGE) / folder)) as interrupt:
            yield interrupt.came

    return interrupted_at


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start programs, which end with the test at the latest."""
    started = []

    def start(*words: object, **more: Any) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                list(map(str, words)), **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Five processes of a job; a scenario runs on the first of them, as many as it likes."""
    pool = RankPool(5)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data next to the project, which is not part of it."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs the text and ratings of ../shared/data, which are not part of the project")
    return path


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of four megabytes, or of the module's ``SMALL_DISK``."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request.module, 'SMALL_DISK', '4m')}", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"may not make a small file system here: {' '.join(command[:3])} fails")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch work in one thread, as a forked child has only that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
