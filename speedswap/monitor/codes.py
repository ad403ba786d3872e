"""The monitor's warnings: each has a code that stays, a level, and a sentence."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from speedswap.errors import SpeedswapWarning

__all__ = [
    "CODES",
    "ChangeWarning",
    "Code",
    "Level",
    "LoopWarning",
    "MemoryWarning",
    "MonitorWarning",
    "WarningPolicy",
]

Level = Literal["off", "user", "expert"]
_RANK: dict[str, int] = {"off": 0, "user": 1, "expert": 2}


class MonitorWarning(SpeedswapWarning):
    """Base of what monitors warn about.

    Attributes:
        code: which warning it is, such as ``"SW101"``. The message begins with it, so that Python's own filters can
            name it too: ``warnings.filterwarnings("ignore", "SW101")``.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class LoopWarning(MonitorWarning):
    """A training loop leaves something out, or does it twice."""


class ChangeWarning(MonitorWarning):
    """A model, an optimizer or a criterion is another than it was, or was changed."""


class MemoryWarning(MonitorWarning):
    """Memory is nearly full, or cut into pieces."""


@dataclass(frozen=True)
class Code:
    """What a code stands for.

    Attributes:
        level: from which level on it is said: ``"user"`` is most likely a mistake, ``"expert"`` may well be meant.
        meaning: what happened, in one sentence.
        category: the warning's class.
    """

    level: Literal["user", "expert"]
    meaning: str
    category: type[MonitorWarning]


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "SW101": Code("user", "the optimizer stepped, but no backward pass had run since its last step", LoopWarning),
        "SW102": Code("user", "more backward passes ran without a step than are accumulated by intent", LoopWarning),
        "SW103": Code("user", "gradients that a step has used were not zeroed before the next backward", LoopWarning),
        "SW104": Code("user", "gradients were left over at the end that no step has used", LoopWarning),
        "SW105": Code("user", "parameters of the optimizer had no gradient when it stepped", LoopWarning),
        "SW106": Code("user", "trainable parameters of the model are not in the optimizer", LoopWarning),
        "SW107": Code("user", "parameters in the optimizer are not the model's", LoopWarning),
        "SW108": Code("expert", "the optimizer stepped while the model was in evaluation mode", LoopWarning),
        "SW109": Code("expert", "the optimizer stepped before as many passes as accumulate had run", LoopWarning),
        "SW110": Code("expert", "gradients were zeroed that no step had used", LoopWarning),
        "SW201": Code("expert", "something observed was replaced by another object", ChangeWarning),
        "SW202": Code("user", "something observed moved to another device", ChangeWarning),
        "SW203": Code("user", "an optimizer's parameters or parameter groups changed", ChangeWarning),
        "SW204": Code("expert", "an optimizer's hyperparameters changed", ChangeWarning),
        "SW205": Code("expert", "other parameters are trainable than before", ChangeWarning),
        "SW206": Code("expert", "something observed changed its dtype", ChangeWarning),
        "SW301": Code("user", "the allocator had to give cached memory back and try again", MemoryWarning),
        "SW302": Code("expert", "much of the reserved memory lies in pieces that are not in use", MemoryWarning),
        "SW303": Code("expert", "more memory is in use after each of several equal phases", MemoryWarning),
    }
)


class WarningPolicy:
    """Which of the monitor's warnings are said, and how often.

    Args:
        level: ``"off"`` says nothing, ``"user"`` what is most likely a mistake, ``"expert"`` everything.
        ignore: codes that are never said.
        always: codes that are said at every occasion; the others are said once.
        codes: the codes that there are, for whoever has more of them.

    Attributes:
        counts: how often each code came up, said or not; codes above the level and ignored ones do not count.

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
        if level not in _RANK:
            raise ValueError(f"level is {level!r}; it must be 'off', 'user' or 'expert'")
        self.level = level
        self.codes = codes
        self.ignore = frozenset(ignore)
        self.always = frozenset(always)
        for code in self.ignore | self.always:
            if code not in codes:
                raise ValueError(f"{code!r} is no warning's code; speedswap.monitor.CODES has them all")
        self.counts: Counter[str] = Counter()

    def wants(self, code: str) -> bool:
        """Whether a code is said at this level."""
        return _RANK[self.codes[code].level] <= _RANK[self.level] and code not in self.ignore

    def warn(self, code: str, detail: str) -> None:
        """Say a warning, unless it is filtered or was said before; it points at the line outside torch and speedswap.

        Args:
            code: which.
            detail: what exactly happened, and the remedy.
        """
        if not self.wants(code):
            return
        self.counts[code] += 1
        if self.counts[code] == 1 or code in self.always:
            warnings.warn(self.codes[code].category(f"{code}: {detail}", code), stacklevel=_users_level())


def _users_level() -> int:
    """The stacklevel, for whoever calls this, of the innermost frame that is neither torch's nor this package's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "speedswap"):
        level, frame = level + 1, frame.f_back
    return level


def as_policy(warn: Level | WarningPolicy) -> WarningPolicy:
    """A policy of a monitor's own, from a level; or the one given, which monitors then share."""
    return warn if isinstance(warn, WarningPolicy) else WarningPolicy(warn)
