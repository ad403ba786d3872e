"""The step benchmark: a training step's time, ours and torch's; over the table's size; beside compute; on own ids.

The model is an embedding alone. The same ids and the same gradient for all: a lookup of 65,536 ids with Zipf's
frequencies, 1.05, out of a million rows of 128; a gradient for the rows found; the optimizer's step.
docs/design/benchmarks.md says more.
"""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import speedswap
from speedswap import kernels
from speedswap.apps.bench import measure
from speedswap.apps.bench.measure import IdBatch, host_memory, in_ms, lacking, renumbered, steps_in_turn, zipf_batches
from speedswap.apps.errors import BenchmarkError, WrongResultError, named
from speedswap.apps.files import PARQUET, opened, parquet_opened
from speedswap.apps.options import WIDEST, one_of, whole
from speedswap.swapping.lookup import look_up

# ---- embeddings and their trainers, each the way its own users would write it ---------------------------------------

LEARNING_RATE = {"sgd": 0.05, "adagrad": 0.05, "adam": 1e-3}
OPTIMIZERS = tuple(LEARNING_RATE)
DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
SPARSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}


class Trainer(Protocol):
    """A table of rows with its optimizer."""

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
        """Train on each batch in turn, yielding after each; ``grad`` is the gradient of every lookup's rows."""

    def load(self, weights: Tensor) -> None:
        """Take these weights for the whole table, before the first step."""

    def weights(self) -> Tensor:
        """Copy the whole table's weights to the CPU."""

    def close(self) -> None:
        """Free the memory."""


class Ours:
    """:class:`speedswap.Embedding` with one of torch's optimizers.

    Args:
        num_rows, dim: of the table.
        optimizer: one of :data:`OPTIMIZERS`.
        device: of the computation.
        storage: of the table; host memory by default, however small the table is.
        fused: torch's fused implementation of the optimizer.
        ahead: prefetch the next batch's rows during a step.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        optimizer: str,
        device: str,
        *,
        storage: speedswap.tables.Storage | str | None = None,
        fused: bool = False,
        ahead: bool = False,
    ) -> None:
        init = speedswap.init.uniform(-0.1, 0.1)
        self.embedding = speedswap.Embedding(
            num_rows, dim, storage=storage or host_memory(device), init=init, seed=0, device=device
        )
        how = {"fused": True} if fused else {}
        self.optimizer = DENSE[optimizer](self.embedding.parameters(), lr=LEARNING_RATE[optimizer], **how)
        self._ahead = ahead
        speedswap.attach(self.optimizer, self.embedding)  # so that state gets its place before anything is written

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
        depth = 1 if self._ahead else 0
        for batch in speedswap.lookahead(batches, {self.embedding: lambda batch: batch.near}, depth=depth):
            self.embedding(batch.near).backward(grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def load(self, weights: Tensor) -> None:
        self.embedding.table.write(0, weights)

    def weights(self) -> Tensor:
        return self.embedding.table.read()

    def close(self) -> None:
        self.embedding.table.close()


class Torch:
    """``nn.Embedding`` in torch's memory: on the compute device, or on the host with the rows copied over.

    Args:
        sparse: sparse gradients, with the optimizer that takes them; else dense ones, which touch every row.
        home: the device of the table.
    """

    def __init__(self, num_rows: int, dim: int, optimizer: str, device: str, *, sparse: bool, home: str) -> None:
        weight = torch.empty(num_rows, dim, device=home).uniform_(-0.1, 0.1)
        self.embedding = nn.Embedding(num_rows, dim, sparse=sparse, _weight=weight)
        kind = (SPARSE if sparse else DENSE)[optimizer]
        self.optimizer = kind(list(self.embedding.parameters()), lr=LEARNING_RATE[optimizer])
        self._device = device
        self._home = home

    def steps(self, batches: Sequence[IdBatch], grad: Tensor) -> Iterator[None]:
        for batch in batches:
            ids = batch.near if self._home == self._device else batch.host
            self.embedding(ids).to(self._device).backward(grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def load(self, weights: Tensor) -> None:
        self.embedding.weight.data.copy_(weights)

    def weights(self) -> Tensor:
        return self.embedding.weight.detach().to("cpu", copy=True)

    def close(self) -> None:
        del self.embedding, self.optimizer


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: as it is reported.
        package: the library.
        make: makes the trainer: rows, width, optimizer, device.
        dense: every row takes part in every step, so that rows outside the batch drift, and has a gradient.
    """

    name: str
    package: str
    make: Callable[[int, int, str, str], Trainer]
    dense: bool = False


