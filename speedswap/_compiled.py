"""The compiled part of the package, ``speedswap._C``, where a source checkout hides the installed package."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

__all__ = ["with_compiled_part"]


def with_compiled_part(search_path: Sequence[str]) -> list[str]:
    """Return the package's search path with a folder that holds ``_C``.

    In a checkout, ``python -m``, ``python -c`` and ``python -m pytest`` import the working directory's ``speedswap``
    ahead of what ``pip install .`` put elsewhere, and it has no compiled part of its own. The installed one is used
    only where it was built from the same sources: the Python files are equal byte for byte, and nothing in ``csrc`` is
    newer. Equal version numbers would not prove that, since sources change between versions, and a stale build under
    newer Python files may compute something else without an error.

    Args:
        search_path: ``__path__`` of the package, its own folder first.

    Returns:
        The same path; with the installed package's folder at its end where ``_C`` comes from there.

    Raises:
        ImportError: there is no ``_C`` for these sources and this Python; one line says what to do.
    """
    if find_spec("speedswap._C") is not None:  # built in place, installed, or found by an editable install's own finder
        return [*search_path]
    package = Path(search_path[0]).resolve()
    installed = _installed_elsewhere(package)
    if installed is not None and _built_from(package, installed):
        return [*search_path, str(installed)]
    raise ImportError(_what_to_do(package, installed), name="speedswap", path=str(package))


def _installed_elsewhere(package: Path) -> Path | None:
    """Find the first other package of the name on ``sys.path`` that is complete."""
    for entry in sys.path:
        folder = Path(entry, package.name)
        if (folder / "__init__.py").is_file() and folder.resolve() != package and _compiled_part(folder) is not None:
            return folder.resolve()
    return None


def _compiled_part(folder: Path) -> Path | None:
    files = (folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _built_from(package: Path, installed: Path) -> bool:
    """Tell whether an installed package was built from a checkout's sources as they are now."""
    names = _python_files(package)
    if names != _python_files(installed):
        return False
    if any((package / name).read_bytes() != (installed / name).read_bytes() for name in names):
        return False
    # The C++ sources are not installed, so that only their age can tell.
    compiled = _compiled_part(installed)
    sources = [file for file in (package.parent / "csrc").rglob("*") if file.is_file()]
    return compiled is not None and all(file.stat().st_mtime <= compiled.stat().st_mtime for file in sources)


def _python_files(folder: Path) -> set[Path]:
    return {file.relative_to(folder) for file in folder.rglob("*.py")}


def _what_to_do(package: Path, installed: Path | None) -> str:
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
