"""The best rows of a whole table are those that torch finds in the whole matrix, whatever the pieces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_script
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import speedswap
from speedswap.errors import IdError
from speedswap.swapping import scoring

STORED = [torch.float16, torch.bfloat16, torch.int8]


@pytest.fixture(params=["device", "pinned", "pageable", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The storage of a table, as arguments of an embedding."""
    if request.param == "pinned" and not torch.cuda.is_available():
        pytest.skip("pinned memory needs a GPU")
    return {"storage": request.param, **({"path": tmp_path / "t"} if request.param == "disk" else {})}


def whole(*shape: int, seed: int = 0, high: int = 4) -> Tensor:
    """Draw small whole numbers: their products are exact in any order of summation, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=generator).float()


def best(queries: Tensor, rows: Tensor, k: int, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the best rows with torch from the whole matrix of scores: largest first, of equal ones the lower id.

    Args:
        left_out: bool, broadcast to the scores.
    """
    scores = queries @ rows.T
    if left_out is not None:
        scores = scores.masked_fill(left_out, -math.inf)
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    values, ids = values[:, :k], ids[:, :k]
    return values, ids.masked_fill(values == -math.inf, -1)


def assert_best(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[1].tolist() == expected[1].tolist()
    assert torch.equal(found[0].cpu(), expected[0])


def items_of(rows: Tensor, **settings: Any) -> speedswap.Embedding:
    return speedswap.Embedding.from_pretrained(rows, **settings)


# ---------------------------------------------------------------------- the whole table


def test_the_best_rows_of_a_tiny_table(device: str) -> None:
    """Two queries by hand: rows 0 and 2 are equal to the first, and row 0 comes first."""
    items = items_of(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 3.0]]))
    found = items.score(torch.tensor([[2.0, 0.0], [0.0, 1.0]], device=device), k=2)
    assert found.values.tolist() == [[2, 2], [3, 2]]
    assert found.ids.tolist() == [[0, 2], [2, 1]]
    assert found.ids.dtype == torch.int64
    assert {tensor.device.type for tensor in found} == {device}


def test_a_table_that_was_trained_is_scored_whole(device: str) -> None:
    """Not only the last batch's rows, and with the values that the step gave them."""
    items = speedswap.Embedding(500, 8, seed=1).to(device)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    items(torch.tensor([3, 7, 7], device=device)).square().sum().backward()
    optimizer.step()
    queries = torch.randn(4, 8)
    values, ids = items.score(queries.to(device), k=20)
    expected = (queries @ items.table.read().T).topk(20)
    torch.testing.assert_close(values.cpu(), expected.values)
    assert torch.equal(ids.cpu(), expected.indices)


