"""Logs of bytes from a coverage-guided fuzzer, for the length of a round; needs atheris."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speedswap.kernels import RowLogDamaged
from torture.attack import Attack, Broken, Skipped
from torture.log_lives import Log, created
from torture.log_rows import Shape
from torture.processes import child

_SHAPE = Shape(groups=40, columns=(256,), births=(0,), layouts=((0,),))
_RUNS = 3_000


def _round(seed: int, folder: Path) -> str:
    if find_spec("atheris") is None:
        raise Skipped("needs atheris")
    with child(_fuzzes, seed, log=folder / "log") as fuzzer:
        if fuzzer.wait(seconds=100.0):
            raise Broken(f"bytes from a fuzzer do something else than being refused\n{fuzzer.said()}")
    return f"{_RUNS} inputs"


def _fuzzes(tell: Any, seed: int) -> None:
    import atheris

    whole = created(b"commit 0")

    def one(data: bytes) -> None:
        """Put the input over the beginning of one file, at a multiple of a sector; the rest stays."""
        name, at, data = ("log", "head")[data[0] % 2 if data else 0], 512 * (data[1] if len(data) > 1 else 0), data[2:]
        bytes_of = whole[name]
        files = {**whole, name: bytes_of[:at].ljust(at, b"\0") + data + bytes_of[at + len(data) :]}
        try:
            with Log(files, _SHAPE, slots=16, writable=bool(seed % 2)) as log:
                log.read()
        except RowLogDamaged:
            pass

    atheris.Setup([sys.argv[0], f"-atheris_runs={_RUNS}", f"-seed={seed % 2**31}"], one)
    atheris.Fuzz()


ATTACK = Attack(
    name="fuzz",
    promise="a log of any bytes is refused or read, and nothing else happens",
    round=_round,
    seconds=120.0,
)
