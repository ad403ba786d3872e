"""The step benchmark: the time of a training step, ours beside torch's and FBGEMM's, and over the size of the table.

The same ids and the same gradient for all: a lookup of 65,536 ids with Zipf's frequencies, 1.05, out of a million rows
of 128; a gradient for the rows found; the optimizer's step. docs/design/benchmarks.md says more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.apps.bench import swap
from speedswap.apps.bench.measure import Peer, in_ms, show_peers, steps_in_turn
from speedswap.apps.bench.trainers import COLUMNS, OPTIMIZERS, Ours, Trainer, contestants, step_peers, verify
from speedswap.apps.bench.workload import Batch, zipf_batches
from speedswap.apps.errors import BenchmarkError, WrongResultError
from speedswap.tables.memory import available_bytes

__all__ = ["Plan", "run"]

_SHARE_OF_MEMORY = 0.85
_ITEM_BYTES = 4  # float32
_LOOPS = 8  # as many loops as have ids of their own


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        num_rows, dim, lookups: of the comparison.
        steps: in a timed loop.
        repeats: timed loops.
        sizes: by width, the rows of the tables that are compared with the first of them.
        size_optimizers: the optimizers of those.
        compute: for the overlap: work beside the swap, over the swap's own time.
        seconds: after which no further table is begun.
    """

    num_rows: int
    dim: int
    lookups: int
    steps: int
    repeats: int
    sizes: Mapping[int, Sequence[int]]
    size_optimizers: Sequence[str]
    compute: Sequence[float]
    seconds: float

    @classmethod
    def of(cls, device: str, quick: bool) -> Plan:
        if quick:
            return cls(100_000, 64, 8192, 6, 3, {64: (100_000, 200_000)}, ("sgd",), (1.0,), 12.0)
        sizes = {128: (10**6, 10**7), 16: (10**6, 10**7, 10**8)}
        if device == "cpu":
            return cls(10**6, 128, 65_536, 8, 9, sizes, OPTIMIZERS, (1.0, 2.0, 4.0), 190.0)
        return cls(10**6, 128, 65_536, 16, 5, sizes, ("sgd", "adam"), (1.0, 2.0, 4.0), 35.0)


