"""Tensors without memory for their items are refused by name at every entry: none is read or written.

A call that is not refused may crash, so each is made by a forked child of one process that has imported torch.
"""

from __future__ import annotations

import json

import pytest
from children import run_script

CASES = {
    # gather_rows and scatter_rows
    "gather_rows, source": ("gather_rows(gone(SOURCE), IDS)", "source"),
    "gather_rows, source that is too small": ("gather_rows(half(SOURCE), IDS)", "source"),
    "gather_rows, ids": ("gather_rows(SOURCE, gone(IDS))", "ids"),
    "gather_rows, out": ("gather_rows(SOURCE, IDS, out=gone(ROWS))", "out"),
    "gather_rows, a view past the end": ("gather_rows(past_the_end(SOURCE), IDS)", "source"),
    "scatter_rows, target": ("scatter_rows(gone(SOURCE), IDS, ROWS)", "target"),
    "scatter_rows, ids": ("scatter_rows(SOURCE, gone(IDS), ROWS, duplicates='last')", "ids"),
    "scatter_rows, values": ("scatter_rows(SOURCE, IDS, gone(ROWS))", "values"),
    # of tables
    "table.gather": ("table().gather(gone(IDS))", "ids"),
    "table.scatter, rows": ("table().scatter(gone(IDS), ROWS)", "ids"),
    "table.scatter, values": ("table().scatter(IDS, gone(ROWS))", "values['weight']"),
    "table.scatter, fake values": ("table().scatter(IDS, fake(ROWS))", "values['weight']"),
    "table.scatter, meta values": ("table().scatter(IDS, ROWS.to('meta'))", "values['weight']"),
    "table.write": ("table().write(0, gone(ROWS))", "values"),
    "table.write, meta values": ("table().write(0, ROWS.to('meta'))", "values"),
    "gather_rows of a table, out": ("gather_rows(table(), IDS, out=gone(ROWS))", "out"),
    # lookups
    "Embedding": ("Embedding(9, 3)(gone(IDS))", "ids"),
    "Embedding, meta ids": ("Embedding(9, 3)(IDS.to('meta'))", "ids"),
    "Embedding, fake ids": ("Embedding(9, 3)(fake(IDS))", "ids"),
    "Embedding under lookahead": ("ahead(gone(IDS))", "ids"),
    "Embedding.read": ("Embedding(9, 3).read(gone(IDS.to(torch.uint8)))", "ids"),
    "EmbeddingBag": ("EmbeddingBag(9, 3)(gone(IDS), BAGS)", "input"),
    "EmbeddingBag, offsets": ("EmbeddingBag(9, 3)(IDS, gone(BAGS))", "offsets"),
    "EmbeddingBag, weights": ("EmbeddingBag(9, 3, mode='sum')(IDS, BAGS, gone(torch.ones(3)))", "per_sample_weights"),
    # the kernels behind them
    "unique": ("kernels.unique(gone(IDS))", "ids"),
    "last_occurrences": ("kernels.last_occurrences(gone(IDS))", "ids"),
    "first_duplicate": ("kernels.first_duplicate(gone(IDS), 4)", "ids"),
    "check_ids": ("kernels.check_ids(gone(IDS), 4, 'it')", "ids"),
    "sum_rows": ("kernels.sum_rows(gone(ROWS), IDS, 4)", "values"),
    "sum_rows, halves": ("kernels.sum_rows(gone(ROWS.half()), IDS, 4)", "values"),
    "sum_segments, values": ("kernels.sum_segments(gone(SOURCE), IDS, ENDS)", "values"),
    "sum_segments, index": ("kernels.sum_segments(SOURCE, gone(IDS), ENDS)", "index"),
    "sum_segments, offsets": ("kernels.sum_segments(SOURCE, IDS, gone(ENDS))", "offsets"),
    "sum_segments, weights": ("kernels.sum_segments(SOURCE, IDS, ENDS, gone(torch.ones(3)))", "weights"),
    "sum_segments, divisors": ("kernels.sum_segments(SOURCE, IDS, ENDS, divisors=gone(torch.ones(1)))", "divisors"),
    "sum_segments_back": ("kernels.sum_segments_back(gone(ROWS[:1]), IDS, 4, ENDS)", "values"),
    "dot_segments": ("kernels.dot_segments(SOURCE, IDS, ENDS, gone(ROWS[:1]))", "others"),
    "max_segments": ("kernels.max_segments(gone(SOURCE), IDS, ENDS)", "values"),
    "sum_taken": ("kernels.sum_taken(ROWS[:1], IDS, ENDS, IDS, gone(IDS.view(1, 3)))", "taken"),
    # stand-ins
    "gather_rows of fakes": ("gather_rows(fake(SOURCE), fake(IDS))", "source"),
    "scatter_rows of fakes": ("scatter_rows(fake(SOURCE), fake(IDS), fake(ROWS))", "target"),
    "functionalized gather_rows": ("functionalize(gather_rows)(SOURCE, IDS)", "source"),
    "functionalized scatter_rows": ("functionalize(scatter_rows)(SOURCE, IDS, ROWS)", "target"),
    "a subclass without memory": ("gather_rows(Wrapper(), IDS)", "source"),
    "gather_rows among fakes": ("among_fakes(lambda: gather_rows(SOURCE, IDS))", "a result"),
    "a lookup among fakes": ("among_fakes(lambda: ITEMS(IDS))", "a result"),
    "a lookup of int32 among fakes": ("among_fakes(lambda: ITEMS(SHORT_IDS))", "a result"),
    "table.gather among fakes": ("among_fakes(lambda: ITEMS.table.gather(IDS))", "a result"),
    "a functionalized lookup of what is not": (
        "functionalize(lambda x: gather_rows(SOURCE, IDS) + x)(ROWS)",
        "a result",
    ),
}
OVERLAPS = {
    "gather_rows, out over the ids": (
        "gather_rows(SOURCE.double(), MEMORY[:3], out=over(9))", "out shares memory with ids",
    ),
    "gather_rows of a table, out over the ids": (
        "gather_rows(table(torch.float64), MEMORY[:3], out=over(9))", "out shares memory with ids",
    ),
    "scatter_rows, target over the ids": (
        "scatter_rows(over(12), MEMORY[:1], torch.ones(1, 3).double())", "target shares memory with ids",
    ),
}  # fmt: skip

