"""The kinds of work that ranks do together, as their lines tell them."""

from __future__ import annotations

import enum

__all__ = ["ANYTHING", "KINDS", "Kind"]

ANYTHING = -1  # the number of the object of a task that is about neither a table nor a map

_EVALUATION = (
    "Ranks evaluate together: let the others make the call, too, each with ids of its own or none, such as "
    "items.read(torch.empty(0, dtype=torch.int64)). "
)
_SAVING = (
    "state_dict() and what saves are calls of all ranks: make them on every rank, and write files of your own on one "
    "of them. "
)
_GRADIENT = "A norm or a sum of a gradient is of all ranks' rows: take it on every rank, and log it on one. "
_SPLITTING = "Every rank has to call the splitter equally often, in the same order and with the same options. "


class Kind(enum.IntEnum):
    """The kind of a task, the same on all ranks.

    Attributes:
        text: the same, for messages.
        remedy: for one rank that is alone there.
    """

    text: str
    remedy: str

    def __new__(cls, text: str, remedy: str = "") -> Kind:
        kind = int.__new__(cls, len(cls.__members__))
        kind._value_, kind.text, kind.remedy = len(cls.__members__), text, remedy
        return kind

    CALL = "a call"  # that has failed before it has begun a task
    # A table's rows
    LOOK_UP = "a training lookup"
    GATHER = "a lookup without a gradient", _EVALUATION
    SCATTER = "a write"
    RESET = "a reset of rows"
    READ = "read()", _EVALUATION
    SCORE = "score()", _EVALUATION
    MAKE = "the making of a table"
    COMPARE = "the comparison of given rows"
    STATE = "state_dict() or load_state_dict()", _SAVING
    SAVE = "save()", _SAVING
    ALONE = "the writing of a file by one rank", _SAVING
    # A training step
    GRADIENTS = "the exchange of gradients"
    SHARES = "the exchange of a split batch's gradients"
    NORM = "a norm or sum of a gradient", _GRADIENT
    FINITE = "the search for infinite gradients"
    STEP = "the optimizer's step"
    # A batch that is split
    AT_OWN_PACE = "a batch that is split", _SPLITTING
    BACKWARD = "BatchSplitter.backward()"
    BACKWARD_COUPLED = "BatchSplitter.backward_coupled()"
    FORWARD = "BatchSplitter.forward()"
    BACKWARD_OF_SHARDS = "BatchSplitter.backward() of sharded modules"
    PASSES = "passes without a gradient", _EVALUATION
    # A lookahead
    BEGIN = "the beginning of a lookahead"
    ERRAND = "a lookup ahead of its step"
    END = "the end of a lookahead"
    # Keys
    KEYS = "a training lookup of keys"
    KNOWN_KEYS = "a lookup of keys without a gradient", _EVALUATION
    REOPENED = "the opening of an id map"
    PARTS = "the saving of an id map", _SAVING
    # The whole job
    CHECKPOINT = "save_checkpoint() or load_checkpoint()", _SAVING
    AGREE = "the agreement on a number"


KINDS: tuple[Kind, ...] = (*Kind,)
"""The kinds by the numbers that lines tell."""
