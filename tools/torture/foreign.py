"""Tables from an unknown source, in which files are links, pipes, devices, sockets or folders."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken
from torture.processes import child

ROWS, DIM = 20, 4
# The longest a round may take.
_SECONDS = 10.0
_NAMES = ("LOCK", "OWNER", "MANIFEST", "MANIFEST.tmp", "rows.log", "HEAD", "keys-0.bin")


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    path, precious = folder / "table", folder / "precious"
    expected = _made(draw, path)
    names = sorted({*_NAMES, *os.listdir(path)})
    for number in range(4):
        name, kind = draw.choice(names), draw.choice(list(_KINDS))
        _precious(draw, precious, path / name)
        kept = _kept(precious)
        aside = folder / f"aside-{number}"
        _replace(path / name, aside, kind, precious)
        use = draw.choice(list(_USES))
        what = f"{name} is a {kind}, {use}"
        was_used = _use(use, path, expected, what, folder / f"log-{number}")
        if _kept(precious) != kept and not _is_its_own(name, kind, use):
            raise Broken(f"a file outside of the table was changed\n{what}: {kept} has become {_kept(precious)}")
        if (folder / "to be made").exists():
            raise Broken(f"a file outside of the table was made\n{what}")
        if was_used:
            _loads(path, expected, what, folder / f"log-{number}")
        _restore(path / name, aside, was_used)
        _expect(path, expected, f"with its own files; {what}")
    return kind


def _made(draw: random.Random, path: Path) -> Tensor:
    init = speedswap.init.normal() if draw.random() < 0.5 else None
    with speedswap.Table.create(ROWS, DIM, path=path, init=init) as table:
        if draw.random() < 0.7:
            table.scatter(torch.tensor([0, 3, 19]), torch.randn(3, DIM))
        return table.read()


def _loads(path: Path, expected: Tensor, what: str, log: Path) -> None:
    if not _use("loaded", path, expected, f"{what}, then loaded", log):
        raise Broken(f"a table does not open any more\nas it was left; {what}")


def _expect(path: Path, expected: Tensor, what: str) -> None:
    try:
        with speedswap.Table.open(path) as table:
            found = table.read()
    except SpeedswapError as error:
        raise Broken(f"a table does not open any more\n{what}") from error
    if not torch.equal(found, expected):
        raise Broken(f"a table's rows have changed\n{what}")


# ---------------------------------------------------------------------- substitutes for a file


def _precious(draw: random.Random, precious: Path, like: Path) -> None:
    """Make a file and a folder that must stay as they are; the file may hold exactly the expected bytes."""
    for path in (precious, precious.with_name("folder")):
        if path.is_dir():
            (path / "inside").unlink()
            path.rmdir()
        path.unlink(missing_ok=True)
    content = like.read_bytes() if like.is_file() and draw.random() < 0.5 else draw.randbytes(draw.choice([0, 10, 320]))
    precious.write_bytes(content)
    precious.chmod(0o640)
    folder = precious.with_name("folder")
    folder.mkdir()
    (folder / "inside").write_text("precious too")


def _kept(precious: Path) -> tuple[object, ...]:
    folder = precious.with_name("folder")
    mode = stat.S_IMODE(precious.stat().st_mode)
    return precious.read_bytes(), oct(mode), sorted(os.listdir(folder)), (folder / "inside").read_text()


def _symlink_to_nothing(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("to be made"))


def _symlink_to_folder(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("folder"))


def _folder(path: Path, precious: Path) -> None:
    path.mkdir()
    (path / "inside").symlink_to(precious)


def _device(path: Path, precious: Path) -> None:
    if os.geteuid():
        path.symlink_to("/dev/zero")
    else:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def _socket(path: Path, precious: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name may be longer than a socket's can be
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


_KINDS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic link": lambda path, precious: path.symlink_to(precious),
    "relative symbolic link": lambda path, precious: path.symlink_to(Path("..") / precious.name),
    "hard link": lambda path, precious: path.hardlink_to(precious),
    "symbolic link to nothing": _symlink_to_nothing,
    "symbolic link to a folder": _symlink_to_folder,
    "symbolic link to itself": lambda path, precious: path.symlink_to(path.name),
    "FIFO": lambda path, precious: os.mkfifo(path),
    "folder": _folder,
    "device": _device,
    "symbolic link to a device": lambda path, precious: path.symlink_to("/dev/full"),
    "socket": _socket,
}


def _replace(path: Path, aside: Path, kind: str, precious: Path) -> None:
    if os.path.lexists(path):
        os.rename(path, aside)
    _KINDS[kind](path, precious)


def _restore(path: Path, aside: Path, was_used: bool) -> None:
    """Put the file back, unless the table has created a new one there since."""
    is_file = path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1
    if was_used and (is_file or not os.path.lexists(path)):
        return
    if path.is_dir() and not path.is_symlink():
        for inside in path.iterdir():
            inside.unlink()
        path.rmdir()
    path.unlink(missing_ok=True)
    if os.path.lexists(aside):
        os.rename(aside, path)


# ---------------------------------------------------------------------- what is done with the table


def _is_its_own(name: str, kind: str, use: str) -> bool:
    """Return whether the change is in the table's own rows: a hard link to them is another name of the same file."""
    return kind == "hard link" and name == "rows.log" and use == "written"


