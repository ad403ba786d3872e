"""Growing id sets over ranks: id maps whose keys the ranks own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Kind, RankGroup, Task
from speedswap.errors import IdMapError, IdMapFullError
from speedswap.kernels import deferred_interrupts
from speedswap.ranks.route import KeyRoute, owners_of_keys, shares_of
from speedswap.swapping.keyed import KeyedLookup, KeyedRows
from speedswap.swapping.row_step import RowStep
from speedswap.tables import Keys, Table, as_keys
from speedswap.tables.files.damage import require, says_damaged
from speedswap.tables.files.keys_file import SavedMap, joined, restored, selected
from speedswap.tables.id_map import AskedAhead, IdMap

_SETTINGS = ("capacity", "keys", "admit_after", "evict")
_NEW, _RENEWED, _FULL = 1, 2, 4  # the note of a rank with new keys, with rows to reset, or with too few rows
_Asked = tuple[Keys, bool, Sequence[int]]  # at own pace: keys, whether to add them, and the number in each part


class Added(NamedTuple):
    """The answer to a training lookup of keys.

    Attributes:
        rows: the row of each key, int64, of the keys' shape, on their device.
        renewed: rows to reset, of keys that this rank owns, int64, shape (n,), on the CPU.
        is_any_renewed: True if any rank has rows to reset, in any of the lookup's maps.
    """

    rows: Tensor
    renewed: Tensor
    is_any_renewed: bool


class ShardedIdMap(IdMap):
    """An id map whose keys are partitioned over ranks: each rank stores the rows and counts of its own keys.

    Rows are assigned in the order of the keys' first occurrence, rank by rank, as in one process that has all ranks'
    batches; a key's row does not depend on its owner. If rows are evicted, each owner evicts its own keys and has an
    equal share of ``capacity``; keys on probation have equal shares of as many places.

    All ranks must make every call about keys together, each with its own keys, in any number.

    Args:
        settings: an empty map with the arguments; it must not be used afterwards.
        group: the ranks.

    Attributes:
        number: the map's number within the group, the same on every rank.
        share: the number of keys that this rank can own.
        renew: resets rows in the table without a lookup, while ranks run at their own pace.
    """

    def __init__(self, settings: IdMap, group: RankGroup) -> None:
        self.group, self.number = group, group.add(self)
        self.capacity, self.evict = settings.capacity, settings.evict
        self._used_by = [0] * len(group)  # number of rows being restored, by the rank that owns their keys
        self._last_in_parts = 0  # the last of these rows
        self.share = self._own_share()
        self._most_on_probation = max(1, shares_of(self.capacity, self._used_by)[group.rank])
        super().__init__(settings.capacity, keys=settings.keys, admit_after=settings.admit_after, evict=settings.evict)
        self.holder = settings.holder
        self.renew: Callable[[Tensor], object] = lambda rows: None
        self._rows = torch.zeros(1, dtype=torch.int32)  # each own key's row, by its place in the compiled map
        self._used = 0  # number of rows on all ranks
        self._serves = False

    @classmethod
    def of(cls, id_map: IdMap, group: RankGroup) -> ShardedIdMap:
        """Return an empty map with another map's settings, whose keys the ranks of a group own.

        Raises:
            ValueError: the map has keys already; it evicts and has fewer rows than the group has ranks; or ranks pass
                maps with different settings.
        """
        given = id_map if id_map.successor is None else id_map.successor
        if isinstance(given, ShardedIdMap):
            if given.group is not group:
                raise ValueError("id_map belongs to a table with another process group; give each table a separate map")
            return given
        if len(id_map):
            raise ValueError(f"id_map has {len(id_map)} keys already; a table owned by ranks begins with a new map")
        group.require_same_settings("id_map", {name: getattr(id_map, name) for name in _SETTINGS})
        found = id_map.successor = cls(id_map, group)
        return found

    @classmethod
    def reopened(cls, found: IdMap, group: RankGroup) -> ShardedIdMap:
        """Return a map of the parts that ranks have read from their files; every rank must call this."""
        part = found.part
        assert part is not None
        again = cls(IdMap(**part.settings), group)
        with group.main.task(Kind.REOPENED, again.number) as task:
            again._used_by = task.round(note=part.cursor.used).notes
            again._last_in_parts = sum(again._used_by)
            again._adopt(*again._restored([part], "the id map"))
        again._is_frozen = found._is_frozen
        return again

    @property
    def name(self) -> str | None:
        """The table's name, once the map belongs to one."""
        return getattr(self.holder(), "name", None)

    def stands_for(self, id_map: IdMap) -> bool:
        is_new = id_map.successor is None and not isinstance(id_map, ShardedIdMap) and not len(id_map)
        if is_new and all(getattr(id_map, name) == getattr(self, name) for name in _SETTINGS):
            id_map.successor = self
        return id_map is self or id_map.successor is self

    def _empty(self) -> kernels.KeyMap:
        return kernels.KeyMap(self.share, self.keys == "exact", self.admit_after, self.evict, self._most_on_probation)

    def __len__(self) -> int:
        """Return the number of keys with a row, over all ranks."""
        return self._used

    @property
    def counts(self) -> bool:
        """True if sightings are counted, so that every occurrence of a key is sent to its owner."""
        return self.admit_after > 1 or self.evict == "lfu"

    def _own_share(self) -> int:
        """Return the number of keys that this rank can own, including those it has."""
        if self.evict is None:
            return self.capacity
        share = shares_of(self.capacity, self._used_by)[self.group.rank]
        if not share:
            raise ValueError(
                f"capacity is {self.capacity}, and this rank, one of {len(self.group)} that evict, gets no row of it; "
                "give the map more rows, or use fewer ranks"
            )
        return share

    def renew_later(self, rows: Tensor) -> None:
        """Defer the reset of rows that could not be reset now until the next keys are added."""
        places = torch.isin(self._rows[: self._map.cursor.used + 1], rows.to(torch.int32)).nonzero().squeeze(1)
        super().renew_later(places[places > 0])

    # ------------------------------------------------------------------ keys to rows

    def lookup(self, keys: Any) -> Tensor:
        """Return the row of each key, or 0, as :meth:`IdMap.lookup` does; every rank must call this."""
        return self.look_up_all([self], [keys])[0]

    def add(self, keys: Any) -> tuple[Tensor, Tensor]:
        """Assign rows to new keys and return every key's row, as :meth:`IdMap.add` does; every rank must call this.

        Returns:
            rows: the row of each key.
            renewed: rows to reset, of keys that this rank owns.

        Raises:
            PeerError: another rank has failed; no map has changed.
        """
        added = self.add_all([self], [keys])[0]
        return added.rows, added.renewed

    @staticmethod
    def look_up_all(maps: Sequence[ShardedIdMap], keys: Sequence[Any]) -> list[Tensor]:
        """Return the rows of a batch of keys in each of several maps, as :meth:`lookup` does, in one exchange."""
        if maps[0].group.own_pace.is_active and not maps[0]._serves:
            return [each._at_own_pace(some, adds=False) for each, some in zip(maps, keys, strict=True)]
        lane, number = maps[0].group.main, maps[0].number
        with lane.task(Kind.KNOWN_KEYS, number) as task, _held(maps, changing=False):
            found = [as_keys(some, each.keys) for each, some in zip(maps, keys, strict=True)]
            route = KeyRoute.of(task, found, [True] * len(maps), [[len(some)] for some in found])
            own = [each._map.find(*asked) for each, asked in zip(maps, route.asked, strict=True)]
            rows = route.bring(task, [each._rows[places] for each, places in zip(maps, own, strict=True)])
        return _shaped(route.given(rows), found)

    @staticmethod
    def add_all(
        maps: Sequence[ShardedIdMap], keys: Sequence[Any], parts: Sequence[Sequence[int] | None] | None = None
    ) -> list[Added]:
        """Add a batch of keys to each of several maps, as :meth:`add` does, in one exchange: to all or none.

        Args:
            maps: maps of one group.
            keys: a batch for each map.
            parts: for each batch, the number of keys in each part: all ranks' first parts precede their second ones;
                None for one part.
        """
        parts = parts or [None] * len(maps)
        if maps[0].group.own_pace.is_active and not maps[0]._serves:
            given = zip(maps, keys, parts, strict=True)
            none = torch.empty(0, dtype=torch.int64)
            return [Added(each._at_own_pace(some, adds=True, parts=own), none, False) for each, some, own in given]
        if len({*maps}) < len(maps):
            return [ShardedIdMap.add_all([each], [some])[0] for each, some in zip(maps, keys, strict=True)]
        lane, number = maps[0].group.main, maps[0].number
        with lane.task(Kind.KEYS, number) as task, _held(maps, changing=True):
            found = [as_keys(some, each.keys) for each, some in zip(maps, keys, strict=True)]
            counts = [own or [len(some)] for own, some in zip(parts, found, strict=True)]
            route = KeyRoute.of(task, found, [not each.counts for each in maps], counts)
            batch = _NewKeys(maps, route)
            try:
                batch.add()
                notes = task.round(note=batch.news).notes
                full = [rank for rank, note in zip(task.lane.ranks, notes, strict=True) if note & _FULL]
                if full:
                    task.finish()  # the others know
                    raise IdMapFullError(
                        f"keys has more distinct keys owned by rank {full[0]} than that rank has rows for; give the "
                        "map a greater capacity, or make the batch smaller; nothing was added"
                    )
                if any(note & _NEW for note in notes):
                    batch.number(task)
                renewed = batch.renewed()
                with deferred_interrupts():  # once this rank has all answers, the others have theirs too
                    rows = route.bring(task, batch.rows())
                    batch.accept()
            except BaseException:
                batch.take_back()
                raise
        is_any_renewed = any(note & _RENEWED for note in notes)
        shaped = _shaped(route.given(rows), found)
        return [Added(own, some, is_any_renewed) for own, some in zip(shaped, renewed, strict=True)]

    # ------------------------------------------------------------------ each rank at its own pace

    def _at_own_pace(self, keys: Any, *, adds: bool, parts: Sequence[int] | None = None) -> Tensor:
        found = as_keys(keys, self.keys)
        return self.group.own_pace.look_up(self.number, (found, adds, parts or [len(found)]))

    def serve(self, task: Task, asked: _Asked | None, part: int) -> Tensor | None:
        """Answer key lookups while the ranks run at their own pace, first those that add no keys."""
        note = 0 if asked is None else len(asked[2]) << 1 | asked[1]
        wanted = [each for each in task.round(note=note).notes if each]
        adds = all(each & 1 for each in wanted)
        is_mine = asked is not None and asked[1] == adds
        if asked is not None and is_mine:
            keys, _, parts = asked
        else:
            none = torch.empty(0, dtype=torch.int64)
            keys = Keys(none, (0,), none.device, kernels.texts_of([]) if self.keys == "exact" else None)
            parts = [0] * max(each >> 1 for each in wanted)
        self._serves = True
        try:
            if adds:
                rows, renewed, is_any_renewed = self.add_all([self], [keys], [parts])[0]
                if is_any_renewed:
                    self.renew(renewed)
            else:
                (rows,) = self.look_up_all([self], [keys])
        finally:
            self._serves = False
        return rows if is_mine else None

    @staticmethod
    def ask_all(maps: Sequence[IdMap], keys: Sequence[Any]) -> list[AskedAhead]:
        raise IdMapError("keys owned by ranks cannot be looked up ahead; look them up in their batch's turn")

    # ------------------------------------------------------------------ saving

    def _saved(self, cells: tuple[Tensor, Tensor] | None = None) -> SavedMap:
        rows = self._rows[1 : self._map.cursor.used + 1].clone() if cells is None else self._rows[cells[0].long()]
        return super()._saved(cells)._replace(own_rows=rows)

    def _kept(self, part: SavedMap) -> SavedMap:
        rows = part.own_rows
        last = part.cursor.used if rows is None else int(rows.max()) if len(rows) else 0
        self._last_in_parts = max(self._last_in_parts, last)
        size, rank = len(self.group), self.group.rank
        used_by = owners_of_keys(part.rows.numbers, size).bincount(minlength=size).tolist()
        self._used_by = [sum(both) for both in zip(self._used_by, used_by, strict=True)]

        def is_own(numbers: Tensor) -> Tensor:
            return owners_of_keys(numbers, size) == rank

        return selected(part, is_own)

    @contextmanager
    def restoring(self, raw: Tensor | Iterable[Tensor], *, what: str = "the id map") -> Iterator[None]:
        self._used_by = [0] * len(self.group)
        self._last_in_parts = 0
        if isinstance(raw, Tensor):  # the whole map
            self.group.require_alike(raw, f"bytes of {what}")
        with super().restoring(raw, what=what):
            yield

    def _restored(self, parts: list[SavedMap], what: str) -> tuple[SavedMap, kernels.KeyMap]:
        with says_damaged(what, "; restore all parts of it from a copy"):
            require(self._last_in_parts == sum(self._used_by), "the keys of some rows are missing")
        share = self._own_share()
        own = [part for part in parts if part.cursor.used or part.cursor.probation_used]
        if len(own) == 1:  # as this rank saved it
            saved = own[0]._replace(free_rows_are_stale=any(part.free_rows_are_stale for part in parts))
        else:
            saved = joined(parts, self.capacity)
        if len(saved.probation.numbers) > self._most_on_probation:
            saved = joined([saved], self._most_on_probation)
        return saved, restored(saved, what, share, self._most_on_probation)

    def _adopt(self, saved: SavedMap, restored: kernels.KeyMap) -> None:
        assert saved.own_rows is not None
        super()._adopt(saved, restored)
        self.share = self._own_share()
        self._rows = torch.cat([torch.zeros(1, dtype=torch.int32), saved.own_rows])
        self._used = sum(self._used_by)

    def _whole(self) -> IdMap:
        """Return an ordinary map with all ranks' keys; every rank must call this."""
        mine, size = self.to_bytes(), len(self.group)
        with self.group.main.task(Kind.PARTS, self.number) as task:
            lengths = task.round([len(mine)] * size).counts
            parts = torch.split(task.send(mine.repeat(size), [len(mine)] * size, lengths), lengths)
        whole = IdMap(self.capacity, keys=self.keys, admit_after=self.admit_after, evict=self.evict)
        whole.restore(parts)
        return whole

    def whole_bytes(self) -> Tensor:
        """Return all ranks' keys as the bytes of an ordinary map; every rank must call this."""
        return self._whole().to_bytes()

    def row_keys(self) -> Tensor | kernels.Texts:
        """Return the keys of all rows over all ranks, as :meth:`IdMap.row_keys` does; every rank must call this."""
        return self._whole().row_keys()

    def __deepcopy__(self, memo: dict[int, Any]) -> IdMap:
        raise TypeError("the keys of the id map are owned by ranks and cannot be copied; save the table")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("the keys of the id map are owned by ranks and cannot be pickled; save the table")