COLUMNS = {"sgd": 1, "adagrad": 2, "adam": 3}


def contestants(optimizer: str, device: str, *, dense: bool = True) -> Iterator[Contestant]:
    """Yield the trainers of this optimizer: ours first. Some torch releases lack a fused implementation of it.

    Args:
        optimizer: one of :data:`OPTIMIZERS`.
        device: of the computation.
        dense: whether torch's dense optimizer is one of them.
    """
    for ahead, fused in product((False, True), repeat=2):
        name = ", ".join(["speedswap", *(["fused"] if fused else []), *(["lookahead"] if ahead else [])])
        yield Contestant(name, "speedswap", partial(Ours, fused=fused, ahead=ahead))
    sparse = f"torch {SPARSE[optimizer].__name__}" + (", sparse" if optimizer != "adam" else "")
    on_gpu = "" if device == "cpu" else ", on the GPU"
    for home, where in {"cpu": "", device: on_gpu}.items():
        yield Contestant(sparse + where, "torch", partial(Torch, sparse=True, home=home))
    if dense:
        name = f"torch {DENSE[optimizer].__name__}, dense{on_gpu}"
        yield Contestant(name, "torch", partial(Torch, sparse=False, home=device), dense=True)


# ---- verification ---------------------------------------------------------------------------------------------------

VERIFIED_STEPS, VERIFIED_LOOKUPS = 3, 4096
_NUM_ROWS, _DIM = 5000, 32


def verify(optimizer: str, one: Contestant, device: str, batches: Sequence[IdBatch] | None = None) -> None:
    """Check that one trains a small table as torch's sparse optimizer does in double precision.

    The gradients are eighths, so that their sum over an id's lookups is the same in any order; only the update itself
    rounds, by little: ``rtol`` 1e-5, ``atol`` 1e-6 after three steps. torch's sparse SGD updates a row for each lookup,
    which adds up where a given id has thousands of them. A trainer that touches every row drifts apart
    from the second step on by definition, and takes one.

    Args:
        optimizer, one, device: whom to check.
        batches: ids to train on, of one number, from 0 on without large gaps; random ones by default.

    Raises:
        WrongResultError: names the trainer, and the first wrong row.
    """
    generator = torch.Generator().manual_seed(3)
    atol: float | Tensor = 1e-6
    if batches is not None:
        atol = 1e-6 + 1e-7 * torch.cat([batch.host for batch in batches]).bincount().unsqueeze(1)
    batches = batches or zipf_batches(_NUM_ROWS, VERIFIED_LOOKUPS, VERIFIED_STEPS, device, seed=5)
    rows = 1 + max(int(batch.host.max()) for batch in batches)
    weights = torch.rand(rows, _DIM, generator=generator) - 0.5
    grad = torch.randint(-16, 17, (len(batches[0].host), _DIM), generator=generator) / 8
    taken = batches[:1] if one.dense else batches
    expected = trained_by_torch(optimizer, weights, [batch.host for batch in taken], grad)
    trainer = one.make(rows, _DIM, optimizer, device)
    try:
        trainer.load(weights)
        deque(trainer.steps(taken, grad.to(device)), maxlen=0)
        found = trainer.weights()
    finally:
        trainer.close()
    require_alike(one.name, optimizer, found, expected, len(taken), atol=atol)


def require_alike(
    name: str, optimizer: str, found: Tensor, expected: Tensor, steps: int, *, atol: float | Tensor = 1e-6
) -> None:
    """Raise WrongResultError, which names the first wrong row, unless a trainer's rows are as expected.

    Args:
        name: of the trainer.
        optimizer: its own, for the message.
        found, expected: weights after the steps, shape (rows, dim), or (tables, rows, dim).
        steps: their number.
        atol: of weights, besides ``rtol`` 1e-5; one for all, or of a shape that fits theirs.
    """
    wrong = ~((found - expected).abs() <= atol + 1e-5 * expected.abs()).all(dim=-1)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        row = f"row {place[-1]}" + (f" of table {place[0]}" if len(place) > 1 else "")
        raise WrongResultError(
            f"{name} trains {int(wrong.sum())} rows of {wrong.numel()} wrongly with {optimizer}: {row} is "
            f"{found[place][:4].tolist()}… after {steps} steps, and should be {expected[place][:4].tolist()}…"
        )


