"""Rounds of other attacks in a process whose compiled part is built with sanitizers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

import speedswap
from torture.attack import Attack, Broken, Skipped

__all__ = ["ATTACK"]

_CSRC = Path(speedswap.__file__).resolve().parent.parent / "csrc"
_TOOLS = Path(__file__).resolve().parent.parent
_REPORTED = 77  # exit status of a process in which a sanitizer has found something

_SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
_LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
# Of torch and Python nothing is instrumented but their locks, which order what threads do.
_OPTIONS = {
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={_REPORTED}:allocator_may_return_null=1",
    "UBSAN_OPTIONS": f"halt_on_error=1:print_stacktrace=1:exitcode={_REPORTED}",
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={_REPORTED}",
}
_WARNINGS = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer")

_ATTACKS = {
    "address": ["tensors", "tensors", "configurations", "configurations", "threads", "states", "splitter"],
    "thread": ["threads", "configurations"],
}
_ROUNDS = 12

_CHILD = """
import importlib, importlib.util, pathlib, sys
place, name, folder, *seeds = sys.argv[1:]
spec = importlib.util.spec_from_file_location("speedswap.kernels._C", place)
sys.modules["speedswap.kernels._C"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["speedswap.kernels._C"])
import torch
attack = importlib.import_module("torture." + name).ATTACK
played = 0
for seed in seeds:
    inside = pathlib.Path(folder, seed)
    inside.mkdir()
    print("round", name, seed, file=sys.stderr, flush=True)
    try:
        attack.round(int(seed), inside)
    except Exception as error:  # what does not hold is found where the attack itself is played
        print(type(error).__name__, str(error)[:200], file=sys.stderr)
    played += 1
print(played)
"""


def _round(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    sanitizer = rng.choice(["address", "address", "address", "thread"])
    library = _built(sanitizer)
    name = rng.choice(_ATTACKS[sanitizer])
    seeds = [str(rng.randrange(2**31)) for _ in range(_ROUNDS)]
    preloaded = [_library(_LIBRARIES[sanitizer]), _library("libstdc++.so")]
    env = {
        **os.environ,
        **_OPTIONS,
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONPATH": os.pathsep.join([str(_TOOLS), str(_CSRC.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-W", "ignore", "-c", _CHILD, str(library), name, str(folder), *seeds]
    done = subprocess.run(words, env=env, capture_output=True, text=True, errors="replace", cwd=folder, check=False)
    said = next((line for line in done.stderr.splitlines() if any(word in line for word in _WARNINGS)), None)
    if said is not None or done.returncode == _REPORTED or done.returncode < 0:
        place = done.stderr.find(said) if said else max(0, len(done.stderr) - 3000)
        rounds = [line for line in done.stderr.splitlines() if line.startswith("round ")]
        report = [
            line[:160] for line in done.stderr[place:].splitlines() if "pybind11" not in line and "<null>" not in line
        ]
        what = "\n".join(report[:60])
        raise Broken(f"{sanitizer} sanitizer, {rounds[-1:]}, status {done.returncode}:\n{what}")
    if done.stdout.strip() != str(_ROUNDS):
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return f"{sanitizer}: {name}"


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++")
    if found is None or platform.system() != "Linux":
        raise Skipped("g++ on Linux builds the sanitized engine, and there is none")
    if not _CSRC.is_dir():
        raise Skipped(f"the sources of the engine are not at {_CSRC}")
    return found


def _library(name: str) -> str:
    asked = [_compiler(), f"-print-file-name={name}"]
    place = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(place):
        raise Skipped(f"the compiler has no {name}")
    return place


def _built(sanitizer: str) -> Path:
    """Return the engine built with a sanitizer, for these sources and this interpreter; built once."""
    compiler = _compiler()
    _library(_LIBRARIES[sanitizer])
    sources = sorted(path for path in _CSRC.iterdir() if path.suffix in (".cpp", ".h", ".cuh"))
    digest = hashlib.sha256(f"{sanitizer} {sys.version} {compiler} {__doc__}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    home = Path(tempfile.gettempdir(), f"speedswap-sanitized-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    if home.is_symlink() or home.stat().st_uid != os.getuid():
        raise Skipped(f"{home} belongs to somebody else")
    library = home / f"{sanitizer}-{digest.hexdigest()[:16]}.so"
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=home) as place:
                _build(compiler, sanitizer, Path(place)).rename(library)
    return library


def _build(compiler: str, sanitizer: str, place: Path) -> Path:
    """Build as CMakeLists.txt does, except for the optimization."""
    headers = [sysconfig.get_paths()["include"], str(Path(torch.__file__).parent / "include"), str(_CSRC)]
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-omit-frame-pointer"]
    flags += [*_SANITIZERS[sanitizer], "-pthread", *(word for path in headers for word in ("-isystem", path))]
    sets = {"baseline": list[str]()}
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-DSPEEDSWAP_X86")
        wide = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
        sets |= {"avx2": ["-mavx2", "-mf16c"], "avx512": wide}
    loops = ("idle_loops", "loops", "pair_loops", "segment_loops")  # compiled once per instruction set
    units = {path.stem: (path, list[str]()) for path in _CSRC.glob("*.cpp") if path.stem not in loops}
    for name, extra in sets.items():
        for stem in loops:
            units[f"{stem}_{name}"] = (_CSRC / f"{stem}.cpp", [f"-DSPEEDSWAP_ISA={name}", *extra])
    for name, (source, extra) in units.items():
        _run([compiler, *flags, *extra, "-c", str(source), "-o", str(place / f"{name}.o")])
    library = place / "_C.so"
    _run([compiler, "-shared", *_SANITIZERS[sanitizer], "-pthread", "-o", str(library), *map(str, place.glob("*.o"))])
    return library


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr[-2000:]}")


ATTACK = Attack(
    name="sanitizers",
    promise="no attack makes the engine read, write or race where it must not: ASan, UBSan and TSan find nothing",
    round=_round,
    seconds=600.0,
    quick=0,  # the first round builds the engine
)
