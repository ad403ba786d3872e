"""The machine of the check: its GPU, versions, tools and memory. Nothing here ends the check by failing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

# Asked of a child process: a broken CUDA installation can end a process.
PROBE = """
import importlib.metadata, json, platform
names = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
wanted = ("cupy", "numpy", "pytest", "pybind11", "scikit", "cmake", "ninja", "hypothesis", "fbgemm", "pylibw")
found = {"python": platform.python_version()}
found["packages"] = {name: v for name, v in names.items() if name and name.lower().startswith(wanted)}
print(json.dumps(found), flush=True)
import torch
found |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
print(json.dumps(found), flush=True)
torch.cuda.init()
gpu = torch.cuda.get_device_properties(0)
found["gpu"] = [gpu.name, f"{gpu.total_memory / 2**30:.1f} GiB", f"{gpu.multi_processor_count} multiprocessors"]
print(json.dumps(found), flush=True)
"""
PROBE_SECONDS = 120.0  # the first import of torch from a cold disk
# What may explain a figure or a failure, before and after: memory may grow as it is used.
SAYS = """
nvidia-smi --query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.mem --format=csv
nvidia-smi topo -m; lscpu | grep -E 'Model name|^CPU\\(s\\)|NUMA'; ulimit -l; df -h /tmp; c++ --version | head -1
grep -E 'MemTotal|MemAvailable|Huge' /proc/meminfo; cat /sys/kernel/mm/transparent_hugepage/enabled
cat /sys/devices/system/cpu/cpu0/cache/index3/size; lspci -vv -d 10de: | grep -E 'MaxPayload|MaxReadReq'
cat /proc/driver/nvidia/params
git rev-parse HEAD; git status --porcelain | head -5; nvcc --version | grep release
"""
SAYS_SECONDS = 20.0


def describe(python: str) -> dict[str, Any]:
    """Describe the machine as far as possible.

    Args:
        python: the interpreter whose packages are listed.

    Returns:
        ``python``, ``packages``, ``torch``, ``torch_cuda`` and ``gpu``, as far as the probe came; ``stopped``: the
        end of its output if it did not finish; ``gpus``: those that the driver's own tool lists;
        ``says``: lines of the system's tools.
    """
    said, complaint = ask([python, "-W", "ignore", "-c", PROBE], PROBE_SECONDS)
    machine: dict[str, Any] = {"packages": {}}
    for line in said.splitlines():
        if line.startswith('{"python"'):
            machine = json.loads(line)
    if "gpu" not in machine:
        machine["stopped"] = complaint.splitlines()[-3:]
    listed, _ = ask(["nvidia-smi", "-L"], SAYS_SECONDS)
    machine["gpus"] = [line.partition(" (")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    machine["says"] = ask(["sh", "-c", SAYS], SAYS_SECONDS)[0].splitlines()
    return machine


def ask(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return a command's output and error output within some seconds, whether it fails or not."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return _text(error.stdout), f"{_text(error.stderr)}\nit was ended after {seconds:.0f} s"
    except OSError as error:
        return "", str(error)
    return _text(done.stdout), _text(done.stderr)


def _text(said: bytes | None) -> str:
    return (said or b"").decode(errors="replace").strip()


def find_cuda_tool(name: str) -> str | None:
    """Find a program of the CUDA toolkit: on PATH, or under CUDA_HOME, CUDA_PATH or /usr/local/cuda."""
    homes = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    folders = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda"))]
    return shutil.which(name, path=os.pathsep.join(folders))
