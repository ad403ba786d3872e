"""Wording of messages: kinds, sizes, warnings with codes, installation commands."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import threading
import warnings

from speedswap.errors import SpeedswapWarning

AVERAGE_OTHERS = (  # of AveragedModel, EMA and SWA
    "an average of a model over its steps is speedswap.optim.Averaged(model); or average a module without the "
    "embedding, or all parameters but speedswap.parameters_to_ignore(model)"
)

# Read aloud: "an int", "an SGD", "an ndarray"; but "a UNet", "a UserDict", "a UnionFind".
_STARTS_WITH_A_VOWEL = re.compile(r"_*(?:[AEIOaeio]|[Uu]n(?!i)|[Uu][mlp]|[FHLMNRSX][A-Z]|ndarray)")


def a_kind(value: object) -> str:
    """Return the name of a value's type with its indefinite article.

    Example:
        >>> import torch
        >>> a_kind(torch.optim.Adam([torch.ones(1)])), a_kind([1])
        ('an Adam', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if _STARTS_WITH_A_VOWEL.match(name) else 'a'} {name}"


def require_kind(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError unless an argument is of a kind.

    Args:
        name: the argument's.
        value: its value.
        kind: a class, or several.
        wanted: what to give, for the message.

    Example:
        >>> require_kind("model", [1], float, "a torch.nn.Module")
        Traceback (most recent call last):
            ...
        TypeError: model is a list; give a torch.nn.Module
    """
    if not isinstance(value, kind):
        shown = f"the class {value.__name__}" if isinstance(value, type) else a_kind(value)
        raise TypeError(f"{name} is {shown}; give {wanted}")


def size_in_words(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that it reaches.

    Example:
        >>> size_in_words(3 << 29), size_in_words(100)
        ('1.5 GiB', '100 bytes')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} bytes"


_said: set[str] = set()
_said_lock = threading.Lock()


def warn(code: str, message: str, category: type[Warning] = SpeedswapWarning) -> None:
    """Warn; this is the only place where the package does.

    Args:
        code: the warning's, such as ``"SW401"``, which docs/warnings.md explains. The message begins with it.
        message: the event in detail, and the remedy.
        category: the class of the warning.
    """
    warnings.warn(category(f"{code}: {message}"), stacklevel=_users_level())


def warn_once(code: str, message: str) -> None:
    """Warn, the first time in this process that a code has this message."""
    with _said_lock:
        if code + message in _said:
            return
        _said.add(code + message)
    warn(code, message)


def _users_level() -> int:
    """Return the caller's stacklevel of the innermost frame that is neither torch's nor this package's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "speedswap"):
        level, frame = level + 1, frame.f_back
    return level


def pip_install(*packages: str, extra: str) -> str:
    """Return the command that installs packages of an extra, in the versions that the extra requires.

    It names the packages themselves: ``speedswap[extra]`` would be looked up in a package index, where speedswap may be
    missing, and the folder it was installed from may be gone. A package that the installed metadata does not list is
    named without a version.

    Args:
        packages: names of distributions.
        extra: the extra of speedswap that includes them.

    Returns:
        One line for a shell.

    Example:
        >>> pip_install("matplotlib", "tqdm", extra="demo")
        "pip install 'matplotlib>=3.8' 'tqdm>=4.66'"
    """
    required = _requirements(extra)
    return shlex.join(["pip", "install", *(required.get(_plain(name), name) for name in packages)])


def _requirements(extra: str) -> dict[str, str]:
    """Return the requirements of an extra by name, such as ``{"tqdm": "tqdm>=4.66"}``."""
    try:
        lines = importlib.metadata.requires("speedswap") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return {}
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name is not None and re.search(rf"extra == .{re.escape(extra)}\b", marker):
            found[_plain(name[0])] = requirement.strip()
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
