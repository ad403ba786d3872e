"""Settings declared once, for a frozen dataclass and for the command line.

    @dataclass(frozen=True)
    class RunSettings(TableSettings):
        dim: int = option(100, "length of a vector", check=whole(1, 2**16))

``RunSettings(dim=0)`` is refused with the name, the value and the remedy; ``RunSettings.add_arguments(parser)`` adds
``--dim`` to a parser, and ``RunSettings.of(args)`` makes settings of what was parsed.
"""

# ruff: noqa: RUF009 (each option makes a new field)

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, asdict, dataclass, field, fields
from itertools import pairwise
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch.optim import Optimizer

from speedswap._machine import available_bytes
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.files import check_scratch
from speedswap.apps.ranks import ON_DISK as ON_DISK
from speedswap.apps.ranks import is_launched, local_gpu

Check = Callable[[str, Any], object]
"""Raises SettingsError, given the name and the value."""

STORAGES = ("auto", "device", "pinned", "pageable", *ON_DISK)
STATE_DTYPES = ("float32", "bfloat16")
STORAGE_TEXT = f"where the tables live: {', '.join(STORAGES[:-1])}"
ROW_BY_ROW = "any of torch.optim that works row by row, such as sgd, adagrad or adam"
DEVICE_TEXT = "where to compute (default: cuda where there is a GPU, else cpu)"
WIDEST = 2**16
"""Numbers in a layer or a row."""
_MOST_LAYERS = 100
_MOST_SHOWN = 24
_TYPES: dict[Any, tuple[Any, str]] = {
    int: ((int, np.integer), "a whole number"),
    float: ((int, float, np.integer, np.floating), "a number"),
    str: (str, "a string"),
    bool: (bool, "True or False"),
    Path: ((str, PathLike), "a path"),
    Mapping: (Mapping, "a mapping"),
    NoneType: (NoneType, "None"),
}

ASettings = TypeVar("ASettings", bound="AppSettings")


# ---- values ---------------------------------------------------------------------------------------------------------


