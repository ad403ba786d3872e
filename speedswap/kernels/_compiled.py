"""The search for the compiled part, ``_C``, where a source checkout hides the installed package."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path


def with_compiled_part(search_path: Sequence[str]) -> list[str]:
    """Return this package's search path, extended by a folder that holds ``_C``.

    In a checkout, ``python -m``, ``python -c`` and ``python -m pytest`` import the working directory's ``speedswap``
    ahead of what ``pip install .`` put elsewhere, and it lacks a compiled part. The installed one is used
    only if it was built from the same sources: the Python files are equal byte for byte, and nothing in ``csrc`` is
    newer. Equal version numbers would not prove that, since sources change between versions, and a stale build under
    newer Python files may compute something else without an error.

    Args:
        search_path: ``__path__`` of ``speedswap.kernels``, its own folder first.

    Returns:
        The same path; with the installed package's folder at its end if ``_C`` comes from there.

    Raises:
        ImportError: there is no ``_C`` for these sources and this Python; one line names the remedy.
    """
    if find_spec("speedswap.kernels._C") is not None:  # in place, installed, or found by an editable install's finder
        return [*search_path]
    package = Path(search_path[0]).resolve().parent
    installed = _installed_elsewhere(package)
    if installed is not None and _built_from(package, installed):
        return [*search_path, str(installed / "kernels")]
    raise ImportError(_remedy(package, installed), name="speedswap", path=str(package))


def _installed_elsewhere(package: Path) -> Path | None:
    """Find the first other package of the same name on ``sys.path`` that is complete."""
    for entry in sys.path:
        folder = Path(entry, package.name)
        if (folder / "__init__.py").is_file() and folder.resolve() != package and _compiled_part(folder) is not None:
            return folder.resolve()
    return None


def _compiled_part(package: Path) -> Path | None:
    files = (package / "kernels" / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _built_from(package: Path, installed: Path) -> bool:
    """Return True if an installed package was built from a checkout's current sources."""
    names = _python_files(package)
    if names != _python_files(installed):
        return False
    if any((package / name).read_bytes() != (installed / name).read_bytes() for name in names):
        return False
    # The C++ sources are not installed: only their age can tell.
    compiled = _compiled_part(installed)
    sources = [file for file in (package.parent / "csrc").rglob("*") if file.is_file()]
    return compiled is not None and all(file.stat().st_mtime <= compiled.stat().st_mtime for file in sources)


def _python_files(folder: Path) -> set[Path]:
    return {file.relative_to(folder) for file in folder.rglob("*.py")}


def _remedy(package: Path, installed: Path | None) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    if not (package.parent / "pyproject.toml").is_file():
        return f"speedswap in {package} has no compiled part (_C) for Python {version}: install it with this Python"
    build = f"run pip install -e {shlex.quote(str(package.parent))}"
    if installed is None:
        return f"{package} is a source checkout that is not built for Python {version}: {build}"
    return (
        f"{package} is a source checkout that is not built for Python {version}, and hides speedswap in {installed}, "
        f"which was built from other sources: change to another directory, or {build}"
    )
