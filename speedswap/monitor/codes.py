"""The monitor's warnings: each has a permanent code, a level, and a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from speedswap._words import warn
from speedswap.errors import SpeedswapWarning

Level = Literal["off", "user", "expert"]
_RANK: dict[str, int] = {"off": 0, "user": 1, "expert": 2}


class MonitorWarning(SpeedswapWarning):
    """Base of the monitors' warnings."""


class LoopWarning(MonitorWarning):
    """A training loop leaves out a call, or repeats it."""


class ChangeWarning(MonitorWarning):
    """A model, an optimizer or a criterion was replaced or changed."""


class MemoryWarning(MonitorWarning):
    """Memory is nearly full, or fragmented."""


@dataclass(frozen=True)
class Code:
    """A warning's code.

    Attributes:
        level: the lowest level that reports it: ``"user"`` is most likely a mistake, ``"expert"`` may be intended.
        meaning: the event, in one sentence.
        category: the warning's class.
    """

    level: Literal["user", "expert"]
    meaning: str
    category: type[MonitorWarning]


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "SW101": Code("user", "the optimizer stepped without a backward pass since its last step", LoopWarning),
        "SW102": Code("user", "more backward passes ran without a step than accumulation_steps", LoopWarning),
        "SW103": Code(
            "user", "gradients that a step had used were not zeroed before the next backward pass", LoopWarning
        ),
        "SW104": Code("user", "gradients that no step had used were left over at the end", LoopWarning),
        "SW105": Code("user", "parameters of the optimizer had no gradient when it stepped", LoopWarning),
        "SW106": Code("user", "trainable parameters of the model are not in the optimizer", LoopWarning),
        "SW107": Code("user", "the optimizer has parameters that are not the model's", LoopWarning),
        "SW108": Code("expert", "the optimizer stepped while the model was in evaluation mode", LoopWarning),
        "SW109": Code("expert", "the optimizer stepped before accumulation_steps backward passes had run", LoopWarning),
        "SW110": Code("expert", "gradients that no step had used were zeroed", LoopWarning),
        "SW201": Code("expert", "an observed object was replaced by another", ChangeWarning),
        "SW202": Code("user", "an observed object moved to another device", ChangeWarning),
        "SW203": Code("user", "an optimizer's parameters or parameter groups changed", ChangeWarning),
        "SW204": Code("expert", "an optimizer's hyperparameters changed", ChangeWarning),
        "SW205": Code("expert", "the set of trainable parameters changed", ChangeWarning),
        "SW206": Code("expert", "an observed object changed its dtype", ChangeWarning),
        "SW301": Code("user", "the allocator had to release cached memory and try again", MemoryWarning),
        "SW302": Code("expert", "much of the reserved memory is in unused pieces", MemoryWarning),
        "SW303": Code("expert", "each of several equal phases left more memory in use", MemoryWarning),
    }
)


class WarningPolicy:
    """A choice of the warnings that are reported, and how often.

    Args:
        level: ``"off"`` reports nothing, ``"user"`` likely mistakes, ``"expert"`` everything.
        ignore: codes that are never reported.
        always: codes that are reported every time; the others are reported once.
        codes: the known codes, if more than :data:`CODES`.

    Attributes:
        counts: how often each code came up, reported or not; codes above the level and ignored ones do not count.

    Raises:
        ValueError: a level or a code is unknown.

    >>> policy = WarningPolicy("expert", ignore={"SW108"})
    >>> policy.wants("SW109"), policy.wants("SW108"), WarningPolicy("user").wants("SW109")
    (True, False, False)
    """

    def __init__(
        self,
        level: Level = "user",
        *,
        ignore: Iterable[str] = (),
        always: Iterable[str] = (),
        codes: Mapping[str, Code] = CODES,
    ) -> None:
        if level not in [*_RANK]:
            raise ValueError(f"level is {level!r}; it must be 'off', 'user' or 'expert'")
        self.level = level
        self.codes = codes
        self.ignore = frozenset(ignore)
        self.always = frozenset(always)
        for code in self.ignore | self.always:
            self._described(code)
        self.counts: Counter[str] = Counter()

    def wants(self, code: str) -> bool:
        """Return whether a code is reported at this level."""
        return _RANK[self._described(code).level] <= _RANK[self.level] and code not in self.ignore

    def _described(self, code: str) -> Code:
        if code not in [*self.codes]:
            raise ValueError(f"{code!r} is not a warning's code; speedswap.monitor.CODES has them all")
        return self.codes[code]

    def warn(self, code: str, detail: str) -> None:
        """Warn at the innermost line outside torch and speedswap, unless the code is filtered or was reported before.

        Args:
            code: its code.
            detail: the event in detail, and the remedy.
        """
        if not self.wants(code):
            return
        self.counts[code] += 1
        if self.counts[code] == 1 or code in self.always:
            warn(code, detail, self.codes[code].category)


def as_policy(warn: Level | WarningPolicy) -> WarningPolicy:
    """Return a new policy for a level; or the given policy, which monitors then share."""
    return warn if isinstance(warn, WarningPolicy) else WarningPolicy(warn)
