"""Facts of the machine: a container's limits on memory and processors, and file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from speedswap import _machine

GIB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that writes the files of control groups, by their path, and this process's place in them."""
    monkeypatch.setattr(_machine, "_GROUPS", tmp_path)
    monkeypatch.setattr(_machine, "_OWN_GROUPS", tmp_path / "own")

    def write(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_without_control_groups_there_is_no_limit(groups):
    assert _machine.group_bytes() is None
    assert _machine.cores() == len(_machine.os.sched_getaffinity(0))


def test_memory_of_a_container_is_its_limit_less_what_is_in_use(groups):
    """The file cache that is not in active use counts as free; the smallest of nested limits counts."""
    half = {
        "memory.max": f"{GIB}\n",
        "memory.current": f"{GIB // 2}\n",
        "memory.stat": f"anon 5\ninactive_file {GIB // 8}\n",
    }
    outer = {"memory.max": "max\n", "memory.current": "1\n", "memory.stat": ""}
    groups("0::/outer/inner\n", {f"outer/inner/{name}": text for name, text in half.items()})
    groups("0::/outer/inner\n", {f"outer/{name}": text for name, text in outer.items()})
    assert _machine.group_bytes() == GIB // 2 + GIB // 8
    assert _machine.available_bytes() == GIB // 2 + GIB // 8
    assert _machine.allocatable_bytes() == GIB // 2 + GIB // 8


def test_a_container_without_its_own_view_finds_its_limit_at_the_root(groups):
    files = {"memory.limit_in_bytes": f"{GIB}", "memory.usage_in_bytes": f"{2 * GIB}", "memory.stat": ""}
    groups("4:memory:/docker/1f2e\n1:cpu,cpuacct:/\n", {f"memory/{name}": text for name, text in files.items()})
    assert _machine.group_bytes() == 0  # usage above the limit, while it shrinks


def test_no_limit_of_version_1_is_none(groups):
    files = {"memory.limit_in_bytes": f"{2**63 - 4096}", "memory.usage_in_bytes": "5", "memory.stat": ""}
    groups("4:memory:/\n", {f"memory/{name}": text for name, text in files.items()})
    assert _machine.group_bytes() is None


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("2:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "75000", "cpu/cpu.cfs_period_us": "100000"}, 0.75),
        ("2:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_a_containers_share(groups, own, files, cores):
    groups(own, files)
    assert _machine.cores() == (len(_machine.os.sched_getaffinity(0)) if cores is None else cores)


def test_the_innermost_mount_tells_the_file_system(tmp_path, monkeypatch):
    inner = tmp_path / "with space"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(
        f"/dev/vda / ext4 rw 0 0\nserver:/ {escaped} nfs4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(_machine, "_MOUNTS", tmp_path / "mounts")
    assert _machine.file_system(inner / "items") == "nfs4"
    assert _machine.file_system(Path(f"{inner}er")) == "ext4"
    monkeypatch.setattr(_machine, "_MOUNTS", tmp_path / "none")
    assert _machine.file_system(inner) == ""
