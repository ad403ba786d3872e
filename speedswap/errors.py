"""The exceptions and warnings of speedswap.

::

    SpeedswapError
    ├── IdError                 (IndexError)    an id is outside the table
    ├── DuplicateIdError        (ValueError)    ids that must be unique are not
    ├── ConversionError         (ValueError)    a model has embeddings that cannot be replaced
    ├── OptimizerError          (TypeError)     this optimizer cannot train a table's rows
    ├── LostUpdateError         (RuntimeError)  a training step did not reach the table
    ├── WeightError             (RuntimeError)  an embedding's weight was used as if its rows were there
    ├── BatchError              (ValueError)    a batch, or what a loss returned for it, cannot be split
    ├── CoupledLossError        (TypeError)     a loss that couples the samples of a batch was to be split
    ├── MemoryBudgetError       (ValueError)    a memory budget is too small for the least that was asked for
    ├── PeerError               (RuntimeError)  another process of the job failed, or was asked for something else
    ├── RanksError              (RuntimeError)  tables of several processes would be trained apart in silence
    ├── IdMapError              (RuntimeError)  keys were to be added to a frozen id map
    │   └── IdMapFullError                      an id map has no row left for a new key
    ├── CheckpointError         (ValueError)    a checkpoint is missing, damaged, or of another model or run
    ├── ThreadError             (RuntimeError)  two threads are in a training step of one module at once
    └── TableError
        ├── TableFormatError    (ValueError)    a file is damaged, or is not a table
        ├── TableBusyError      (OSError)       another process has the table open for writing
        ├── TableFullError      (OSError)       the disk has no room for the rows to be written
        ├── TableTooLargeError  (MemoryError)   the table cannot be materialized in memory
        └── TableClosedError    (ValueError)    the table was closed, or belongs to the parent of a fork

Every message names the argument, its value and the remedy, and every error is raised before anything has changed.
"""

from __future__ import annotations


class SpeedswapError(Exception):
    """Base class of speedswap's errors."""


class IdError(SpeedswapError, IndexError):
    """An id is negative, or not below the table's number of rows."""


class DuplicateIdError(SpeedswapError, ValueError):
    """An id occurs twice where each row may be written once."""


class ConversionError(SpeedswapError, ValueError):
    """A model has embeddings that cannot be replaced by speedswap's; the message names them all."""


class OptimizerError(SpeedswapError, TypeError):
    """The optimizer cannot train a table's rows; the message says why."""


class IdMapError(SpeedswapError, RuntimeError):
    """Keys were to be added to an id map that is frozen."""


class IdMapFullError(IdMapError):
    """An id map has no row left for a new key; nothing was added."""


class LostUpdateError(SpeedswapError, RuntimeError):
    """A training step changed the rows on the device in a way that never reached the table."""


class WeightError(SpeedswapError, RuntimeError):
    """An embedding's ``weight`` was used as a tensor, but its rows are in a table."""


class BatchError(SpeedswapError, ValueError):
    """A batch, or what a loss returned for it, cannot be split, or was overwritten; nothing was computed with it."""


class CoupledLossError(SpeedswapError, TypeError):
    """A loss that couples the samples of a batch was to be accumulated over parts of it."""


class MemoryBudgetError(SpeedswapError, ValueError):
    """A memory budget is too small for the least that was asked for."""


class PeerError(SpeedswapError, RuntimeError):
    """Another process of the job failed, or was asked for something else."""


class RanksError(SpeedswapError, RuntimeError):
    """Tables of several processes would silently be trained apart, or mixed."""


class CheckpointError(SpeedswapError, ValueError):
    """A checkpoint that is missing, damaged, or of another model or run; nothing was loaded."""


class ThreadError(SpeedswapError, RuntimeError):
    """A call in the middle of an optimizer's step, usually another thread's; nothing was changed, no gradient taken."""


class TableError(SpeedswapError):
    """Base of the errors about a table's storage."""


class TableFormatError(TableError, ValueError):
    """A table's directory, or a file of rows to import, is damaged, or is none."""


class TableBusyError(TableError, OSError):
    """Another process has the table open for writing."""


class TableFullError(TableError, OSError):
    """The disk has no room for the rows to be written; nothing was written."""


class TableTooLargeError(TableError, MemoryError):
    """The table is too large to be materialized as one tensor."""


class TableClosedError(TableError, ValueError):
    """The table was closed, or its memory stayed behind in the parent process of a fork."""


class SpeedswapWarning(UserWarning):
    """Base of speedswap's warnings: something works, but not in the way that was asked for.

    A message begins with its code, such as ``SW401``, by which Python's filters can name it too:
    ``warnings.filterwarnings("ignore", "SW401")``. docs/warnings.md explains each.
    """

    @property
    def code(self) -> str:
        """The warning's code, such as ``"SW401"``."""
        return str(self).partition(":")[0]


class DuplicateRowsWarning(SpeedswapWarning):
    """An id occurs twice in one swap: the last one wins, the other updates are lost."""