def _written(path: Path, expected: Tensor) -> None:
    with speedswap.Table.open(path) as table:
        _compare(table, expected)
        table.scatter(torch.arange(ROWS), expected)
        table.attributes["note"] = 1
        table.flush()


def _with_columns(path: Path, expected: Tensor) -> None:
    with speedswap.Table.open(path) as table:
        _compare(table, expected)
        name = f"extra{len(table.columns)}"
        table.add_columns([speedswap.Column(name, (2,), torch.float32, speedswap.init.zeros())])


def _opened(mode: str) -> Callable[[Path, Tensor], None]:
    def use(path: Path, expected: Tensor) -> None:
        with speedswap.Table.open(path, mode=mode) as table:
            _compare(table, expected)

    return use


def _loaded(path: Path, expected: Tensor) -> None:
    _compare(speedswap.Table.load(path), expected)


def _saved_over(path: Path, expected: Tensor) -> None:
    with speedswap.Table.create(ROWS, DIM) as table:
        table.write(0, expected)
        try:
            table.save(path, overwrite=True)
        except FileExistsError as error:  # there is more than a table
            raise SpeedswapError("refused, as it is said") from error


def _created(path: Path, expected: Tensor) -> None:
    try:
        speedswap.Table.create(ROWS, DIM, path=path).close()
    except FileExistsError as error:
        raise SpeedswapError("refused, as it is said") from error
    raise Broken("a table was made where there is one")


def _compare(table: speedswap.Table, expected: Tensor) -> None:
    if not torch.equal(table.read(), expected):
        raise Broken("a foreign table has other rows than its own")


_USES: dict[str, Callable[[Path, Tensor], None]] = {
    "opened": _opened("r+"),
    "opened to be read": _opened("r"),
    "loaded": _loaded,
    "written": _written,
    "given columns": _with_columns,
    "saved over": _saved_over,
    "made again": _created,
}


def _use(use: str, path: Path, expected: Tensor, what: str, log: Path) -> bool:
    """Use the table in a child, which may fail with speedswap's own errors only; return whether it could be used."""
    with child(_reports, use, path, expected, log=log) as user:
        line, end = None, time.monotonic() + _SECONDS
        try:
            line = user.line(seconds=_SECONDS)
        except Broken as error:
            raise Broken(f"a foreign table hangs\n{what}: {error}") from None
        if line is None:
            raise Broken(f"a foreign table ends the process with {user.wait()}\n{what}: {user.said()}")
        was_used, flaw = json.loads(line)
        if flaw:
            raise Broken(f"{flaw[0]}\n{what}: {flaw[1]}")
        user.wait(max(0.1, end - time.monotonic()))
        return bool(was_used)


def _reports(tell: Callable[[str], None], use: str, path: Path, expected: Tensor) -> None:
    flaw: list[str] = []
    was_used = False
    try:
        _USES[use](path, expected)
        was_used = True
    except SpeedswapError:
        pass
    except Broken as error:
        flaw = [str(error), ""]
    except Exception as error:
        flaw = [f"{type(error).__name__} for a foreign table", str(error)]
    tell(json.dumps([was_used, flaw]))


ATTACK = Attack(
    name="foreign",
    promise="a table with links, pipes or devices for files is refused or right, at once; nothing outside is touched",
    round=_round,
    seconds=120.0,
    quick=6,
)
