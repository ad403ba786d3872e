"""The search for the compiled part, ``_C``, where a source checkout hides the installed package."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path


def with_compiled_part(search_path: Sequence[str]) -> list[str]:
    """Return this package's search path, extended by a folder that holds ``_C``.

    In a checkout, ``python -m``, ``python -c`` and ``python -m pytest`` import the working directory's ``speedswap``
    ahead of what ``pip install .`` put elsewhere, and it lacks a compiled part. The installed one is used
    only if it was built from the same sources: the files in ``speedswap`` and in ``csrc`` are equal byte for byte.
    Equal version numbers would not prove that, since sources change between versions, and a stale build under
    newer Python files may compute something else without an error, also after ``git pull`` in a checkout that was
    installed with ``pip install -e``.

    Args:
        search_path: ``__path__`` of ``speedswap.kernels``.

    Returns:
        The same path; with the installed package's folder at its end if ``_C`` comes from there.

    Raises:
        ImportError: there is no ``_C`` for these sources and this Python; one line names the remedy.
    """
    # An editable install may name the folder of its compiled part first.
    folders = [Path(entry).resolve() for entry in search_path]
    package = next((each for each in folders if (each / "__init__.py").is_file()), folders[0]).parent
    spec = find_spec("speedswap.kernels._C")
    if spec is not None:  # in place, installed, or found by an editable install's finder
        if spec.origin is None or _built_from(package, Path(spec.origin).parent):  # None: documentation tools' stand-in
            return [*search_path]
        reason = f"the compiled part of speedswap was built from other sources than {package.parent}: {_build(package)}"
    else:
        installed = _installed_elsewhere(package)
        if installed and _has_same_files(package, installed) and _built_from(package, installed / "kernels"):
            return [*search_path, str(installed / "kernels")]
        reason = _remedy(package, installed)
    raise ImportError(reason, name="speedswap", path=str(package))


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


def _has_same_files(package: Path, installed: Path) -> bool:
    """Return True if an installed package has a checkout's Python files."""
    names = _python_files(package)
    return names == _python_files(installed) and all(
        (package / name).read_bytes() == (installed / name).read_bytes() for name in names
    )


def _built_from(package: Path, kernels: Path) -> bool:
    """Return True unless a package is in a checkout with other C++ sources than those of the ``_C`` in a folder."""
    if not _is_in_checkout(package):
        return True
    found, csrc = kernels / "_C.sha256", package.parent / "csrc"  # as CMakeLists.txt writes it
    sources = sorted(path for path in csrc.iterdir() if path.suffix in (".cpp", ".h", ".cuh"))
    digests = "".join(f"{sha256(path.read_bytes()).hexdigest()}\n" for path in sources)
    return found.is_file() and found.read_text() == sha256(digests.encode()).hexdigest()


def _python_files(folder: Path) -> set[Path]:
    return {file.relative_to(folder) for file in folder.rglob("*.py")}


def _remedy(package: Path, installed: Path | None) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    if not _is_in_checkout(package):
        return f"speedswap in {package} has no compiled part (_C) for Python {version}: install it with this Python"
    if installed is None:
        return f"{package} is a source checkout that is not built for Python {version}: {_build(package)}"
    return (
        f"{package} is a source checkout that is not built for Python {version}, and hides speedswap in {installed}, "
        f"which was built from other sources: change to another directory, or {_build(package)}"
    )


def _is_in_checkout(package: Path) -> bool:
    return (package.parent / "csrc" / "row_log.cpp").is_file()  # another project may have the package in it, and a csrc


def _build(package: Path) -> str:
    return f"run pip install -e {shlex.quote(str(package.parent))}"
