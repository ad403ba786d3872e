"""A run over the processes that torchrun has started: the ranks of a job, which train one model together.

Every rank does the same: it reads the data, makes the model, whose rows they own between them, and takes its share of
each batch. The first rank leads: it alone shows progress, writes results and reports.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from speedswap.apps.files import scratch_folder
from speedswap.collectives import Buckets, Kind, RankGroup
from speedswap.errors import PeerError
from speedswap.ranks import Ranks
from speedswap.tables import Disk, Storage, Table, as_storage
from speedswap.tables.store import read_alone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ON_DISK = ("disk", "memmap")  # the second is the older name
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STORE_SECONDS = timedelta(seconds=5)

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The processes of a run, of which this is one; they call its methods all together.

    Attributes:
        rank: the number of this process, from 0.
        size: their number.
        process_group: of torch.distributed; None where the run is one process.
    """

    rank: int = 0
    size: int = 1
    process_group: ProcessGroup | None = None

    @classmethod
    def of(cls, process_group: ProcessGroup | None = None) -> Job:
        """Return the job of a process group, by default that of all processes, which may be one alone."""
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        if process_group is None or process_group.size() == 1:
            return cls()
        return cls(process_group.rank(), process_group.size(), process_group)

    @property
    def group(self) -> RankGroup | None:
        """The lanes of the ranks; None where the run is one process."""
        return None if self.process_group is None else RankGroup.of(self.process_group)

    @property
    def leads(self) -> bool:
        """True for the first rank."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this rank's part of ``count`` items; the ranks' parts cover them in order, and some may be empty.

        Example:
            >>> [Job(rank, 4).share(6) for rank in range(4)]
            [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None), slice(4, 6, None)]
        """
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def place_of_tables(
        self, model: object, storage: str, scratch: Path | None
    ) -> tuple[Storage, Callable[[], object]]:
        """Return the place of a model's tables, whose rows the ranks own, each with its share of a batch's loss.

        Args:
            model: on disk, tables are in a temporary directory that goes with it.
            storage: the name of a place.
            scratch: the directory to make that in; the system's by default.

        Returns:
            The place, and a function that removes what the tables leave.
        """
        place: Storage
        if storage in ON_DISK:
            folder, remove = scratch_folder(model, scratch)
            place = Disk(folder / "tables", scratch=True)  # the folder itself is locked by this process
        else:
            place, remove = as_storage(storage), lambda: None
        return place if self.process_group is None else Ranks(place, self.process_group, reduction="sum"), remove

    def agree(self, number: int) -> list[int]:
        """Return the number of every rank.

        Args:
            number: this rank's, of 64 bits.

        Raises:
            PeerError: a rank has failed or cannot be reached.
        """
        if (group := self.group) is None:
            return [number]
        with group.main.task(Kind.AGREE) as task:
            notes = task.round(note=number).notes
            task.finish()
        return notes

    def collect(self, numbers: Tensor) -> list[Tensor]:
        """Return the numbers of all ranks, in their order.

        Args:
            numbers: this rank's, 8 bytes each, shape (n,), on the CPU; the n may differ.
        """
        if (group := self.group) is None:
            return [numbers]
        with group.main.task(Kind.AGREE) as task:
            found = task.share_numbers(numbers)
            task.finish()
        return found

    def add_up(self, *values: float) -> list[float]:
        """Return the sum of each value over the ranks."""
        every = self.collect(torch.tensor(values, dtype=torch.float64))
        return [sum(each) for each in zip(*(own.tolist() for own in every), strict=True)]

    def sum_gradients(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Let each step of an optimizer begin with the sum of dense parameters' gradients over the ranks."""
        every = [*parameters]
        if self.process_group is None or not every:
            return
        buckets = Buckets(every, self.process_group)

        def add_up(*step: object) -> None:
            try:
                buckets.add_up({*every}, 1.0)
            except RuntimeError as error:
                raise PeerError("another rank cannot be reached any more; its log says why") from error

        optimizer.register_step_pre_hook(add_up)

    def lead(self, table: Table, work: Callable[[Table], T]) -> T | None:
        """Let the first rank alone work with a table, while the others send it their rows.

        Returns:
            The work's result; None on the other ranks.
        """
        with read_alone(table.store) as store:
            if store is None:
                return None
            return work(table if store is table.store else Table(store))


# ---- beginning and end ----------------------------------------------------------------------------------------------


@contextmanager
def joined(device: torch.device) -> Iterator[Job]:
    """Surround a run with its job's beginning and end; the ranks end together.

    Nothing is done for one process, or where torch.distributed is initialized. After an error the job is left as it
    is: other ranks stop waiting when this process ends.

    Args:
        device: to compute on. GPUs talk over NCCL if each rank of this machine has its own.
    """
    if not is_launched() or dist.is_initialized():
        yield Job.of()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    has_own_gpu = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    # In a store of this attempt's own: that of torchrun, after a restart, has the addresses of the processes before.
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu else "gloo"
    dist.init_process_group(backend, store=of_attempt(store), rank=rank, world_size=size)
    job = Job.of()
    yield job
    job.agree(0)
    dist.destroy_process_group()


# ---- this process among those that torchrun has started ------------------------------------------------------------


def is_launched() -> bool:
    """Return whether torchrun, or a launcher like it, has started this process as one of several."""
    return all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def share_of_machine(nbytes: int) -> int:
    """Return the part of the bytes of a job's tables that the ranks of this machine hold."""
    if not is_launched():
        return nbytes
    return nbytes * int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) // int(os.environ["WORLD_SIZE"])


def local_gpu() -> int:
    """Return the number of the GPU for this process of several on the machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) % max(torch.cuda.device_count(), 1)


def is_first_to_say(message: str) -> bool:
    """Return whether this rank is the job's first to say this, and record that it has."""
    store = _store()
    if store is None:
        return True
    store.add("spoken", 1)
    return bool(store.add(f"said/{zlib.crc32(message.encode())}", 1) == 1)


def another_has_spoken(seconds: float = 0.0) -> bool:
    """Return whether another rank of the job has said why it has failed, or does so within some seconds."""
    store, until = _store(), time.monotonic() + seconds
    while store is not None:
        if store.add("spoken", 0):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return False


def _store() -> Any:
    """Return the store of torchrun's own process, which outlives the ranks, or None."""
    if not is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(*address, timeout=_STORE_SECONDS)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):
        return None
    return of_attempt(store)


def of_attempt(store: Any) -> Any:
    """Return a part of a store for the processes that torchrun has started last."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"speedswap/attempt-{attempt}", store)  # type: ignore[attr-defined]