def trained_by_torch(optimizer: str, weights: Tensor, ids: Sequence[Tensor], grad: Tensor) -> Tensor:
    """Return weights after a step of torch's sparse optimizer per batch of ids, in double precision."""
    embedding = nn.Embedding(weights.shape[0], weights.shape[1], sparse=True, _weight=weights.double())
    stepping = SPARSE[optimizer](list(embedding.parameters()), lr=LEARNING_RATE[optimizer])
    for batch in ids:
        embedding(batch).backward(grad.double())
        stepping.step()
        stepping.zero_grad()
    return embedding.weight.detach().float()


# ---- the measurement ----------------------------------------------------------------------------------------------

_LOOPS = 8  # loops with different ids
_DENSE_STEPS = 4
_OVERLAPPED_STEPS = 12


@dataclass(frozen=True)
class StepPlan:
    """The sizes of the measurement.

    Attributes:
        num_rows, dim, lookups: of the comparison.
        steps: in a timed loop.
        repeats: timed loops.
        sizes: by width, the rows of the tables that are compared with the first of them.
        size_optimizers: the optimizers of those.
        compute: for the overlap: work during the swap, over the swap's own time.
    """

    num_rows: int
    dim: int
    lookups: int
    steps: int
    repeats: int
    sizes: Mapping[int, Sequence[int]]
    size_optimizers: Sequence[str]
    compute: Sequence[float]

    @classmethod
    def of(cls, device: str, quick: bool) -> StepPlan:
        if quick:
            return cls(100_000, 64, 8192, 6, 3, {64: (100_000, 200_000)}, ("sgd",), (1.0,))
        sizes = {128: (10**6, 10**7), 16: (10**6, 10**7, 10**8)}
        steps, repeats = (8, 9) if device == "cpu" else (16, 5)
        return cls(10**6, 128, 65_536, steps, repeats, sizes, OPTIMIZERS, (1.0, 2.0, 4.0))