SCRIPT = """
import json, os, sys, warnings
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
import speedswap
from speedswap import Embedding, EmbeddingBag, Table, gather_rows, kernels, scatter_rows

warnings.simplefilter("ignore")
torch.set_num_threads(1)  # others are missing in the forked children
IDS, BAGS, ENDS = torch.tensor([1, 2, 0]), torch.tensor([0, 1]), torch.tensor([0, 3])
SOURCE, ROWS = torch.arange(12.0).view(4, 3), torch.ones(3, 3)
MEMORY = torch.zeros(64, dtype=torch.int64)
ITEMS, SHORT_IDS = Embedding(9, 3), IDS.int()

def resized(tensor, nbytes):
    copy = tensor.clone()
    copy.untyped_storage().resize_(nbytes)
    return copy

def gone(tensor):
    return resized(tensor, 0)

def half(tensor):
    return resized(tensor, tensor.nbytes // 2)

def past_the_end(tensor):
    whole = torch.zeros(len(tensor) + 1, tensor.shape[1])
    view = whole[1:]
    whole.untyped_storage().resize_(tensor.nbytes)
    return view

def over(items):
    return MEMORY[:items].view(torch.float64).view(-1, 3)

def fake(tensor):
    return FakeTensorMode().from_tensor(tensor)

def among_fakes(call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call()

def table(dtype=torch.float32):
    return Table.create(4, 3, dtype=dtype)

def ahead(ids):
    items = Embedding(9, 3)
    return [items(batch) for batch in speedswap.lookahead([ids], {items: lambda batch: batch})]

class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4, 3))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)

among_fakes(lambda: fake(torch.zeros(2)).add(1))  # its slow imports here, not in every child
results = {}
for call in json.loads(sys.argv[1]):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            eval(call)
            said = "nothing was raised"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    said = b"".join(iter(lambda: os.read(read, 4096), b"")).decode()
    os.close(read)
    _, status = os.waitpid(child, 0)
    results[call] = said if status == 0 else f"ended by signal {os.WTERMSIG(status)}"
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """The error of each call, or the exit status of its process."""
    calls = [call for call, _ in (*CASES.values(), *OVERLAPS.values())]
    ended = run_script(SCRIPT, json.dumps(calls))
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("call, name", CASES.values(), ids=CASES.keys())
def test_tensor_without_memory_is_refused_by_name(call: str, name: str, said: dict[str, str]) -> None:
    """Freed or too small storage, stand-ins of torch's modes, and results that would be such."""
    assert said[call].startswith(f"TypeError: {name}"), said[call]
    assert "memory" in said[call]


@pytest.mark.parametrize("call, message", OVERLAPS.values(), ids=OVERLAPS.keys())
def test_what_is_written_over_the_ids_is_refused(call: str, message: str, said: dict[str, str]) -> None:
    assert said[call].startswith(f"ValueError: {message}"), said[call]
