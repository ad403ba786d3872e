"""Check ids, find their rows, and find duplicates: on the ids' own device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from speedswap.errors import IdError
from speedswap.kernels import _C
from speedswap.kernels.host import address, as_ids, empty, get_num_threads, ids_at, require_dense, threads_for


def require_id_dtype(ids: Tensor, name: str = "ids") -> None:
    """Raise TypeError unless ids is a dense int32 or int64 tensor, with memory for its items."""
    require_dense(ids, name)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {ids.dtype}; convert it to torch.int64 or torch.int32, as ids.long() does")
    if ids.is_neg():
        raise TypeError(f"{name} is a lazily negated view; carry the negation out with ids.resolve_neg()")


# ---- range -----------------------------------------------------------------------------------------------------------


def check_ids(ids: Tensor, num_rows: int, what: str) -> None:
    """Raise unless every id is one of ``num_rows`` rows.

    Args:
        ids: int32 or int64, any shape, on any device. On a GPU this waits for the ids.
        num_rows: ids must be 0 to num_rows - 1.
        what: the rows' owner, for the message: ``"table 'items'"``.

    Raises:
        IdError: an id is negative, or not below num_rows.
        TypeError: ids is not an int32 or int64 tensor.
    """
    require_id_dtype(ids)
    position = _position_outside(ids, num_rows)
    if position >= 0:
        raise _outside(ids, position, num_rows, what)


def _position_outside(ids: Tensor, num_rows: int) -> int:
    """Return the position of the first id out of range, or -1."""
    if ids.numel() == 0:
        return -1
    if ids.device.type == "cpu":
        flat = as_ids(ids)
        return _C.check_ids(flat.data_ptr(), flat.numel(), num_rows, get_num_threads())
    lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
    return -1 if lowest >= 0 and highest < num_rows else _first_outside(ids, num_rows)


def _first_outside(ids: Tensor, num_rows: int) -> int:
    flat = ids.reshape(-1).long()  # int32 cannot be compared with a greater number of rows
    return int(((flat < 0) | (flat >= num_rows)).nonzero()[0].item())


def _outside(ids: Tensor, position: int, num_rows: int, what: str) -> IdError:
    where = ", ".join(str(int(index)) for index in torch.unravel_index(torch.tensor(position), ids.shape))
    rows = f"rows 0 to {num_rows - 1}" if num_rows else "no rows"
    return IdError(
        f"ids[{where}] is {int(ids.reshape(-1)[position])}, but {what} has {rows}; "
        "map unknown ids to a padding row (padding_idx=) before the lookup"
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def find_rows(ids: Tensor, num_rows: int, what: str) -> tuple[Tensor, Tensor]:
    """Return a batch's rows and each id's position among them, after checking their range; on a GPU in one round trip.

    Args:
        ids: as for :func:`check_ids`; the caller has checked them with :func:`require_id_dtype`.
        num_rows, what: as for :func:`check_ids`.

    Returns:
        As :func:`unique` does.

    Raises:
        IdError: as :func:`check_ids` does.

    >>> find_rows(torch.tensor([[7, 3], [3, 9]]), 10, "table 'items'")
    (tensor([3, 7, 9]), tensor([[1, 0],
            [0, 2]]))
    """
    found = _unique(ids, num_rows) if ids.is_cpu else distinct([ids], [num_rows])[0]
    if found is None:
        raise _outside(ids, _first_outside(ids, num_rows), num_rows, what)
    return found


def find_all(lookups: Sequence[tuple[Tensor, int]]) -> list[tuple[Tensor, Tensor] | None]:
    """Return :func:`find_rows` of each of several lookups; on a GPU with one sort and one round trip.

    Args:
        lookups: of each its ids, all on one device, and the number of existing rows.

    Returns:
        In their order; None for a lookup with an id out of range.
    """
    for ids, _ in lookups:
        require_id_dtype(ids)
    if lookups and lookups[0][0].device.type != "cpu":
        return distinct([ids for ids, _ in lookups], [num_rows for _, num_rows in lookups])
    return [_unique(ids, num_rows) for ids, num_rows in lookups]


def unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch's rows, and each id's position among them.

    Args:
        ids: int32 or int64, any shape, on any device.

    Returns:
        rows: the distinct ids, ascending; int64, shape (n,), on the ids' device.
        local: int64, of the ids' shape; ``rows[local]`` are the ids.

    >>> unique(torch.tensor([[7, 3], [3, 9]]))
    (tensor([3, 7, 9]), tensor([[1, 0],
            [0, 2]]))
    """
    require_id_dtype(ids)
    found = _unique(ids) if ids.is_cpu else distinct([ids])[0]
    assert found is not None
    return found


