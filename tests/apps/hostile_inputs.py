"""Hostile command lines: absurd numbers, wrong files, places that take nothing.

``command_lines`` draws them from a seed, and ``outcomes`` runs each in a process forked from one that has
imported what takes long. As a program: ``python tests/apps/hostile_inputs.py SEED FOLDER`` prints what failed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import gzip
import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NUMBERS = [
    *("0", "-1", "1", "2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551616"),
    *(
        "100000000000000000000",
        "-100000000000000000000",
        "9" * 400,
        "9" * 5000,
        "nan",
        "inf",
        "-inf",
        "1e308",
        "1e-320",
    ),
    *("0.5", "", " ", "0x10", "1_000", "²", "٣", "1e9", "--", "None", "true"),
]
MEASURES = ("1", "0.5", "٣", "1_000")
"""With these a benchmark begins, and takes minutes."""
WORDS = [
    "",
    " ",
    "-",
    "\udcff",
    "ä" * 300,
    "x" * 5000,
    "a=b,c",
    ",",
    "=",
    "\n",
    "auto",
    "none",
    "../..",
    "{}",
    "%s",
    "🜚",
]
SMALL = {
    "word2vec": ["TEXT", "--dim", "4", "--epochs", "1", "--min-count", "1", "--device", "cpu"],
    "ncf": "--users 40 --items 120 --interactions 300 --factors 2 --layers 4,2 --epochs 1 --device cpu".split(),
    "dlrm": "--generate 300 --ids 20 --dim 2 --bottom 2 --top 2 --capacity 50 --epochs 1 --device cpu".split(),
    "digits": "--epochs 1 --width 2 --batch 600 --device cpu".split(),
    "recommend": ["MODEL", "--user", "1", "--device", "cpu"],
}
NUMERIC = {
    "word2vec": "dim window negative min-count sample epochs lr batch lookahead seed max-types generate".split(),
    "ncf": "users items interactions factors layers negatives epochs lr batch test-negatives test-users lookahead "
    "seed".split(),
    "dlrm": "generate ids dim bottom top capacity admit-after epochs lr batch holdout test-samples evaluate-every "
    "lookahead seed".split(),
    "digits": "batch micro-batch-size memory-budget grow-after epochs width lr seed".split(),
    "recommend": ["k", "user"],
    "bench": ["threads", "compute"],
}
NAMED = {
    "word2vec": ["optimizer", "storage", "state-dtype", "device", "nearest"],
    "ncf": ["optimizer", "storage", "state-dtype", "device", "columns", "missing", "model", "layers"],
    "dlrm": ["optimizer", "storage", "state-dtype", "device", "test", "evict", "top"],
    "digits": ["optimizer", "device", "micro-batch-size", "memory-budget"],
    "recommend": ["user", "storage", "device"],
    "bench": ["device", "compute"],
}
PLACES = {
    "word2vec": ["output", "scratch", "eval"],
    "ncf": ["output", "scratch"],
    "dlrm": ["output", "scratch"],
    "digits": ["output"],
    "recommend": ["scratch"],
    "bench": ["json", "plot", "folder"],
}
SECONDS = 15.0
"""The time in which a command ends, or has begun to train."""


def command_lines(seed: int, folder: Path) -> list[list[str]]:
    """Make some hundred command lines, and the files that they name.

    Args:
        seed: of everything random; the same one gives the same lines.
        folder: empty but for ``model``, the output directory of a run of ``speedswap ncf``, if there is one.

    Returns:
        For each, the words after ``speedswap``. All that they write is in the folder or the system's temporary one.
    """
    chance = random.Random(seed)
    text, files = folder / "text.txt", write_files(folder, chance)
    text.write_text("some words of text to read\n" * 50)
    places = write_places(folder)

    def small(command: str) -> list[str]:
        words = {"TEXT": str(text), "MODEL": str(folder / "model")}
        made = [command, *(words.get(word, word) for word in SMALL.get(command, []))]
        return made if command in ("recommend", "bench") else [*made, "--output", str(folder / "out")]

    lines = [["info"], ["info", "more"], [], ["--"], ["word2vec", "a", "b"], ["recommend"]]
    for command, options in NUMERIC.items():
        for option in options:
            for value in sorted(chance.sample(NUMBERS, 12)):
                if command == "bench" and value in MEASURES:
                    continue
                lines.append([*small(command), f"{'-' if option == 'k' else '--'}{option}={value}"])
    for command, options in NAMED.items():
        for option in options:
            lines += [[*small(command), f"--{option}={value}"] for value in sorted(chance.sample(WORDS, 4))]
    for command, options in PLACES.items():
        for option in options:
            lines += [[*small(command), f"--{option}={place}"] for place in places if fits(command, option, place)]
    for path in files:
        lines.append(["word2vec", str(path), *small("word2vec")[2:]])
        lines.append(["ncf", str(path), "--test-negatives", "1", *small("ncf")[7:]])
        lines.append([*small("dlrm"), str(path)])
        lines.append(["predict", str(folder / "model"), str(path)])
        lines.append([*small("word2vec"), "--eval", str(path)])
        lines.append(["ncf", str(path), "--columns", chance.choice(["user=1,item=2", "user=a,item=b", "item=9" * 9])])
    formats = ("npy", "safetensors", "word2vec", "word2vec-binary", "parquet")
    for number, path in enumerate([*files, *places]):
        lines.append(["import", str(path), str(folder / "imported"), "--format", formats[number % len(formats)]])
        lines += [["info", str(path)], ["export", str(path), str(folder / "exported.npy")]][number % 2 :][:1]
    for path in sorted(folder.glob("models/*")):
        lines.append(["recommend", str(path), "--user", "1", "--device", "cpu"])
        lines.append([*small("ncf")[:-1], str(path), "--resume"])
    commands = list(NUMERIC)[:4]
    for _ in range(40):  # several at once
        command = chance.choice(commands)
        line = small(command)
        for option in chance.sample(NUMERIC[command], 3):
            line.append(f"--{option}={chance.choice(NUMBERS)}")
        lines.append(line)
    return lines


def fits(command: str, option: str, place: Path) -> bool:
    """Leave out valid commands that would measure for minutes, or read a pipe without a writer."""
    if command == "bench":
        return os.path.islink(place) and not os.path.exists(place)
    return not (option == "eval" and place.name == "pipe")


def write_places(folder: Path) -> list[Path]:
    """Make names that no directory can be made under, or at which nothing can be written."""
    place = folder / "places"
    place.mkdir()
    (place / "file").write_text("")
    (place / "dangling").symlink_to(place / "nowhere")
    (place / "loop").symlink_to(place / "loop")
    os.mkfifo(place / "pipe")
    (place / "linked").symlink_to(folder)
    for name in ("vectors.txt", "run.json", "model.pt", "training.png"):  # in place of files
        (place / "taken" / name).mkdir(parents=True)
    (place / "checkpointed").mkdir()
    (place / "checkpointed" / "checkpoints").write_text("")
    names = ["file", "file/below", "dangling", "loop", "pipe", "linked", "taken", "checkpointed", "n" * 300, "\udcff"]
    devices = [Path(name) for name in ("/dev/null", "/dev/full", "/dev/null/below", "/proc", "/proc/self/mem", "/sys")]
    return [*(place / name for name in names), *devices]


def write_files(folder: Path, chance: random.Random) -> list[Path]:
    """Make files of the wrong kinds to read."""
    rows = [f"{number % 13}\t{number * number % 163}\t3\t{number}" for number in range(200)]
    good = "\n".join(rows)
    contents = {
        "empty": b"",
        "binary": chance.randbytes(20_000),
        "zeros": bytes(1000),
        "one-byte": b"x",
        "bom": b"\xef\xbb\xbf",
        "utf16": good.encode("utf-16"),
        "latin1": "größe straße\tmaß\n".encode("latin-1") * 30,
        "newlines": b"\n" * 3_000_000,
        "blank lines": b" \n\t\r\n" * 500_000,
        "spaces": b"1\t2\t3\t4\n" + b" " * 3_000_000 + b"\n",
        "spaces in a field": b"1\t2\t3\t4\n1\t" + b" " * 3_000_000 + b"\t2\t3\n",
        "one word": b"a" * 3_000_000,
        "one line": b"a b " * 700_000,
        "quote": b'1,2,3\n1,"2,3\n' * 20,
        "long field": b'1,2,3\n1,"' + b"x" * 200_000 + b'",3\n',
        "columns": b"\n".join(b"1\t" * (number % 7) for number in range(50)),
        "many columns": b"1\t" * 300_000 + b"\n",
        "digits": b"1\t2\t" + b"9" * 5000 + b"\n" + b"1\t3\t" + b"8" * 5000 + b"\n",
        "digit ids": b"".join(b"9" * 400 + b"%d\t%d\t3\t4\n" % (row % 7, row) for row in range(50)),
        "times": b"".join(
            b"%d\t%d\t3\t%s\n" % (row % 7, row, t) for row, t in enumerate([b"1e400", b"nan", b"-", b"1"])
        ),
        "dates": b"user,item,time\n1,2,2024-02-30\n1,3,0000-00-00\n2,2,9999-99-99T99:99:99+99:99\n",
        "heading": b"user,item,rating,time\n",
        "headings": b"user,user,item,item\n1,2,3,4\n",
        "markup": b"</s> </s>\n" * 200,
        "carriage returns": b"1\t2\t3\t4\r" * 200,
        "pairs": b"a\tb\tnan\nb\ta\tinf\n",
        "good.gz": gzip.compress(good.encode(), mtime=0),
        "cut.gz": gzip.compress(chance.randbytes(9000), mtime=0)[:4000],
        "named.gz": good.encode(),
        "nested.gz": gzip.compress(gzip.compress(good.encode(), mtime=0), mtime=0),
        "trailing.gz": gzip.compress(good.encode(), mtime=0) + b"more",
        "bomb of newlines.gz": bomb(b"\n", 200_000_000),
        "bomb of words.gz": bomb(b"1\t2\t3\t4\n", 20_000_000),
    }
    there = folder / "files"
    there.mkdir()
    for name, content in contents.items():
        (there / name).write_bytes(content)
    with zipfile.ZipFile(there / "archive.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ratings.csv", good)
    for name, length in (("sparse", 2**30), ("sparse.gz", 2**30)):  # one line of 1 GiB, which takes no room
        with open(there / name, "wb") as file:
            file.truncate(length)
    write_models(folder, random.Random(chance.random()))
    devices = [Path(name) for name in ("/dev/zero", "/dev/null", "/dev/urandom", "/proc/self/mem", "/", "/nowhere")]
    return [*sorted(there.iterdir()), there, *devices]


@functools.cache
def bomb(text: bytes, times: int) -> bytes:
    """Compress a text repeated so often."""
    return gzip.compress(text * times, 9, mtime=0)


def write_models(folder: Path, chance: random.Random) -> None:
    """Make damaged copies of a saved model, and files that never were one."""
    models = folder / "models"
    (models / "empty" / "checkpoints" / "0001-00000000").mkdir(parents=True)
    (models / "file").write_text("")
    if not (folder / "model").is_dir():
        return
    saved = sorted(path for path in (folder / "model" / "checkpoints").rglob("*") if path.is_file())
    for number, path in enumerate(saved):
        within = path.relative_to(folder / "model")
        ours = len(within.parts) == 3  # not a table's
        for kind in ("cut", "flipped", "gone", "garbage", *(["pipe"] if ours else [])):
            copy = models / f"{number}-{kind}"
            shutil.copytree(folder / "model", copy)
            content = bytearray(path.read_bytes())
            (copy / within).unlink()
            if kind == "cut":
                (copy / within).write_bytes(content[: len(content) // 2])
            elif kind == "flipped":
                for _ in range(5):
                    if content:
                        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                (copy / within).write_bytes(content)
            elif kind == "garbage":
                (copy / within).write_bytes(chance.randbytes(500))
            elif kind == "pipe":
                os.mkfifo(copy / within)


class Outcome(NamedTuple):
    """The outcome of a command line."""

    words: list[str]
    status: int
    """As shells have it: 128 and the signal's number where it was one."""
    seconds: float
    errors: str
    """The end of what was written to standard error."""

    @property
    def failed(self) -> str | None:
        """The failure, or None if it did its work, refused in one line or started to train."""
        if "Traceback" in self.errors:
            return "traceback"
        if self.seconds > SECONDS:
            return "does not end" if self.status != 130 or "speedswap: interrupted" in self.errors else None
        return None if self.status in (0, 2) else f"status {self.status}"


