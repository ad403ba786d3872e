"""Records in this machine's memory: on a GPU or in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableClosedError
from speedswap.kernels import Lookup, Transfer, Transfers
from speedswap.tables.files.manifest import require_size
from speedswap.tables.init import chunks_of
from speedswap.tables.memory import RecordGroup, allocate, begin_cache, placed_near, says_too_large
from speedswap.tables.pending import Gathered, PendingTransfers, PendingWrite, Prefetch
from speedswap.tables.record import Block, Column, RecordLayout, initial_values, is_lazy
from speedswap.tables.store import Prefetched, RowStore, StoreFacts

_CPU = torch.device("cpu")
_Fields = list[tuple[RecordGroup, kernels.WantedColumns]]
_Blocks = Mapping[str, Tensor]
_Forms = Mapping[str, kernels.Stored | None]


class LocalStore(RowStore):
    """Records in device, pinned or pageable memory.

    Pinning memory takes long, and an optimizer that is attached later gives the records more columns. So pinned memory
    is taken and filled when rows are first written, or many were gathered. Until then, initial values are computed
    where they are read.

    Args:
        facts: facts about the store; ``storage`` is the kind of memory.
        written: True if rows may differ from their initial values.
        may_be_near: True if pinned rows are to lie in the memory of the first GPU that steps with them, if that has
            ample room.

    Attributes:
        groups: record groups, each with some of the columns: most tables have one group, which holds every column;
            columns added after the first write get another group.
    """

    def __init__(self, facts: StoreFacts, *, written: bool = False, may_be_near: bool = False) -> None:
        self.facts = facts
        self.num_embeddings, self.seed, self.name = facts.num_embeddings, facts.seed, facts.name
        self.groups: tuple[RecordGroup, ...] = ()
        self._columns: dict[str, Column] = {}
        self._by_names: dict[tuple[str, ...], _Fields] = {}  # cached for these groups, since every batch needs it
        self._written, self._may_be_near = written, may_be_near
        self._is_filled = True
        self._num_computed = 0  # rows
        self._lost = False  # neither could columns be added nor the old ones restored
        self._pending = PendingTransfers()
        self._hot_bytes = facts.hot_bytes  # None once no cache may begin
        self._is_divided = True
        self._owner_pid = os.getpid()
        self._replaces_memory = False  # a child forked in the meantime has none

    @classmethod
    def create(cls, facts: StoreFacts, weight: Column, *, may_be_near: bool = False) -> LocalStore:
        """Return a new store filled with initial values; errors are those of :meth:`Table.create`."""
        require_size(facts.num_embeddings, [weight])
        store = cls(facts, written=weight.init.is_given, may_be_near=may_be_near)
        store._hold(store._new_group([weight]))
        return store

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        return self._columns

    def check(self, *, writing: bool = False) -> bool:
        if self._lost:
            raise TableClosedError(
                f"table {self.name!r} lost its memory when columns could neither be added nor the old ones put back; "
                "make it again"
            )
        if os.getpid() != self._owner_pid:
            self._check_fork(writing)
        return False

    def _check_fork(self, writing: bool) -> None:
        """Raise if a forked process cannot use this store."""
        parent, remedy = self._owner_pid, "fork at another time"
        if self._replaces_memory:
            problem = f"table {self.name!r} was being changed by process {parent} when this one was forked from it"
        elif self._pending.writes():  # these writes never arrive in the child
            problem = (
                f"rows were on their way to table {self.name!r} in process {parent} when this one was forked from it"
            )
        elif writing or self.notes.pinned:
            limit = "not see its pinned memory" if self.notes.pinned else "only read it"
            problem = f"table {self.name!r} belongs to process {parent}; a forked process can {limit}"
            remedy = "keep the table on disk (path=), and open its path there with mode='r'"
        else:
            return
        raise TableClosedError(f"{problem}; {remedy}")

    # ------------------------------------------------------------------ memory

    def group_of(self, column: str) -> RecordGroup:
        """Return the group that holds a column.

        Raises:
            ValueError: none does.
        """
        for group in self.groups:
            if group.layout.has(column):
                return group
        raise ValueError(f"column {column!r} is not in table {self.name!r}; it has {', '.join(self.columns)}")

    def _fields(self, names: Iterable[str]) -> _Fields:
        """Return the named columns as the kernels gather them, by the group that holds them."""
        wanted = tuple(names)
        if wanted not in self._by_names:
            for name in wanted:
                self.group_of(name)  # raises if no group holds it
            self._by_names[wanted] = [(group, some) for group in self.groups if (some := group.fields(wanted))]
        return self._by_names[wanted]

    def _hold(self, *groups: RecordGroup) -> None:
        self.groups, self._by_names = groups, {}
        self._columns = {column.name: column for group in groups for column in group.layout.columns}
        self.facts.nbytes = sum(group.nbytes for group in groups)
        self.notes.pinned = any(group.memory.pinned for group in groups)
        self._is_filled = all(group.is_filled for group in groups)

    def add_group(self, group: RecordGroup) -> None:
        """Take over the records of further columns."""
        self._hold(*self.groups, group)

    def add_unfilled(self, columns: Sequence[Column]) -> RecordGroup:
        """Add zeroed records of a new table, whose rows the caller is about to write; return them."""
        self._hold(self._new_group(columns, filled=False))
        self._written = True
        return self.groups[0]

    def _new_group(self, columns: Sequence[Column], *, filled: bool = True) -> RecordGroup:
        """Return memory for these columns, filled with initial values, now or later, unless it should stay zero."""
        layout = RecordLayout.of(columns)
        memory = allocate(self.facts.storage, self.num_embeddings * layout.stride)
        gather, scatter = (1.0 if share is None else share for share in self.facts.shares)
        self._is_divided = self.facts.storage != "pinned" or None not in self.facts.shares
        group = RecordGroup(layout, memory, self.num_embeddings, kernels.Shares(gather, scatter), is_filled=False)
        if memory.is_taken or self._written or not filled:
            try:
                self._take(group, columns if filled else [])
            except BaseException:
                group.close()
                raise
        return group

    def _take(self, group: RecordGroup, columns: Sequence[Column]) -> None:
        """Take a group's memory and write columns' initial values."""
        with says_too_large(self.facts.storage, group.nbytes):
            group.take()
        self._fill(group, [column for column in columns if not column.init.is_zero])  # fresh memory is zero already
        group.is_filled = True

    def _take_all(self, device: torch.device = _CPU) -> None:
        """Take and fill the memory; no more columns are expected now.

        Args:
            device: where rows are moved to or from; memory is pinned by way of this GPU, or of the current one.

        Raises:
            TableTooLargeError: there is not enough memory. Nothing has changed.
        """
        if self._is_filled:
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if self._may_be_near and device.type == "cuda" and placed_near(self.groups, device):
                self.facts.storage, self._is_divided = "device", True
            for group in self.groups:
                if not group.is_filled:
                    self._take(group, group.layout.columns)
        self._hold(*self.groups)

    def _divide(self, device: torch.device) -> None:
        """Measure, before rows first go to or from a GPU, in which shares they go, where that is left open."""
        if not self._is_filled or device.type != "cuda":
            return
        self.drain()
        self._pending.finish_prefetches()
        for group in self.groups:
            best, (gather, scatter) = kernels.best_shares(group.records, device), self.facts.shares
            if gather is None:  # staged rows are read past a cache
                gather = 1.0 if self._hot_bytes is not None else best.gather
            group.divide(best._replace(gather=gather, scatter=best.scatter if scatter is None else scatter))
        self._is_divided = True

    def _fill(self, group: RecordGroup, columns: Sequence[Column]) -> None:
        """Write the initial values of some of a group's columns."""
        group.fill(columns, self.seed, {column.name: s for s in [*self.groups, group] for column in s.layout.columns})

    def _computes(self, count: int, device: torch.device) -> bool:
        """Return whether to compute the initial values of rows that are read now; if not, the memory is filled.

        After as many rows as the table has, computing them has taken as long as filling the memory does.
        """
        self._num_computed += count
        if self._num_computed <= self.num_embeddings and all(map(is_lazy, self._columns.values())):
            return True
        self._take_all(device)
        return False

    def _computed(self, rows: Tensor, names: Iterable[str], device: torch.device, out: Mapping[str, Tensor]) -> Block:
        """Return rows' initial values; arguments as for :meth:`gather`."""
        self._fields(names)  # raises if a column does not exist
        ids, order = rows.to(_CPU, torch.int64).sort()
        found, columns = initial_values(self._columns, ids, self.seed, self.num_embeddings), {}
        for name in names:
            initial, column = found[name], self._columns[name]
            if column.stored_dtype is torch.int8:  # not rounded yet, unlike other dtypes
                initial = column.as_read(initial)
            values = torch.empty_like(initial)
            values[order] = initial
            columns[name] = out[name].copy_(values) if name in out else values.to(device)
        return Block(rows, columns)

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        if self._pending.unfinished:
            self.drain()
        names, near = self._columns if columns is None else columns, device or rows.device
        if not self._is_filled and self._computes(rows.shape[0], near):
            return self._computed(rows, names, near, out or {})
        if not self._is_divided:
            self._divide(near)
        if out is None and rows.is_cpu and near.type == "cpu":
            fields = self._fields(names)
            if len(fields) == 1 and (columns is None or len(columns) == 1):  # the usual case
                group, wanted = fields[0]
                if group.memory.fence is None:
                    return Block(rows, kernels.gather_blocks(group.records, rows, wanted, near))
        return self._gather(rows, names, device, out)

    def _gather(
        self,
        rows: Tensor,
        names: Iterable[str],
        device: torch.device | None,
        out: Mapping[str, Tensor] | None = None,
        to_read: Tensor | None = None,
    ) -> Block:
        """Gather without waiting for pending writes.

        Args:
            to_read: the rows, with -1 for those that a pending write forwards; it forwards all of its rows, so that the
                gather does not wait for the memory.
        """
        if device is None:
            home = self.group_of("weight").memory.device
            device = home if home.type != "cpu" else rows.device
        blocks: dict[str, Tensor] = {}
        for group, fields in self._fields(names):
            if device.type == "cpu" and group.memory.fence is not None:
                group.settle()
            records, ids = (group.records, rows) if to_read is None else (group.records_ahead, to_read)
            blocks |= kernels.gather_blocks(records, ids, fields, device, out)
        return Block(rows, {name: blocks[name] for name in names})

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        first = next(iter(values.values()), block.rows)
        near = first.is_cuda
        if not self._is_filled:
            self._take_all(first.device)
        if not self._is_divided:
            self._divide(first.device)
        groups, leased, blocks = self._fields(values), block.columns, dict[str, Tensor]()
        for name, value in values.items():
            blocks[name] = value if leased.get(name) is value else kernels.as_read(value.detach())
        if near and self._hot_bytes is not None and self.notes.hot is None:
            self.notes.hot = begin_cache(self._hot_bytes, self.groups, first, self.name)
            self._hot_bytes = None if self.notes.hot is None else self._hot_bytes
        if transfers is not None and (near or self.notes.hot is None):
            forms = self._forms({name: fields[name] for _, fields in groups for name in fields})
            self._written = True
            write = PendingWrite(block, blocks, forms)
            self._scatter_later(write, groups, transfers)
            self.notes.writes += 1
            self._pending.add_write(write)
            return
        if is_busy := bool(self._pending.unfinished or self._pending.prefetches):
            self.drain()
            self._pending.finish_prefetches()
        self._written = True  # from here on
        try:
            for group, fields in groups:
                if group.memory.fence is not None and not near:
                    group.settle(writing=True)
                as_held = None if fields.copied else self._forms(fields)
                kernels.scatter_blocks(group.records, block.rows, fields, blocks, as_held)
            if near and self.notes.hot is not None:
                self.notes.hot.scattered()
        except BaseException:
            self._pending.make_stale()
            raise
        self.notes.writes += 1
        if is_busy:
            self._pending.make_stale()

    def _scatter_later(self, write: PendingWrite, groups: _Fields, transfers: Transfers) -> None:
        """Queue a pending write: on the CPU loops' thread if everything is in host memory, else with the transfers."""
        blocks, forms, device = write.values, write.forms, write.device
        if self._in_host_memory(device):
            self._pending.settle_before(write)
            for group, _ in groups:
                group.settle(writing=True)
            moves = [(group.records, fields.parts(blocks, forms)) for group, fields in groups]
            kernels.scatter_on_cpu(write, write.rows, moves)
            return

        hot, rows, is_near = self.notes.hot, write.rows, device.type == "cuda"
        expected = tuple if hot is None else self._pending.rows_expected()
        is_direct = is_near and all(group.records.direct_share("scatter") == 1 for group, _ in groups)

        def scatter(some: Tensor) -> None:
            for group, fields in groups:
                kernels.scatter_blocks(group.records, some, fields, blocks, forms)
            if hot is not None:
                hot.scattered(expected)

        def queue(to: Transfer[None], into: Transfers, rows_of: Callable[[], Tensor], waits: bool) -> None:
            # The table may be freed before the write is done.
            inputs = [rows, *blocks.values(), *[group.memory.bytes for group, _ in groups]]
            into.add(to, lambda: lambda: scatter(rows_of()), device, inputs=inputs, waits=waits or not is_direct)

        leaves_rows = is_near and hot is None and not self.notes.viewed and self._in_host_memory(_CPU)
        self._pending.queue_write(write, transfers, queue, leaves_rows=leaves_rows)

    def _forms(self, fields: Mapping[str, kernels.WantedColumn]) -> dict[str, kernels.Stored | None]:
        """Return how the next scatter converts columns."""
        draw = self.seed, self.notes.writes
        return {name: fields[name].stored and self._columns[name].form_of_write(*draw) for name in fields}

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        writes = self._pending.writes()
        if self.notes.hot is not None and lookup.device.type == "cpu":
            return super().prefetch(lookup, transfers)  # the host cannot read ahead of rows on their way home
        computes = not self._is_filled and self._computes(lookup.ids.numel(), lookup.device)
        if not self._is_divided:
            self._divide(lookup.device)
        if computes or lookup.ids.device.type != "cpu" or not self._in_host_memory(lookup.device):
            prefetch = self._prefetch_by(transfers, lookup, writes, computes)
        else:
            if any(write.transfers is not None for write in writes):
                self.drain()  # another thread writes these, unordered with the prefetching one
            prefetch = self._prefetch_on_cpu(lookup)
        self._pending.add_prefetch(prefetch)
        return prefetch

    def _prefetch_on_cpu(self, lookup: Lookup) -> Prefetch:
        """Prefetch in the thread that does the writes, and so after those queued before."""
        groups = self._fields(self.columns)
        for group, _ in groups:
            group.settle()
        names = [name for _, fields in groups for name in fields]
        moves = [(group.records, list(fields.values())) for group, fields in groups]

        def finish(found: kernels.FoundBlocks) -> Gathered:
            return Gathered((Block(found.rows, dict(zip(names, found.blocks, strict=True))), found.local))

        prefetch = Prefetch(self._pending, [])
        kernels.prefetch_on_cpu(prefetch, lookup.ids, self.num_embeddings, moves, finish)
        return prefetch

    def _prefetch_by(
        self, transfers: Transfers, lookup: Lookup, writes: list[PendingWrite], computes: bool
    ) -> Prefetch:
        """Prefetch to a GPU, or compute initial values.

        Rows of pending writes, and rows of the previous prefetch, which its step will write, do not cross the bus: they
        are forwarded when the prefetch is taken.
        """
        previous, is_on_host = self._pending.previous(transfers), self._in_host_memory(_CPU)
        drained = self._pending.drained

        def begin() -> Callable[[], Gathered]:
            assert lookup.found is not None
            rows, local = lookup.found
            prefetch.note_found(rows)
            expected = previous.block_so_far() if previous is not None else None
            others = [(write.block, write.rows_here()) for write in writes if write.has(self.columns)]
            if expected is not None:
                others.append((expected, expected.rows))
            to_read, known = rows, list[tuple[Block, Tensor]]()
            if is_on_host and rows.is_cuda and rows.shape[0]:
                known = [(block, other.to(rows.device)) for block, other in others if other.shape[0]]
            if known:
                to_read, places = kernels.shared_places(rows, [other for _, other in known])
                known = [(block, each) for (block, _), each in zip(known, places, strict=True)]

            def gather() -> Gathered:
                if drained is not None and not drained.query():  # type: ignore[no-untyped-call]
                    drained.synchronize()
                kernels.used_here([rows, to_read])
                if computes:
                    block = self._computed(rows, self.columns, lookup.device, {})
                else:
                    block = self._gather(rows, self.columns, lookup.device, to_read=to_read)
                return Gathered((block, local), None if to_read is rows else expected, known)

            return gather

        prefetch = Prefetch(self._pending, writes)
        memories = [group.memory.bytes for group in self.groups]
        # Nothing queued makes ids in host memory, and fences order what GPUs do with records there.
        follows = lookup.ids.device.type != "cpu" or not is_on_host
        transfers.add(prefetch, begin, lookup.device, inputs=[lookup.ids, *memories], lookup=lookup, follows=follows)
        return prefetch

    def _in_host_memory(self, device: torch.device) -> bool:
        return device.type == "cpu" and all(group.memory.bytes.is_cpu for group in self.groups)

    def drain(self) -> None:
        if os.getpid() == self._owner_pid:  # nothing arrives in a forked process
            self._pending.drain()

    # ------------------------------------------------------------------ whole columns

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        group = self.group_of(column)
        if device is not None and (self.columns[column].compact or group.memory.device != device):
            ids = torch.arange(start, stop, device=group.memory.device)
            return self.gather(ids, [column], device).columns[column]
        self.drain()
        if not self._is_filled and all(map(is_lazy, self._columns.values())):
            values = kernels.empty((stop - start, *self._columns[column].row_shape), self._columns[column].dtype)
            for rows in group.chunks(start, stop):
                out = {column: values[rows.start - start : rows.stop - start]}
                self._computed(torch.arange(rows.start, rows.stop), [column], _CPU, out)
            return values
        self._take_all()
        group.settle()
        return group.read(column, start, stop)

    def write(self, column: str, start: int, values: Tensor) -> None:
        group = self.group_of(column)
        self._change_in_place()
        group.settle(writing=True)
        for rows in group.chunks(start, start + len(values)):  # copy values from another device piece by piece
            group.write(column, rows.start, values[rows.start - start : rows.stop - start])

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        self.drain()
        for group in self.groups:
            group.settle()
        columns = self.columns
        if not self._written and all(is_lazy(column) for column in columns.values()):
            return
        self._take_all()
        for rows in chunks_of(self.num_embeddings):
            held = {name: self.group_of(name).bytes_of(name)[rows.start : rows.stop] for name in columns}
            yield torch.arange(rows.start, rows.stop), {name: each.to(_CPU).contiguous() for name, each in held.items()}

    def view(self, column: str) -> Tensor:
        group = self.group_of(column)
        self._take_all()
        view = group.view(column)
        self._change_in_place()
        self._end_cache()
        self._hot_bytes = None
        group.memory.share()
        group.settle()
        return view

    def add_columns(self, columns: Sequence[Column]) -> None:
        with self._replacing_memory():
            self._end_cache()
            together = [*columns] if self._written else [*self.columns.values(), *columns]
            require_size(self.num_embeddings, together)
            if self._written:
                self.add_group(self._new_group(together))
            else:
                self._rebuild(together)

    def _rebuild(self, columns: Sequence[Column]) -> None:
        """Merge all columns into one record; release the old memory first, so the peak is only the new table."""
        layouts = [group.layout for group in self.groups]
        try:
            for group in self.groups:
                group.close()
            self._hold(self._new_group(columns))
        except BaseException:
            self._lost = True  # and stays so if this also fails
            self._hold(*(self._new_group(layout.columns) for layout in layouts))
            self._lost = False
            raise

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self._change_in_place()
        for column in columns:
            self._fill(self.group_of(column.name), [column])

    def _change_in_place(self) -> None:
        """Wait until nothing else reads or writes the memory, which is about to change."""
        self._take_all()
        self.drain()
        self._pending.finish_prefetches()
        self._pending.make_stale()
        self._written = True

    @contextmanager
    def _replacing_memory(self) -> Iterator[None]:
        """Replace the memory once nothing reads or writes it."""
        self.drain()
        kernels.finish_transfers()
        self._pending.make_stale()
        self._replaces_memory = True
        try:
            yield
        finally:
            self._replaces_memory = False

    # ------------------------------------------------------------------ the cache of hot rows

    def _end_cache(self) -> None:
        """Bring all rows home; the next batch that a GPU writes begins another cache."""
        for group in self.groups:
            group.settle(writing=True)
        self.notes.hot = None
        for group in self.groups:
            group.use(None)

    # ------------------------------------------------------------------ lifetime

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            self.notes.closed = True
            return
        try:
            if not self.notes.closed:
                self.drain()
        finally:
            with self._replacing_memory():
                self.notes.closed, self.notes.pinned, self.notes.hot, self._is_filled = True, False, None, True
                for group in self.groups:
                    group.close()