def _unique(ids: Tensor, num_rows: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Return :func:`unique` of ids in host memory, whose dtype was checked; None if one is out of range."""
    pointer, ids = ids_at(ids)
    count = ids.numel()
    rows, local = torch.empty(count, dtype=torch.int64), torch.empty(ids.shape, dtype=torch.int64)
    limit = -1 if num_rows is None else num_rows
    found = _C.unique(pointer, count, rows.data_ptr() or address(rows), local.data_ptr(), threads_for(8 * count), limit)
    if found < 0:
        return None
    # Far more memory than the rows need is not kept alive.
    return (rows.resize_(found) if 2 * found >= count else rows[:found].clone()), local


def by_owner(ids: Tensor, *, bits: int, factor: int, world_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Order ids by the ranks that own their rows, as :class:`speedswap.ranks.Owners` defines them.

    Args:
        ids: int64, shape (n,), in host memory, not negative.
        bits, factor, world_size: the owners'.

    Returns:
        ordered: the ids, in rank order; ids of one rank keep their order.
        places: int64, shape (n,); ``ordered[places]`` are the ids.
        counts: the number of ids that each rank owns.
    """
    flat = as_ids(ids)
    ordered, places = torch.empty_like(flat), torch.empty_like(flat)
    counts = torch.empty(world_size, dtype=torch.int64)
    _C.by_owner(
        flat.data_ptr(), len(flat), bits, factor, world_size, address(ordered), address(places), address(counts)
    )
    return ordered, places, counts.tolist()


def distinct(lookups: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor] | None]:
    """Return each lookup's rows, and each id's position among them: with one sort and one round trip to a device.

    The ids of all lookups are sorted together, as keys: an id is offset by its lookup's base. An id out of range
    becomes one of two extra keys, the smallest or the greatest of its lookup.

    Args:
        lookups: int32 or int64, any shapes, on one device.
        num_rows: per lookup, the bound of its ids, which start at 0. If None, there is one lookup, of any ids.

    Returns:
        For each lookup as :func:`unique` does, with :func:`order_of`; None if an id is out of range.
    """
    ends = list(accumulate(ids.numel() for ids in lookups))
    begins = [0, *ends[:-1]]
    keys, bases = _keys(lookups, begins, ends, num_rows)
    some = [i for i, ids in enumerate(lookups) if ids.numel()]
    nothing = torch.empty(0, dtype=torch.int64, device=keys.device)
    results = [None if ids.numel() else (nothing, nothing.view(ids.shape)) for ids in lookups]
    if not some:
        return results
    ordered, order = torch.sort(keys, stable=True)
    is_new = torch.empty(len(keys), dtype=torch.bool, device=keys.device)
    is_new[:1].fill_(False)
    torch.ne(ordered[1:], ordered[:-1], out=is_new[1:])
    places = torch.cumsum(is_new, 0)
    local = torch.empty_like(places).scatter_(0, order, places)
    # Equal keys write equal values to one place; the number of places need not be known for that.
    found = torch.empty_like(ordered).scatter_(0, places, ordered)
    place, key = _ask([begins[i] for i in some] + [ends[i] - 1 for i in some], places, ordered)
    for first, i in enumerate(some):
        last = first + len(some)
        if num_rows is not None and not bases[i] <= key[first] <= key[last] < bases[i] + num_rows[i]:
            continue
        rows = empty((place[last] + 1 - place[first],), torch.int64, keys.device)
        torch.sub(found[place[first] : place[last] + 1], bases[i], out=rows)
        mine = local[begins[i] : ends[i]].sub_(place[first]).view(lookups[i].shape)
        positions = order[begins[i] : ends[i]]
        mine.order = positions.sub_(begins[i]) if begins[i] else positions  # type: ignore[attr-defined]
        results[i] = (rows, mine)
    return results


def order_of(local: Tensor) -> Tensor | None:
    """Return the positions of a lookup's ids by row, those of one row ascending, as the sort that found it left them.

    Args:
        local: each id's position among the rows, as :func:`unique` returned it: not a view of it.

    Returns:
        int64, shape (count,); None for ids in host memory, which are not sorted.
    """
    return getattr(local, "order", None)


