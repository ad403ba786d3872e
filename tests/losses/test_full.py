"""The softmax over all rows, in chunks, is torch's over a matrix; so are the ranks of targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import speedswap
from speedswap.errors import IdError, WeightError
from speedswap.losses import full_softmax, target_ranks

ROWS, DIM = 60, 4


def doubles(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def items_of(rows: Tensor, **settings: Any) -> speedswap.Embedding:
    return speedswap.Embedding.from_pretrained(rows, **settings)


@pytest.mark.parametrize("chunk", [None, 1, 7, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("several", [False, True], ids=["one target", "several targets"])
def test_value_and_gradient_are_torchs(chunk: int | None, reduction: str, several: bool, device: str) -> None:
    """With ignored targets, biases and a padding row, which does not count."""
    weight, biases, hidden = doubles(ROWS, DIM), doubles(ROWS, 1), doubles(3, 5, DIM)
    targets = torch.randint(1, ROWS, (3, 5, 2) if several else (3, 5))
    targets[0, 1] = targets[-1, -1] = -100
    if several:
        targets[1, 1, 1] = -100

    expected_hidden = hidden.clone().requires_grad_()
    logits = expected_hidden.reshape(15, DIM) @ weight.T + biases.T
    logits = logits.index_fill(1, torch.tensor([0]), -math.inf)
    if several:  # each target has the same probability
        is_there = (targets != -100).reshape(15, 2)
        own = logits.gather(1, targets.reshape(15, 2).clamp(min=0)).where(is_there, 0)
        losses = logits.logsumexp(1) - own.sum(1) / is_there.sum(1).clamp(min=1)
        losses = losses[is_there.any(1)]
        if reduction == "none":
            losses = torch.zeros(15, dtype=torch.float64).masked_scatter(is_there.any(1), losses).view(3, 5)
        expected = {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}[reduction]()
    else:
        expected = F.cross_entropy(logits, targets.reshape(15), reduction=reduction)
        expected = expected.view(3, 5) if reduction == "none" else expected
    factors = doubles(*expected.shape)
    (expected * factors).sum().backward()

    given = hidden.to(device).requires_grad_()
    items, bias = items_of(weight, padding_idx=0), items_of(biases)
    found = full_softmax(given, targets.to(device), items, bias=bias, chunk=chunk, reduction=reduction)
    (found * factors.to(device)).sum().backward()
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(given.grad.cpu(), expected_hidden.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("place", ["pageable", "disk", "collection", "table", "bfloat16"])
def test_rows_may_be_anywhere(place: str, tmp_path: Path) -> None:
    """Also rows of a trained table, given as a table, and compact ones."""
    weight, hidden, targets = torch.randn(ROWS, DIM), torch.randn(5, DIM), torch.randint(ROWS, (5,))
    if place == "collection":
        frozen = torch.nn.ModuleDict(
            {name: torch.nn.Embedding.from_pretrained(weight * sign) for name, sign in (("user", -1), ("item", 1))}
        )
        items: Any = speedswap.EmbeddingCollection.from_modules(dict(frozen.items())).embeddings["item"]
    elif place == "table":
        items = items_of(weight, freeze=False).table
    else:
        more = {"path": tmp_path / "items"} if place == "disk" else {}
        more |= {"stored_dtype": torch.bfloat16} if place == "bfloat16" else {}
        items = items_of(weight, **more)
    rows = items.read()
    torch.testing.assert_close(
        full_softmax(hidden, targets, items, chunk=13), F.cross_entropy(hidden @ rows.T, targets)
    )


def test_rows_are_read_in_chunks_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the chunk's rows exist at a time: two passes of 9 chunks of at most 7 rows."""
    read: list[int] = []
    own = speedswap.Table.rows_between

    @contextmanager
    def counted(table: speedswap.Table, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
        read.append(stop - start)
        with own(table, start, stop, device) as rows:
            yield rows

    monkeypatch.setattr(speedswap.Table, "rows_between", counted)
    hidden = torch.randn(5, DIM, requires_grad=True)
    full_softmax(hidden, torch.arange(5), items_of(torch.randn(ROWS, DIM)), chunk=7).backward()
    assert read == [7] * 8 + [4] + [7] * 8 + [4]


def test_autocast_changes_nothing() -> None:
    weight, hidden, targets = torch.randn(ROWS, DIM), torch.randn(5, DIM, requires_grad=True), torch.randint(ROWS, (5,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = full_softmax(hidden, targets, items_of(weight))
    found.backward()
    (grad,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), hidden)
    torch.testing.assert_close(hidden.grad, grad)


def test_scores_that_overflow_one_by_one_do_not_overflow_together() -> None:
    weight = torch.tensor([[1000.0], [999.0], [-1000.0]])
    found = full_softmax(torch.ones(2, 1), torch.tensor([0, 2]), items_of(weight), chunk=1, reduction="none")
    expected = F.cross_entropy(weight.T.expand(2, 3), torch.tensor([0, 2]), reduction="none")
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)  # of numbers of 1000


def test_no_samples() -> None:
    hidden = torch.empty(0, DIM, requires_grad=True)
    loss = full_softmax(hidden, torch.empty(0, dtype=torch.int64), items_of(torch.randn(ROWS, DIM)))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.shape == (0, DIM)


def test_trained_rows_are_constants_under_no_grad_and_as_a_table() -> None:
    items = items_of(torch.randn(ROWS, DIM), freeze=False)
    hidden, targets = torch.randn(5, DIM), torch.randint(ROWS, (5,))
    expected = F.cross_entropy(hidden @ items.read().T, targets)
    with torch.no_grad():
        torch.testing.assert_close(full_softmax(hidden, targets, items), expected)
    found = full_softmax(hidden, targets, items.table)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


def test_a_table_written_between_the_passes_is_an_error() -> None:
    """The gradient would be that of other rows."""
    items = items_of(torch.randn(ROWS, DIM), freeze=False)
    hidden, targets = torch.randn(5, DIM, requires_grad=True), torch.randint(ROWS, (5,))
    loss = full_softmax(hidden, targets, items.table)
    items.table.write(3, torch.ones(1, DIM))
    with pytest.raises(WeightError, match=r"was written after full_softmax's forward pass.*call backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.ones(3, 5)}, ValueError, r"hidden has shape \(3, 5\) .*\(\*samples, 4\), as wide"),
        ({"targets": torch.ones(2).long()}, ValueError, r"targets has shape \(2,\), but hidden \(3, 4\)"),
        ({"targets": torch.tensor([1, 2, ROWS])}, IdError, r"is 60, but table"),
        ({"items": torch.nn.Embedding(ROWS, DIM)}, TypeError, r"items is an Embedding; give an embedding of speedswap"),
        (
            {"bias": speedswap.Embedding(ROWS, 2).requires_grad_(False)},
            ValueError,
            r"bias is .* of width 1 with 60 rows",
        ),
        ({"bias": speedswap.Embedding(9, 1).requires_grad_(False)}, ValueError, r"bias is .* of width 1 with 60 rows"),
        ({"chunk": 0}, ValueError, r"chunk is 0"),
        ({"reduction": "average"}, ValueError, r"reduction is 'average'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"hidden": torch.ones(3, DIM), "targets": torch.tensor([1, 2, 3]), "items": items_of(torch.ones(ROWS, DIM))}
    with pytest.raises(error, match=message):
        full_softmax(**(given | change))


def test_an_id_map_is_refused_with_the_call_to_make() -> None:
    items = speedswap.Embedding(ROWS, DIM, id_map=speedswap.IdMap(ROWS))
    items(torch.tensor([10**12, 5]))
    hidden, keys = torch.randn(2, DIM), torch.tensor([5, 10**12])
    with pytest.raises(
        ValueError,
        match=r"items has an id map.*to count them, give items\.id_map\.lookup\(keys\) as targets and items\.table",
    ):
        full_softmax(hidden, keys, items)
    found = full_softmax(hidden, items.id_map.lookup(keys), items.table)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ items.read().T, items.id_map.lookup(keys)))


# ---------------------------------------------------------------------- ranks of targets


def ranks_one_by_one(hidden: Tensor, targets: Tensor, weight: Tensor, excluded: list[set[int]]) -> list[float]:
    found = []
    for sample, target in enumerate(targets.tolist()):
        own = weight[target] @ hidden[sample]
        others = [
            weight[row] @ hidden[sample] for row in range(len(weight)) if row != target and row not in excluded[sample]
        ]
        found.append(1 + sum(float(each > own) + float(each == own) / 2 for each in others))
    return found


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_ranks_are_those_counted_one_by_one(chunk: int | None, device: str) -> None:
    """In whole numbers, with many ties; the padding row competes as little as excluded ones, among them targets."""
    weight, hidden = torch.randint(-2, 3, (ROWS, DIM)).float(), torch.randint(-2, 3, (8, DIM)).float()
    targets, exclude = torch.randint(1, ROWS, (8,)), torch.randint(ROWS, (8, 5))
    exclude[:, 0], exclude[2:, 1] = targets, -1
    items = items_of(weight, padding_idx=3)
    weight = items.read()
    found = target_ranks(hidden.to(device), targets.to(device), items, exclude=exclude, chunk=chunk)
    assert found.tolist() == ranks_one_by_one(hidden, targets, weight, [{3, *row} for row in exclude.tolist()])
    found = target_ranks(hidden.view(2, 4, DIM).to(device), targets.view(2, 4).to(device), items, chunk=chunk)
    assert found.flatten().tolist() == ranks_one_by_one(hidden, targets, weight, [{3}] * 8)


def test_biases_count_and_trained_rows_are_taken() -> None:
    items, bias = items_of(torch.zeros(3, 2), freeze=False), items_of(torch.tensor([[1.0], [3.0], [2.0]]), freeze=False)
    assert target_ranks(torch.ones(3, 2), torch.arange(3), items, bias=bias).tolist() == [3, 1, 2]


def test_a_target_that_is_not_a_number_comes_last() -> None:
    items = items_of(torch.tensor([[1.0], [math.nan], [2.0]]))
    assert target_ranks(torch.ones(2, 1), torch.tensor([1, 2]), items).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda items: target_ranks(torch.ones(3, DIM), torch.ones(3, 2).long(), items),
            r"targets has shape \(3, 2\); give \(3,\), one each",
        ),
        (lambda items: target_ranks(torch.ones(3, DIM), torch.tensor([0, 1, ROWS]), items), r"is 60, but table"),
        (
            lambda items: target_ranks(torch.ones(3, DIM), torch.arange(3), items, exclude=torch.ones(2, 2).long()),
            r"exclude has shape",
        ),
    ],
)
def test_ranks_of_what_does_not_fit(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises((ValueError, IdError), match=message):
        call(items_of(torch.ones(ROWS, DIM)))
