"""The route of a batch's rows between the requesting rank and the rows' owners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import SPARE_IDS, Agreed, Asked, Parcel, Task, Way, as_bytes, digest_of, packed, unpacked
from speedswap.kernels import Texts
from speedswap.tables import Block, Keys
from speedswap.tables.keys import select_texts
from speedswap.tables.owners import Owners

_DIGESTS = 1 << 18
_MOST_BYTES = 4096  # of a row sent along with a line


class _Lookup(NamedTuple):
    """A rank's lookup as its note describes it to the others; as a number, it is below 0.

    Attributes:
        num_ids: the number of ids to send to all ranks.
        digest: of the columns, or of the tables of several lookups; 18 bits.
        row_bytes: bytes per row to send along with lines; 0 for none.
        fits: True if every line has room for its ids.
        is_several: True for several lookups.
    """

    num_ids: int
    digest: int
    row_bytes: int
    fits: bool
    is_several: bool

    @classmethod
    def of(cls, note: int) -> _Lookup:
        """Return the lookup that a note below 0 describes."""
        bits = ~note
        return cls(
            num_ids=bits >> 32 & (1 << 29) - 1,
            digest=bits >> 14 & _DIGESTS - 1,
            row_bytes=bits >> 1 & (1 << 13) - 1,
            fits=not bits & 1,
            is_several=bits >= 1 << 61,
        )

    def __int__(self) -> int:
        """Return the note: 29 bits of ids, 18 of digest, 13 of row bytes, inverted."""
        return ~(self.is_several << 61 | self.num_ids << 32 | self.digest << 14 | self.row_bytes << 1 | (not self.fits))


@dataclass(frozen=True)
class Wanted:
    """Rows that this rank requests, grouped by owner: the order in which they are sent and kept.

    Attributes:
        rows: ids, int64, shape (n,), on the CPU.
        sent: the number of ids sent to each rank.
    """

    rows: Tensor
    sent: list[int]

    @classmethod
    def of(cls, owners: Owners, rows: Tensor) -> tuple[Wanted, Tensor]:
        """Order rows by their owners.

        Args:
            owners: of the table's rows.
            rows: ids, shape (n,), on any device.

        Returns:
            The rows, and each given row's index among them, int64, shape (n,), on the CPU.
        """
        ordered, places, sent = owners.ordered(rows.detach().cpu().long())
        return cls(ordered, sent), places

    @classmethod
    def found(cls, owners: Owners, ids: Tensor, what: str) -> tuple[Wanted, Tensor]:
        """Check a batch's ids, and order their rows by owner.

        Args:
            owners: of the table's rows.
            ids: int32 or int64, any shape, on any device.
            what: the table, for messages.

        Returns:
            The distinct rows, and each id's index among them, of the ids' shape, on their device.

        Raises:
            IdError, TypeError: as :func:`speedswap.kernels.find_rows` does.
        """
        rows, local = kernels.find_rows(ids, owners.num_embeddings, what)
        wanted, places = cls.of(owners, rows)
        return wanted, kernels.near(places, local.device)[local]


@dataclass(frozen=True)
class Route:
    """The rows that this rank requests, and those requested from it.

    Attributes:
        wanted: the rows that this rank requests.
        received: the number of rows that each rank requests here.
        union: the distinct places of the rows requested here, ascending, int64, shape (m,).
        positions: each requested row's index in ``union``, int64, shape (sum(received),).
        way: the rows' way to their owners, if the ranks of a host request them together.
    """

    wanted: Wanted
    received: list[int]
    union: Tensor
    positions: Tensor
    way: Way | None = None

    def parcel(self, values: Tensor) -> Parcel:
        """Return rows of the union in the order in which the requesting ranks receive them.

        Args:
            values: values of the union, shape (m, …), on any device.
        """
        asked = values.detach().index_select(0, kernels.near(self.positions, values.device))
        return Parcel(asked, self.received, self.wanted.sent, self.way and self.way.back)

    def parcel_back(self, values: Tensor) -> Parcel:
        """Return the parcel that sends the owners values of the rows that this rank requested, e.g. gradients."""
        return Parcel(values, self.wanted.sent, self.received, self.way)

    def add_up(self, came: Tensor) -> Tensor:
        """Return the sums over the ranks, in rank order, of the values received for the rows requested here.

        If hosts merge what their ranks send, these are sums over the hosts, in the order of their first ranks.

        Args:
            came: the received values, shape (sum(received), dim), on any device.

        Returns:
            Shape (m, dim).
        """
        return kernels.sum_rows(came, kernels.near(self.positions, came.device), len(self.union))


class LentRows(NamedTuple):
    """The route of a lookup's rows, with the rows that this rank lent to others for it.

    Attributes:
        route: the route.
        block: columns of the rows requested here, numbered by place in this rank's table.
        version: the version of this rank's table when they were gathered.
    """

    route: Route
    block: Block
    version: int

    @property
    def rows(self) -> Tensor:
        """The distinct ids that this rank requested, on the CPU."""
        return self.route.wanted.rows


def ask(
    task: Task,
    tables: Sequence[tuple[Owners, Wanted]],
    row_bytes: Sequence[int] = (),
    columns: Sequence[str] = ("weight",),
    *,
    merges: bool = True,
    together: int | None = None,
) -> list[Route] | None:
    """Request rows of one or several tables from their owners in one exchange; every rank must call this.

    Args:
        task: the ranks' common task.
        tables: for each table, at least one, the division of its rows and the rows that this rank wants.
        row_bytes: bytes per row of each table, if :func:`bring` is called next, once, with rows in host memory.
        columns: the columns to send, one after the other.
        merges: False if owners need to know which rank requests a row, not only which host.
        together: identifies the set of lookups if there are several; None for one. Peers may send several.

    Returns:
        The routes; None, on all ranks, if their lookups differ.

    Raises:
        ValueError: another rank requests different columns.
    """
    lane, sheet = task.lane, task.lane.sheet
    most_bytes = max(row_bytes, default=0)
    if most_bytes > _MOST_BYTES:
        most_bytes = 0
    sheet.reserve(most_bytes)
    sent, ids = ids_of_tables([wanted for _, wanted in tables])
    levels = lane.levels if merges else None
    digest = (digest_of([*columns]) if together is None else together) % _DIGESTS
    mine = _Lookup(len(ids), digest, most_bytes, max(sent) <= sheet.room, together is not None)
    came: Tensor | None = None
    with task.promised():
        while True:
            lines = task.round(sent, note=int(mine), ids=ids)
            lookups = [_Lookup.of(note) for note in lines.notes if note < 0]
            # Ranks with prefetched rows, or with several lookups, come to this round next.
            if len(lookups) == len(lines.notes) and (mine.is_several or not any(each.is_several for each in lookups)):
                break
        counts = lines.counts
        is_alike = all(each.digest == digest for each in lookups)
        if mine.is_several and not (is_alike and all(each.is_several for each in lookups)):
            return None
        if levels is not None:
            merged = levels.ask([(wanted.rows, wanted.sent) for _, wanted in tables])
        elif len(lane.ranks) > 1 and all(each.fits for each in lookups):
            came = sheet.ids_that_came(counts)
            if (
                lane.levels is None
                and most_bytes
                and is_alike
                and all(each.row_bytes == most_bytes for each in lookups)
            ):
                received = [each.received for each in tables_of_ids(came, counts, len(tables))]
                sheet.agreed = _agreed(row_bytes, received, [wanted.sent for _, wanted in tables])
        elif sum(each.num_ids for each in lookups) <= SPARE_IDS:  # all ranks have memory for these ids
            came = task.prepared(ids, sent, counts, lane.spare[: sum(counts)])()
    if not is_alike:
        task.finish()  # the others know
        raise ValueError(
            f"columns is {', '.join(columns)} here, but another rank has different ones; give the same columns on "
            "every rank of the group"
        )
    if levels is not None:
        return _routes(task, tables, merged)
    if came is None:
        came = task.send(ids, sent, counts)
    return _routes(task, tables, tables_of_ids(came, counts, len(tables)))


def ask_ahead(task: Task, tables: Sequence[tuple[Owners, Wanted]], counts: list[int]) -> list[Route]:
    """Request rows as :func:`ask` does, after a round in which ranks have sent the counts.

    Args:
        task, tables: as for :func:`ask`.
        counts: the count of numbers from each rank.
    """
    wanted = [each for _, each in tables]
    if (levels := task.lane.levels) is None:
        sent, ids = ids_of_tables(wanted)
        return _routes(task, tables, tables_of_ids(task.send(ids, sent, counts), counts, len(tables)))
    with task.promised():
        task.round()
        return _routes(task, tables, levels.ask([(each.rows, each.sent) for each in wanted]))


def _routes(task: Task, tables: Sequence[tuple[Owners, Wanted]], asked: Iterable[Asked]) -> list[Route]:
    routes = []
    for (owners, wanted), (received, ids, way) in zip(tables, asked, strict=True):
        union, positions = kernels.unique(owners.places(ids, task.lane.rank))
        routes.append(Route(wanted, received, union, positions, way))
    return routes


def bring(task: Task, routes: Sequence[Route], values: Sequence[Tensor]) -> list[Tensor]:
    """Send the rows requested from this rank, and return the rows that it requested.

    Args:
        task: the ranks' common task.
        routes: a route per table.
        values: values of each route's union, shape (m, …), on any device.

    Returns:
        For each table, shape (n, …), in the order of ``wanted``.
    """
    return send_back(task, [route.parcel(some) for route, some in zip(routes, values, strict=True)])


def send_back(task: Task, parcels: Sequence[Parcel]) -> list[Tensor]:
    """Send the parcels of requested rows, after :func:`ask`; return the received rows of each."""
    sheet = task.lane.sheet
    if sheet.agreed is None:
        return task.send_parcels(parcels)
    whole = packed(parcels)
    sheet.put_rows(as_bytes(whole.rows))
    task.round()
    came = sheet.rows_that_came().view(whole.rows.dtype)
    return unpacked(came.view(-1, *whole.rows.shape[1:]), parcels)


def ids_of_tables(tables: Sequence[Wanted]) -> tuple[list[int], Tensor]:
    """Return the count of numbers to send to each rank, and the numbers: rows per table, then the tables' rows."""
    if len(tables) == 1:
        return tables[0].sent, tables[0].rows
    heads = torch.tensor([wanted.sent for wanted in tables]).unbind(1)
    ids = zip(*(torch.split(wanted.rows, wanted.sent) for wanted in tables), strict=True)
    parts = [torch.cat([head, *some]) for head, some in zip(heads, ids, strict=True)]
    return list(map(len, parts)), torch.cat(parts)


