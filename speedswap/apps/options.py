"""Settings declared once: default, meaning and limits of each, for a dataclass and for the command line.

    @dataclass(frozen=True)
    class Settings(Options):
        dim: int = option(100, "length of a vector", check=whole(1, 2**16))
        seed: int = seed()

``Settings(dim=0)`` is refused with the name, the value and the remedy; ``Settings.add_arguments(parser)`` adds
``--dim`` and ``--seed`` to a parser, and ``Settings.of(args)`` makes settings of what was parsed.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch
from torch.optim import Optimizer

from speedswap.apps.errors import SettingsError
from speedswap.apps.launched import is_launched, local_gpu
from speedswap.apps.option_types import of_type
from speedswap.apps.output import check_scratch
from speedswap.tables.memory import available_bytes

__all__ = [
    "Options",
    "check_loss",
    "check_memory",
    "compute_device",
    "device",
    "epochs",
    "in_gib",
    "lookahead",
    "lr",
    "named_optimizer",
    "one_of",
    "optimizer_of",
    "option",
    "plain",
    "scratch",
    "seed",
    "shortened",
    "state_dtype",
    "storage",
    "whole",
    "widths",
]

Check = Callable[[str, Any], object]
"""Raises SettingsError, given the name and the value."""

_MOST_SHOWN = 24
_DECLARED = "declared"

AnOptions = TypeVar("AnOptions", bound="Options")


@dataclass(frozen=True)
class _Declared:
    """The declaration of one setting, in a field's metadata."""

    text: str
    check: Check | None
    more: dict[str, Any]


def option(default: Any, text: str, *, check: Check | None = None, **more: Any) -> Any:
    """Declare a setting.

    Args:
        default: its default; None for a setting that need not be given.
        text: what it means, as the command line's help says it; the default is added.
        check: refuses values other than None.
        **more: for ``add_argument``, such as ``metavar``; ``type``, where the default's own does not do; ``nargs``
            for a positional argument.
    """
    return field(default=default, metadata={_DECLARED: _Declared(text, check, more)})


@dataclass(frozen=True)
class Options:
    """The base of an application's settings, whose fields are each an :func:`option`.

    ``device``, ``storage``, ``lookahead``, ``optimizer`` and ``lr`` are among them.

    Attributes:
        suited_lr: learning rates at the beginning, by :func:`plain` name; other optimizers have their own default.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    suited_lr: ClassVar[Mapping[str, float]] = {}

    def __init_subclass__(cls) -> None:
        """Have the docstring list the settings."""
        declared = {name: value.metadata[_DECLARED] for name, value in vars(cls).items() if hasattr(value, "metadata")}
        lines = [f"    {name}: {one.text}." for name, one in declared.items()]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):
            object.__setattr__(self, one.name, of_type(one.name, getattr(self, one.name), hints[one.name]))
            check, value = one.metadata[_DECLARED].check, getattr(self, one.name)
            if check is not None and value is not None:
                check(one.name, value)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add an argument per setting."""
        for one in fields(cls):
            declared, default = one.metadata[_DECLARED], one.default
            text = declared.text.replace("%", "%%")
            if "nargs" in declared.more:
                parser.add_argument(one.name, help=text, **declared.more)
                continue
            how: dict[str, Any] = {"action": "store_true"}
            if not isinstance(default, bool):
                shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
                text += "" if default in (None, ()) else f" (default: {shown})"
                how = {"type": type(default), "default": default}
            parser.add_argument("--" + one.name.replace("_", "-"), help=text, **how | declared.more)

    @classmethod
    def of(cls: type[AnOptions], args: argparse.Namespace, **changes: Any) -> AnOptions:
        """Make settings of parsed arguments, with some of them replaced."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls)} | changes)

    @classmethod
    def refuse_beside(cls, args: argparse.Namespace, files: str, *names: str) -> None:
        """Refuse arguments that say what is to be made up, beside the files that are read instead.

        Args:
            args: parsed arguments.
            files: the name of the argument that has the files.
            names: of the others.

        Raises:
            SettingsError: one of them was given, and is not its default.
        """
        given = getattr(args, files)
        for one in fields(cls):
            value = getattr(args, one.name)
            if given and one.name in names and value != one.default:
                shown = ",".join(map(str, given)) if isinstance(given, list | tuple) else given
                raise SettingsError(f"{files} is {shown} and {one.name} is {value}: give one of the two")

    def to_json(self, **changes: Any) -> dict[str, Any]:
        """Return the settings as JSON can hold them, with some of them replaced."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()} | changes

    def compute_device(self) -> torch.device:
        """Return the compute device."""
        return compute_device(vars(self)["device"])

    def lookahead_depth(self) -> int:
        """Return how many batches ahead rows are fetched.

        Without a given number it is none where rows are read from memory by the processor that computes: fetching
        them beside a step only takes its cores.
        """
        given: int | None = vars(self)["lookahead"]
        is_near = self.compute_device().type == "cpu" and vars(self)["storage"] not in ON_DISK
        return int(not is_near) if given is None else given

    def make_optimizer(self, model: torch.nn.Module) -> Optimizer:
        """Make the optimizer of a model's parameters, with a learning rate that suits it unless one is given.

        Raises:
            SettingsError: it takes neither them nor the learning rate.
        """
        name, lr = vars(self)["optimizer"], vars(self)["lr"]
        return optimizer_of(model, name, lr or self.suited_lr.get(plain(name)))


