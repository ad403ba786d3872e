"""Damaged and hostile files of a table on disk: an error that says so, or the rows as they were; never other rows."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from children import peak_of_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torture.crashes import Story
from torture.damage import damaged, read_through

from speedswap import Column, Table, init
from speedswap.errors import TableFormatError

ROWS, DIM = 300, 4
MOMENTUM = Column("momentum", (DIM,), torch.float32, init.normal())


@pytest.mark.parametrize("seed", range(3))
def test_every_group_of_a_damaged_log_is_right_or_named_by_an_error(seed):
    """Flipped bits, lost and moved sectors, noise, files that are cut or too long, and other files in their place."""
    draw = random.Random(seed)
    story = Story(draw)
    story.live(20)
    files = story.rest(30)
    found: Counter[str] = Counter()
    tries = 0
    while tries < 60 or (len(found) < 3 and tries < 600):  # thread timing decides what is damaged
        tries += 1
        way, hostile = damaged(files, draw)
        found[read_through(hostile, story.timeline, story.slots, writable=draw.random() < 0.3, what=way)] += 1
    assert found.keys() <= {"refused", "noticed", "as it was"}
    assert len(found) == 3


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A table with rows and state in two layouts, and its columns."""
    path = tmp_path_factory.mktemp("damaged") / "t"
    with Table.create(ROWS, DIM, path=path, init=init.normal(), seed=4) as table:
        table.scatter(torch.arange(0, ROWS, 2), torch.randn(ROWS // 2, DIM))
        table.add_columns([MOMENTUM])
        table.scatter(torch.arange(0, ROWS, 3), {"weight": torch.randn(100, DIM), "momentum": torch.ones(100, DIM)})
    with Table.open(path, mode="r") as table:
        return path, {name: table.read(column=name) for name in table.columns}


def opened_or_refused(path: Path, expected: dict[str, torch.Tensor], mode: str) -> str:
    try:
        with Table.open(path, mode=mode) as table:
            for name, values in expected.items():
                assert torch.equal(table.read(column=name), values)
    except TableFormatError as error:
        return "refused" if str(path) in str(error) or "row" in str(error) else f"refused without a name: {error}"
    return "as it was"


FILES = st.sampled_from(["rows.log", "HEAD", "MANIFEST"])
SLOW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.release
@SLOW
@given(file=FILES, bit=st.integers(0, 2**23), mode=st.sampled_from(["r", "r+"]))
def test_flipped_bit_never_gives_other_rows(written, tmp_path, file, bit, mode):
    path, expected = written
    copy = tmp_path / "t"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    data = bytearray((copy / file).read_bytes())
    used = [at for at in range(min(len(data), 60_000)) if data[at]]
    at = used[bit // 8 % len(used)]
    data[at] ^= 1 << bit % 8
    (copy / file).write_bytes(data)
    assert opened_or_refused(copy, expected, mode) in ("refused", "as it was")


@SLOW
@given(file=FILES, share=st.floats(0, 1), mode=st.sampled_from(["r", "r+"]))
def test_truncated_file_never_gives_other_rows(written, tmp_path, file, share, mode):
    path, expected = written
    copy = tmp_path / "t"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    whole = (copy / file).read_bytes()
    end = len(whole.rstrip(b"\0"))
    (copy / file).write_bytes(whole[: int(share * (end - 1))])
    assert opened_or_refused(copy, expected, mode) == "refused" or file == "HEAD"


@SLOW
@given(file=st.sampled_from(["rows.log", "HEAD"]), data=st.binary(max_size=9000), mode=st.sampled_from(["r", "r+"]))
def test_random_bytes_are_refused(written, tmp_path, file, data, mode):
    path, expected = written
    copy = tmp_path / "t"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    (copy / file).write_bytes(data)
    assert opened_or_refused(copy, expected, mode) == "refused"


def test_hostile_log_takes_no_more_memory_than_twice_its_size(written, tmp_path):
    """Headers that name more than the file holds are not believed."""
    path, expected = written
    copy = tmp_path / "t"
    shutil.copytree(path, copy)
    log = (copy / "rows.log").read_bytes()
    (copy / "rows.log").write_bytes(log[:4096] * (len(log) // 4096))
    before = peak_of_memory(anew=True)
    assert opened_or_refused(copy, expected, "r") == "refused"
    assert peak_of_memory() - before < 2 * len(log)
