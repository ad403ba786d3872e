"""Bytes over a network: of ranks in two network namespaces of this machine, by what their virtual cards have sent.

``python -m ranks.network RANK HOST LOOKUPS`` is one of the ranks, as :func:`measured` starts them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import speedswap
from ranks.counting import between, train

__all__ = ["connected", "ip", "measured"]

PER_MACHINE, LOOKUPS = 2, (64, 4096)
_MACHINES = {"speedswap-c": "10.78.0.1", "speedswap-d": "10.78.0.2"}
_SENT = Path("/sys/class/net/card/statistics/tx_bytes")
_SECONDS = 300


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``ip``."""
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@contextmanager
def connected(machines: Mapping[str, str]) -> Iterator[bool]:
    """Connect two namespaces, given with their addresses, by a cable; provide False where that is not possible."""
    first, second = machines
    is_possible = not os.geteuid() and shutil.which("ip") is not None
    is_possible = is_possible and not ip("netns", "add", first, check=False).returncode
    try:
        if is_possible:
            ip("netns", "add", second)
            ip("link", "add", "card", "netns", first, "type", "veth", "peer", "name", "card", "netns", second)
            for machine, address in machines.items():
                ip("-n", machine, "addr", "add", f"{address}/24", "dev", "card")
                ip("-n", machine, "link", "set", "lo", "up")
                ip("-n", machine, "link", "set", "card", "up")
        yield is_possible
    finally:
        for machine in machines if is_possible else ():
            ip("netns", "del", machine, check=False)


def measured() -> list[dict[str, Any]] | None:
    """Return the bytes of steps of two ranks on each of two machines, flat and in two levels.

    Returns:
        For each, ``host``, ``lookups``, and per step and machine ``counted`` bytes handed to gloo for the other machine
        and ``on_card``, those that the card has sent, headers included. None without root or namespaces.
    """
    with connected(_MACHINES) as is_possible:
        if not is_possible:
            return None
        return [
            {"host": host, "lookups": lookups, **_run(host, lookups)}
            for lookups in LOOKUPS
            for host in (1, PER_MACHINE)
        ]


def _run(host: int, lookups: int) -> dict[str, float]:
    folder, root = Path(__file__).resolve().parents[1], Path(speedswap.__file__).parents[1]
    own = {
        "GLOO_SOCKET_IFNAME": "card",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, root))),
    }
    machines = [machine for machine in _MACHINES for _ in range(PER_MACHINE)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", __name__, str(rank), str(host), str(lookups)],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
        )
        for rank, machine in enumerate(machines)
    ]
    try:
        said = [json.loads(each.communicate(timeout=_SECONDS)[0]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return {
        "counted": sum(each["counted"] for each in said) / len(_MACHINES),
        "on_card": sum(each["on_card"] for each in said) / len(said),  # the ranks of a machine read one card
    }


def _be_rank(rank: int, host: int, lookups: int) -> None:
    torch.set_num_threads(1)
    ranks, timeout = PER_MACHINE * len(_MACHINES), timedelta(seconds=_SECONDS)
    (first, *_) = _MACHINES.values()
    store = dist.TCPStore(first, 29500, ranks, is_master=not rank, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    assert dist.group.WORLD is not None
    found = train(dist.group.WORLD, host, "1 embedding", False, lookups, lambda: int(_SENT.read_text()))
    away = between(found.traffic, rank, PER_MACHINE)["bytes_away"]
    print(json.dumps({"counted": away, "on_card": found.card_bytes}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _be_rank(*map(int, sys.argv[1:]))