# ---- checks ---------------------------------------------------------------------------------------------------------


def whole(least: int, most: int, *, shown: str | None = None) -> Check:
    """Refuse a count that is too small to mean anything, or too large to be meant.

    Args:
        least, most: its limits.
        shown: both in words, for the message; otherwise it names the limit that was passed.
    """

    def check(name: str, value: int) -> None:
        if least <= value <= most:
            return
        limit = shown or (f"of {least} or more" if value < least else f"of at most {most:,}")
        raise SettingsError(f"{name} is {shortened(value)}: give a whole number {limit}")

    return check


def one_of(choices: Sequence[str]) -> Check:
    """Refuse a word that is not among the choices."""

    def check(name: str, value: str) -> None:
        if value not in choices:
            raise SettingsError(f"{name} is {value!r}: give one of {', '.join(choices)}")

    return check


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise SettingsError(f"{name} is {value}: give a number above 0")


def shortened(number: int) -> str:
    """Return a number as messages show it."""
    text = str(number)
    return text if len(text) <= _MOST_SHOWN else f"{text[:5]}…, of {len(text)} digits,"


def in_gib(nbytes: int) -> str:
    """Return bytes as messages show them, without floating point, which overflows."""
    tenths = nbytes * 10 >> 30
    return f"{tenths // 10:,}.{tenths % 10}"


def check_memory(what: str, nbytes: int, remedy: str) -> None:
    """Refuse work that needs more memory than is free."""
    free = available_bytes()
    if nbytes > free:
        raise SettingsError(f"{what} need {in_gib(nbytes)} GiB of memory, and {in_gib(free)} are free: {remedy}")


def check_loss(loss: float, *, lr: float, optimizer: str, when: str, remedy: str = "lower lr") -> None:
    """Refuse a learning rate with which the loss is not finite any more."""
    if not math.isfinite(loss):
        raise SettingsError(f"lr={lr} is too large for {optimizer}: the loss became {loss} {when}; {remedy}")


def compute_device(name: str | None) -> torch.device:
    """Return the device of a name; without one, CUDA where there is a GPU, else the CPU.

    Under torchrun a process without a GPU's number takes that of its place on the machine.

    Raises:
        SettingsError: this machine has no such device.
    """
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    missing = "" if "cuda" in available else "; speedswap info says why there is no cuda"
    wrong = f"device is {name!r}: give one of {', '.join(available)}{missing}"
    try:
        found = torch.device(name or available[-1])
    except RuntimeError as error:
        raise SettingsError(wrong) from error
    if found.type not in available or (found.index or 0) >= max(torch.cuda.device_count(), 1):
        raise SettingsError(wrong)
    if found.type == "cuda" and found.index is None and is_launched():
        return torch.device("cuda", local_gpu())
    return found


