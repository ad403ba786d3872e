"""Uses of tables' stores that no lock guards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import speedswap
from speedswap.tables.disk.store import LogStore
from speedswap.tables.idle import IdleStore
from speedswap.tables.local import LocalStore

NAMES = ("gather", "scatter", "read", "write", "add_columns", "reset_columns", "prefetch", "commit", "flush", "drain")
OF_IDLE_ROWS = ("take",)


@contextmanager
def unguarded_uses(*tables: speedswap.Table) -> Iterator[list[str]]:
    """Collect the methods that any thread calls without the lock of the tables whose rows they read or change."""
    found: list[str] = []
    watched = [table.store.facts.locked for table in tables]

    def watch(kind: type, name: str) -> mock._patch:
        method = getattr(kind, name)

        @functools.wraps(method)
        def noted(store, *args, **settings):
            locked = store.facts.locked
            if any(locked is each for each in watched) and not locked.lock._is_owned():
                found.append(f"{kind.__name__}.{name}")
            return method(store, *args, **settings)

        return mock.patch.object(kind, name, noted)

    with ExitStack() as patches:
        for kind in (LocalStore, LogStore, IdleStore):
            for name in (*NAMES, *(OF_IDLE_ROWS if kind is IdleStore else ())):
                patches.enter_context(watch(kind, name))
        yield found