def run(
    device: str,
    *,
    quick: bool = False,
    plan: StepPlan | None = None,
    others: Callable[[str], Iterable[Contestant]] = lambda optimizer: (),
) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        quick: small sizes, in seconds.
        plan: other sizes.
        others: returns further contestants for an optimizer.

    Returns:
        The figures, as JSON can hold them: ``workload``, ``optimizers``, ``overlap`` and ``sizes``.

    Raises:
        BenchmarkError: this machine cannot measure it.
        WrongResultError: a trainer's result differs from torch's.
    """
    plan = plan or StepPlan.of(device, quick)
    if missing := lacking(4 * plan.num_rows * plan.dim):
        raise BenchmarkError(f"{missing}; use --quick")
    batches = zipf_batches(plan.num_rows, plan.lookups, _LOOPS * plan.steps, device)
    workload = {"rows": plan.num_rows, "dim": plan.dim, "lookups": plan.lookups, "zipf_exponent": 1.05}
    optimizers = {}
    for optimizer in OPTIMIZERS:
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]  # torch warns unless told
            optimizers[optimizer] = compare(optimizer, device, plan, batches, others=others(optimizer))
        show_steps(optimizer, optimizers[optimizer])
    distinct = measure.random_batches(plan.num_rows, plan.lookups // 2, plan.dim * 4, device)
    with closing(Ours(plan.num_rows, plan.dim, "adam", device, fused=device == "cpu")) as trainer:
        overlap = overlapped(trainer, distinct, plan.compute)
    show_overlap(overlap)
    sizes = []
    for dim, rows in plan.sizes.items():
        for optimizer in plan.size_optimizers:
            sizes.append(over_sizes(optimizer, dim, rows, device, plan))
            show_sizes(sizes[-1])
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "workload": {**workload, "unique_rows": _unique_rows(batches)},
        "optimizers": optimizers,
        "overlap": overlap,
        "sizes": sizes,
    }


def compare(
    optimizer: str,
    device: str,
    plan: StepPlan,
    batches: Sequence[IdBatch],
    sample: Sequence[IdBatch] | None = None,
    *,
    others: Iterable[Contestant] = (),
) -> dict[str, Any]:
    """Compare the trainers of one optimizer: each is verified, then all are timed in turn.

    Args:
        optimizer, device, plan, batches: of the steps.
        sample: batches of a user's ids to verify with; torch's dense optimizer is compared too then.
        others: further contestants.

    Returns:
        ``trainers``: by name the ``package`` and median ``seconds`` of a step, or why it was ``skipped``;
        ``time_over``: the time of each of ours over that of each peer, below 1 where ours is faster.
    """
    everyone = [*contestants(optimizer, device, dense=optimizer == "adam" or sample is not None), *others]
    grad = torch.randn(plan.lookups, plan.dim, device=device)
    trainers: dict[str, dict[str, Any]] = {one.name: {"package": one.package} for one in everyone}
    # A dense step takes tens of times as long: a few of them tell as much.
    loops: dict[bool, dict[str, Callable[[int], Iterator[None]]]] = {False: {}, True: {}}
    with ExitStack() as stack:
        for one in everyone:
            try:
                verify(optimizer, one, device, sample)
            except WrongResultError:
                raise
            except Exception as error:
                if one.name == "speedswap":
                    raise
                trainers[one.name]["skipped"] = f"failed: {type(error).__name__}: {error}"
                continue
            if missing := lacking(4 * (COLUMNS[optimizer] + one.dense) * plan.num_rows * plan.dim):
                trainers[one.name]["skipped"] = missing
                continue
            trainer = one.make(plan.num_rows, plan.dim, optimizer, device)
            stack.callback(trainer.close)
            steps = _DENSE_STEPS if one.dense else plan.steps
            loops[one.dense][one.name] = _loop(trainer, batches, steps, grad)
        seconds = steps_in_turn(loops[False], steps=plan.steps, repeats=plan.repeats)
        seconds |= steps_in_turn(loops[True], steps=_DENSE_STEPS, repeats=min(3, plan.repeats))
    for name, took in seconds.items():
        trainers[name]["seconds"] = took
    mine = [name for name in seconds if trainers[name]["package"] == "speedswap"]
    time_over = {name: {peer: seconds[name] / seconds[peer] for peer in seconds if peer not in mine} for name in mine}
    return {"trainers": trainers, "time_over": time_over}


def over_sizes(optimizer: str, dim: int, sizes: Sequence[int], device: str, plan: StepPlan) -> dict[str, Any]:
    """Time our plain step on tables of different sizes in turn: its time should not depend on the table.

    Returns:
        ``tables``: the ``rows`` of each with the ``seconds`` per step, ``unique_rows`` per batch (a larger table has
        more under the same law) and ``table_bytes``, or why it was ``skipped``.
    """
    grad = torch.randn(plan.lookups, dim, device=device)
    tables: list[dict[str, Any]] = []
    loops = {}
    with ExitStack() as stack:
        for num_rows in sizes:
            tables.append({"rows": num_rows})
            if missing := lacking(4 * COLUMNS[optimizer] * num_rows * dim):
                tables[-1]["skipped"] = missing
                continue
            trainer = Ours(num_rows, dim, optimizer, device)
            stack.callback(trainer.close)
            batches = zipf_batches(num_rows, plan.lookups, _LOOPS * plan.steps, device)
            tables[-1] |= {"unique_rows": _unique_rows(batches), "table_bytes": trainer.embedding.table.nbytes}
            loops[num_rows] = _loop(trainer, batches, plan.steps, grad)
        seconds = steps_in_turn(loops, steps=plan.steps, repeats=plan.repeats)
    timed = [{**entry, "seconds": seconds[entry["rows"]]} if entry["rows"] in seconds else entry for entry in tables]
    return {"optimizer": optimizer, "dim": dim, "tables": timed}


def show_steps(optimizer: str, found: Mapping[str, Any]) -> None:
    """Print a line per trainer, and ours over each peer."""
    print(f"\nA step with {optimizer}:")
    for name, entry in found["trainers"].items():
        said = in_ms(entry["seconds"]) if "seconds" in entry else f"left out, {entry['skipped']}"
        over = found["time_over"].get(name, {}).items()
        print(f"  {name:<28} {said}  " + ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in over), flush=True)


def show_sizes(found: Mapping[str, Any]) -> None:
    """Print a line per size of table."""
    print(f"\nA step with {found['optimizer']}, {found['dim']} wide, by the rows of the table:")
    for entry in found["tables"]:
        if "skipped" in entry:
            print(f"  {entry['rows']:>12,}  left out, {entry['skipped']}")
        else:
            size = f"{entry['table_bytes'] / 2**30:.2f} GiB, {entry['unique_rows']:,} unique rows per batch"
            print(f"  {entry['rows']:>12,} {in_ms(entry['seconds'])}  {size}", flush=True)


def _loop(trainer: Trainer, batches: Sequence[IdBatch], steps: int, grad: Tensor) -> Callable[[int], Iterator[None]]:
    """Make training loops of ``steps`` steps, each with the next ids."""

    def loop(repeat: int) -> Iterator[None]:
        first = repeat * steps % (len(batches) - steps + 1)
        return trainer.steps(batches[first : first + steps], grad)

    return loop


def _unique_rows(batches: Sequence[IdBatch]) -> int:
    return round(sum(len(kernels.unique(batch.host)[0]) for batch in batches[:4]) / len(batches[:4]))


# ---- the share of the swap that lookahead hides behind compute -------------------------------------------------------


def overlapped(
    trainer: Ours, batches: Sequence[IdBatch], compute: Sequence[float], *, repeats: int = 5
) -> list[dict[str, Any]]:
    """Time a step with Adam and a tunable amount of compute, plain and with lookahead.

    On the CPU torch computes on one thread and the swap runs on another, which has another core.

    Args:
        trainer: the table with Adam.
        batches: distinct rows of each step; no two steps in a row have one in common.
        compute: the step's compute over the swap's time, one measurement each. The lookup, its gradient and the
            optimizer belong to the compute; products of matrices make up the rest.
        repeats: timed loops of each.

    Returns:
        For each: ``compute_asked_for`` over the swap, ``matmuls`` a step; the seconds of a step ``compute`` alone
        (the same work on rows that stay on the device), ``swap`` alone (unique, gather, scatter), ``plain`` and
        ``lookahead``; ``lookahead_over_larger``: over the larger of compute and swap.
    """
    found = []
    threads, (ids, near) = torch.get_num_threads(), batches[0]
    if not near.is_cuda:
        torch.set_num_threads(1)
    try:
        work = _Work(torch.randn(len(ids), trainer.embedding.embedding_dim, device=near.device))
        loops = _overlap_loops(trainer, batches, work)
        measure.synchronize()
        swap, least = (
            steps_in_turn({one: loops[one]}, steps=_OVERLAPPED_STEPS, repeats=1)[one] for one in ("swap", "compute")
        )
        one = work.time_matmul()
        for asked in compute:
            work.matmuls = max(0, round((asked * swap - least) / one))
            seconds = steps_in_turn(loops, steps=_OVERLAPPED_STEPS, repeats=repeats)
            larger = max(seconds["compute"], seconds["swap"])
            found.append(
                {
                    "compute_asked_for": asked,
                    "matmuls": work.matmuls,
                    "threads": torch.get_num_threads(),
                    "seconds": seconds,
                    "plain_over_larger": seconds["plain"] / larger,
                    "lookahead_over_larger": seconds["lookahead"] / larger,
                }
            )
    finally:
        torch.set_num_threads(threads)
    return found


class _Work:
    """The compute of a step besides the embedding's own: products of square matrices; and the gradient of its rows."""

    def __init__(self, grad: Tensor) -> None:
        size = 2048 if grad.is_cuda else 256
        self.matmuls = 0
        self.grad = grad
        self._matrix = torch.randn(size, size, device=grad.device) / size**0.5
        self._product = torch.empty_like(self._matrix)

    def do(self) -> None:
        for _ in range(self.matmuls):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def time_matmul(self) -> float:
        self.matmuls = 20
        return measure.in_turn({"matmuls": lambda _: self.do()}, repeats=1, warm_up=0)["matmuls"] / self.matmuls