# ---- settings that several applications have ------------------------------------------------------------------------

ON_DISK = ("disk", "memmap")  # the second is the older name
STORAGES = ("auto", "device", "pinned", "pageable", *ON_DISK)
STATE_DTYPES = ("float32", "bfloat16")
STORAGE_TEXT = f"where the tables live: {', '.join(STORAGES[:-1])}"
DEVICE_TEXT = "where to compute (default: cuda where there is a GPU, else cpu)"


def epochs(default: int, over: str) -> Any:
    """Declare the number of passes over something."""
    return option(default, f"passes over {over}", check=whole(1, 10**9))


def lr(text: str = "learning rate (default: what suits the optimizer)") -> Any:
    """Declare a learning rate."""
    return option(None, text, check=_above_zero, type=float)


def seed(bits: int = 64) -> Any:
    """Declare the seed of everything random, an unsigned number of ``bits`` bits."""
    text = "of everything random; on one machine, the same seed gives the same result"
    return option(0, text, check=whole(0, 2**bits - 1, shown=f"from 0 to 2**{bits} - 1"))


def device() -> Any:
    """Declare the compute device."""
    return option(None, DEVICE_TEXT, check=lambda name, value: compute_device(value), type=str)


def storage() -> Any:
    """Declare the storage of the tables."""
    return option("auto", STORAGE_TEXT, check=one_of(STORAGES))


def state_dtype() -> Any:
    """Declare the form in which the tables hold the optimizer's state."""
    return option(
        "float32", f"how the optimizer's state is stored: {', '.join(STATE_DTYPES)}", check=one_of(STATE_DTYPES)
    )


def lookahead() -> Any:
    """Declare the depth of the lookahead."""
    return option(
        None,
        "how many batches ahead rows are fetched; 0 for a plain loop, with the same result (default: 1 where they come "
        "to a GPU or from a disk, else 0)",
        check=whole(0, 1024),
        type=int,
    )


def scratch(what: str) -> Any:
    """Declare the directory of temporary files."""
    text = f"directory for {what} (default: the system's)"
    return option(None, text, check=lambda name, value: check_scratch(value), type=Path, metavar="DIR")


def widths(text: str) -> tuple[int, ...]:
    """Read the widths of layers as the command line gives them."""
    return tuple(int(width) for width in text.split(","))


# ---- optimizers by name ---------------------------------------------------------------------------------------------


def named_optimizer(name: str, own: Mapping[str, type[Optimizer]] | None = None) -> type[Optimizer]:
    """Return the optimizer of a name such as ``adam``: one of ``torch.optim``, or of an application's own.

    Raises:
        SettingsError: no optimizer has the name.
    """
    known = {plain(key): value for key, value in (own or {}).items()}
    names = [*(own or {})]
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            known[plain(value.__name__)] = value
            names.append(plain(value.__name__))
    if plain(name) not in known:
        count = len(own or {})
        raise SettingsError(f"optimizer is {name!r}: give one of {', '.join(names[:count] + sorted(names[count:]))}")
    return known[plain(name)]


def optimizer_of(model: torch.nn.Module, name: str, lr: float | None) -> Optimizer:
    """Make the optimizer of a name for a model's parameters; with torch's own learning rate where ``lr`` is None.

    Raises:
        SettingsError: no optimizer has the name, or it takes neither the parameters nor the learning rate.
    """
    make: Any = named_optimizer(name)
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if on_cpu and "fused" in inspect.signature(make).parameters:
        given["fused"] = True  # one pass over memory, where torch's default takes five
    try:
        optimizer: Optimizer = make(model.parameters(), **given)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"optimizer is {name!r}, which does not take this model: {error}") from error
    return optimizer


def plain(name: str) -> str:
    """Return a name without the differences in how people write it."""
    return name.lower().replace("_", "").replace("-", "")