class _NewKeys:
    """The keys that a rank receives in a training lookup, for its parts of several maps.

    Attributes:
        news: flags: some keys are new here, some rows are reset, some map has too few rows.
    """

    def __init__(self, maps: Sequence[ShardedIdMap], route: KeyRoute) -> None:
        self._maps = maps
        self._route = route
        self._undos = [kernels.IdMapUndo() for _ in maps]
        self._had = [each._map.cursor.used for each in maps]
        self._totals = [each._used for each in maps]
        self._places: list[Tensor] = []
        self.news = 0

    def add(self) -> None:
        """Assign places in this rank's maps to new keys: in all maps or in none."""
        maps, asked = self._maps, self._route.asked
        self._places, full = kernels.add_to_maps([each._map for each in maps], asked, self._undos)
        if full >= 0:
            self.news = _FULL
            return
        new = [each._map.cursor.used - had for each, had in zip(maps, self._had, strict=True)]
        are_stale = any(each._free_rows_are_stale for each in maps)
        has_renewed = any(len(each._map.renewed) or len(each._stale) for each in maps)
        self.news = _NEW * any(new) | _RENEWED * (has_renewed or (are_stale and any(new)))

    def number(self, task: Task) -> None:
        """Assign rows to new keys, in the order of ranks and of their batches; every rank must call this.

        The first rank whose batch has a key assigns its row, since that rank knows the key's position in the order.
        """
        route, maps = self._route, self._maps
        first = torch.cat([_is_first(places, had) for places, had in zip(self._places, self._had, strict=True)])
        sizes = [len(places) for places in self._places]
        mine = route.bring(task, torch.split(first.to(torch.uint8), sizes)).bool()
        counts = torch.stack([part.sum() for part in torch.split(mine, route.counts)])
        of_ranks = torch.stack(task.share_numbers(counts))
        before = of_ranks[: task.lane.rank].sum(0).tolist()
        totals, given = list(self._totals), []
        for index, start, own, of_all in zip(
            route.of_map, before, counts.tolist(), of_ranks.sum(0).tolist(), strict=True
        ):
            first_row = totals[index] + start + 1
            given.append(torch.arange(first_row, first_row + own))
            totals[index] += of_all
        for each, total in zip(maps, totals, strict=True):
            if total > each.capacity:
                task.finish()  # the others know
                raise IdMapFullError(
                    f"keys has more new keys, over all ranks, than the {each.capacity - each._used} rows left of "
                    f'{each.capacity}; give the map a greater capacity, or make it with evict="lru" or "lfu"; nothing '
                    "was added"
                )
        rows = route.send_back(task, torch.cat(given).to(torch.int32), mine, first)
        new = [each._map.cursor.used - had for each, had in zip(maps, self._had, strict=True)]
        for each, had, own in zip(maps, self._had, torch.split(rows, new), strict=True):
            each._rows = _written(each._rows, had + 1, own)
        self._totals = totals

    def rows(self) -> list[Tensor]:
        """Return the row of each received key."""
        return [each._rows[places] for each, places in zip(self._maps, self._places, strict=True)]

    def renewed(self) -> list[Tensor]:
        """Return, for each map, the rows of this rank's keys to reset."""
        renewed = []
        for each, had in zip(self._maps, self._had, strict=True):
            places = torch.cat([each._stale, each._renewed_since(each._map.cursor._replace(used=had))])
            renewed.append(each._rows[kernels.unique(places)[0]].long())
        return renewed

    def accept(self) -> None:
        """Accept the batch."""
        self._undos = []
        for each, total in zip(self._maps, self._totals, strict=True):
            each._used = total
            each._stale = each._stale[:0]

    def take_back(self) -> None:
        """Undo the batch, unless it was accepted."""
        for each, undo in zip(self._maps, self._undos, strict=False):
            each._map.undo(undo)


