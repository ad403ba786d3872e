"""Exchange in two levels: the ranks of a host merge what they send to another host into one message.

For any two hosts, one rank of each carries everything between them; the ranks of a host take turns by the other host's
number. Between GPUs that each have a network card, all ranks carry a share unless there are more hosts than ranks per
host. So ids that several ranks of a host request cross the network once, as do their weights and the sums of their
gradients. Two hosts exchange one message per carrier, instead of one per pair of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from speedswap import kernels
from speedswap.collectives.messages import Connections, Parcel, Way, as_bytes, packed, unpacked

_Exchange = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


class Asked(NamedTuple):
    """Rows of one table that ranks or hosts request from this rank.

    Attributes:
        received: the number of rows that each rank requests; rows merged by a host count as its first rank's.
        ids: the rows, int64, in rank order; if merged, each once per host, in host order.
        way: the way of the rows' values, if they are merged.
    """

    received: list[int]
    ids: Tensor
    way: Way | None = None


class Levels:
    """The hosts of a lane's ranks.

    Args:
        lane: the lane; its connections carry what crosses hosts.
        hosts: each host's ranks, as indices among the lane's, in the order of their first ranks.
        local: connections between the ranks of this host.
        carriers: number of ranks per host that carry what passes between two hosts.

    Attributes:
        messages, message_bytes: the messages that this rank has sent to other hosts, and their bytes.
    """

    def __init__(
        self, lane: Connections, hosts: Sequence[Sequence[int]], local: dist.ProcessGroup, carriers: int = 1
    ) -> None:
        self._lane, self._hosts, self._local, self._carriers = lane, hosts, local, carriers
        self._host = next(number for number, ranks in enumerate(hosts) if lane.rank in ranks)
        self._mine = hosts[self._host]
        self._place = self._mine.index(lane.rank)
        # Rows first go to their carrier on this host: by carrier, then by destination host.
        order = sorted(
            (self._carrier(self._host, host, place), host, place, rank)
            for host, ranks in enumerate(hosts)
            for place, rank in enumerate(ranks)
        )
        self._carriers_here, host_of, _, self._by_carrier = torch.tensor(order).unbind(1)
        is_mine = self._carriers_here == self._place
        self._ours, self._host_of_ours = self._by_carrier[is_mine], host_of[is_mine]
        # For each host, the places of the ranks here to which this rank passes on what comes from that host.
        self._passed_to = [
            [place for place in range(len(self._mine)) if self._carrier(self._host, host, place) == self._place]
            for host in range(len(hosts))
        ]
        firsts = [next(iter(places), 0) for places in self._passed_to]
        self._peers = [hosts[to][self._carrier(to, self._host, place)] for to, place in enumerate(firsts)]
        self._carried = [host for host, places in enumerate(self._passed_to) if places and host != self._host]
        self._segments = self._segments_of_hops()
        self._way_of_lines = self._way([torch.ones(len(order), dtype=torch.int64) for order, _, _ in self._segments])
        self.messages = self.message_bytes = 0

    @property
    def _hops(self) -> tuple[_Exchange, ...]:
        return self._between_ranks, self._across, self._between_ranks

    def _carrier(self, host: int, other: int, place: int) -> int:
        """Return the place of the rank that carries what passes between its host and another.

        Args:
            host, other: the hosts; if they are the same, ``place`` is returned.
            place: the place of the rank that owns the rows, on either host.
        """
        if host == other:
            return place
        return place % self._carriers if self._carriers > 1 else (other - (other > host)) % len(self._hosts[host])

    # ------------------------------------------------------------------ rounds, and rows that are not merged

    def _segments_of_hops(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the layout of the segments, one for each pair of ranks, before each hop and after the last.

        Returns:
            For each of these layouts: the segments' order; the number of the rank here, or of the host, that each
            segment goes to in the hop, in this order; and the number of that which it came from.
        """
        size, every = len(self._mine), [*enumerate(self._hosts)]
        # From each rank of a host to each rank here; within this host, the hop across ends where it began.
        across = [(host, place) for host, ranks in every for _ in ranks for place in self._passed_to[host]]
        from_host, to_place = torch.tensor(across).T
        back = sorted(
            (self._carrier(self._host, host, self._place), host, rank) for host, each in every for rank in each
        )
        from_place, _, sender = torch.tensor(back).T
        none = sender[:0]
        return [
            (self._by_carrier, self._carriers_here, none),
            (*_ordered(self._host_of_ours.repeat(size)), torch.arange(size).repeat_interleave(len(self._ours))),
            (*_ordered(to_place), from_host),
            (sender.argsort(), none, from_place),
        ]

    def _way(self, lengths: Sequence[Tensor]) -> Way:
        """Return the way of rows, given each segment's number of rows before each hop and after the last."""
        turns = [_moved(own, order) for own, (order, _, _) in zip(lengths, self._segments, strict=True)]
        counts = []
        for hop, number in enumerate((len(self._mine), len(self._hosts), len(self._mine))):
            (order, goes_to, _), (_, _, comes_from) = self._segments[hop : hop + 2]
            sent, received = (lengths[hop][order], goes_to), (lengths[hop + 1], comes_from)
            counts.append((_sums_by(*sent, number), _sums_by(*received, number)))
        return Way(tuple(turns), tuple(counts))

    def exchange(self, into: Tensor, out: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()) -> None:
        """Send rows to every rank, and receive rows from each, in rank order.

        Args:
            into, out: contiguous memory for the received rows, and the sent ones.
            received, sent: the number of rows from each rank and to each rank; by default one.
        """
        way = self._way_of_lines
        if sent:
            numbers = torch.tensor(sent)
            way = self._way([numbers, *(some.view(-1) for some in self._hop_by_hop(way, numbers.view(-1, 1)))])
        *_, came = self._hop_by_hop(way, out)
        into.copy_(way.turned(len(self._hops), came))

    def _hop_by_hop(self, way: Way, rows: Tensor) -> Iterator[Tensor]:
        """Yield the rows received in each hop."""
        for hop, exchange in enumerate(self._hops):
            sent, received = way.counts[hop]
            rows = exchange(way.turned(hop, rows), received, sent)
            yield rows

    # ------------------------------------------------------------------ rows

    def ask(self, tables: Sequence[tuple[Tensor, Sequence[int]]]) -> list[Asked]:
        """Request rows of some tables from their owners, merged by host; every rank must call this.

        Args:
            tables: for each table, the distinct ids that this rank requests, int64, in the order of their owners; and
                the number that each rank owns.
        """
        # To the carriers, after a message that tells every rank of this host how many ids to expect.
        size, ours, host_of = len(self._mine), self._ours, self._host_of_ours
        sent = torch.tensor([counts for _, counts in tables])
        wanted = self._between_ranks(sent.repeat(size, 1), [len(sent)] * size, [len(sent)] * size)
        wanted = wanted.view(size, *sent.shape)[:, :, ours]  # by asking rank, table, owner
        orders = [_moved(counts, self._by_carrier) for counts in sent]
        firsts = [
            (_sums_by(counts[self._by_carrier], self._carriers_here, size), wanted[:, table].sum(1).tolist())
            for table, counts in enumerate(sent)
        ]
        columns = [ids.view(-1, 1)[order] for (ids, _), order in zip(tables, orders, strict=True)]
        came = self._send(self._between_ranks, columns, firsts)

        # Each id once per owner.
        unions, sums, owned = [], [], torch.empty(len(tables), len(ours), dtype=torch.int64)
        for table, ids in enumerate(came):
            counts = wanted[:, table].reshape(-1)
            owner = torch.repeat_interleave(torch.arange(len(ours)).repeat(size), counts)
            span = int(ids.max()) + 1 if len(ids) else 1
            union, positions = kernels.unique(ids.view(-1) + owner * span)
            owned[table] = torch.bincount(union // span, minlength=len(ours))
            unions.append((union % span).view(-1, 1))
            sums.append(positions)

        # To the other hosts, after a message with the numbers of ids.
        arriving = torch.zeros(len(self._hosts), len(tables), size, dtype=torch.int64)  # by host, table, owner here
        arriving[self._host, :, self._place] = owned[:, host_of == self._host].squeeze(1)
        heads = {host: owned[:, host_of == host].contiguous() for host in self._carried}
        numbers = {host: torch.empty(len(tables), len(self._passed_to[host]), dtype=torch.int64) for host in heads}
        self._between_hosts(numbers, heads)
        for host, some in numbers.items():
            arriving[host, :, self._passed_to[host]] = some
        seconds = [
            (_sums_by(counts, host_of, len(self._hosts)), arriving[:, table].sum(1).tolist())
            for table, counts in enumerate(owned)
        ]
        came = self._send(self._across, unions, seconds)

        # To the owners, in the same way; they order the ids by host.
        each = arriving.permute(2, 1, 0).reshape(size * len(tables), -1)
        coming = self._between_ranks(each, [len(tables)] * size, [len(tables)] * size)
        coming = coming.view(size, len(tables), -1)  # by carrier, table, host
        thirds = [
            (arriving[:, table].sum(0).tolist(), coming[:, table].sum(1).tolist()) for table in range(len(tables))
        ]
        to_owners = [_transposed(arriving[:, table]) for table in range(len(tables))]
        to_hosts = [_transposed(coming[:, table]) for table in range(len(tables))]
        columns = [ids[order] for ids, order in zip(came, to_owners, strict=True)]
        came = self._send(self._between_ranks, columns, thirds)

        found = []
        for table, (ids, order) in enumerate(zip(came, to_hosts, strict=True)):
            received = [0] * len(self._lane.ranks)
            for ranks, count in zip(self._hosts, coming[:, table].sum(0).tolist(), strict=True):
                received[ranks[0]] = count
            hops = firsts[table], seconds[table], thirds[table]
            way = Way((orders[table], sums[table], to_owners[table], order), hops, len(unions[table]))
            found.append(Asked(received, ids.view(-1)[order], way))
        return found

    def send(self, parcels: Sequence[Parcel]) -> list[Tensor]:
        """Send the values of requested rows; return those received, on the same devices."""
        rows = [parcel.rows.detach() for parcel in parcels]
        if self._lane.is_staged(rows[0]):
            rows = [some.cpu() for some in rows]
        ways = [parcel.way.on(some.device) for parcel, some in zip(parcels, rows, strict=True) if parcel.way]
        for hop, exchange in enumerate(self._hops):
            rows = [way.turned(hop, some) for way, some in zip(ways, rows, strict=True)]
            rows = self._send(exchange, rows, [way.counts[hop] for way in ways])
        rows = [way.turned(len(self._hops), some) for way, some in zip(ways, rows, strict=True)]
        return [some.to(parcel.rows.device) for some, parcel in zip(rows, parcels, strict=True)]

    def prepared(self, parcels: Sequence[Parcel]) -> Callable[[], list[Tensor]]:
        """Return a function that sends parcels as :meth:`send` does; the GPU memory it needs is reserved now."""
        moved = sum(each.row_bytes * sum(map(sum, hop)) for each in parcels if each.way for hop in each.way.counts)
        rows = parcels[0].rows  # of six hops' memory, sent and received, about three are in use at once
        held = (
            [rows.new_empty(moved // 2, dtype=torch.uint8)] if rows.is_cuda and not self._lane.is_staged(rows) else []
        )

        def post() -> list[Tensor]:
            held.clear()
            return self.send(parcels)

        return post

    def send_some(self, parcels: Sequence[Parcel], chosen: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Send the values of some of the requested rows.

        Args:
            parcels: as for :meth:`send`, with the values of all rows.
            chosen: for each parcel, a mask of the rows to send, bool, shape (n,).

        Returns:
            For each parcel, the indices of the received rows among those that this rank requested, and their values.
        """
        narrowed = self._narrowed([parcel.way for parcel in parcels if parcel.way is not None], chosen)
        every = zip(parcels, chosen, narrowed, strict=True)
        came = self.send([Parcel(parcel.rows[some], [], [], way) for parcel, some, (way, _) in every])
        return [(places, rows) for (_, places), rows in zip(narrowed, came, strict=True)]

    def _narrowed(self, ways: Sequence[Way], chosen: Sequence[Tensor]) -> list[tuple[Way, Tensor]]:
        """Return ways for some of the rows that owners send back; a byte per row tells every rank which.

        Args:
            ways: the ways of all rows from their owners.
            chosen: for each way, a mask of the rows that this rank sends, bool, shape (n,).

        Returns:
            For each way, the way of the chosen rows; and the indices of the rows that come here among all that would.
        """
        marks = [*chosen]
        turns: list[list[Tensor]] = [[] for _ in ways]
        counts: list[list[tuple[list[int], list[int]]]] = [[] for _ in ways]
        for hop in range(4):
            for place, way in enumerate(ways):
                turn, indices = way.turns[hop], marks[place].cumsum(0) - 1
                marks[place] = marks[place][turn]
                turns[place].append(indices[turn[marks[place]]])
            if hop < len(self._hops):
                sent, every = marks, [way.counts[hop] for way in ways]
                marks = [
                    some.view(-1) for some in self._send(self._hops[hop], [some.view(-1, 1) for some in sent], every)
                ]
                for place, (out, came, (leaving, coming)) in enumerate(zip(sent, marks, every, strict=True)):
                    counts[place].append((_true_in(out, leaving), _true_in(came, coming)))
        narrow = [Way(tuple(turn), tuple(some)) for turn, some in zip(turns, counts, strict=True)]
        return [(way, own.nonzero().squeeze(1)) for way, own in zip(narrow, marks, strict=True)]

    # ------------------------------------------------------------------ one hop

    def _send(
        self,
        exchange: _Exchange,
        rows: Sequence[Tensor],
        counts: Sequence[tuple[Sequence[int], Sequence[int]]],
    ) -> list[Tensor]:
        """Send the rows of several tables in one message to each rank of this host, or to each host."""
        parcels = [Parcel(some, *each) for some, each in zip(rows, counts, strict=True)]
        whole = packed(parcels)
        if not whole.rows.is_cuda:
            own = whole.sent[self._host if exchange == self._across else self._place]
            self._lane.payload_bytes += (sum(whole.sent) - own) * whole.row_bytes
        came = exchange(as_bytes(whole.rows.contiguous()), whole.received, whole.sent)
        return unpacked(came.view(whole.rows.dtype).view(-1, *whole.rows.shape[1:]), parcels)

    def _between_ranks(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send rows to each rank of this host; return those received."""
        if rows.is_cuda:
            return self._between_gpus(self._mine, rows, received, sent)
        into = rows.new_empty(sum(received), *rows.shape[1:])
        with self._lane.connected():
            self._local.alltoall_base(into, rows.contiguous(), [*received], [*sent]).wait()
        return into

    def _across(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send rows to each host; return those received."""
        if rows.is_cuda:
            return self._between_gpus(self._peers, rows, received, sent)
        into = rows.new_empty(sum(received), *rows.shape[1:])
        came, leaving = torch.split(into, [*received]), torch.split(rows, [*sent])
        came[self._host].copy_(leaving[self._host])
        self._between_hosts(
            {host: came[host] for host in self._carried}, {host: leaving[host] for host in self._carried}
        )
        return into

    def _between_gpus(self, peers: Sequence[int], rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send rows to some ranks, in an exchange where all others send none; return those received."""
        order = sorted(range(len(peers)), key=peers.__getitem__)
        is_by_rank = order == [*range(len(peers))]  # otherwise hosts' ranks are interleaved
        if not is_by_rank:
            rows = torch.cat([torch.split(rows, [*sent])[place] for place in order])
        into = rows.new_empty(sum(received), *rows.shape[1:])
        counts = [dict(zip(peers, each, strict=True)) for each in (received, sent)]
        self._lane.exchange_rows(
            into, rows, *([each.get(rank, 0) for rank in range(len(self._lane.ranks))] for each in counts)
        )
        if is_by_rank:
            return into
        parts = torch.split(into, [received[place] for place in order])
        return torch.cat([parts[order.index(place)] for place in range(len(peers))])

    def _between_hosts(self, into: dict[int, Tensor], out: dict[int, Tensor]) -> None:
        """Exchange a message with each host that this rank carries for; empty messages are not sent."""
        with self._lane.connected() as group:
            works = []
            for host in self._carried:
                peer = self._peers[host]
                if out[host].numel():
                    works.append(group.send([out[host].view(-1)], peer, 0))
                    self.messages += 1
                    self.message_bytes += out[host].nbytes
                if into[host].numel():
                    works.append(group.recv([into[host].view(-1)], peer, 0))
            for work in works:
                work.wait()


def _moved(lengths: Tensor, order: Tensor) -> Tensor:
    """Return the indices of rows in segments, for a new order of the segments.

    Args:
        lengths: rows per segment.
        order: the segments in their new order.
    """
    before, after = lengths.cumsum(0) - lengths, lengths[order].cumsum(0) - lengths[order]
    shifts = torch.repeat_interleave(before[order] - after, lengths[order])
    return torch.arange(len(shifts)) + shifts


def _ordered(peers: Tensor) -> tuple[Tensor, Tensor]:
    """Return a stable order by peer, and the peers in this order."""
    order = peers.argsort(stable=True)
    return order, peers[order]


def _transposed(lengths: Tensor) -> Tensor:
    """Return the indices of rows whose segments form a matrix, in the order of the matrix's columns."""
    return _moved(lengths.reshape(-1), torch.arange(lengths.numel()).view(lengths.shape).T.reshape(-1))


def _sums_by(counts: Tensor, places: Tensor, number: int) -> list[int]:
    return torch.zeros(number, dtype=torch.int64).index_add_(0, places, counts).tolist()


def _true_in(marks: Tensor, counts: Sequence[int]) -> list[int]:
    """Return the number of true marks of each peer."""
    return [int(part.sum()) for part in torch.split(marks, [*counts])]
