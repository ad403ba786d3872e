"""The parts of the check on a machine with a GPU, the most informative first."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

RECOVERIES = """
import json, pathlib, sys
sys.path.insert(0, "benchmarks")
from batching.limits import measure_limits
from speedswap.apps.bench.measure import write_json
write_json(pathlib.Path(sys.argv[1]), "recoveries", measure_limits("cuda", quick=False))
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of the check.

    Attributes:
        name: as it is reported and asked for.
        command: what is run; ``{seconds}`` is the time in which it should end.
        limit_seconds: what it may take.
        kept_seconds: what earlier parts leave it.
        env: added to the environment, with ``GPU_CHECK_SECONDS``, the same time.
        group: by which it is asked for.
        unsupported: where its output says so, it cannot run on this machine.
        only_after: the part without whose failure this one is not needed.
    """

    name: str
    command: Sequence[str]
    limit_seconds: float
    kept_seconds: float = 0.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    group: str = ""
    unsupported: str = ""
    only_after: str = ""


def plan(
    python: str, out: Path, more: Path, *, nvcc: str | None, sanitizer: str | None, has: Collection[str]
) -> list[Part]:
    """Return the parts.

    Args:
        python: the interpreter.
        out: the folder for the figures that matter most: up to seven files and the archive may come back.
        more: the folder for the others, which are packed.
        nvcc, sanitizer: the programs, if they are there.
        has: the Python packages that are there.
    """
    return [*_build(python, nvcc), *_tests(python, has), *_figures(python, out, more, sanitizer)]


def _build(python: str, nvcc: str | None) -> list[Part]:
    """Build with nvcc; else without, so that NVRTC compiles the kernels; else by CMake."""
    can_be_imported = '"$0" -c "import speedswap.kernels"'
    pip = f'"$0" -m pip install --no-index --no-build-isolation --no-deps --editable . && {can_be_imported}'
    by_hand = (
        "cmake -S . -B build/by-hand -G Ninja -DCMAKE_BUILD_TYPE=Release -DSPEEDSWAP_CUDA=OFF "
        '-DPython_EXECUTABLE="$0" -Dpybind11_DIR="$("$0" -m pybind11 --cmakedir)" && cmake --build build/by-hand && '
        f"cmake --install build/by-hand --prefix . && {can_be_imported}"
    )
    with_nvcc = {"SPEEDSWAP_CUDA": "ON" if nvcc else "AUTO"}
    return [
        Part("build", ["sh", "-c", pip, python], 120, env=with_nvcc, group="build"),
        Part("build without nvcc", ["sh", "-c", pip, python], 90, env={"SPEEDSWAP_CUDA": "OFF"},
             group="build", only_after="build"),
        Part("build by hand", ["sh", "-c", by_hand, python], 90, group="build", only_after="build without nvcc"),
        Part("info", [python, "-m", "speedswap", "info"], 60, group="build"),
    ]  # fmt: skip


def _tests(python: str, has: Collection[str]) -> list[Part]:
    # Only the plugins that are asked for, and warnings as text: other versions than ours must not fail every test.
    # Failures are reported when they happen, and not again; unreadable files and skipped tests, at the end.
    pytest = [python, "-m", "pytest", "-q", "-rEs", "-p", "gpu_tests", "-W", "default", "--tb=no", "--gpu-only"]
    if "pytest-timeout" in has:  # for a lock that is never released; a thread also ends calls in the driver
        pytest += ["-p", "pytest_timeout", "--timeout=90", "--timeout-method=thread"]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SPEEDSWAP_TEST_DEVICE": "cuda"}
    cuda = {**env, "OMP_NUM_THREADS": "2"}
    workers = str(max(2, min(8, (os.cpu_count() or 2) // 2)))
    # Neighbours to one process, which share its fixtures.
    several = ["-p", "xdist", "-n", workers, "--dist", "worksteal"] if "pytest-xdist" in has else []
    again = ["--last-failed", "--last-failed-no-failures=none"]
    nvrtc = {**cuda, "SPEEDSWAP_CUDA_SOURCE": "nvrtc", "GPU_CHECK_SPREAD": "1"}
    return [
        Part("promises", [python, "tools/gpu_promises.py"], 60, 15, group="tests"),
        Part("tests", [*pytest, "--durations=5", *several, "tests"], 200, 100, cuda, "tests"),
        Part("tests that failed, alone", [*pytest, *again, "tests"], 30, 10, cuda, "tests", only_after="tests"),
        Part("kernel tests, NVRTC", [*pytest, "-m", "cuda_kernels", "tests/kernels"], 30, 15, nvrtc, "tests"),
    ]


def _figures(python: str, out: Path, more: Path, sanitizer: str | None) -> list[Part]:
    def script(name: str, limit: float, kept: float, *words: str, to: Path = more, group: str = "figures") -> Part:
        command = [python, f"benchmarks/bench_{name}.py", "--device", "cuda", "--json", str(to / f"{name}-cuda.json")]
        return Part(name, [*command, *words], limit, kept, group=group)

    def bench(name: str, limit: float) -> Part:
        command = [python, "-m", "speedswap", "bench", name, "--device", "cuda", "--quick"]
        return Part(name, [*command, "--json", str(more / f"{name}-cuda.json")], limit, group="applications")

    # Without torch's caching allocator each tensor is an allocation, and so has bounds that memcheck sees. Tests have
    # calls refused on purpose.
    memcheck = [sanitizer or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "86", "--print-limit", "20"]
    memcheck += ["--report-api-errors", "no", python, "-m", "pytest", "-q", "-rEs", "-p", "gpu_tests", "-W", "default"]
    memcheck += ["--tb=no", "--gpu-only", "-m", "cuda_kernels", "tests/kernels"]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SPEEDSWAP_TEST_DEVICE": "cuda", "GPU_CHECK_EXAMPLES": "3"}
    env |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GPU_CHECK_SPREAD": "1"}
    sanitized = Part("memcheck", memcheck, 60, 20, env, "sanitizer", "not supported")
    digits = [python, "-m", "speedswap", "digits", "--device", "cuda", "--epochs", "2", "--output"]
    return [
        script("tables", 200, 120, "--rows", "4000000", "--seconds", "{seconds}", "--profile", str(out), to=out),
        script("ceilings", 60, 25, "--gib", "1,20", "--seconds", "{seconds}", to=out),
        *([sanitized] if sanitizer else []),
        script("word2vec", 50, 10, to=out),
        Part("recoveries", [python, "-c", RECOVERIES, str(more / "recoveries-cuda.json")], 40, group="applications"),
        script("speedtorch", 30, 0, group="applications"),
        bench("step", 30),
        bench("transfer", 40),
        Part("digits", [*digits, str(more / "digits")], 30, group="applications", unsupported="which is not installed"),
        script("many_tables", 60, 0, "--quick", group="applications"),
        script("ncf", 60, 0, "--quick", group="applications"),
        script("batching", 60, 0, "--quick", group="applications"),
    ]
