"""The parts of the check on a machine with a GPU, in calls with a time each, what is worth most first."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

# Seconds of each call. The first two fit into a quarter of an hour on a lent machine, its start included; the others
# are made where they are asked for.
CALLS = {"first": 330.0, "second": 240.0, "tests": 470.0, "tables": 470.0, "applications": 470.0}
USUAL = ("first", "second")
# Tests of what no GPU has run yet, or has since changed.
CHANGED = [f"tests/{name}.py" for name in (
    "kernels/test_engines", "kernels/test_staging", "kernels/test_transfers", "kernels/test_features",
    "kernels/test_distinct", "tables/test_table_engines", "swapping/test_hot_rows", "swapping/test_shared_rows",
)]  # fmt: skip
RECOVERIES = """
import pathlib, sys
sys.path.insert(0, "benchmarks")
from batching.limits import measure_limits
from speedswap.apps.bench.measure import write_json
device, file = sys.argv[1:3]
write_json(pathlib.Path(file), "recoveries", measure_limits(device, quick="--quick" in sys.argv))
"""
SIMULATED = "tools/on_simulated_gpu.py"
REHEARSAL_SECONDS = 900.0  # of a part, on a machine that has much else to do
NO_MEMCHECK = ("not supported", "too few tests to mean anything", "cannot be run")  # as it and tools/ say
PROCESSES = str(max(2, min(12, (os.cpu_count() or 2) * 3 // 4)))  # that run tests at a time


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of the check.

    Attributes:
        name: as it is reported and asked for.
        command: what is run; ``{seconds}`` is the time in which it should end.
        limit_seconds: what it may take.
        kept_seconds: what earlier parts of its call leave it.
        env: added to the environment, with ``GPU_CHECK_SECONDS``, the same time.
        call: of :data:`CALLS`, or ``build``, which comes before each of them.
        not_run_if: where its output says one of these, it has shown nothing.
        only_after: the part without whose failure this one is not needed.
    """

    name: str
    command: Sequence[str]
    limit_seconds: float
    kept_seconds: float = 0.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    call: str = ""
    not_run_if: Sequence[str] = ()
    only_after: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """The check's programs, and the folders for its files.

    Attributes:
        python: the interpreter.
        out: the folder for what matters most: up to eight files may come back.
        more: the folder for all else, which is packed into one of them.
        nvcc, sanitizer: the programs, if they are there.
        has: the Python packages that are there.
        rehearsal: True for a simulated GPU: in small sizes, and nothing is built.
    """

    python: str
    out: Path
    more: Path
    nvcc: str | None = None
    sanitizer: str | None = None
    has: Collection[str] = ()
    rehearsal: bool = False

    def on_gpu(self, *words: str) -> list[str]:
        """Return the command that runs a script or a module with the GPU."""
        return [self.python, *([SIMULATED] if self.rehearsal else []), *words]

    def quick(self, *full: str) -> list[str]:
        """Return the words for the sizes of a benchmark."""
        return ["--quick"] if self.rehearsal else list(full)


def plan(place: Place) -> list[Part]:
    """Return the parts of all calls, those that build first; those of a rehearsal have all the time they need."""
    parts = [*_build(place), *_first(place), *_second(place), *_tests(place), *_tables(place), *_applications(place)]
    if not place.rehearsal:
        return parts
    return [dataclasses.replace(part, limit_seconds=REHEARSAL_SECONDS, kept_seconds=0.0) for part in parts]


def _build(place: Place) -> list[Part]:
    """Build in place by CMake, with nvcc; else without, so that NVRTC compiles the kernels."""
    info = Part("info", [place.python, "-m", "speedswap", "info"], 60, call="build")
    if place.rehearsal:
        return [info]
    # Not by pip, which would need scikit-build-core as well.
    script = (
        "cmake -S . -B build/gpu-check $(command -v ninja > /dev/null && echo -G Ninja) -DCMAKE_BUILD_TYPE=Release "
        '-DSPEEDSWAP_CUDA=$SPEEDSWAP_CUDA -DPython_EXECUTABLE="$0" -Dpybind11_DIR="$("$0" -m pybind11 --cmakedir)" && '
        "cmake --build build/gpu-check --parallel $(nproc) && cmake --install build/gpu-check --prefix . && "
        '"$0" -c "import speedswap.kernels"'
    )
    build = Part("build", ["sh", "-c", script, place.python], 150, call="build")
    with_nvcc, without = ({"SPEEDSWAP_CUDA": how} for how in ("ON" if place.nvcc else "AUTO", "OFF"))
    return [
        dataclasses.replace(build, env=with_nvcc),
        dataclasses.replace(build, name="build without nvcc", limit_seconds=90, env=without, only_after="build"),
        info,
    ]


