"""The CUDA kernels compile: with NVRTC, as at first use, and with nvcc, as at build. No GPU is needed for either."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speedswap.kernels.cuda import driver

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = {
    *(f"{what}_w{word}" for what in ("gather", "scatter") for word in (1, 4, 16)),
    *(
        f"{what}_{form}_w{word}"
        for what in ("gather", "scatter")
        for form in ("float16", "bfloat16")
        for word in (2, 16)
    ),
    *(f"{what}_int8" for what in ("gather", "scatter")),
    *(f"round_{form}" for form in ("float16", "bfloat16")),
    *(f"fill_{kind}_f{bits}" for kind in ("uniform", "normal") for bits in (32, 64)),
    *(f"hot_{what}" for what in ("expect", "count", "choose", "pick", "swap_w16", "swap_w4", "swap_w1")),
    *("bandwidth_copy", "bandwidth_gather", "bandwidth_scatter", "find_starts"),
    *(
        f"{what}_{dtype}"
        for what in ("pool", "pool_max", "dot_bags", "sum_chunks", "join_chunks")
        for dtype in ("float32", "float64", "float16", "bfloat16")
    ),
    *(f"{what}_i{bits}" for what in ("merge_ids", "count_keys", "number_keys") for bits in (32, 64)),
    *("join_offsets", "find_places", "sum_counts", "take_steps_float32", "take_steps_float64", "step_adagrad"),
}


def nvrtc_path() -> Path | None:
    """libnvrtc of the nvidia-cuda-nvrtc wheel, for any CUDA version."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for library in sorted(Path(folder).glob("**/libnvrtc.so.*")):
            return library
    return None


class Nvrtc:
    """The few calls that compile a program."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        assert status == 0, f"{name} gave {status}"

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", archs)
        return list(archs)

    def ptx(self, source: str, options: list[str]) -> str:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._check("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"rows.cu", 0, None, None)
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._library.nvrtcCompileProgram(program, len(options), flags)
        self._check("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._check("nvrtcGetProgramLog", program, log)
        assert status == 0, log.value.decode()
        assert "warning" not in log.value.decode()
        self._check("nvrtcGetPTXSize", program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        self._check("nvrtcGetPTX", program, ptx)
        self._check("nvrtcDestroyProgram", ctypes.byref(program))
        return ptx.value.decode()


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    path = nvrtc_path()
    if path is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    return Nvrtc(path)


@pytest.fixture(scope="module")
def ptx_for(nvrtc: Nvrtc) -> Callable[[int], str]:
    """Compile the kernels for an architecture, with CuPy's text and options, and the one that it adds."""
    return functools.cache(
        lambda arch: nvrtc.ptx(driver.source(), [*driver.NVRTC_OPTIONS, f"-arch=compute_{arch}", "-ftz=true"])
    )


@pytest.mark.sweep(2)  # 90, whose PTX the next test reads, and the oldest
@pytest.mark.parametrize("arch", [80, 90, 86, 89, 100, 75, 120])
def test_nvrtc_compiles_every_kernel_for_every_architecture(nvrtc: Nvrtc, ptx_for: Callable[[int], str], arch: int):
    if arch not in nvrtc.architectures():
        assert arch != 90
        pytest.skip(f"this NVRTC does not know sm_{arch}")
    assert set(re.findall(r"\.entry (\w+)", ptx_for(arch))) == KERNELS


