"""Predictions of the model for machines that were not measured: GPUs on many hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ranks.simulator import Load, Message, Protocol, expected_load, payload

__all__ = ["CLUSTER", "Cluster", "Workload", "efficiency", "predictions"]

RANKS = tuple(1 << power for power in range(11))
_EXPONENTS = {"uniform": 0.0, "Zipf 1.05": 1.05, "Zipf 1.3": 1.3}
_PEER_SECONDS = (1e-6, 5e-6, 20e-6, 50e-6)
_ENOUGH = 0.9  # of one rank's speed


@dataclass(frozen=True)
class Cluster:
    """Stated constants of GPUs on hosts, each with a share of its host's memory; seconds and bytes per second.

    Attributes:
        step_seconds: of kernels and Python, whatever the batch.
        host_bandwidth: between a GPU and its host's memory: PCIe 4 ×16.
        round_seconds, round_peer_seconds: of a round through the hosts' memory, and of each peer in it.
        rows_seconds: of an exchange between GPUs: 58 µs on 8 × H20 (nccl-tests#314).
        rows_peer_seconds: of each peer in it; assumed.
        link_bandwidth: of a GPU to those of its host (nccl#2169).
        net_bandwidth: of a GPU to those of other hosts (nccl#1138, #1792).
        gpus: of a host.
    """

    step_seconds: float = 0.3e-3
    host_bandwidth: float = 25e9
    round_seconds: float = 30e-6
    round_peer_seconds: float = 5e-6
    rows_seconds: float = 58e-6
    rows_peer_seconds: float = 1e-6
    link_bandwidth: float = 120e9
    net_bandwidth: float = 20e9
    gpus: int = 8

    def lookup_or_rest(self, protocol: Protocol, part: int, load: Load, dim: int) -> float:
        """Return the seconds that ranks exchange, in a step's lookup (0) or in the rest of it (1)."""
        peers = load.ranks - 1
        messages = protocol.messages[part]
        rounds = protocol.rounds[part] + sum(not one.is_row for one in messages)  # ids go through host memory too
        seconds = rounds * (self.round_seconds + self.round_peer_seconds * peers)
        seconds += payload([one for one in messages if not one.is_row], load, dim) / self.net_bandwidth
        for one in messages:
            if one.is_row:
                seconds += self.rows_seconds + self.rows_peer_seconds * peers + self.moving([one], load, dim)
        return seconds

    def moving(self, messages: Iterable[Message], load: Load, dim: int) -> float:
        """Return the seconds that bytes take: to GPUs of the host, and to the others."""
        if load.ranks == 1:
            return 0.0
        away = payload(messages, load, dim)
        near = min(self.gpus, load.ranks) - 1
        share = near / (load.ranks - 1)
        return max(away * share / self.link_bandwidth, away * (1 - share) / self.net_bandwidth)

    def swapping(self, load: Load, record_bytes: int) -> float:
        """Return the seconds in which an owner gathers its rows, or scatters them."""
        return load.union * record_bytes / self.host_bandwidth


CLUSTER = Cluster()


class Workload(NamedTuple):
    """A rank's work in each step: 65,536 lookups by Zipf's law, Adam's state in the records, dense milliseconds."""

    rows: int = 4_000_000
    lookups: int = 65_536
    dim: int = 128
    columns: int = 3
    exponent: float = 1.05
    dense_seconds: float = 0.0


def seconds(cluster: Cluster, protocol: Protocol, work: Workload, load: Load, *, ahead: bool) -> float:
    """Return the seconds of a step.

    Args:
        ahead: True with lookahead: the next batch's lookup runs during the step, and rows that the step has changed
            are sent again.
    """
    record_bytes = 4 * work.dim * work.columns
    lookup = cluster.swapping(load, record_bytes) + cluster.lookup_or_rest(protocol, 0, load, work.dim)
    rest = cluster.swapping(load, record_bytes) + cluster.lookup_or_rest(protocol, 1, load, work.dim)
    if load.ranks == 1:  # a single process has no protocol
        lookup = rest = cluster.swapping(load, record_bytes)
    step = cluster.step_seconds + work.dense_seconds
    if not ahead:
        return step + lookup + rest
    again = 0.0
    if load.ranks > 1:
        changed = load._replace(lent_away=load.lent_away * load.again, asked_away=load.asked_away * load.again)
        again = cluster.rows_seconds + cluster.rows_peer_seconds * (load.ranks - 1)
        again += cluster.moving([Message(False, True, 4)], changed, work.dim)
    return max(step + rest + again, lookup)


def efficiency(
    cluster: Cluster, protocol: Protocol, work: Workload, *, ahead: bool, ranks: Sequence[int] = RANKS
) -> dict[int, float]:
    """Return the speed of a rank over that of one process, by the number of ranks."""
    loads = {number: expected_load(work.rows, number, work.lookups, work.exponent) for number in ranks}
    one = expected_load(work.rows, 1, work.lookups, work.exponent)
    alone = seconds(cluster, protocol, work, one, ahead=ahead)
    return {number: alone / seconds(cluster, protocol, work, load, ahead=ahead) for number, load in loads.items()}


def predictions(protocol: Protocol, peer_seconds: float, plain: Workload) -> dict[str, Any]:
    """Return what the model says of 1 to 1,024 GPUs.

    Args:
        protocol: of a step.
        peer_seconds: of each peer in a round, as measured; added to the stated ones.
        plain: a rank's work, without dense work.

    Returns:
        ``cluster``, ``workload``: the stated constants. ``efficiency``: by what is varied, and the number of ranks.
        ``widest``: up to how many ranks a rank keeps nine tenths of its speed, by the same names.
    """
    dense = plain._replace(dense_seconds=5e-3)
    curves = {
        "embedding alone": efficiency(CLUSTER, protocol, plain, ahead=False),
        "embedding alone, lookahead": efficiency(CLUSTER, protocol, plain, ahead=True),
        "5 ms of dense work": efficiency(CLUSTER, protocol, dense, ahead=False),
        "5 ms of dense work, lookahead": efficiency(CLUSTER, protocol, dense, ahead=True),
    }
    for name, exponent in _EXPONENTS.items():
        work = dense._replace(exponent=exponent)
        curves[f"{name}, 5 ms, lookahead"] = efficiency(CLUSTER, protocol, work, ahead=True)
    peers = {f"{1e6 * peer:g} µs a peer": peer for peer in _PEER_SECONDS} | {"as measured": peer_seconds}
    for name, peer in peers.items():
        cluster = replace(CLUSTER, round_peer_seconds=peer)
        curves[f"rounds {name}, 5 ms, lookahead"] = efficiency(cluster, protocol, dense, ahead=True)
    return {
        "cluster": asdict(CLUSTER),
        "workload": plain._asdict(),
        "measured_peer_seconds": peer_seconds,
        "efficiency": {name: {str(ranks): speed for ranks, speed in curve.items()} for name, curve in curves.items()},
        "widest": {name: _widest(curve) for name, curve in curves.items()},
    }


def _widest(curve: dict[int, float]) -> int:
    widest = 1
    for ranks, speed in curve.items():
        if speed < _ENOUGH:
            break
        widest = ranks
    return widest