def _pytest(
    place: Place,
    name: str,
    limit: float,
    kept: float,
    *words: str,
    several: bool = False,
    call: str = "tests",
    **env: str,
) -> Part:
    """Run tests that use a GPU, without those for the processor; in ``several`` processes, if that can be done."""
    # Only the plugins that are asked for, and warnings as text: other versions than ours must not fail every test.
    # Failures are reported when they happen, and not again; unreadable files and skipped tests, at the end. A file
    # that cannot be imported takes no other test with it.
    pytest = [place.python, "-m", "pytest", "-q", "-rEs", "-p", "gpu_tests", "-W", "default", "--tb=no", "--gpu-only",
              "--continue-on-collection-errors"]  # fmt: skip
    if "pytest-timeout" in place.has:  # for a lock that is never released; a thread also ends calls in the driver
        pytest += ["-p", "pytest_timeout", "--timeout=90", "--timeout-method=thread"]
    if several and "pytest-xdist" in place.has and not place.rehearsal:  # a few at a time, so that neighbours share
        pytest += ["-p", "xdist", "-n", PROCESSES, "--dist", "load", "--maxschedchunk", "4"]
    known = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "2"}
    known["SPEEDSWAP_TEST_DEVICE"] = "simulated" if place.rehearsal else "cuda"
    return Part(name, [*pytest, *words], limit, kept, {**known, **env}, call)


def _tests(place: Place) -> list[Part]:
    which = ["tests/kernels/test_engines.py"] if place.rehearsal else ["tests"]
    again = ["--last-failed", "--last-failed-no-failures=none"]
    promises = ["tools/gpu_promises.py", *(["--rows", "40001"] if place.rehearsal else [])]
    kernels = which if place.rehearsal else ["tests/kernels"]
    nvrtc = {"SPEEDSWAP_CUDA_SOURCE": "nvrtc"}
    return [
        Part("promises", place.on_gpu(*promises), 60, 10, call="tests"),
        _pytest(place, "tests", 300, 150, "--durations=5", *which, several=True),
        dataclasses.replace(_pytest(place, "tests that failed", 60, 15, *again, *which), only_after="tests"),
        _memcheck(place),
        _pytest(place, "kernel tests by NVRTC", 80, 25, "-m", "cuda_kernels", *kernels, several=True, **nvrtc),
    ]