def _overlap_loops(
    trainer: Ours, batches: Sequence[IdBatch], work: _Work
) -> dict[str, Callable[[int], Iterator[None]]]:
    rest = itertools.cycle(batches)

    def taken() -> Iterator[IdBatch]:  # none that another loop has just brought into a cache
        return islice(rest, _OVERLAPPED_STEPS)

    def train(depth: int) -> Iterator[None]:
        prefetched = speedswap.lookahead([*taken()], {trainer.embedding: lambda batch: batch.near}, depth=depth)
        for batch in prefetched:
            rows = trainer.embedding(batch.near)
            work.do()
            rows.backward(work.grad)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            yield

    def swap() -> Iterator[None]:
        table = trainer.embedding.table
        for batch in taken():
            rows, _ = kernels.unique(batch.near)
            block = table.lease(rows, device=batch.near.device)
            table.give_back(block, block.columns)
            yield

    def compute() -> Iterator[None]:
        """Run the steps of a batch whose rows stay on the device."""
        rows, local = kernels.unique(batches[0].near)
        weight = nn.Parameter(trainer.embedding.table.gather(rows, columns=["weight"], device=local.device).weight)
        optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE["adam"], fused=not weight.is_cuda)
        for _ in range(_OVERLAPPED_STEPS):
            found = look_up(weight, local)
            work.do()
            found.backward(work.grad)  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            yield

    return {
        "swap": lambda repeat: swap(),
        "compute": lambda repeat: compute(),
        "plain": lambda repeat: train(0),
        "lookahead": lambda repeat: train(1),
    }


