"""Other libraries on this machine, found at run time."""

from __future__ import annotations

import importlib
import importlib.metadata

from speedswap.apps.bench.measure import Peer

__all__ = ["find_peer"]


def find_peer(module: str, distribution: str, remedy: str | None = None) -> Peer:
    """Import a library; if it is missing or built for another torch, say so."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return Peer(None, f"not installed: {remedy or error}")
    except Exception as error:  # a library built for another torch fails in many ways
        return Peer(None, f"cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    version = getattr(found, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    return Peer(str(version))
