"""The ranks that save or load a checkpoint together, where their tables are; one process alone is the first of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from speedswap.collectives import Kind, RankGroup, Task
from speedswap.swapping.table_module import TableModule

__all__ = ["SavingRanks"]


class SavingRanks:
    """The ranks of a model's tables.

    Args:
        group: theirs; None for a process alone.

    Attributes:
        rank: of this process among them.
        world_size: their number.
    """

    def __init__(self, group: RankGroup | None) -> None:
        self._group = group
        self._task: Task | None = None
        self.rank = 0 if group is None else group.rank
        self.world_size = 1 if group is None else len(group)

    @classmethod
    def of(cls, modules: Mapping[str, TableModule]) -> SavingRanks:
        """Return the ranks that own the tables of a model.

        Raises:
            ValueError: a table is each rank's own, so that there is no one state of it; or they are of several groups.
        """
        groups = {each.table.ranks for each in modules.values()} - {None}
        if len(groups) > 1:
            raise ValueError(
                f"model has tables of {len(groups)} process groups, and a checkpoint is of one; give all tables "
                "those of one, or save parts of the model apart"
            )
        for name, each in modules.items():
            if groups and each.table.ranks is None and each.weight.requires_grad:
                raise ValueError(
                    f"table {each.table.name!r} of the model ({name or 'itself'}) is each rank's own, and others are "
                    "owned by all of them; give it their storage=speedswap.Ranks() too, or save it apart"
                )
        return cls(next(iter(groups), None))

    def once(self, work: Callable[[], Any], elsewhere: Callable[[], Any]) -> Any:
        """Let the first rank do what is done once for all, and the others something else."""
        return work() if self.rank == 0 else elsewhere()

    def writes(self, module: TableModule) -> bool:
        """Return whether this process writes rows of a module's table."""
        return self.rank == 0 or module._step.is_sharded

    @property
    def suffix(self) -> str:
        """The end of the names of this rank's files."""
        return f"-{self.rank}" if self.rank else ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Surround what the ranks do together: what fails in it is an error of all."""
        if self._group is None:
            yield
            return
        with self._group.main.task(Kind.CHECKPOINT) as self._task:
            yield
            self._task.finish()

    def wait(self) -> None:
        """Return when all ranks have come here, and nothing has failed."""
        if self._task is not None:
            self._task.round()

    def give_up(self) -> None:
        """Let the others fail in their next round, and return when they have come there."""
        if self._task is not None:
            self._task.give_up()

    def share(self, data: Any) -> list[Any]:
        """Return the data of all ranks, in their order.

        Args:
            data: of this one, as JSON can hold it.
        """
        return [data] if self._task is None else self._task.share(data)