def show_overlap(found: list[dict[str, Any]]) -> None:
    """Print a line per amount of compute."""
    if found:
        print("\nCompute and swap alone, and a step with both:")
        print(f"  {'compute':>11} {'swap':>11} {'plain':>11} {'lookahead':>11}   over the larger of the two")
    for entry in found:
        cells = " ".join(in_ms(entry["seconds"][name]) for name in ("compute", "swap", "plain", "lookahead"))
        over = f"{entry['plain_over_larger']:.2f} plain, {entry['lookahead_over_larger']:.2f} with lookahead"
        print(f"  {cells}   {over}", flush=True)


# ---- a step on a user's own ids, read from a file --------------------------------------------------------------------

_MOST_IDS = 1 << 23
_OWN_STEPS, _OWN_LOOPS = 8, 5
_NPY = b"\x93NUMPY"


def run_mine(device: str, path: Path, *, column: str | None, dim: int, optimizer: str, batch: int) -> dict[str, Any]:
    """Run the benchmark on ids of a file; print its figures, and how many times faster a step is with speedswap.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        path: the file of ids, as for :func:`read_ids`.
        column: the column of a Parquet file.
        dim: numbers in a row.
        optimizer: sgd, adagrad or adam.
        batch: ids in a step.

    Returns:
        The figures, as JSON can hold them: ``workload``, ``trainers``, and ``times_faster`` than the ``fastest``
        of torch's.

    Raises:
        BenchmarkError: the ids cannot be read or looked up, or the table does not fit.
        SettingsError: a number is out of range, or the optimizer is another one.
        WrongResultError: a trainer's result differs from torch's.
    """
    whole(1, WIDEST)(named("dim"), dim)
    whole(1, 2**31)(named("batch"), batch)
    one_of([*COLUMNS])(named("optimizer"), optimizer)
    ids = read_ids(path, column)
    batch = min(batch, len(ids))
    row_bytes, rows = 4 * COLUMNS[optimizer] * dim, int(ids.max()) + 1
    if lacking(rows * row_bytes):
        unique, ids = torch.unique(ids, return_inverse=True)
        print(f"ids up to {rows - 1:,} are numbered from 0 to {len(unique) - 1:,}; in training speedswap.IdMap does so")
        rows = len(unique)
    if missing := lacking(rows * row_bytes):
        raise BenchmarkError(f"a table of {rows:,} rows does not fit: {missing}; give a smaller {named('dim')}")
    print(f"{len(ids):,} ids, steps of {batch:,} in {rows:,} rows of {dim}", flush=True)
    hosts = ids[: len(ids) // batch * batch].view(-1, batch)
    batches = [IdBatch(host, host.to(device)) for host in hosts]
    batches *= -(-_OWN_STEPS // len(batches))
    plan = StepPlan(rows, dim, batch, _OWN_STEPS, _OWN_LOOPS, {}, (), ())
    sample = renumbered(batches[:VERIFIED_STEPS], VERIFIED_LOOKUPS)
    found = compare(optimizer, device, plan, batches, sample)
    show_steps(optimizer, found)
    seconds = {name: one["seconds"] for name, one in found["trainers"].items() if "seconds" in one}
    fastest = min((name for name in seconds if name.startswith("torch")), key=seconds.__getitem__)
    times = seconds[fastest] / seconds["speedswap"]
    said = f"{times:.1f}×" if times >= 1 else f"{times:.2f}×, which is slower: torch's nn.Embedding suits them better"
    print(f"\nCompared with {fastest}, the fastest of plain torch:\non your machine, your ids: {said}")
    workload = {"rows": rows, "dim": dim, "lookups": batch, "optimizer": optimizer, "ids": len(ids)}
    return {"device": device, "workload": workload, **found, "fastest": fastest, "times_faster": times}


def read_ids(path: Path, column: str | None = None) -> Tensor:
    """Return the first 8,388,608 ids of a file, int64, in their order.

    Args:
        path: .npy with whole numbers of any shape; Parquet; or text, plain or gzip, with whole numbers separated by
            white space or commas.
        column: of a Parquet file; by default the only one with whole numbers.

    Raises:
        BenchmarkError: the file cannot be read, has no ids, or one of them is not a whole number of 0 or more.
    """
    with opened(path, "the file of ids", BenchmarkError) as file:
        kind = file.peek(len(_NPY))[: len(_NPY)]
        if column is not None and not kind.startswith(PARQUET):
            raise BenchmarkError(f"{named('column')} is {column!r}, but {path} is not Parquet: leave it out")
        try:
            if kind == _NPY:
                values = _of_array(path)
            elif kind.startswith(PARQUET):
                values = _of_parquet(path, column)
            else:
                text = io.TextIOWrapper(file, "utf-8-sig")
                words = (word for line in text for word in line.replace(",", " ").split())
                values = np.fromiter(map(int, islice(words, _MOST_IDS)), np.int64)
        except BenchmarkError:
            raise
        except (ValueError, OverflowError) as error:  # also NumPy's and pyarrow's
            remedy = "give whole numbers of 64 bits without a heading; speedswap.IdMap makes rows of any keys"
            raise BenchmarkError(f"the file of ids {path} cannot be used ({error}): {remedy}") from error
    if not len(values):
        raise BenchmarkError(f"{path} has no ids: give a file with whole numbers")
    if (wrong := values < 0).any():
        first = int(wrong.argmax())
        raise BenchmarkError(f"id {first:,} of {path} is {values[first]}: leave out ids below 0, which no table has")
    return torch.from_numpy(values)


def _of_array(path: Path) -> npt.NDArray[np.int64]:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    if not np.issubdtype(values.dtype, np.integer):
        raise BenchmarkError(f"{path} holds {values.dtype}: give whole numbers")
    return np.array(values.reshape(-1)[:_MOST_IDS], np.int64)


def _of_parquet(path: Path, column: str | None) -> npt.NDArray[np.int64]:
    pieces, count = [np.empty(0, np.int64)], 0
    with parquet_opened(path, "the file of ids", BenchmarkError) as file:
        from pyarrow import types

        names = [each.name for each in file.schema_arrow if types.is_integer(each.type)]
        wanted = column if column is not None or len(names) != 1 else names[0]
        if wanted not in names:
            among = f"one of {', '.join(names)}" if names else "another file: it has no column of whole numbers"
            raise BenchmarkError(f"{named('column')} of {path} is {column!r}: give {among}")
        for batch in file.iter_batches(columns=[wanted]):
            pieces.append(batch.column(0).drop_null().to_numpy().astype(np.int64))
            count += len(pieces[-1])
            if count >= _MOST_IDS:
                break
    return np.concatenate(pieces)[:_MOST_IDS]
