"""The ranks that share tables, and sums of dense gradients over them."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from speedswap._process import in_child
from speedswap.collectives.ahead import Ahead, OwnPace
from speedswap.collectives.lane import Lane
from speedswap.collectives.messages import Kind, digest_of
from speedswap.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BUCKET_BYTES = 25 << 20  # the same as DistributedDataParallel's
P = ParamSpec("P")
R = TypeVar("R")


class RankGroup:
    """The ranks that share tables, with the lanes on which they exchange rows. :meth:`of` makes it.

    It lives as long as the process group and the tables, since lanes own connections and threads, and their store may
    be a server.

    Attributes:
        ranks: the ranks, as torch.distributed numbers them.
        rank: this process's index among them.
        main: the lane of the program's own operations, in program order.
        ahead: the work that runs ahead of its step, in a background thread on a separate lane.
        next_number: the number for the next object that is added.
        own_pace: the ranks while they run passes at their own pace, on the main lane.
    """

    def __init__(self, process_group: dist.ProcessGroup, host: int | dist.ProcessGroup | None = None) -> None:
        self._process_group = weakref.ref(process_group)
        self.ranks = dist.get_process_group_ranks(process_group)
        timeout = _timeout_of(process_group)
        on_gpus = _backend_of(process_group, "cuda")
        has_nccl = on_gpus is not None and on_gpus.name() == "nccl"
        self.main = Lane(process_group, "main", timeout, process_group if has_nccl else None)
        self.host = host
        ahead = Lane(process_group, "ahead", timeout)
        hosts = _hosts_of(self.main, host)
        for lane in (self.main, ahead):
            lane.set_hosts(hosts, process_group, spreads=has_nccl)
        self.ahead = Ahead(ahead, self.main)
        self.rank = self.main.rank
        self.next_number = 0
        self._tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.main.tables = self._tables
        self.own_pace = OwnPace(self.main, self._tables)
        _all.add(self)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group."""
        found = self._process_group()
        if found is None:
            raise RanksError("the process group of the tables was destroyed; make tables with a new one")
        return found

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh for DTensors; all ranks must request it for the first time at the same point."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.process_group, "cpu")

    def end(self) -> None:
        """Close the lanes before the process exits: first the main lane, where other ranks may be waiting."""
        self.main.close()
        self.ahead.end()

    def add(self, thing: Any) -> int:
        """Return the number of the ranks' next table, map or training step; it is the same on all ranks.

        Args:
            thing: the object; it has a name for messages. Tables and maps serve lookups under that number.
        """
        self._tables[self.next_number] = thing
        self.next_number += 1
        return self.next_number - 1

    def __len__(self) -> int:
        return len(self.ranks)

    def require_same_settings(self, what: str, settings: Mapping[str, object], kind: Kind = Kind.MAKE) -> None:
        """Raise ValueError on every rank unless all of them pass the same settings; every rank must call this.

        Args:
            what: the object that has the settings, for messages.
            settings: the settings by name, compared as text.
            kind: what the ranks do with them.
        """
        with self.main.task(kind) as task:
            found = task.difference_of({"": {name: str(value) for name, value in settings.items()}})
        if found is not None:
            raise ValueError(f"{what} has {found[1]}; give the same on all ranks")

    def call(self) -> AbstractContextManager[None]:
        """Surround a call that all ranks make: an error in it becomes a PeerError on the others."""
        return nullcontext() if self.own_pace.is_active else self.main.call()

    def agree_on_seed(self, seed: int) -> int:
        """Return the first rank's seed, on every rank."""
        return int(self.main.share(Kind.MAKE, seed)[0])

    def require_alike(self, given: object, what: str) -> None:
        """Check that all ranks were given the same values; every rank must call this.

        Args:
            given: a tensor, or settings.
            what: their description, for the message.

        Raises:
            ValueError: the values differ between ranks; raised on all of them.
        """
        digests = self.main.notes(Kind.COMPARE, digest_of(given))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            one, other = self.ranks[0], self.ranks[other]
            raise ValueError(
                f"{what} differ between ranks {one} and {other}, but each rank keeps only the rows that it owns. Load "
                f"the same rows on every rank, or first send rank {one}'s to the others with "
                f"torch.distributed.broadcast(rows, {one}). Nothing was written"
            )

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, host: int | dist.ProcessGroup | None = None) -> RankGroup:
        """Return the group's ranks; all ranks must first request a group at the same point of their program.

        Args:
            process_group: the ranks.
            host: the ranks of this host; see :class:`speedswap.Ranks`.

        Raises:
            ValueError: this process is not one of the ranks, or not in a job yet; or other hosts were given before.
            TypeError: ``process_group`` is not a process group.
        """
        if not is_distributed():
            raise ValueError(
                "speedswap.Ranks was given, but this process is not in a job yet; call "
                "torch.distributed.init_process_group() first, and start the script with torchrun"
            )
        if not isinstance(process_group, dist.ProcessGroup):
            if process_group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"group does not contain rank {dist.get_rank()}, this process; make the embedding only in its ranks"
                )
            raise TypeError(
                f"group is {process_group!r}; give torch.distributed.group.WORLD, or a group that new_group returned"
            )
        alive = dist.distributed_c10d._world.pg_map
        for ended in [each for each in _groups if each not in alive]:
            del _groups[ended]
        if process_group not in _groups:
            _groups[process_group] = cls(process_group, host)
        found = _groups[process_group]
        if host is not None and host != found.host:
            raise ValueError(
                f"host is {host!r}, but {found.host!r} for the first table of these ranks; give all of them the same"
            )
        return found


