"""Embeddings and bags made from existing rows, called as torch's are."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from children import killed_at
from torch import nn

import speedswap

KINDS = [(speedswap.Embedding, nn.Embedding), (speedswap.EmbeddingBag, nn.EmbeddingBag)]
ROWS = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("ours, theirs", KINDS)
def test_arguments_come_in_torchs_order_with_torchs_defaults(ours: Any, theirs: Any) -> None:
    wanted = inspect.signature(theirs.from_pretrained).parameters.values()
    found = list(inspect.signature(ours.from_pretrained).parameters.values())
    if found[3].kind is inspect.Parameter.VAR_POSITIONAL:  # takes what it refuses, by place and by name
        wanted, found = [*wanted][:3], [*found[:3], *found[4:]]
    assert [(one.name, one.default) for one in found[: len(wanted)]] == [(one.name, one.default) for one in wanted]
    rest = {one.kind for one in found[len(wanted) :]}
    assert rest <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def test_torchs_defaults_by_position_are_taken() -> None:
    ids = torch.tensor([[0, 3], [2, 2]])
    for (ours, theirs), arguments in zip(
        KINDS, [(False, 2, None, 2.0, False, False), (False, None, 2.0, False, "max", False, False, 3)], strict=True
    ):
        mine, reference = (kind.from_pretrained(ROWS.clone(), *arguments) for kind in (ours, theirs))
        assert torch.equal(mine(ids), reference(ids))
        assert mine.padding_idx == reference.padding_idx
        assert mine(ids).requires_grad


@pytest.mark.parametrize(
    "argument, value, advice",
    [
        ("max_norm", 1.0, "max_norm is 1.0, but a lookup does not change the table; scale the rows it returns"),
        ("norm_type", 1.0, "norm_type is 1.0, but it belongs to max_norm, which is not set; leave it out"),
        ("scale_grad_by_freq", True, "scale_grad_by_freq is True; leave it out, and weight the loss"),
        ("sparse", True, "sparse is True; leave it out: gradients are dense"),
    ],
)
@pytest.mark.parametrize("kind", [ours for ours, _ in KINDS])
def test_what_these_have_not_is_refused_with_advice(
    kind: Any, argument: str, value: Any, advice: str, tmp_path: Path
) -> None:
    """It was a TypeError about an unexpected keyword, without a remedy."""
    with pytest.raises(ValueError, match=re.escape(advice)):
        kind.from_pretrained(ROWS, **{argument: value}, storage="disk", path=tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", [ours for ours, _ in KINDS])
def test_integer_rows_are_refused_before_a_table_is_made(
    kind: Any, dtype: torch.dtype, freeze: bool, tmp_path: Path
) -> None:
    """The right call at the same place then works."""
    path = tmp_path / "table"
    with pytest.raises(TypeError) as raised:
        kind.from_pretrained(ROWS.to(dtype), freeze, storage="disk", path=path)
    assert f"embeddings is {dtype}" in str(raised.value)
    assert "embeddings.float(), or look integers up with speedswap.gather_rows(embeddings, ids)" in str(raised.value)
    assert not path.exists()
    module = kind.from_pretrained(ROWS.to(dtype).float(), freeze, storage="disk", path=path)
    assert torch.equal(module.table.read(), ROWS.to(dtype).float())
    module.table.close()


@pytest.mark.release
@pytest.mark.parametrize("kind", [ours for ours, _ in KINDS])
def test_a_table_killed_while_it_is_filled_with_given_rows_has_them_all_or_is_not_there(
    kind: Any, tmp_path: Path
) -> None:
    path, seen, step = tmp_path / "table", set(), 0

    def work() -> None:
        kind.from_pretrained(ROWS, path=path).table.close()

    while killed_at(step, work):
        seen.add(path.exists())
        if path.exists():
            with speedswap.Table.open(path) as table:
                assert torch.equal(table.read(), ROWS)
            shutil.rmtree(path)
        step += 1
    assert seen == {False, True}


@pytest.mark.parametrize("storage", ["pageable", "disk"])
def test_given_rows_stay_when_the_optimizer_adds_its_state(storage: str, tmp_path: Path) -> None:
    """All of them, the padding row too: they are no initial values that can be computed again."""
    path = tmp_path / "table" if storage == "disk" else None
    rows = ROWS + 1
    items = speedswap.Embedding.from_pretrained(rows.clone(), False, 2, storage=storage, path=path)
    assert torch.equal(items.table.read(), rows)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.0)
    items(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert "exp_avg" in items.table.columns
    assert torch.equal(items.table.read(), rows)
    items.table.close()


def test_the_advice_for_integer_rows_works() -> None:
    rows, ids = ROWS.to(torch.int32), torch.tensor([3, 0, 3])
    assert torch.equal(speedswap.gather_rows(rows, ids), rows[ids])
