"""Ids that grow, with keys that are owned by the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Kind, RankGroup, Task
from speedswap.errors import IdMapError, IdMapFullError
from speedswap.kernels import deferred_interrupts
from speedswap.ranks.key_route import KeyRoute
from speedswap.ranks.new_keys import FULL, NEW, RENEWED, NewKeys
from speedswap.ranks.owned_keys import SETTINGS, OwnedKeys
from speedswap.tables.id_map import AskedAhead, IdMap
from speedswap.tables.keys import Keys, as_keys

__all__ = ["Added", "ShardedIdMap"]


class Added(NamedTuple):
    """The answer to a training lookup of keys.

    Attributes:
        rows: of each key, int64, of the keys' shape, on their device.
        renewed: rows that start anew, of the keys that this rank owns, int64, shape (n,), on the CPU.
        is_any_renewed: True if any rank has such rows, in any of the maps of the lookup.
    """

    rows: Tensor
    renewed: Tensor
    is_any_renewed: bool


class _AskedKeys(NamedTuple):
    """A lookup of keys while the ranks run their passes at a pace of their own.

    Attributes:
        keys: of the lookup.
        adds: True for a training one.
        parts: the number of keys in each part.
    """

    keys: Keys
    adds: bool
    parts: Sequence[int]


class ShardedIdMap(OwnedKeys):
    """An id map whose keys are owned by ranks: each knows the rows of its own keys, and counts their sightings.

    Rows are given over all ranks in the order of the keys' first occurrence, rank after rank, as one process gives them
    that has all ranks' batches; the row of a key says nothing of the key's owner. Where rows are evicted, an owner
    takes them from its own keys: it has an equal share of ``capacity`` then.

    Every call about keys is made by all ranks at once, each with keys of its own, of any number.

    Args:
        settings: a map without keys, with the arguments; it cannot be used any more.
        group: the ranks.

    Attributes:
        renew: lets rows start anew in the table, without a lookup that asks: while ranks run at a pace of their own.
    """

    def __init__(self, settings: IdMap, group: RankGroup) -> None:
        self.number = group.add(self)
        super().__init__(settings, group)
        self.renew: Callable[[Tensor], object] = lambda rows: None
        self._serves = False

    @classmethod
    def of(cls, id_map: IdMap, group: RankGroup) -> ShardedIdMap:
        """Return the map with the settings of another one, whose keys the ranks of a group own from now on.

        Raises:
            ValueError: it has keys already; or it evicts, and has fewer rows than the group ranks; or other ranks give
                a map with other settings.
        """
        given = id_map if id_map.successor is None else id_map.successor
        if isinstance(given, ShardedIdMap):
            if given.group is not group:
                raise ValueError("id_map is that of a table with another process group; give each a map of its own")
            return given
        if len(id_map):
            raise ValueError(f"id_map has {len(id_map)} keys already; a table owned by ranks begins with a new map")
        group.require_same_settings("id_map", {name: getattr(id_map, name) for name in SETTINGS})
        found = id_map.successor = cls(id_map, group)
        return found

    @classmethod
    def reopened(cls, found: IdMap, group: RankGroup) -> ShardedIdMap:
        """Return the map of which each rank has found its own part in files; every rank calls this."""
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
        """The table's name, once the map is kept with one."""
        return getattr(self.holder(), "name", None)

    def stands_for(self, id_map: IdMap) -> bool:
        is_new = id_map.successor is None and not isinstance(id_map, ShardedIdMap) and not len(id_map)
        if is_new and all(getattr(id_map, name) == getattr(self, name) for name in SETTINGS):
            id_map.successor = self
        return id_map is self or id_map.successor is self

    # ------------------------------------------------------------------ keys to rows

    def lookup(self, keys: Any) -> Tensor:
        """Return the row of each key, 0 for a key without one; every rank calls this. As :meth:`IdMap.lookup`."""
        return self.look_up_all([self], [keys])[0]

    def add(self, keys: Any) -> tuple[Tensor, Tensor]:
        """Return the row of each key, after new ones were given theirs; every rank calls this. As :meth:`IdMap.add`.

        Returns:
            rows: of each key.
            renewed: rows that start anew, of the keys that this rank owns.

        Raises:
            PeerError: another rank has failed; no map has changed.
        """
        added = self.add_all([self], [keys])[0]
        return added.rows, added.renewed

    @staticmethod
    def look_up_all(maps: Sequence[ShardedIdMap], keys: Sequence[Any]) -> list[Tensor]:
        """Return the rows of a batch of keys in each of several maps, as :meth:`lookup` does, by one exchange."""
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
        """Add a batch of keys to each of several maps, as :meth:`add` does, by one exchange: to all, or to none.

        Args:
            maps: of one group.
            keys: a batch for each.
            parts: of each batch, the number of keys in each part: all ranks' first parts come before their second ones;
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
            batch = NewKeys(maps, route)
            try:
                batch.add()
                notes = task.round(note=batch.news).notes
                full = [rank for rank, note in zip(task.lane.ranks, notes, strict=True) if note & FULL]
                if full:
                    task.finish()  # the others know
                    raise IdMapFullError(
                        f"keys has more distinct keys of those that rank {full[0]} owns than its rows of the map can "
                        "hold at once; make the map with a greater capacity, or the batch smaller; nothing was added"
                    )
                if any(note & NEW for note in notes):
                    batch.number(task)
                renewed = batch.renewed()
                with deferred_interrupts():  # a rank that has all answers knows that the others have
                    rows = route.bring(task, batch.rows())
                    batch.accept()
            except BaseException:
                batch.take_back()
                raise
        is_any_renewed = any(note & RENEWED for note in notes)
        shaped = _shaped(route.given(rows), found)
        return [Added(own, some, is_any_renewed) for own, some in zip(shaped, renewed, strict=True)]

    # ------------------------------------------------------------------ at a pace of their own

    def _at_own_pace(self, keys: Any, *, adds: bool, parts: Sequence[int] | None = None) -> Tensor:
        found = as_keys(keys, self.keys)
        asked = _AskedKeys(found, adds, parts or [len(found)])
        return self.group.own_pace.look_up(self.number, asked)

    def serve(self, task: Task, asked: _AskedKeys | None) -> Tensor | None:
        """Answer a lookup of keys, while the ranks run at a pace of their own: first those that add none."""
        note = 0 if asked is None else len(asked.parts) << 1 | asked.adds
        wanted = [each for each in task.round(note=note).notes if each]
        adds = all(each & 1 for each in wanted)
        is_mine = asked is not None and asked.adds == adds
        if asked is not None and is_mine:
            keys, parts = asked.keys, asked.parts
        else:
            none = torch.empty(0, dtype=torch.int64)
            keys = Keys(none, (0,), none.device, kernels.texts_of([]) if self.keys == "exact" else None)
            parts = [0] * max(each >> 1 for each in wanted)
        self._serves = True
        try:
            if not adds:
                rows = self.look_up_all([self], [keys])[0]
            else:
                rows, renewed, is_any_renewed = self.add_all([self], [keys], [parts])[0]
                if is_any_renewed:
                    self.renew(renewed)
        finally:
            self._serves = False
        return rows if is_mine else None

    def ask(self, keys: Any) -> AskedAhead:
        _refuse_ahead()

    @staticmethod
    def ask_all(maps: Sequence[IdMap], keys: Sequence[Any]) -> list[AskedAhead]:
        _refuse_ahead()


@contextmanager
def _held(maps: Sequence[ShardedIdMap], *, changing: bool) -> Iterator[None]:
    """Hold the locks of some maps."""
    with ExitStack() as held:
        for each in sorted({*maps}, key=id):
            if each.frozen:
                raise IdMapError("the keys of the id map are owned by ranks, which only their own processes can ask")
            held.enter_context(each._changing() if changing else each._unbroken())
        yield


def _shaped(rows: Sequence[Tensor], keys: Sequence[Keys]) -> list[Tensor]:
    return [own.long().view(some.shape).to(some.device) for own, some in zip(rows, keys, strict=True)]


def _refuse_ahead() -> NoReturn:
    raise IdMapError("keys that are owned by ranks are not asked for ahead of their turn; look them up when it comes")