def _memcheck(place: Place) -> Part:
    # Without torch's caching allocator each tensor is an allocation, and so has bounds that memcheck sees.
    few = {"GPU_CHECK_EXAMPLES": "3", "GPU_CHECK_LEAST": "20", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tests = ["-m", "cuda_kernels", "-p", "no:cacheprovider", "tests/kernels"]
    # It wants a kernel to run until another has ended, but under memcheck they run one after the other.
    tests += ["--deselect", "tests/kernels/test_records.py::test_the_current_stream_is_the_one_that_moves"]
    tests += ["--timeout=0"] if "pytest-timeout" in place.has else []  # all take long; gpu_memcheck.py ends the longest
    part = _pytest(place, "memcheck", 150, 90, *tests, **few)
    runs = [place.python, "tools/gpu_memcheck.py", place.sanitizer or "compute-sanitizer", PROCESSES, "{seconds}"]
    return dataclasses.replace(part, command=[*runs, *part.command], not_run_if=NO_MEMCHECK)


def _script(
    place: Place, of: str, limit: float, kept: float, *words: str, call: str, name: str = "", out: bool = False
) -> Part:
    """Run the benchmark ``of`` something; ``out`` if its figures should come back by themselves."""
    file = (place.out if out else place.more) / f"{name or of}-cuda.json"
    command = place.on_gpu(f"benchmarks/bench_{of}.py", "--device", "cuda", "--json", str(file), *words)
    return Part(name or of, command, limit, kept, call=call)


def _large(place: Place, name: str, runs: str, limit: float, kept: float, *words: str, call: str) -> Part:
    """Measure steps over large tables; the store of each run serves every way in which its rows may go."""
    rows = place.quick("--rows", "4000000")
    part = _script(place, "tables", limit, kept, *rows, "--seconds", "{seconds}", out=True, call=call)
    return dataclasses.replace(part, name=name, command=[*part.command, "--only", runs, *words])


def _first(place: Place) -> list[Part]:
    """Return what no GPU has measured yet, and the steps that most users take."""
    pages = (*place.quick("--gib", "8"), "--seconds", "{seconds}")
    words = ("--probe", *place.quick(), "--gib", "0.03" if place.rehearsal else "8", "--seconds", "{seconds}")
    return [
        _script(place, "ceilings", 45, 30, *words, name="probe", call="first"),
        _script(place, "pages", 45, 30, *pages, "--kinds", "registered,allocated", call="first"),
        _large(place, "SGD", "sgd", 70, 35, call="first"),
        _large(place, "Adam with hot rows", "adam-hot", 70, 45, call="first"),
        _large(place, "Adam", "adam", 70, 35, call="first"),
        _large(place, "Adam in bfloat16", "bfloat16", 70, 0, call="first"),
    ]


def _second(place: Place) -> list[Part]:
    """Return the tests of what has changed, word2vec, and a step in detail."""
    which = CHANGED[:1] if place.rehearsal else CHANGED
    pages = (*place.quick("--gib", "8"), "--seconds", "{seconds}")
    words = ("--quick", "--words", "50000") if place.rehearsal else ("--epochs", "2")
    return [
        _pytest(place, "tests of what changed", 90, 60, *which, several=True, call="second"),
        _script(place, "word2vec", 60, 35, *words, out=True, call="second"),
        _large(place, "profile", "adam", 80, 20, "--profile", str(place.out), call="second"),
        # Last, since too much of it has hung GPUs.
        _script(place, "pages", 30, 0, *pages, "--kinds", "managed", name="managed", call="second"),
    ]


def _tables(place: Place) -> list[Part]:
    words = (*place.quick(), "--gib", "0.03" if place.rehearsal else "1,40", "--seconds", "{seconds}")
    return [
        _large(place, "Adam on the GPU", "adam-gpu", 60, 20, call="tables"),
        _large(place, "SGD with hot rows", "sgd-hot", 100, 35, call="tables"),
        _large(place, "fits in hot rows", "fits-hot,fits-gpu", 60, 15, call="tables"),
        _script(place, "ceilings", 250, 0, *words, out=True, call="tables"),
    ]


def _real(place: Place, part: Part) -> Part:
    """Return a part that asks for what the simulated GPU lacks, as peers do: it is rehearsed on the CPU."""
    words = ["cpu" if word == "cuda" else word for word in part.command if word != SIMULATED]
    return dataclasses.replace(part, command=words) if place.rehearsal else part


def _applications(place: Place) -> list[Part]:
    def bench(name: str, limit: float, kept: float) -> Part:
        file = str(place.more / f"{name}-cuda.json")
        command = place.on_gpu("-m", "speedswap", "bench", name, "--device", "cuda", "--quick", "--json", file)
        return Part(name, command, limit, kept, call="applications")

    def app(name: str, limit: float, kept: float, *words: str, unless: Sequence[str] = ()) -> Part:
        output = ["--output", str(place.more / name)]
        command = place.on_gpu("-m", "speedswap", name, "--device", "cuda", *words, *output)
        return Part(name, command, limit, kept, call="applications", not_run_if=unless)

    recoveries = place.on_gpu("-c", RECOVERIES, "cuda", str(place.more / "recoveries-cuda.json"), *place.quick())
    return [
        _real(place, Part("recoveries", recoveries, 120, 90, call="applications")),
        app("ncf", 40, 20, "--epochs", "1" if place.rehearsal else "3"),
        app("dlrm", 40, 20, "--generate", "20000" if place.rehearsal else "500000"),
        _real(place, app("digits", 30, 10, "--epochs", "2", unless=("which is not installed",))),
        _script(place, "speedtorch", 30, 15, *place.quick(), call="applications"),
        bench("step", 30, 10),
        _real(place, bench("transfer", 40, 10)),
        _real(place, _script(place, "many_tables", 60, 0, "--quick", call="applications")),
        dataclasses.replace(_script(place, "ncf", 60, 0, "--quick", call="applications"), name="ncf of large tables"),
        _real(place, _script(place, "batching", 60, 0, "--quick", call="applications")),
    ]
