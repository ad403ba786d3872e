"""Figures: of memory at one moment and by phase, of a model's parameters and tables, and of caches of hot rows."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedswap._machine import physical_bytes, resident_bytes
from speedswap._words import pip_install, require_kind
from speedswap.batching.memory import LimitedMemory, free_bytes
from speedswap.batching.nested import tensors_of
from speedswap.batching.rollback import has_memory
from speedswap.kernels import HotCounts
from speedswap.monitor.codes import Level, WarningPolicy, as_policy
from speedswap.tables import Table

# ---- memory ----------------------------------------------------------------------------------------------------------

# A leak is suspected after this many consecutive phases of one name that each left more memory in use.
GROWING_PHASES = 5
# Share of the reserved memory in unused pieces from which on a warning is given.
INACTIVE_SHARE = 0.25


@dataclass(frozen=True)
class MemorySnapshot:
    """A device's memory at one moment, in bytes; None where it is unknown.

    Attributes:
        device: the device.
        source: ``"allocator"``: torch's allocator of the device, which counts tensors only; ``"process"``: the
            operating system, which counts all memory of the process.
        allocated: in use: live blocks of the allocator, or the process's resident memory.
        reserved: held by the allocator, in use or not.
        inactive: unused pieces of blocks that are partly in use (``inactive_split_bytes``): they cannot be returned to
            the driver, and serve only requests that fit into them.
        active: blocks in use or awaited by a stream.
        peak: the most that was allocated.
        free: bytes that could still be allocated.
        total: all of the device's.
        retries: how often the allocator released its cache and tried again.
        ooms: how often it ran out of memory.
    """

    device: str
    source: str
    allocated: int
    reserved: int | None = None
    inactive: int | None = None
    active: int | None = None
    peak: int | None = None
    free: int | None = None
    total: int | None = None
    retries: int | None = None
    ooms: int | None = None


def memory_snapshot(device: torch.device | str | int | None = None, *, synchronize: bool = True) -> MemorySnapshot:
    """Take a snapshot of a device's memory.

    Args:
        device: the device; by default the current CUDA device, or the CPU without CUDA.
        synchronize: wait for the device's queued work first.

    Returns:
        The snapshot: on CUDA from the allocator, elsewhere from the operating system, as far as it reports.

    >>> memory_snapshot("cpu").source
    'process'
    """
    where = default_device() if device is None else torch.device(device)
    if where.type == "cuda":
        return _of_cuda(where, synchronize)
    allocated, peak = resident_bytes()
    return MemorySnapshot(str(where), "process", allocated, peak=peak, free=free_bytes("cpu"), total=physical_bytes())


def default_device() -> torch.device:
    """Return the current CUDA device, or the CPU without CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _of_cuda(device: torch.device, synchronize: bool) -> MemorySnapshot:
    if synchronize:
        torch.cuda.synchronize(device)
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return MemorySnapshot(
        str(device),
        "allocator",
        allocated,
        reserved,
        inactive=stats.get("inactive_split_bytes.all.current", 0),
        active=stats.get("active_bytes.all.current", 0),
        peak=torch.cuda.max_memory_allocated(device),
        free=free + reserved - allocated,
        total=total,
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of one phase, in bytes.

    Attributes:
        name: the phase.
        source: ``"allocator"``: as torch's allocator of the device reports; ``"tensors"``: the tensors that operations
            touched.
        before: in use at the start.
        after: in use at the end.
        peak: the most in between.
        parameters: the model's parameters and buffers, at the end.
        gradients: at the end.
        optimizer: of its state, at the end.
        activations: the peak beyond these at the start, at the end, or at the peak: activations, temporaries, the
            batch. Memory that became gradients or state during the phase, or was before, does not count.
        inactive: unused pieces of blocks in use, at the end; None where the source does not report it.
        retries: how often the allocator released its cache and tried again during the phase; None likewise.
    """

    name: str
    source: str
    before: int
    after: int
    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    inactive: int | None = None
    retries: int | None = None


class MemoryMonitor:
    """A monitor of the memory of training's phases.

    On CUDA it reads torch's allocator, whose peak it resets at the start of each phase. Elsewhere no allocator reports
    a peak, so it watches the tensors of every operation inside a phase, which costs some microseconds per operation.

    Args:
        model: the model, whose parameters and gradients are listed separately.
        optimizer: the optimizer, whose state is listed separately.
        device: the device; by default that of the model's first parameter.
        warn: a level or a :class:`speedswap.monitor.WarningPolicy`.

    Attributes:
        phases: the measured phases, in order.

    >>> model = nn.Linear(64, 64, bias=False)
    >>> memory = MemoryMonitor(model, device="cpu")
    >>> with memory.phase("forward"):
    ...     loss = model(torch.ones(32, 64)).square().mean()
    >>> with memory.phase("backward"):
    ...     loss.backward()
    >>> [(phase.name, phase.parameters, phase.gradients) for phase in memory.phases]
    [('forward', 16384, 0), ('backward', 16384, 16384)]
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device | str | None = None,
        warn: Level | WarningPolicy = "user",
    ) -> None:
        if model is not None:
            require_kind("model", model, nn.Module, "a torch.nn.Module, or None")
        self.model, self.optimizer = model, optimizer
        parameter = None if model is None else next(model.parameters(), None)
        if device is None:
            device = default_device() if parameter is None else parameter.device
        self.device = torch.device(device)
        self.policy = as_policy(warn)
        self.phases: list[PhaseMemory] = []
        self._tensors = None if self.device.type == "cuda" else _LiveTensors(self.device)
        self._growth: defaultdict[str, list[int]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, even if it fails."""
        known_before, begin = self._known(), self._snapshot()
        if self._tensors is None:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._tensors.reset_peak()
        try:
            with self._tensors or nullcontext():
                yield
        finally:
            self._add(name, known_before, begin)

    def _add(self, name: str, known_before: tuple[int, int, int], begin: MemorySnapshot) -> None:
        known, end = self._known(), self._snapshot()
        before, after, peak = begin.allocated, end.allocated, end.peak or end.allocated
        others = (before - sum(known_before), after - sum(known), peak - sum(map(max, known_before, known)))
        retries = None if end.retries is None or begin.retries is None else end.retries - begin.retries
        phase = PhaseMemory(name, end.source, before, after, peak, *known, max(0, *others), end.inactive, retries)
        self.phases.append(phase)
        self._judge(phase, end)

    def _judge(self, phase: PhaseMemory, end: MemorySnapshot) -> None:
        if phase.retries:
            self.policy.warn(
                "SW301",
                f"in phase {phase.name!r} the allocator released its cache {phase.retries} time(s) to go on; memory "
                "is nearly full: use a smaller micro-batch",
            )
        if phase.inactive and end.reserved and phase.inactive > INACTIVE_SHARE * end.reserved:
            self.policy.warn(
                "SW302",
                f"after phase {phase.name!r}, {phase.inactive:,} of {end.reserved:,} reserved bytes are unused pieces; "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of that",
            )
        growth = self._growth[phase.name]
        if growth and phase.after <= growth[-1]:
            growth.clear()
        growth.append(phase.after)
        if len(growth) > GROWING_PHASES:
            self.policy.warn(
                "SW303",
                f"phase {phase.name!r} left more memory in use {GROWING_PHASES} times in a row ({growth[0]:,} to "
                f"{growth[-1]:,} bytes); keep losses as numbers (loss.item()), not as tensors with their graph",
            )
            growth.clear()

    def _snapshot(self) -> MemorySnapshot:
        if self._tensors is None:
            return memory_snapshot(self.device)
        return MemorySnapshot(str(self.device), "tensors", self._tensors.live_bytes, peak=self._tensors.peak_bytes)

    def _known(self) -> tuple[int, int, int]:
        """Return the bytes on the device of parameters and buffers, of gradients, and of the optimizer's state."""
        parameters = [] if self.model is None else [*self.model.parameters(), *self.model.buffers()]
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        state = [] if self.optimizer is None else list(self.optimizer.state.values())
        if self._tensors is not None:  # tensors made outside of phases count too
            self._tensors.add([parameters, gradients, state])
        return self._bytes(parameters), self._bytes(gradients), self._bytes(state)

    def _bytes(self, value: object) -> int:
        return sum({one._cdata: one.nbytes() for one in _storages(value, self.device)}.values())

    def report(self) -> dict[str, int]:
        """Return the most that each kind took in any phase, and the highest peak, in bytes."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "peak")
        return {kind: max((getattr(phase, kind) for phase in self.phases), default=0) for kind in kinds}


class _LiveTensors(LimitedMemory):  # type: ignore[no-untyped-call]
    """The bytes of a device's live tensors: those created inside ``with``, and the inputs of operations inside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def add(self, value: Any) -> None:
        """Count the tensors of a nested value in."""
        for storage in _storages(value, self._device):
            self.count(storage, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.add((args, kwargs))
        result = func(*args, **kwargs)
        self.add(result)
        return result


def _storages(value: Any, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of a nested value's tensors on a device; parameters that stand for rows elsewhere have none."""
    for tensor in tensors_of(value):
        for part in (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,):
            if part.device.type == device.type and device.index in (None, part.device.index) and has_memory(part):
                yield part.untyped_storage()


# ---- parameters and tables -------------------------------------------------------------------------------------------


def hot_rows(model: nn.Module | Table) -> dict[Table, HotCounts]:
    """Return what the caches of hot rows have done so far, without waiting for the GPU.

    The numbers are those of the last admission of rows that the GPU has completed: of some steps ago.

    Args:
        model: a model with embeddings, or a table.

    Returns:
        Rows found in the cache or not, bytes that crossed the bus, and admissions, by table. Tables without a cache are
        left out: ``Pinned(hot_bytes=…)`` asks for one, and the first step on a GPU makes it.

    >>> import speedswap
    >>> hot_rows(speedswap.Embedding(1000, 8, storage="pageable"))
    {}
    """
    require_kind("model", model, (nn.Module, Table), "a torch.nn.Module or a Table")
    tables = [model] if isinstance(model, Table) else [getattr(module, "table", None) for module in model.modules()]
    caches = {table: table.store.notes.hot for table in tables if isinstance(table, Table)}
    return {table: cache.counts() for table, cache in caches.items() if cache is not None}


def import_optional(name: str) -> Any:
    """Return a module of the ``monitor`` extra.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise ImportError(f"{package} is not installed: {pip_install(package, extra='monitor')}") from error


@contextmanager
def modes_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put each module of some models back in its mode, training or evaluation, at the end of the block."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def count_parameters(model: nn.Module, *, example: Any = None) -> Any:
    """Count a model's parameters, module by module, with ``torchinfo.summary``.

    Unlike torchinfo's, the totals count a parameter that several modules share once, and parameters outside of
    ``example``'s forward pass too. Each module stays in its training or evaluation mode.

    Args:
        model: the model.
        example: arguments of the model (a tensor, a tuple, or a dictionary of named ones) for one forward pass in
            evaluation mode, which finds shapes, bytes of the outputs and multiply-adds. torchinfo keeps the model alive
            afterwards.

    Returns:
        A ``torchinfo.ModelStatistics``: ``total_params``, ``trainable_params``, ``total_param_bytes``,
        ``total_mult_adds``, ``summary_list``; ``print`` shows a table.

    Raises:
        ImportError: torchinfo is not installed.

    >>> tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    >>> tied[1].weight = tied[0].weight
    >>> count_parameters(tied).total_params
    12
    """
    require_kind("model", model, nn.Module, "a torch.nn.Module")
    torchinfo = import_optional("torchinfo")
    columns = ["num_params", "params_percent", "trainable"]
    with modes_kept([model]):
        statistics = torchinfo.summary(
            model,
            input_data=example,
            col_names=columns if example is None else ["output_size", *columns, "mult_adds"],
            depth=1 + max(name.count(".") + 1 for name, _ in model.named_modules()),
            row_settings=["depth", "var_names"],
            verbose=0,
        )
    parameters = list(model.parameters())
    statistics.total_params = sum(parameter.numel() for parameter in parameters)
    statistics.trainable_params = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    statistics.total_param_bytes = sum(parameter.nbytes for parameter in parameters)
    return statistics


_OF_FILES = ("touched_rows", "log_bytes", "reusable_bytes")


def table_metrics(model: nn.Module | Table) -> dict[str, float]:
    """Return figures of each table, as MLflow, TensorBoard and other trackers take them.

    For every table: ``bytes``, the size of all rows with their state, and ``writes``, the number of batches written to
    it. For one on disk: ``touched_rows`` (rows ever written), ``log_bytes`` (the size of its log) and
    ``reusable_bytes`` (the free room in it). With an id map: ``keys``. With hot rows on a GPU: ``hot_share``, the share
    of gathered rows that were found there.

    Args:
        model: a model with embeddings, or a table.

    Returns:
        Numbers, by ``tables/<name of the module>/<figure>``; a table alone has its own name.

    Example:
        >>> import speedswap
        >>> speedswap.monitor.table_metrics(speedswap.Embedding(1000, 8, name="items", storage="pageable"))
        {'tables/items/bytes': 32000, 'tables/items/writes': 0}
    """
    require_kind("model", model, (nn.Module, Table), "a torch.nn.Module or a Table")
    named = {"": model} if isinstance(model, Table) else dict(model.named_modules())
    names: dict[Table, str] = {}
    for name, each in named.items():
        table = each if isinstance(each, Table) else getattr(each, "table", None)
        if isinstance(table, Table):
            names.setdefault(table, name or table.name)
    hot = hot_rows(model)
    found: dict[str, float] = {}
    for table, name in names.items():
        figures: dict[str, float] = {"bytes": table.nbytes, "writes": table.writes}
        details = {} if table.store.files is None else table.store.files.details()
        figures |= {each: details[each] for each in _OF_FILES if each in details}
        if maps := table.store.notes.id_maps:
            figures["keys"] = sum(map(len, maps.values()))
        if counts := hot.get(table):
            figures["hot_share"] = counts.gathered_hits / max(1, counts.gathered_hits + counts.gathered_misses)
        found |= {f"tables/{name}/{each}": value for each, value in figures.items()}
    return found