class Server:
    """A process that has imported what takes long, and forks a process for each command line."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid: int | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def start(self, words: list[str], folder: Path, output: int, errors: int, *, limited: bool = False) -> int:
        """Start a command line; only one may run at a time.

        Args:
            words: after ``speedswap``.
            folder: the current directory.
            output, errors: descriptors for standard output and standard error.
            limited: to 6 GiB of memory, files of 1 GiB, and the folder's ``tmp`` for temporary files.

        Returns:
            The process's number.
        """
        asked = json.dumps([words, str(folder), limited]).encode()
        socket.send_fds(self._connection, [asked], [output, errors])
        self._pid = int(self._received(None))
        return self._pid

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit status as shells have it, 128 and the number where it was a signal.

        Raises:
            TimeoutError: the command still runs after ``seconds``.
        """
        status = int(self._received(seconds))
        self._pid = None
        return status

    def end(self) -> None:
        """Kill the command that runs, if any."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.wait()

    def _received(self, seconds: float | None) -> bytes:
        self._connection.settimeout(seconds)
        found = self._connection.recv(100)
        if not found:
            raise ChildProcessError("the server has ended")
        return found

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self._connection.close()
        self._process.kill()  # it sees the end only once no other process has the connection open
        self._process.wait()


def outcomes(lines: list[list[str]], folder: Path, server: Server | None = None) -> Iterator[Outcome]:
    """Run command lines one after the other, each in a separate process and directory.

    None of them may take more than 6 GiB of memory, or write files of more than 1 GiB.

    Args:
        lines: for each, the words after ``speedswap``.
        folder: their current directory.
        server: starts them; by default a temporary one.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    with Server() if server is None else contextlib.nullcontext(server) as server:
        for words in lines:
            with tempfile.TemporaryFile(dir=folder) as errors, open(os.devnull, "wb") as output:
                child = server.start(words, folder, output.fileno(), errors.fileno(), limited=True)
                started = time.monotonic()  # the first start waits for the server's imports
                status = wait(server, child)
                seconds = time.monotonic() - started
                errors.seek(0)
                yield Outcome(words, status, seconds, errors.read().decode(errors="replace")[-4000:])