def of_type(name: str, value: Any, hint: Any) -> Any:
    """Return the value of a setting: a string as a path, a list as a tuple, NumPy's numbers as Python's.

    Args:
        name: the setting's.
        value: as it was given.
        hint: its annotation: int, float, str, bool, Path, None, tuples of one of them, mappings, and unions of these.

    Raises:
        SettingsError: it is of another type.

    >>> of_type("layers", [64, 32], tuple[int, ...])
    (64, 32)
    """
    kinds = _kinds(hint)
    for kind in kinds:
        with suppress(TypeError):
            return _cast(value, kind)
    raise SettingsError(f"{name} is {value!r}: give {' or '.join(map(_in_words, kinds))}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _cast(value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(_cast(each, get_args(kind)[0]) for each in value)
    if not isinstance(value, _TYPES[get_origin(kind) or kind][0]) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return Path(value) if kind is Path else value.item() if isinstance(value, np.generic) else value


def _in_words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a tuple, each of its parts {_in_words(get_args(kind)[0])}"
    return _TYPES[get_origin(kind) or kind][1]


def whole(least: int, most: int, *, shown: str | None = None) -> Check:
    """Refuse a count that is too small to make sense, or too large to be intended.

    Args:
        least, most: its limits.
        shown: both in words, for the message; otherwise it names the limit that was passed.
    """

    def check(name: str, value: int) -> None:
        if not least <= value <= most:
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


def widths(text: str) -> tuple[int, ...]:
    """Read the widths of layers as the command line gives them."""
    return tuple(int(width) for width in text.split(","))


def check_widths(name: str, layers: tuple[int, ...]) -> None:
    """Refuse widths of layers that no model has."""
    if min(layers, default=1) < 1:
        raise SettingsError(f"{name} is {','.join(map(str, layers))}: give widths such as 64,32")
    if max(layers, default=1) > WIDEST or len(layers) > _MOST_LAYERS:
        raise SettingsError(
            f"{name} has {len(layers)} widths of up to {shortened(max(layers))}: give at most {_MOST_LAYERS} of at "
            f"most {WIDEST:,}"
        )


def check_layers_memory(*chains: Sequence[int]) -> None:
    """Refuse chains of linear layers, by their widths, that need more memory than is free."""
    numbers = sum(ins * outs for widths in chains for ins, outs in pairwise(widths))
    with_moments = 4 * 4 * numbers  # as if the optimizer kept two, of float32
    check_memory("the layers with their gradients and moments", with_moments, "give narrower layers")


def plain(name: str) -> str:
    """Return a name without the differences in how people write it."""
    return name.lower().replace("_", "").replace("-", "")


def named_optimizer(name: str, own: Mapping[str, Callable[..., Optimizer]] | None = None) -> Callable[..., Optimizer]:
    """Return the optimizer of a name such as ``adam``: one of ``torch.optim``, or of an application's own.

    Raises:
        SettingsError: no optimizer has the name.
    """
    known: dict[str, Callable[..., Optimizer]] = {
        plain(each.__name__): each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
    }
    known = {**(own or {}), **dict(sorted(known.items()))}
    for each, found in known.items():
        if plain(each) == plain(name):
            return found
    raise SettingsError(f"{named('optimizer')} is {name!r}: give one of {', '.join(known)}")


def compute_device(name: str | None) -> torch.device:
    """Return the device of a name; without one, CUDA where there is a GPU, else the CPU.

    Under torchrun a process without a GPU's number takes that of its place on the machine.

    Raises:
        SettingsError: this machine has no such device.
    """
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    missing = "" if "cuda" in available else "; speedswap info says why there is no cuda"
    wrong = f"{named('device')} is {name!r}: give one of {', '.join(available)}{missing}"
    try:
        found = torch.device(name or available[-1])
    except RuntimeError as error:
        raise SettingsError(wrong) from error
    if found.type not in available or (found.index or 0) >= max(torch.cuda.device_count(), 1):
        raise SettingsError(wrong)
    if found.type == "cuda" and found.index is None and is_launched():
        return torch.device("cuda", local_gpu())
    return found


# ---- settings -------------------------------------------------------------------------------------------------------


def option(default: Any, text: str, *, check: Check | None = None, **more: Any) -> Any:
    """Declare a setting.

    Args:
        default: its default; None for a setting that need not be given.
        text: what it means, as the command line's help says it; the default is added.
        check: refuses invalid values other than None.
        **more: for ``add_argument``, such as ``metavar``; ``type``, where the annotation does not do; ``nargs`` for a
            positional argument.
    """
    return field(default=default, metadata={"text": text, "check": check, "more": more})


def epochs(default: int, over: str) -> Any:
    """Declare the number of passes over something."""
    return option(default, f"passes over {over}", check=whole(1, 10**9))


def optimizer(default: str, text: str = ROW_BY_ROW, own: Mapping[str, Callable[..., Optimizer]] | None = None) -> Any:
    """Declare the name of an optimizer, as for :func:`named_optimizer`."""
    return option(default, text, check=lambda name, value: named_optimizer(value, own))


@dataclass(frozen=True)
class AppSettings:
    """The base of an application's settings, whose fields are each an :func:`option`.

    Attributes:
        suited_lr: learning rates at the beginning, by :func:`plain` name; other optimizers have their own default.
        own_optimizers: those that ``torch.optim`` lacks, by name.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    suited_lr: ClassVar[Mapping[str, float | None]] = {}
    own_optimizers: ClassVar[Mapping[str, Callable[..., Optimizer]]] = {}

    epochs: int = epochs(1, "the data")
    optimizer: str = optimizer("adam", "any of torch.optim, such as sgd or adam")
    lr: float | None = option(None, "learning rate (default: what suits the optimizer)", check=_above_zero)
    device: str | None = option(None, DEVICE_TEXT, check=lambda name, value: compute_device(value))
    seed: int = option(
        0,
        "of everything random; on one machine, the same seed gives the same result",
        check=whole(0, 2**64 - 1, shown="from 0 to 2**64 - 1"),
    )

    def __init_subclass__(cls) -> None:
        """Have the docstring list the settings."""
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        declared = {**{one.name: one for one in fields(cls)}, **own}
        lines = [f"    {name}: {one.metadata['text']}." for name, one in declared.items()]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):
            name = one.name if "nargs" in one.metadata["more"] else named(one.name)
            value = of_type(name, getattr(self, one.name), hints[one.name])
            object.__setattr__(self, one.name, value)
            if (check := one.metadata["check"]) is not None and value is not None:
                check(name, value)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add an argument per setting."""
        hints = get_type_hints(cls)
        for one in fields(cls):
            text, more, default = one.metadata["text"].replace("%", "%%"), one.metadata["more"], one.default
            kind = _kinds(hints[one.name])[0]
            how: dict[str, Any] = {"type": kind} if kind in (int, float, Path) else {}
            if "nargs" in more:
                parser.add_argument(one.name, help=text, **how | more)
                continue
            if isinstance(default, bool):
                how = {"action": "store_true"}
            elif default not in (None, ()):
                shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
                text += f" (default: {shown})"
            flag = "--" + one.name.replace("_", "-")
            parser.add_argument(flag, help=text, default=default, **how | more)

    @classmethod
    def of(cls: type[ASettings], args: argparse.Namespace, **changes: Any) -> ASettings:
        """Make settings of parsed arguments, with some of them replaced."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls)} | changes)

    @classmethod
    def refuse_beside(cls, args: argparse.Namespace, files: str, *names: str) -> None:
        """Refuse arguments that describe generated data if files are read instead.

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
                raise SettingsError(f"{files} is {shown} and {named(one.name)} is {value}: give one of the two")

    def to_json(self, **changes: Any) -> dict[str, Any]:
        """Return the settings as JSON can hold them, with some of them replaced."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return found | changes

    def compute_device(self) -> torch.device:
        """Return the compute device."""
        return compute_device(self.device)

    def make_optimizer(self, model: torch.nn.Module) -> Optimizer:
        """Make the optimizer of a model's parameters, with a learning rate that suits it unless one is given.

        Raises:
            SettingsError: it takes neither them nor the learning rate.
        """
        make = named_optimizer(self.optimizer, self.own_optimizers)
        lr = self.lr or self.suited_lr.get(plain(self.optimizer))
        given: dict[str, Any] = {} if lr is None else {"lr": lr}
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        if on_cpu and "fused" in inspect.signature(make).parameters:
            given["fused"] = True  # one pass over memory, where torch's default takes five
        try:
            return make(model.parameters(), **given)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{named('optimizer')} {self.optimizer} does not take this model: {error}") from error


@dataclass(frozen=True)
class TableSettings(AppSettings):
    """The base of the settings of an application with tables."""

    optimizer: str = optimizer("adam")
    storage: str = option("auto", STORAGE_TEXT, check=one_of(STORAGES))
    state_dtype: str = option(
        "float32", f"how the optimizer's state is stored: {', '.join(STATE_DTYPES)}", check=one_of(STATE_DTYPES)
    )
    lookahead: int | None = option(
        None,
        "how many batches ahead rows are fetched; 0 for a plain loop, with the same result (default: 1 where they come "
        "to a GPU or from a disk, else 0)",
        check=whole(0, 1024),
    )
    scratch: Path | None = option(
        None,
        "directory for temporary files, such as tables on disk (default: the system's)",
        check=lambda name, value: check_scratch(value),
        metavar="DIR",
    )

    def lookahead_depth(self) -> int:
        """Return how many batches ahead rows are fetched.

        The default is 0 where the processor or GPU that computes reads rows from its memory: fetching them during a
        step only takes its cores, or more launches.
        """
        is_near = self.storage == "device" or (self.compute_device().type == "cpu" and self.storage not in ON_DISK)
        return int(not is_near) if self.lookahead is None else self.lookahead


# ---- commands -------------------------------------------------------------------------------------------------------


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    settings: type[AppSettings],
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    resumes: bool = True,
) -> argparse.ArgumentParser:
    """Add the command of an application to a parser's commands.

    Args:
        commands: of the parser.
        name: of the command.
        settings: the class of its settings.
        run: runs it, given the parsed arguments, and returns the exit status.
        summary, description: for the help.
        resumes: whether it goes on from checkpoints.
    """
    parser = commands.add_parser(name, help=summary, description=description)
    settings.add_arguments(parser)
    parser.add_argument(
        "--output", type=Path, default=Path(f"{name}-output"), metavar="DIR", help="default: %(default)s"
    )
    if resumes:
        choice = parser.add_mutually_exclusive_group()
        choice.add_argument(
            "--resume",
            action="store_true",
            default=None,
            help="insist on going on from the last checkpoint in the output directory, also of a finished run to more "
            "--epochs; an unfinished run of the same settings goes on without this",
        )
        choice.add_argument(
            "--restart",
            dest="resume",
            action="store_false",
            help="start over; the first checkpoint replaces those in the output directory",
        )
    parser.set_defaults(run=run)
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that reads a trained model from a run's output directory."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's output directory")
    parser.add_argument("--storage", default="auto", help=STORAGE_TEXT)
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="directory for tables on disk, which are temporary")
    parser.add_argument("--device", help=DEVICE_TEXT)


@contextmanager
def loaded_model(args: argparse.Namespace, load: Callable[..., Any]) -> Iterator[Any]:
    """Load the model that the options of :func:`add_model_options` describe, and close it afterwards.

    Args:
        args: parsed arguments.
        load: loads it, given the output directory, the tables' storage, and the directory for those on disk.
    """
    one_of(STORAGES)(named("storage"), args.storage)
    check_scratch(args.scratch)
    device = compute_device(args.device)
    model = load(args.directory, storage=args.storage, scratch=args.scratch).to(device)
    try:
        yield model
    finally:
        model.close()
