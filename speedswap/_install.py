"""Installation commands for optional packages, as quoted in messages."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

__all__ = ["pip_install"]


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