def tables_of_ids(came: Tensor, counts: list[int], number: int) -> list[Asked]:
    """Decode what :func:`ids_of_tables` sent: for each table, the rows that ranks request.

    Args:
        came: the received numbers, in rank order.
        counts: the count of numbers from each rank.
        number: the number of tables.
    """
    if number == 1:
        return [Asked(counts, came)]
    parts = torch.split(came, counts)
    received = torch.stack([part[:number] for part in parts], dim=1).tolist()
    asked = zip(*(torch.split(part[number:], part[:number].tolist()) for part in parts), strict=True)
    return [Asked(of_ranks, torch.cat(some)) for of_ranks, some in zip(received, asked, strict=True)]


def _agreed(row_bytes: Sequence[int], *counts: Sequence[Sequence[int]]) -> Agreed:
    """Return the rows to send along with lines: a single table's unchanged, several tables' as bytes."""
    if len(row_bytes) == 1:
        return Agreed(row_bytes[0], *chain(*counts))
    bytes_of = [[sum(map(mul, row_bytes, of_rank)) for of_rank in zip(*each, strict=True)] for each in counts]
    return Agreed(1, *bytes_of)


def starts_of(counts: Sequence[int]) -> Tensor:
    """Return the offset of each rank's rows, in rank order."""
    ends = torch.tensor(counts).cumsum(0)
    return ends - torch.tensor(counts)


