"""Predictions of the model for machines that were not measured: GPUs on many hosts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from ranks.balance import asked
from ranks.hops import LINE_BYTES, Asked, Hop, Hosts, expected_asked
from ranks.simulator import Protocol, expected_load
from speedswap.tables.owners import Owners

__all__ = ["CLUSTER", "WAYS", "Cluster", "Way", "Workload", "efficiency", "predictions", "seconds"]

RANKS = tuple(1 << power for power in range(11))
_AHEAD = 1  # rounds that a lookahead adds, in the batch's turn
_NUMBER_BYTES = 8


class Way(NamedTuple):
    """The way of rounds, ids and rows.

    Attributes:
        in_levels: True for two levels.
        rows_bandwidth: of a rank's rows if they go through host memory; None for rows between GPUs.
    """

    in_levels: bool = False
    rows_bandwidth: float | None = None


WAYS = {
    "flat, rows between GPUs": Way(),
    "two levels, rows at 5 GB/s": Way(True, 5e9),
    "two levels, rows between GPUs": Way(True),
}
"""By name; groups with NCCL have the last, or with ``host=1`` the first, others the second."""
_FLAT, _STAGED, _BUILT = WAYS
_BANDWIDTH_HERE = 0.7e9  # the byte that is fitted in ranks-cpu.json
_AS_HERE = "rows at 0.7 GB/s, as fitted here"


@dataclass(frozen=True)
class Cluster:
    """Stated constants of GPUs on hosts, each with a share of its host's memory; seconds and bytes per second.

    Attributes:
        step_seconds: of kernels and Python, whatever the batch.
        host_bandwidth: between a GPU and its host's memory: PCIe 4 ×16.
        round_seconds, round_peer_seconds: of a hop through the hosts' memory, and of each message that a rank sends.
        rows_seconds: of a hop between GPUs: 58 µs on 8 × H20 (nccl-tests#314).
        rows_peer_seconds: of each message in it; assumed.
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

    def numbers(self, hops: Sequence[Hop]) -> float:
        """Return the seconds of a round, or of ids."""
        bandwidth = self.net_bandwidth
        return sum(self._hop(hop, self.round_seconds, self.round_peer_seconds, bandwidth, bandwidth) for hop in hops)

    def rows(self, hops: Sequence[Hop], way: Way) -> float:
        """Return the seconds of rows; those through host memory are copied from a GPU and to one."""
        if way.rows_bandwidth is None:
            constants = self.rows_seconds, self.rows_peer_seconds, self.link_bandwidth, self.net_bandwidth
            return sum(self._hop(hop, *constants) for hop in hops)
        constants = self.round_seconds, self.round_peer_seconds, way.rows_bandwidth, way.rows_bandwidth
        copied = float(hops[0].bytes.sum(1).max() + hops[-1].bytes.sum(0).max())
        return sum(self._hop(hop, *constants) for hop in hops) + copied / self.host_bandwidth

    def _hop(self, hop: Hop, fixed: float, message: float, link: float, net: float) -> float:
        """Return the seconds of the rank that has most to send or receive, within its host and to others at once."""
        host = torch.arange(len(hop.bytes)) // self.gpus
        is_near = host.unsqueeze(1) == host
        near, away = (max(float(some.sum(axis).max()) for axis in (0, 1)) for some in _divided(hop.bytes, is_near))
        messages = int(hop.messages.sum(1).max())
        return (fixed + message * messages + max(near / link, away / net)) * (messages > 0)


def _divided(values: torch.Tensor, chosen: torch.Tensor) -> Iterator[torch.Tensor]:
    yield values * chosen
    yield values * ~chosen


CLUSTER = Cluster()


class Workload(NamedTuple):
    """A rank's work in each step: 65,536 lookups by Zipf's law, Adam's state in the records, dense milliseconds."""

    rows: int = 4_000_000
    lookups: int = 65_536
    dim: int = 128
    columns: int = 3
    exponent: float = 1.05
    dense_seconds: float = 0.0


@functools.cache
def _asked(rows: int, ranks: int, lookups: int, exponent: float, per_host: int) -> Asked:
    owner = Owners(rows, ranks).of(torch.arange(rows))
    return expected_asked(owner, ranks, asked(rows, lookups, exponent), min(per_host, ranks))


def seconds(cluster: Cluster, protocol: Protocol, work: Workload, way: Way, ranks: int, *, ahead: bool) -> float:
    """Return the seconds of a step.

    Args:
        protocol: of a step whose ids do not fit into a round's messages.
        ranks: their number, a multiple of the GPUs of a host or less.
        ahead: True with lookahead: the next batch's ids go to the owners during the step, which gather its rows; they
            send the weights in the batch's turn.
    """
    load = expected_load(work.rows, ranks, work.lookups, work.exponent)
    swap = load.union * 4 * work.dim * work.columns / cluster.host_bandwidth
    alone = cluster.step_seconds + work.dense_seconds
    if ranks == 1:  # a single process has no protocol
        return max(alone + swap, swap) if ahead else alone + 2 * swap
    if ranks <= cluster.gpus:  # one host is flat, whatever it was given
        way = Way()
    hosts = Hosts(ranks, cluster.gpus, in_levels=way.in_levels, spreads=way.rows_bandwidth is None)
    every = _asked(work.rows, ranks, work.lookups, work.exponent, cluster.gpus)
    line_bytes = LINE_BYTES + _NUMBER_BYTES * min(2048 // ranks, 32 if hosts.in_levels else 2048)
    full = cluster.numbers(hosts.round(line_bytes))
    lean = full if hosts.in_levels else cluster.numbers(hosts.lean_round())

    def of(part: int) -> tuple[float, float]:
        """Return the seconds of rounds and ids, and of rows."""
        numbers, rows = (protocol.rounds[part] - protocol.lean[part]) * full + protocol.lean[part] * lean, 0.0
        for one in protocol.messages[part]:
            hops = hosts.hops(every, one.row_bytes * (work.dim if one.is_row else 1), to_owners=one.to_owners)
            if one.is_row:
                rows += cluster.rows(hops, way)
            else:
                numbers += cluster.numbers([*hops, *hosts.heads()])
        return numbers, rows

    (asking, weights), rest = of(0), swap + sum(of(1))
    if not ahead:
        return alone + swap + asking + weights + rest
    return max(alone + rest + _AHEAD * lean + weights, swap + asking)


def efficiency(
    cluster: Cluster, protocol: Protocol, work: Workload, way: Way, *, ahead: bool, ranks: Sequence[int] = RANKS
) -> dict[int, float]:
    """Return the speed of a rank over that of one process, by the number of ranks."""
    alone = seconds(cluster, protocol, work, way, 1, ahead=ahead)
    return {number: alone / seconds(cluster, protocol, work, way, number, ahead=ahead) for number in ranks}


def predictions(protocol: Protocol, plain: Workload, ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """Return what the model says of some numbers of GPUs.

    Args:
        protocol: of a step.
        plain: a rank's work, without dense work.
        ranks: numbers of GPUs.

    Returns:
        ``cluster``, ``workload``: the stated constants. ``curves``: for each ``way``, what is ``varied``, ``dense_ms``
        and ``lookahead``, the ``efficiency`` by number of ranks.
    """

    def curve(
        way: str, dense_ms: float, ahead: bool, varied: str = "", cluster: Cluster = CLUSTER, **more: Any
    ) -> dict[str, Any]:
        work = plain._replace(dense_seconds=dense_ms / 1000, **more)
        through = WAYS[way]
        if varied == _AS_HERE:
            through = through._replace(rows_bandwidth=_BANDWIDTH_HERE)
        found = efficiency(cluster, protocol, work, through, ahead=ahead, ranks=ranks)
        speeds = {str(number): speed for number, speed in found.items()}
        return {"way": way, "varied": varied, "dense_ms": dense_ms, "lookahead": ahead, "efficiency": speeds}

    curves = [curve(way, dense_ms, ahead) for dense_ms in (5, 20) for ahead in (False, True) for way in WAYS]
    for way in (_FLAT, _BUILT):
        for peer in (1e-6, 20e-6, 50e-6):
            cluster = replace(CLUSTER, round_peer_seconds=peer)
            curves.append(curve(way, 20, True, f"{1e6 * peer:g} µs a message", cluster))
    curves.append(curve(_STAGED, 20, True, _AS_HERE))
    curves += [
        curve(way, 20, True, name, exponent=exponent)
        for way in WAYS
        for name, exponent in (("uniform", 0.0), ("Zipf 1.3", 1.3))
    ]
    return {"cluster": asdict(CLUSTER), "workload": plain._asdict(), "curves": curves}