def wait(server: Server, child: int) -> int:
    """Wait for a child, terminate it after a while, then kill it; return the exit status."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            return server.wait(SECONDS)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)
    return server.wait()


def serve(connection: socket.socket) -> None:
    """Run each command line in a child; never return."""
    import torch

    from speedswap.cli import main

    for module in ("torch._dynamo", "sklearn.datasets", "matplotlib.backends.backend_agg", "tqdm"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)  # here once, and not in each child
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # commands collect their own objects alone
    while True:
        asked, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
        if not asked:
            os._exit(0)  # a normal exit of such a large process takes seconds
        child = os.fork()
        if child == 0:
            run(main, *json.loads(asked), *files)
        for file in files:
            os.close(file)
        connection.send(str(child).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(str(code if code >= 0 else 128 - code).encode())


def run(main, words: list[str], folder: str, limited: bool, output: int, errors: int) -> None:
    """Become the command; never return."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if limited:
            os.environ["TMPDIR"] = str(Path(folder, "tmp"))
            tempfile.tempdir = None  # an import may have looked it up
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + 6 * 2**30,) * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**30,) * 2)
        status = main(words)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        there = Path(sys.argv[2]).absolute()
        there.mkdir(parents=True)
        model = ["ncf", *SMALL["ncf"], "--output", str(there / "model")]
        subprocess.run([sys.executable, "-m", "speedswap", *model], check=True, capture_output=True)
        counts: dict[str, int] = {}
        for outcome in outcomes(command_lines(int(sys.argv[1]), there), there):
            kind = outcome.failed or "right"
            counts[kind] = counts.get(kind, 0) + 1
            if outcome.failed:
                said = [word if len(word) < 80 else f"{word[:60]}… ({len(word)})" for word in outcome.words]
                last = outcome.errors.strip().splitlines()[-1:]
                print(f"{kind}: {outcome.seconds:.1f} s, status {outcome.status}: {said}\n    {last}", flush=True)
        print(counts)