def test_the_ptx_is_what_was_meant(ptx_for: Callable[[int], str]):
    ptx = ptx_for(90)
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx, re.DOTALL))
    for what in ("gather", "scatter"):
        wide = bodies[f"{what}_w16"]
        # A turn is four loads of 16 bytes; the compiler writes it once for packed records, and once for others.
        assert len(re.findall(r"ld\.global\.v2\.[ub]64", wide)) in (4, 8)
        assert len(re.findall(r"st\.global\.v2\.[ub]64", wide)) in (4, 8)
    for form in ("float16", "bfloat16"):
        gather, scatter = bodies[f"gather_{form}_w16"], bodies[f"scatter_{form}_w16"]
        # A piece of 8 values: one access of 16 bytes to the record, two to the block; copied, one to each. A turn is
        # four of a gather, two of a scatter.
        loads, stores = r"ld\.global\.v4\.[ub]32", r"st\.global\.v4\.[ub]32"
        assert [len(re.findall(each, gather)) for each in (loads, stores, r"st\.v4\.b32")] == [4, 4, 4 * 2]
        assert [len(re.findall(each, scatter)) for each in (loads, stores)] == [2 * (1 + 2), 2]
    assert ".local" not in ptx, "the columns were copied to the stack"
    adagrad = bodies["step_adagrad"]
    assert {"shfl.sync.bfly.b32", "shfl.sync.idx.b32"} <= set(re.findall(r"shfl[\w.]+", adagrad))
    assert not re.search(r"fma.rn|\.approx|\.full", adagrad), "other bits than on the host"
    fills = "".join(body for name, body in bodies.items() if name.startswith("fill"))
    assert "fma.rn.f64" not in fills, "a multiplication and an addition were fused: other bits than on the host"
    assert ".ftz" not in fills, "subnormal floats would be flushed to zero: other bits than on the host"
    assert "sqrt.rn.f64" in fills
    assert "div.rn.f64" in fills


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 103, 120])
def test_nvcc_compiles_without_warnings(tmp_path: Path, arch: int):
    """For each architecture that the wheels' fatbin is for."""
    known = subprocess.run(["nvcc", "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    if f"compute_{arch}" not in known:
        assert arch != 90
        pytest.skip(f"this nvcc does not know sm_{arch}")
    fatbin = tmp_path / "rows.fatbin"
    command = ["nvcc", "-fatbin", "-std=c++17", "-fmad=false", "-allow-unsupported-compiler", "-Werror", "all-warnings"]
    targets = ["-gencode", f"arch=compute_{arch},code=[sm_{arch},compute_{arch}]"]
    subprocess.run([*command, *targets, "-x", "cu", str(CSRC / "rows.cuh"), "-o", str(fatbin)], check=True)
    assert fatbin.stat().st_size > 10_000


def test_the_sources_are_read_in_a_locale_without_utf_8():
    code = "from speedswap.kernels.cuda import driver; driver.source()"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


OURS = sorted(path.name for path in CSRC.glob("*.cuh"))


@pytest.mark.parametrize("name", OURS)
def test_the_kernels_need_no_header(name: str):
    """NVRTC has none to offer; philox.cuh's are behind the host's compiler."""
    text = (CSRC / name).read_text("utf-8")
    device = re.sub(r"#else.*?#endif", "", text, flags=re.DOTALL)
    ours = {f'"{each}"' for each in OURS}
    assert set(re.findall(r"#include\s+(\S+)", device)) <= ours
    assert "#include" not in driver.source().split("#else")[0]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Run CMake with the given SPEEDSWAP_CUDA, an nvcc and two kinds of GPUs; return the build folder."""
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake")
    pybind11 = pytest.importorskip("pybind11")
    folder = tmp_path_factory.mktemp("configure")
    for name, prints in {
        "nvcc": r"compute_75\ncompute_87\ncompute_90\ncompute_110\ncompute_120\n",
        "nvidia-smi": r"9.0\n7.5\n9.0\n6.1\n",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\nprintf '{prints}'\n")
        (folder / name).chmod(0o755)
    settings = [f"-DNVCC={folder / 'nvcc'}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    command = ["cmake", "-S", str(CSRC.parent), "-B", str(folder / "build"), "-G", "Unix Makefiles", *settings]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    def run(cuda: str) -> Path:
        words = [*command, f"-DPython_EXECUTABLE={sys.executable}", f"-DSPEEDSWAP_CUDA={cuda}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=env)
        return folder / "build"

    return run


def targets_in(build: Path) -> list[tuple[str, str]]:
    rules = (build / "CMakeFiles/fatbin.dir/build.make").read_text()
    return re.findall(r"arch=compute_(\d+),code=(\w+)", rules)


def test_the_fatbin_has_ptx_of_the_oldest_architecture_too(configure: Callable[[str], Path]):
    """GPUs between those that are named, as sm_87 and sm_110, are older than the newest PTX."""
    assert targets_in(configure("ON")) == [
        *((arch, f"sm_{arch}") for arch in ("75", "90", "120")),
        *((arch, f"compute_{arch}") for arch in ("75", "120")),
    ]


def test_an_install_compiles_kernels_for_the_gpus_of_its_machine(configure: Callable[[str], Path]):
    """Each kind once; none that this nvcc does not know."""
    assert targets_in(configure("AUTO")) == [
        *((arch, f"sm_{arch}") for arch in ("75", "90")),
        *((arch, f"compute_{arch}") for arch in ("75", "90")),
    ]


def test_wheels_share_a_fatbin_that_was_compiled_once(configure: Callable[[str], Path], tmp_path: Path):
    fatbin = tmp_path / "shared.fatbin"
    installed = (configure(str(fatbin)) / "cmake_install.cmake").read_text()
    assert re.search(rf'RENAME "rows.fatbin" FILES "{fatbin}"', installed)