def _keys(
    lookups: Sequence[Tensor], begins: Sequence[int], ends: Sequence[int], num_rows: Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    """Return all ids as keys, and each lookup's base. Narrow keys are sorted in half the time."""
    flat = [ids.detach().reshape(-1) for ids in lookups]
    if num_rows is None:
        (ids,) = flat
        return ids, [0]
    bases = list(accumulate((count + 2 for count in num_rows), initial=0))
    dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
    if len(flat) == 1 and flat[0].dtype == dtype:
        return flat[0], bases
    keys = torch.empty(ends[-1], dtype=dtype, device=flat[0].device)
    for ids, begin, end, base, count in zip(flat, begins, ends, bases, num_rows, strict=False):
        known = ids.clamp(-1, min(count, torch.iinfo(ids.dtype).max))
        if ids.dtype == torch.int64:
            torch.add(known, base, out=keys[begin:end])
        else:  # which cannot hold every base
            keys[begin:end].copy_(known).add_(base)
    return keys, bases


# ---- duplicates ------------------------------------------------------------------------------------------------------


def last_occurrences(ids: Tensor) -> Tensor:
    """Return the last position of each distinct id, ascending by id.

    Args:
        ids: int32 or int64, shape (n,), on any device.

    Returns:
        Positions, int64, on the ids' device.

    >>> last_occurrences(torch.tensor([5, 2, 5]))
    tensor([1, 2])
    """
    require_id_dtype(ids)
    if ids.device.type != "cpu":
        rows, local = unique(ids)
        positions = torch.zeros(len(rows), dtype=torch.int64, device=ids.device)
        every = torch.arange(len(ids), device=ids.device)
        return positions.scatter_reduce_(0, local, every, "amax")
    flat = as_ids(ids)
    positions = torch.empty(len(flat), dtype=torch.int64)
    found = _C.last_occurrences(flat.data_ptr(), len(flat), address(positions))
    return positions[:found].clone()


def first_duplicate(ids: Tensor, num_rows: int) -> int:
    """Return the first position whose id occurs before it, or -1.

    Args:
        ids: int32 or int64, shape (n,), on any device, each in 0 to num_rows - 1.
        num_rows: the bound of the ids.

    >>> first_duplicate(torch.tensor([4, 1, 4, 1]), num_rows=5)
    2
    """
    require_id_dtype(ids)
    if len(ids) < 2:
        return -1
    if ids.device.type == "cpu":
        flat = as_ids(ids)
        return _C.first_duplicate(flat.data_ptr(), len(flat), num_rows)
    ordered, order = torch.sort(ids, stable=True)
    again = order[1:][ordered[1:] == ordered[:-1]]
    return int(again.min()) if len(again) else -1


def first_fall(values: Tensor) -> int:
    """Return the first position whose value is greater than the next one's, or -1 if the values ascend.

    Args:
        values: int32 or int64, shape (n,), on any device. On a GPU this waits for them.

    >>> first_fall(torch.tensor([0, 2, 2, 1])), first_fall(torch.tensor([0, 2, 2]))
    (2, -1)
    """
    require_id_dtype(values)
    if values.device.type == "cpu":
        read = as_ids(values)
        return _C.first_fall(read.data_ptr(), read.numel(), get_num_threads())
    falls = (values[1:] < values[:-1]).nonzero()
    return int(falls[0]) if len(falls) else -1


# ---- answers from a device -------------------------------------------------------------------------------------------


def _ask(positions: Sequence[int], *values: Tensor) -> list[list[int]]:
    """Return the items at some positions of tensors on a device: the only thing that the host waits for in a step.

    Positions and items travel through pinned memory, which is reused; the host waits only for this stream.

    Args:
        positions: in each of the tensors.
        values: int32 or int64, shape (n,), on one device.

    Raises:
        RuntimeError: the stream is being captured into a CUDA graph.
    """
    if values[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rows are looked up inside torch.cuda.graph, but the number of a batch's rows is not known before the ids "
            "are; look them up before the graph, and capture what is computed with them"
        )
    needed = len(positions) * (1 + len(values))
    waiting = _free[values[0].device]
    mailbox = waiting.pop() if waiting else None
    if mailbox is None or mailbox.capacity < needed:
        mailbox = _Mailbox(values[0].device, max(256, 2 * needed))
    try:
        return mailbox.ask(positions, values)
    finally:
        waiting.append(mailbox)


class _Mailbox:
    """Pinned host memory, and the same amount on the device. No transfer is pending between two questions."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):  # it is written to later, in other modes
            self._near = torch.empty(capacity, dtype=torch.int64, device=device)
            self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._items = self._host.numpy()

    def ask(self, positions: Sequence[int], values: Sequence[Tensor]) -> list[list[int]]:
        count = len(positions)
        begins = range(count, count * (1 + len(values)), count)
        self._items[:count] = positions
        try:
            places = self._near[:count].copy_(self._host[:count], non_blocking=True)
            for begin, tensor in zip(begins, values, strict=True):
                self._near[begin : begin + count].copy_(tensor.index_select(0, places))
            self._host[count : begins.stop].copy_(self._near[count : begins.stop], non_blocking=True)
        finally:
            self._wait()
        return [self._items[begin : begin + count].tolist() for begin in begins]

    def _wait(self) -> None:
        if self._near.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._near.device))
            done.synchronize()


# Idle buffers; one per concurrent caller.
_free: defaultdict[torch.device, list[_Mailbox]] = defaultdict(list)
