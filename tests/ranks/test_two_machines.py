"""Two machines, which are network namespaces of this one: a lost one, one that comes back, a pulled cable."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks.network import connected, ip

import speedswap

DOCS = Path(__file__).resolve().parents[2] / "docs"
EPOCHS, PER_MACHINE = 12, 2
SECONDS = 120  # for anything to happen
MACHINES = {"speedswap-a": "10.77.0.1", "speedswap-b": "10.77.0.2"}
FIRST, SECOND = MACHINES


def kill(machine: str) -> None:
    for pid in ip("netns", "pids", machine, check=False).stdout.split():
        os.kill(int(pid), signal.SIGKILL)


Started = list["subprocess.Popen[bytes]"]


@pytest.fixture
def machines() -> Iterator[Started]:
    """Connect two namespaces by a cable; what is started in them is put into the list."""
    started: Started = []
    with connected(MACHINES) as is_possible:
        if not is_possible:
            pytest.skip("network namespaces need root and iproute2")
        try:
            yield started
        finally:
            for machine in MACHINES:
                kill(machine)
            for each in started:
                each.wait()


def script(folder: Path) -> str:
    """Write the page's script, with a time limit, more epochs, and a line and a second for each; return its name."""
    page = (DOCS / "many-processes.md").read_text()
    (code,) = (
        code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "init_process_group" in code
    )
    saved = '    speedswap.save_checkpoint("checkpoints"'
    told = """
    time.sleep(1)
    if dist.get_rank() == 0:
        print("epoch", epoch, "of", dist.get_world_size(), flush=True)
"""
    changes = {
        'init_process_group("gloo")': 'init_process_group("gloo", timeout=timedelta(seconds=15))',
        "range(sampler.epoch, 3)": f"range(sampler.epoch, {EPOCHS})",
        saved: told + saved,
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (folder / "train.py").write_text(f"import time\nfrom datetime import timedelta\n{code}")
    return "train.py"


def start(started: Started, machine: str, folder: Path, log: str) -> None:
    """Start the page's torchrun on a machine."""
    words = f"--nnodes 1:2 --nproc-per-node {PER_MACHINE} --max-restarts 3 --rdzv-backend c10d --rdzv-id job"
    words += f" --rdzv-endpoint {MACHINES[FIRST]}:29500 --local-addr {MACHINES[machine]}"
    words += f" --rdzv-conf is_host={str(machine == FIRST).lower()} {script(folder)}"
    own = {
        "GLOO_SOCKET_IFNAME": "card",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(speedswap.__file__).parents[1]),
    }
    with (folder / log).open("wb") as file:
        command = ["ip", "netns", "exec", machine, sys.executable, "-m", "torch.distributed.run", *words.split()]
        started.append(
            subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=file, stderr=subprocess.STDOUT)
        )


def wait_for(said: str, *logs: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not any(said in log.read_text(errors="replace") for log in logs):
        assert time.monotonic() < deadline, "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        time.sleep(0.2)


def result(log: Path) -> str:
    (found,) = re.findall(r"norms of some rows.*", log.read_text(errors="replace"))
    return found


@pytest.fixture
def undisturbed(tmp_path: Path, machines: Started) -> str:
    """Return what the job prints at its end if nothing happens."""
    (tmp_path / "alone").mkdir()
    start(machines, FIRST, tmp_path / "alone", "log")
    assert machines[-1].wait(SECONDS) == 0
    return result(tmp_path / "alone" / "log")


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "cable"])
def test_a_job_outlives_a_machine(tmp_path: Path, machines: Started, undisturbed: str, fault: str) -> None:
    """It goes on with the ranks that are left, from the last checkpoint, and with all of them once it is back."""
    first, second, again = (tmp_path / name for name in ("first", "second", "again"))
    start(machines, FIRST, tmp_path, first.name)
    job = machines[-1]
    start(machines, SECOND, tmp_path, second.name)
    wait_for("epoch 3 of 4", first, second)
    if fault == "killed":
        kill(SECOND)
        wait_for("cannot be reached any more", first)
    else:
        ip("-n", SECOND, "link", "set", "card", "down")
        wait_for("did not come within 15 seconds", first)
        kill(SECOND)
        ip("-n", SECOND, "link", "set", "card", "up")
    wait_for("of 2", first)
    if fault == "killed":
        start(machines, SECOND, tmp_path, again.name)
    assert job.wait(SECONDS) == 0
    said = first.read_text(errors="replace")
    epochs = [tuple(map(int, each)) for each in re.findall(r"^epoch (\d+) of (\d)", said, flags=re.MULTILINE)]
    numbers, sizes = zip(*epochs, strict=True)
    assert [*dict.fromkeys(numbers)] == [*range(EPOCHS)]  # an epoch may be repeated, none is left out
    assert [*dict.fromkeys(sizes)] == [4, 2]
    assert (sizes[-1] == 4) == (fault == "killed")
    assert result(first) == undisturbed


def test_slurms_variables_become_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "two-machines.md").read_text(), flags=re.DOTALL)
    exec(code, {})
    found = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert [*found.values()] == ["5", "8", "1", "10.0.0.1", "29500"]