# ---------------------------------------------------------------------- of keys

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio


def owners_of_keys(numbers: Tensor, world_size: int) -> Tensor:
    """Return the rank that owns each key, int64; it depends only on the key and the number of ranks.

    Args:
        numbers: the keys, or the hashes of strings, int64.
        world_size: the number of ranks.
    """
    spread = (numbers ^ (numbers >> 32)) * _GOLDEN  # Fibonacci hashing (Knuth, volume 3, 6.4)
    return ((spread >> 32 & 0xFFFFFFFF) * world_size) >> 32


def shares_of(capacity: int, used_by: Sequence[int]) -> list[int]:
    """Return the number of keys that each rank can own: an equal share, or the number it has, if greater.

    If some have more, the others share the rest equally. Shares do not change as ranks fill them, so a training run
    evicts the same keys after it is reloaded.

    Args:
        capacity: rows over all ranks.
        used_by: number of rows with keys on each rank, in rank order; the sum is at most ``capacity``.
    """
    shares = [0] * len(used_by)
    within = [*range(len(used_by))]
    while within:
        each, more = divmod(
            capacity - sum(used for rank, used in enumerate(used_by) if rank not in within), len(within)
        )
        for place, rank in enumerate(within):
            shares[rank] = each + (place < more)
        beyond = [rank for rank in within if used_by[rank] > shares[rank]]
        if not beyond:
            break
        for rank in beyond:
            shares[rank] = used_by[rank]
        within = [rank for rank in within if rank not in beyond]
    return shares