def run(
    device: str,
    *,
    quick: bool = False,
    compute: Sequence[float] | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        quick: small sizes, in seconds.
        compute: for the overlap: work beside the swap, over the swap's own time.
        plan: other sizes.

    Returns:
        The figures, as JSON can hold them: ``peers``, ``workload``, ``optimizers``, ``overlap`` and ``sizes``.

    Raises:
        BenchmarkError: this machine cannot measure it.
        WrongResultError: a trainer's result differs from torch's.
    """
    plan = plan or Plan.of(device, quick)
    need = 4 * plan.num_rows * plan.dim * _ITEM_BYTES
    if not _fits(need):
        raise BenchmarkError(f"{need / 2**30:.1f} GiB of memory are needed, which are not free; use --quick")
    deadline = time.monotonic() + plan.seconds
    peers = step_peers(device)
    show_peers(peers)
    batches = zipf_batches(plan.num_rows, plan.lookups, _LOOPS * plan.steps, device)
    found: dict[str, Any] = {
        "device": device,
        "threads": torch.get_num_threads(),
        "peers": {name: peer._asdict() for name, peer in peers.items()},
        "workload": {
            "rows": plan.num_rows,
            "dim": plan.dim,
            "lookups": plan.lookups,
            "zipf_exponent": 1.05,
            "unique_rows": _unique_rows(batches),
        },
        "optimizers": {},
        "sizes": [],
    }
    for optimizer in OPTIMIZERS:
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]  # torch warns unless told
            found["optimizers"][optimizer] = compare(optimizer, device, plan, peers, batches)
        show_steps(optimizer, found["optimizers"][optimizer])
    found["overlap"] = swap.overlap(device, plan.num_rows, plan.dim, plan.lookups // 2, compute or plan.compute)
    swap.show(found["overlap"])
    for dim, sizes in plan.sizes.items():
        for optimizer in plan.size_optimizers:
            found["sizes"].append(over_sizes(optimizer, dim, sizes, device, plan, deadline))
            show_sizes(found["sizes"][-1])
    return found


def compare(
    optimizer: str, device: str, plan: Plan, peers: Mapping[str, Peer], batches: Sequence[Batch]
) -> dict[str, Any]:
    """Compare the trainers of one optimizer: each is verified, then all are timed in turn.

    Returns:
        ``trainers``: by name the ``package`` and median ``seconds`` of a step, or why it was ``skipped``;
        ``time_over``: the time of each of ours over that of each peer, below 1 where ours is faster; ``parts``: the
        time of our plain step by part.
    """
    everyone = [one for one in contestants(optimizer, device) if one.package not in peers or peers[one.package].present]
    grad = torch.randn(plan.lookups, plan.dim, device=device)
    trainers: dict[str, dict[str, Any]] = {one.name: {"package": one.package} for one in everyone}
    lazy: dict[str, Trainer] = {}
    dense: dict[str, Trainer] = {}
    with ExitStack() as stack:
        for one in everyone:
            try:
                verify(optimizer, one, device)
            except WrongResultError:
                raise
            except Exception as error:
                if one.name == "speedswap":
                    raise
                trainers[one.name]["skipped"] = f"failed: {type(error).__name__}: {error}"
                continue
            need = int(one.bytes_factor * plan.num_rows * plan.dim * _ITEM_BYTES)
            if not _fits(need):
                trainers[one.name]["skipped"] = f"{need / 2**30:.1f} GiB of memory are not free"
                continue
            trainer = one.make(plan.num_rows, plan.dim, optimizer, device)
            stack.callback(trainer.close)
            (dense if one.dense else lazy)[one.name] = trainer
        loops = {name: _loop(trainer, batches, plan.steps, grad) for name, trainer in lazy.items()}
        seconds = steps_in_turn(loops, steps=plan.steps, repeats=plan.repeats)
        # A dense step takes tens of times as long: a few of them tell as much.
        loops = {name: _loop(trainer, batches, 4, grad) for name, trainer in dense.items()}
        seconds |= steps_in_turn(loops, steps=4, repeats=min(3, plan.repeats))
        plain = lazy["speedswap"]
        assert isinstance(plain, Ours)
        spent = swap.time_parts(plain, batches[: plan.steps], grad)
    for name, took in seconds.items():
        trainers[name]["seconds"] = took
    time_over = {
        name: {peer: took / seconds[peer] for peer in seconds if trainers[peer]["package"] != "speedswap"}
        for name, took in seconds.items()
        if trainers[name]["package"] == "speedswap"
    }
    return {"trainers": trainers, "time_over": time_over, "parts": spent}


def over_sizes(
    optimizer: str, dim: int, sizes: Sequence[int], device: str, plan: Plan, deadline: float
) -> dict[str, Any]:
    """Time our plain step on tables of different sizes in turn: its time should not depend on the table.

    Returns:
        ``tables``: the ``rows`` of each with its ``seconds`` a step, ``unique_rows`` a batch (a larger table has more
        under the same law) and ``table_bytes``, or why it was ``skipped``; ``largest_over_first``, and the same for
        each unique row.
    """
    grad = torch.randn(plan.lookups, dim, device=device)
    tables: list[dict[str, Any]] = []
    loops = {}
    with ExitStack() as stack:
        for num_rows in sizes:
            entry: dict[str, Any] = {"rows": num_rows}
            tables.append(entry)
            need = COLUMNS[optimizer] * num_rows * dim * _ITEM_BYTES
            if not _fits(need):
                entry["skipped"] = f"{need / 2**30:.1f} GiB of memory are not free"
            elif time.monotonic() > deadline:
                entry["skipped"] = f"the {plan.seconds:.0f} seconds for this benchmark are over"
            else:
                trainer = Ours(num_rows, dim, optimizer, device)
                stack.callback(trainer.close)
                batches = zipf_batches(num_rows, plan.lookups, _LOOPS * plan.steps, device)
                entry |= {"unique_rows": _unique_rows(batches), "table_bytes": trainer.embedding.table.nbytes}
                loops[num_rows] = _loop(trainer, batches, plan.steps, grad)
        seconds = steps_in_turn(loops, steps=plan.steps, repeats=plan.repeats)
    for entry in tables:
        if entry["rows"] in seconds:
            entry["seconds"] = seconds[entry["rows"]]
    result: dict[str, Any] = {"optimizer": optimizer, "dim": dim, "tables": tables}
    timed = [entry for entry in tables if "seconds" in entry]
    if len(timed) > 1:
        first, last = timed[0], timed[-1]
        result["largest_over_first"] = last["seconds"] / first["seconds"]
        more = last["unique_rows"] / first["unique_rows"]
        result["largest_over_first_for_each_unique_row"] = result["largest_over_first"] / more
    return result


def show_steps(optimizer: str, found: Mapping[str, Any]) -> None:
    """Print a line per trainer, ours over each peer, and the parts of ours."""
    print(f"\nA step with {optimizer}:")
    for name, entry in found["trainers"].items():
        said = in_ms(entry["seconds"]) if "seconds" in entry else f"left out, {entry['skipped']}"
        over = found["time_over"].get(name, {})
        print(f"  {name:<28} {said}  " + ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in over.items()))
    print("  parts: " + ", ".join(f"{name} {1000 * took:.2f} ms" for name, took in found["parts"].items()), flush=True)


def show_sizes(found: Mapping[str, Any]) -> None:
    """Print a line per size of table."""
    print(f"\nA step with {found['optimizer']}, {found['dim']} wide, by the rows of the table:")
    for entry in found["tables"]:
        if "skipped" in entry:
            print(f"  {entry['rows']:>12,}  left out, {entry['skipped']}")
        else:
            size = f"{entry['table_bytes'] / 2**30:.2f} GiB, {entry['unique_rows']:,} unique rows per batch"
            print(f"  {entry['rows']:>12,} {in_ms(entry['seconds'])}  {size}")
    if "largest_over_first" in found:
        each = found["largest_over_first_for_each_unique_row"]
        print(
            f"  the largest over the first: {found['largest_over_first']:.2f}; {each:.2f} for each unique row",
            flush=True,
        )


def _loop(trainer: Trainer, batches: Sequence[Batch], steps: int, grad: Tensor) -> Callable[[int], Iterator[None]]:
    """Make training loops of ``steps`` steps, each with the next ids."""

    def loop(repeat: int) -> Iterator[None]:
        first = repeat * steps % (len(batches) - steps + 1)
        return trainer.steps(batches[first : first + steps], grad)

    return loop


def _unique_rows(batches: Sequence[Batch]) -> int:
    return round(sum(len(kernels.unique(batch.host)[0]) for batch in batches[:4]) / len(batches[:4]))


def _fits(nbytes: int) -> bool:
    return nbytes <= _SHARE_OF_MEMORY * available_bytes()
