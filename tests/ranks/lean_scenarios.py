"""Rounds without counts, and the messages that they take."""

from __future__ import annotations

from unittest import mock

import torch
from places import owned

import speedswap
from speedswap.collectives import Lane, RankGroup
from speedswap.errors import PeerError


class Sent:
    """The rounds of a lane that were gathered, and its exchanges of every rank with every other one."""

    def __init__(self):
        self.gathered = self.exchanged = 0

    def counting(self):
        gather, exchange = Lane._gather, Lane._exchange

        def gathers(lane, line):
            self.gathered += 1
            return gather(lane, line)

        def exchanges(lane, *given):
            self.exchanged += 1
            exchange(lane, *given)

        return mock.patch.multiple(Lane, _gather=gathers, _exchange=exchanges)


def trained(group, *, clips=False):
    """Train an embedding; return the rounds, the exchanges and the gathered rounds of each step, and the rows."""
    items = speedswap.Embedding(50, 4, seed=1, storage=owned(group))
    optimizer, lane, steps = torch.optim.Adagrad(items.parameters(), 0.1), RankGroup.of(group).main, []
    lane._leans.clear()
    for step in range(6):
        sent, before = Sent(), lane.rounds
        with sent.counting():
            items(torch.arange(group.rank() + step, 9 + step)).square().sum().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(items.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        steps.append((lane.rounds - before, sent.exchanged, sent.gathered))
    return steps, items.read()


def departing(group):
    """Come to another place than the one expected, fail, and go on; return what was raised, and the rows."""
    items = speedswap.Embedding(50, 4, seed=1, storage=owned(group))
    optimizer, raised, ids = torch.optim.Adagrad(items.parameters(), 0.1), [], torch.arange(group.rank(), 9)
    for step in range(24):
        try:
            rows = items(ids)
            if step % 6 == 3:
                items.read(ids)  # in place of the gradients' exchange
            if step in (7, 20) and group.rank() == 1:
                raise ValueError("between")
            loss = rows.square().sum()
            if step == 10 and group.rank() == 0:
                loss = torch.zeros((), requires_grad=True)
            loss.backward()
            if step == 14 and group.rank() == 1:
                items.read(torch.tensor([99]))  # while the others step
            optimizer.step()
        except (ValueError, IndexError, PeerError) as error:
            raised.append(type(error).__name__)
            if step in (7, 20) and group.rank() == 1:
                try:
                    items.read(ids)
                except PeerError as other:
                    raised.append(type(other).__name__)
        optimizer.zero_grad()
    return raised, items.read()