@dataclass(frozen=True)
class KeyRoute:
    """The keys of several maps that this rank sends to their owners, and those that it receives.

    Attributes:
        of_map: the map that each part of the keys belongs to.
        places: for each part, the index of each key among the part's sent keys.
        counts: the number of keys sent per part.
        order: the order of the sent keys by owner.
        sent, received: the number of keys sent to, and received from, each rank.
        asked: the keys received for each map, part by part, in rank order: numbers and texts.
        by_map: the order that sorts the received keys into that of ``asked``.
    """

    of_map: list[int]
    places: list[Tensor]
    counts: list[int]
    order: Tensor
    sent: list[int]
    received: list[int]
    asked: list[tuple[Tensor, Texts | None]]
    by_map: Tensor

    @classmethod
    def of(cls, task: Task, keys: Sequence[Keys], once: Sequence[bool], parts: Sequence[Sequence[int]]) -> KeyRoute:
        """Send keys to their owners; every rank must call this together.

        Args:
            task: the ranks' common task.
            keys: a batch of keys for each map.
            once: for each map, True to send a key only once per part.
            parts: for each batch, the number of keys in each part: all ranks' first parts precede their second ones.
        """
        size = len(task.lane.ranks)
        of_map = [index for index, some in enumerate(parts) for _ in some]
        given = [part for some, counts in zip(keys, parts, strict=True) for part in _parted(some, counts)]
        sent_keys, places = zip(
            *(
                _distinct(part) if once[index] else (part, torch.arange(len(part)))
                for index, part in zip(of_map, given, strict=True)
            ),
            strict=True,
        )
        counts = torch.tensor([len(part) for part in sent_keys])
        numbers = torch.cat([part.numbers for part in sent_keys])
        owner = owners_of_keys(numbers, size)
        order = owner.argsort(stable=True)
        of_part = torch.repeat_interleave(torch.arange(len(given)), counts)
        to_each = torch.bincount(owner * len(given) + of_part, minlength=size * len(given)).view(size, -1)
        from_each = task.send(to_each, [1] * size, [1] * size)
        sent, received = to_each.sum(1).tolist(), from_each.sum(1).tolist()
        came, texts = task.send(numbers[order], sent, received), None
        if any(some.texts is not None for some in keys):
            texts = sent_texts(task, select_texts(_joined(sent_keys), order), sent, received)
        by_map = torch.repeat_interleave(torch.arange(len(given)).repeat(size), from_each.view(-1)).argsort(stable=True)
        of_maps = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, torch.tensor(of_map), from_each.sum(0))
        asked = [
            (came[own], None if some.texts is None or texts is None else select_texts(texts, own))
            for some, own in zip(keys, torch.split(by_map, of_maps.tolist()), strict=True)
        ]
        return cls(of_map, [*places], counts.tolist(), order, sent, received, asked, by_map)

    def bring(self, task: Task, answers: Sequence[Tensor]) -> Tensor:
        """Send an answer for each received key; return the answers for the sent keys, part by part.

        Args:
            task: the ranks' common task.
            answers: for each map, shape (n,), all of the same dtype.
        """
        return _put(task.send(_put(torch.cat(list(answers)), self.by_map), self.received, self.sent), self.order)

    def send_back(self, task: Task, values: Tensor, chosen: Tensor, wanted: Tensor) -> Tensor:
        """Send values for some of the sent keys to their owners; return the values received here.

        Args:
            task: the ranks' common task.
            values: values of the chosen keys, part by part, shape (m,).
            chosen: a mask of the sent keys, part by part.
            wanted: a mask of the received keys, map by map: those for which a value arrives.

        Returns:
            The values of the wanted keys, map by map.
        """
        of_all = torch.zeros(len(chosen), dtype=values.dtype).masked_scatter_(chosen, values)
        leaving, coming = chosen[self.order], _put(wanted, self.by_map)
        sent = [int(part.sum()) for part in torch.split(leaving, self.sent)]
        received = [int(part.sum()) for part in torch.split(coming, self.received)]
        came = task.send(of_all[self.order][leaving], sent, received)
        return torch.zeros(len(coming), dtype=values.dtype).masked_scatter_(coming, came)[self.by_map][wanted]

    def given(self, answers: Tensor) -> list[Tensor]:
        """Return, for each map, the answer for every given key, from what :meth:`bring` returned."""
        found: list[list[Tensor]] = [[] for _ in self.asked]
        for index, places, part in zip(self.of_map, self.places, torch.split(answers, self.counts), strict=True):
            found[index].append(part[places])
        return [torch.cat(own) for own in found]