def _is_first(places: Tensor, had: int) -> Tensor:
    """Return, for each key, whether it is the first key of its place and the place is at least ``had``."""
    if not len(places):
        return torch.empty(0, dtype=torch.bool)
    highest = torch.cat([torch.tensor([had]), places.cummax(0).values[:-1]])
    return places > highest.clamp(min=had)


def _written(rows: Tensor, begin: int, values: Tensor) -> Tensor:
    """Write values into rows from ``begin``, in memory that grows by at least an eighth; return the rows."""
    if begin + len(values) > len(rows):
        longer = torch.zeros(begin + len(values) + len(rows) // 8, dtype=rows.dtype)
        longer[:begin] = rows[:begin]
        rows = longer
    rows[begin : begin + len(values)] = values
    return rows


@contextmanager
def _held(maps: Sequence[ShardedIdMap], *, changing: bool) -> Iterator[None]:
    """Hold the locks of the given maps."""
    with ExitStack() as held:
        for each in sorted({*maps}, key=id):
            if each.frozen:
                raise IdMapError("the keys of the id map are owned by ranks; look them up in the ranks only")
            held.enter_context(each._changing() if changing else each._unbroken())
        yield


def _shaped(rows: Sequence[Tensor], keys: Sequence[Keys]) -> list[Tensor]:
    return [own.long().view(some.shape).to(some.device) for own, some in zip(rows, keys, strict=True)]


def part_of(parts: Sequence[IdMap], world_size: int, rank: int) -> IdMap:
    """Return a rank's part of a map, extracted from the parts of another number of ranks."""
    saved = [part.part for part in parts if part.part is not None]
    kept = [selected(each, lambda numbers: owners_of_keys(numbers, world_size) == rank) for each in saved]
    found = IdMap(**saved[0].settings)
    found.part = joined(kept, found.capacity)
    return found


class ShardedKeys(KeyedRows):
    """The id map of a table whose keys and rows are owned by ranks.

    Args:
        id_map, table, step, first_row: as for :class:`KeyedRows`.
        reset_rows: resets rows in the table and the step; every rank must call it.
    """

    is_over_ranks = True
    id_map: ShardedIdMap

    def __init__(
        self, id_map: IdMap, table: Table, step: RowStep, first_row: int, reset_rows: Callable[[Tensor], None]
    ) -> None:
        super().__init__(id_map, table, step, first_row)
        self.reset_rows = reset_rows
        renew = weakref.WeakMethod(self._renew)
        self.id_map.renew = lambda rows: (found := renew()) and found(rows)

    def _renew(self, rows: Tensor) -> None:
        """Reset rows that no training lookup of this rank requested; every rank must call this."""
        try:
            self.reset_rows(rows + self.first_row)
        except BaseException:
            self.id_map.renew_later(rows)
            raise

    @staticmethod
    def find_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        found = ShardedIdMap.look_up_all([_map_of(each) for each in lookups], [each.given for each in lookups])
        return [rows.to(each.device) for rows, each in zip(found, lookups, strict=True)]

    @staticmethod
    def take_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        maps = [_map_of(each) for each in lookups]
        added = ShardedIdMap.add_all(maps, [each.given for each in lookups], [each.parts for each in lookups])
        if any(each.is_any_renewed for each in added):
            renewed: dict[Callable[[Tensor], None], list[Tensor]] = {}  # by the step's reset_rows
            for each, own in zip(lookups, added, strict=True):
                assert isinstance(each.table, ShardedKeys)
                renewed.setdefault(each.table.reset_rows, []).append(own.renewed + each.table.first_row)
            try:
                for reset_rows, rows in renewed.items():
                    reset_rows(torch.cat(rows))
            except BaseException:
                for id_map, own in zip(maps, added, strict=True):
                    id_map.renew_later(own.renewed)
                raise
        return [own.rows.to(each.device) for each, own in zip(lookups, added, strict=True)]


def _map_of(lookup: KeyedLookup) -> ShardedIdMap:
    """Return the map of a lookup, in a collection whose keys are all owned by ranks."""
    assert isinstance(lookup.table, ShardedKeys)
    return lookup.table.id_map