@pytest.mark.parametrize("chunk", [None, 1, 7, 300, 1000])
def test_every_storage_gives_torchs_rows(chunk: int | None, place: dict[str, Any], device: str) -> None:
    rows, queries = whole(300, 6), whole(5, 6, seed=1)
    items = items_of(rows, freeze=False, **place)
    for _ in range(2):  # again with records that hold the optimizer's state, too
        assert_best(items.score(queries.to(device), k=12, chunk=chunk), best(queries, items.table.read(), 12))
        optimizer = torch.optim.SGD(items.parameters(), lr=1.0, momentum=0.5)
        items(torch.arange(40, device=device)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_compact_rows_are_scored_as_floats(stored: torch.dtype, place: dict[str, Any], device: str) -> None:
    rows, queries = whole(200, 6), whole(3, 6, seed=1)
    rows[:, 0] = 127  # of a row's scale, which is 1 then: int8 has whole numbers exactly
    items = items_of(rows, stored_dtype=stored, **place)
    assert_best(items.score(queries.to(device), k=9, chunk=33), best(queries, rows, 9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_scores_are_computed_in_the_tables_dtype(dtype: torch.dtype, device: str) -> None:
    """Queries of another floating dtype are converted, and autocast changes nothing."""
    rows, queries = whole(100, 4), whole(3, 4, seed=1)
    items = items_of(rows.to(dtype))
    with torch.autocast(device, dtype=torch.bfloat16):
        values, ids = items.score(queries.to(device), k=5)
    assert values.dtype == dtype
    assert_best((values.float(), ids), best(queries, rows, 5))


def test_one_query_gives_one_list(device: str) -> None:
    rows, query = whole(50, 4), whole(4, seed=1)
    values, ids = items_of(rows).score(query.to(device), k=3, exclude=[torch.tensor([0])])
    expected = best(query[None], rows, 3, torch.arange(50) == 0)
    assert_best((values[None], ids[None]), expected)


def test_no_queries_give_no_rows(device: str) -> None:
    values, ids = items_of(whole(50, 4)).score(torch.empty(0, 4, device=device), k=3)
    assert values.shape == ids.shape == (0, 3)


def test_bags_are_scored_too(device: str) -> None:
    rows, queries = whole(60, 4), whole(3, 4, seed=1)
    bag = speedswap.EmbeddingBag.from_pretrained(rows, padding_idx=7)
    assert_best(bag.score(queries.to(device)), best(queries, rows, 10, torch.arange(60) == 7))


def test_queries_with_a_gradient_are_scored_without_one() -> None:
    queries = torch.randn(2, 4, requires_grad=True)
    values, _ = items_of(whole(50, 4)).score(queries, k=3)
    assert not values.requires_grad


def test_writes_behind_the_next_step_are_seen(device: str) -> None:
    """Inside a lookahead a step's rows are still on their way when it ends."""
    rows = torch.zeros(200, 4)
    items = items_of(rows, freeze=False).to(device)
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    for ids in speedswap.lookahead(
        [torch.arange(i, i + 50, device=device) for i in (3, 40, 150)], {items: lambda i: i}
    ):
        (-items(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows[ids.cpu()] += 1
        assert_best(items.score(torch.ones(1, 4, device=device), k=60), best(torch.ones(1, 4), rows, 60))


# ---------------------------------------------------------------------- ties, and what is not finite


@pytest.mark.parametrize("chunk", [None, 1, 64, 999, 5000])
@pytest.mark.parametrize("k", [1, 7, 600])
def test_equal_scores_come_by_id(chunk: int | None, k: int, device: str) -> None:
    """A table of zeros, and one of three values: far more ties than places."""
    num_rows = 1000 if chunk == 1 else 5000  # each row is a separate piece
    queries = torch.ones(2, 2)
    for rows in (torch.zeros(num_rows, 2), torch.arange(num_rows).remainder(3)[:, None].expand(-1, 2).float()):
        assert_best(items_of(rows).score(queries.to(device), k=k, chunk=chunk), best(queries, rows, k))


@pytest.mark.parametrize("ascending", [True, False])
def test_rows_in_the_order_of_their_scores(ascending: bool, device: str) -> None:
    """Every row beats those before it, or none does."""
    rows = torch.arange(20_000.0)[:, None] * (1 if ascending else -1)
    queries = torch.tensor([[1.0], [-2.0]])
    for k, chunk in ((5, None), (5, 3000), (700, 1500)):
        assert_best(items_of(rows).score(queries.to(device), k=k, chunk=chunk), best(queries, rows, k))


@pytest.mark.parametrize("chunk", [None, 1, 10])
def test_nan_comes_first_as_in_topk(chunk: int | None, device: str) -> None:
    """Rows that have become NaN are seen; what is left out is not, NaN or not."""
    rows = whole(40, 3)
    rows[[4, 30, 31]] = math.nan
    rows[8] = 1000
    values, ids = items_of(rows).score(torch.ones(1, 3, device=device), k=5, chunk=chunk, exclude=torch.tensor([31]))
    assert ids[0, :3].tolist() == [4, 30, 8]
    assert values[0, :2].isnan().all()
    assert values[0, 2] == 3000
    assert (rows.sum(1).topk(3).values.isnan()).all()  # torch's own


def test_infinite_scores_are_ranked(device: str) -> None:
    rows = torch.tensor([[1.0], [math.inf], [-math.inf], [2.0]])
    values, ids = items_of(rows).score(torch.ones(1, 1, device=device), k=4)
    assert ids.tolist() == [[1, 3, 0, -1]]
    assert values.tolist() == [[math.inf, 2, 1, -math.inf]]


# ---------------------------------------------------------------------- what is left out


@pytest.mark.parametrize("chunk", [None, 1, 9])
@pytest.mark.parametrize("form", ["mask", "ids", "int32", "padded", "list", "all but two"])
def test_what_is_excluded_is_not_returned(form: str, chunk: int | None, device: str) -> None:
    rows, queries = whole(60, 4), whole(3, 4, seed=1)
    own = [torch.tensor([5, 5, 2]), torch.tensor([], dtype=torch.int64), torch.arange(59, -1, -1)]
    left_out = torch.zeros(3, 60, dtype=torch.bool)
    exclude: Any
    if form in ("padded", "list"):
        for i, ids in enumerate(own):
            left_out[i, ids] = True
        exclude = [ids.to(device) for ids in own]
        if form == "padded":
            exclude = torch.full((3, 60), -1, device=device)
            for i, ids in enumerate(own):
                exclude[i, torch.randperm(60)[: len(ids)].to(device)] = ids.to(device)
    else:
        ids = torch.tensor([i for i in range(60) if i not in (8, 33)]) if form == "all but two" else own[0]
        left_out[:, ids] = True
        exclude = left_out[0] if form == "mask" else ids.int() if form == "int32" else ids
    found = items_of(rows).score(queries.to(device), k=4, chunk=chunk, exclude=exclude)
    assert_best(found, best(queries, rows, 4, left_out))


def test_fewer_rows_than_asked_for_are_filled_up() -> None:
    items = items_of(torch.tensor([[1.0], [5.0], [3.0]]), padding_idx=0)
    values, ids = items.score(torch.ones(2, 1), k=3, exclude=torch.tensor([[2], [-1]]))
    assert ids.tolist() == [[1, -1, -1], [1, 2, -1]]
    assert values.tolist() == [[5, -math.inf, -math.inf], [5, 3, -math.inf]]


@given(data=st.data())
def test_any_pieces_and_exclusions_give_torchs_rows(data: st.DataObject) -> None:
    num_rows, dim = data.draw(st.integers(1, 70), "rows"), data.draw(st.integers(1, 5), "dim")
    num_queries = data.draw(st.integers(0, 9), "queries")
    k, chunk = data.draw(st.integers(1, num_rows), "k"), data.draw(st.none() | st.integers(1, num_rows + 3), "chunk")
    padding = data.draw(st.none() | st.integers(0, num_rows - 1), "padding_idx")
    rows, queries = (whole(n, dim, seed=data.draw(st.integers(0, 99)), high=2) for n in (num_rows, num_queries))
    some = st.lists(st.integers(0, num_rows - 1), max_size=num_rows)
    form = data.draw(st.sampled_from(["none", "mask", "ids", "padded", "list"]), "form")
    own = [data.draw(some) for _ in range(num_queries if form in ("padded", "list") else 1)]
    left_out = torch.zeros(max(1, len(own)), num_rows, dtype=torch.bool)
    for i, ids in enumerate(own if form != "none" else []):
        left_out[i, ids] = True
    width = max(map(len, own), default=0)
    exclude = {
        "none": lambda: None,
        "mask": lambda: left_out[0],
        "ids": lambda: torch.tensor(own[0], dtype=torch.int64),
        "padded": lambda: torch.tensor([ids + [-1] * (width - len(ids)) for ids in own]).long().view(len(own), width),
        "list": lambda: [torch.tensor(ids, dtype=torch.int64) for ids in own],
    }[form]()
    if padding is not None:
        left_out = left_out | (torch.arange(num_rows) == padding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scoring._SCORES_BYTES, "cpu", data.draw(st.sampled_from([1, 200, 2**20]), "bytes of scores"))
        found = items_of(rows, padding_idx=padding).score(queries, k, chunk=chunk, exclude=exclude)
    assert_best(found, best(queries, rows, k, left_out[: max(1, num_queries)] if num_queries else None))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"k": 51}, ValueError, "k is 51, but table 'table' has 50 rows; give at most as many"),
        ({"k": 0}, ValueError, "k is 0; give a whole number of at least 1"),
        ({"chunk": 0}, ValueError, "chunk is 0; give a whole number of at least 1"),
        ({"queries": torch.ones(2, 5)}, ValueError, r"queries has shape \(2, 5\), but the rows .* have 4 items"),
        ({"queries": torch.ones(2, 4).long()}, TypeError, "queries has dtype torch.int64"),
        ({"queries": [1.0] * 4}, TypeError, "queries is a list"),
        ({"exclude": torch.ones(49).bool()}, ValueError, r"a mask of shape \(49,\), but table 'table' has 50 rows"),
        ({"exclude": torch.tensor([3, 50])}, IdError, r"exclude\[1\] is 50, but table 'table' has rows 0 to 49"),
        ({"exclude": torch.tensor([-1])}, IdError, r"exclude\[0\] is -1, .* leave it out"),
        ({"exclude": torch.tensor([[3, -1], [-2, 1]])}, IdError, r"exclude\[1, 0\] is -2, .* pad with -1"),
        ({"exclude": torch.tensor([[3, 1]])}, ValueError, "but there are 2 queries; give a row of ids for each"),
        ({"exclude": [torch.tensor([3])]}, ValueError, "exclude is a list of 1, but there are 2 queries"),
        ({"exclude": [torch.tensor([3]), torch.tensor([99])]}, IdError, r"exclude\[1\]\[0\] is 99"),
        ({"exclude": [3, 4]}, TypeError, r"exclude\[0\] is an int; pass a tensor of ids"),
        (
            {"exclude": torch.ones(50).byte()},
            TypeError,
            "exclude has dtype torch.uint8; give ids as int32 or int64, or",
        ),
        ({"exclude": {3}}, TypeError, "exclude is a set; pass a tensor, or a list"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    queries = settings.pop("queries", torch.ones(2, 4))
    with pytest.raises(error, match=message):
        items_of(whole(50, 4)).score(queries, **settings)


@pytest.mark.parametrize("exclude", [torch.arange(101) == 2, torch.tensor([2, 50])], ids=["mask", "ids"])
def test_rows_of_no_key_are_not_found(exclude: Tensor, place: dict[str, Any]) -> None:
    items = speedswap.Embedding(100, 4, id_map=speedswap.IdMap(100), **place)
    items(torch.tensor([70, 80, 90, 70]))
    (values, ids), rows = items.score(torch.ones(2, 4), k=5, exclude=exclude), items.table.read()
    assert sorted(ids[0].tolist()) == [-1, -1, -1, 1, 3]
    assert torch.equal(values[1, :2], rows[ids[1, :2]].sum(1))


def test_rows_of_complex_numbers_have_no_order() -> None:
    items = speedswap.Embedding(5, 4, dtype=torch.complex64, init=speedswap.init.zeros())
    with pytest.raises(TypeError, match=r"complex64; .*complex products have no order"):
        items.score(torch.ones(4))


# ---------------------------------------------------------------------- memory


def test_memory_is_bounded() -> None:
    """All scores at once would be 1 GiB."""
    script = """
        import resource, torch, speedswap
        items = speedswap.Embedding(1_000_000, 16, storage="pageable", init=speedswap.init.uniform())
        items.score(torch.ones(2, 16))
        queries = torch.randn(256, 16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        items.score(queries)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    run = run_script(script)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 64, "MiB"