def _parted(keys: Keys, counts: Sequence[int]) -> Iterator[Keys]:
    """Yield the parts of a batch."""
    if len(counts) == 1:
        yield keys
        return
    for within in torch.split(torch.arange(len(keys)), list(counts)):
        texts = None if keys.texts is None else select_texts(keys.texts, within)
        yield Keys(keys.numbers[within], (len(within),), keys.device, texts)


def _distinct(keys: Keys) -> tuple[Keys, Tensor]:
    """Return the distinct keys, in order of first occurrence, and each given key's index among them."""
    seen = kernels.KeyMap(max(1, len(keys)), keys.texts is not None, 1, None)
    rows = seen.add(keys.numbers, keys.texts)
    assert rows is not None
    once = seen.save(False)
    return Keys(once.numbers, tuple(once.numbers.shape), keys.device, once.texts), rows - 1


def _joined(batches: Sequence[Keys]) -> Texts:
    """Return the texts of all keys, empty for maps of numbers."""
    none = torch.empty(0, dtype=torch.uint8)
    texts = [some.texts or (none, torch.zeros(len(some) + 1, dtype=torch.int64)) for some in batches]
    return torch.cat([text for text, _ in texts]), _offsets(torch.cat([offsets.diff() for _, offsets in texts]))


def sent_texts(task: Task, texts: Texts, sent: Sequence[int], received: Sequence[int]) -> Texts:
    """Send texts to each rank, as :meth:`Task.send` does rows, and return those received."""
    text, offsets = texts
    lengths = task.send(offsets.diff(), sent, received)
    to_each = [int(part.sum()) for part in torch.split(offsets.diff(), list(sent))]
    from_each = [int(part.sum()) for part in torch.split(lengths, list(received))]
    return task.send(text, to_each, from_each), _offsets(lengths)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _put(values: Tensor, places: Tensor) -> Tensor:
    """Return values scattered to their places."""
    return torch.empty_like(values).index_copy_(0, places, values)