def _hosts_of(lane: Lane, host: int | dist.ProcessGroup | None) -> list[list[int]]:
    """Return the ranks of each host, as indices among a lane's; every rank must call this.

    Raises:
        ValueError: the ranks were given different hosts; raised on all of them.
    """
    given: list[list[int] | int]
    if isinstance(host, dist.ProcessGroup):
        members = dist.get_process_group_ranks(host)
        given = lane.share(Kind.MAKE, [place for place, rank in enumerate(lane.ranks) if rank in members])
    elif host is not None:
        given = lane.share(Kind.MAKE, lane.rank // host)
    else:  # the rank of the host's first process: torchrun numbers a host's processes consecutively
        given = lane.share(Kind.MAKE, dist.get_rank() - int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(given):
        found.setdefault(str(each), []).append(rank)
    for each, ranks in zip(given, (found[str(each)] for each in given), strict=True):
        if isinstance(each, list) and each != ranks:
            raise ValueError(
                f"host has the ranks {[lane.ranks[rank] for rank in each]} on rank {lane.ranks[ranks[0]]}, but not on "
                "each of these ranks; give all ranks of a host the same process group"
            )
    return [*found.values()]


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[RankGroup] = weakref.WeakSet()  # including groups whose process group was destroyed
in_child(_all.clear)  # the lanes' threads do not exist in a child


def is_distributed() -> bool:
    """Return whether this process belongs to an initialized torch.distributed job."""
    return dist.is_available() and dist.is_initialized()


def begin_batch(number: int) -> None:
    """Begin a batch on all groups; see :meth:`Lane.begin_batch`."""
    for group in list(_all):
        group.main.begin_batch(number)


@atexit.register
def _end_all() -> None:
    for group in list(_all):
        group.end()


def _backend_of(process_group: dist.ProcessGroup, device: str) -> Any:
    try:
        return process_group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def _timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    for device in ("cpu", "cuda"):
        if (options := getattr(_backend_of(process_group, device), "options", None)) is not None:
            return cast(timedelta, options._timeout)
    return dist.distributed_c10d.default_pg_timeout


def surround_forward(module: nn.Module, ranks: RankGroup | None) -> None:
    """Report any error in a module's forward pass to the other ranks, which run it too.

    Args:
        ranks: the ranks that own its rows; None for a single process, which leaves the module unchanged.
    """
    if ranks is not None:
        vars(module)["forward"] = functools.partial(_forward, weakref.ref(module), ranks)


def _forward(reference: weakref.ref[nn.Module], ranks: RankGroup, *args: Any, **kwargs: Any) -> Any:
    module = reference()  # the caller holds a reference
    assert module is not None
    with ranks.call():
        return type(module).forward(module, *args, **kwargs)


def of_all_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Report any error in a function that all ranks call, argument checks included, to the other ranks.

    Args:
        function: one of its first two arguments, or ``model`` or ``table``, is an object with ``ranks`` (a
            :class:`RankGroup` or None), a model that contains one, or a mapping of them. Or it creates such objects
            from a ``storage`` with ``ranks``, or from a mapping of storages.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        ranks = False if not args or "storage" in kwargs else getattr(args[0], "ranks", False)
        if ranks is not None and not isinstance(ranks, RankGroup):
            ranks = _ranks_among(args, kwargs)
        if ranks is None:
            return function(*args, **kwargs)
        with ranks.call():
            return function(*args, **kwargs)

    return call


def _ranks_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankGroup | None:
    storage = kwargs.get("storage")
    for place in storage.values() if isinstance(storage, Mapping) else [storage]:
        if isinstance(ranks := getattr(place, "ranks", None), RankGroup):
            return ranks
    for given in (*args[:2], kwargs.get("model"), kwargs.get("table")):
        within: Iterable[Any] = [given]
        if isinstance(given, Mapping):  # e.g. of methods of modules
            within = given
        elif isinstance(given, nn.Module) and "_modules" in vars(given) and not hasattr(given, "ranks"):
            within = given.modules()  # unless it is still being constructed
        for each in within:
            ranks = getattr(each, "ranks", False)
            if ranks is None or isinstance(ranks, RankGroup):
                return ranks
    return None


class Buckets:
    """Flat buffers for summing gradients over ranks, allocated once so that summing allocates nothing.

    Args:
        parameters: all parameters that may have a gradient, the same and in the same order on each rank.
        group: the ranks.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        divided = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        places = divided(list(parameters), [_BUCKET_BYTES])[0] if parameters else []
        self._buckets = [[parameters[place] for place in some] for some in places]  # one dtype and device each
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for bucket in self._buckets:
            numel = sum(parameter.numel() for parameter in bucket)
            kind = bucket[0].device, bucket[0].dtype
            if kind not in self._buffers or self._buffers[kind].numel() < numel:
                self._buffers[kind] = torch.empty(numel, device=kind[0], dtype=kind[1])

    @torch.no_grad()
    def add_up(self, used: set[Tensor], divisor: float) -> None:
        """Sum the dense gradients of the parameters in ``used`` over the ranks, in place: one all-reduce per bucket.

        A bucket always has the same members, used or not; unused parameters stay without a gradient.

        Args:
            used: parameters that have a gradient on at least one rank; a missing one counts as zero.
            divisor: each sum is divided by it.
        """
        for bucket in self._buckets:
            if used.isdisjoint(bucket):
                continue
            flat = self._buffers[bucket[0].device, bucket[0].dtype]
            sizes = [parameter.numel() for parameter in bucket]
            whole = flat[: sum(sizes)]
            parts = torch.split(whole, sizes)
            for parameter, part in zip(bucket, parts, strict=True):
                grad = parameter.grad if parameter in used else None
                part.zero_() if grad is None else part.copy_(grad.reshape(-1))
            dist.all_reduce(whole, group=self._group)
            if divisor != 1:
                whole.div_(divisor)
            for parameter, part in zip(bucket, parts, strict=True):
                if parameter in used and parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter.grad))
