"""Embeddings and bags made of rows that are there, called as torch's are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import speedswap

KINDS = [(speedswap.Embedding, nn.Embedding), (speedswap.EmbeddingBag, nn.EmbeddingBag)]
ROWS = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("ours, theirs", KINDS)
def test_arguments_come_in_torchs_order_with_torchs_defaults(ours: Any, theirs: Any) -> None:
    wanted = inspect.signature(theirs.from_pretrained).parameters.values()
    found = list(inspect.signature(ours.from_pretrained).parameters.values())
    assert [(one.name, one.default) for one in found[: len(wanted)]] == [(one.name, one.default) for one in wanted]
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in found[len(wanted) :])


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
        ("norm_type", 1.0, "norm_type is 1.0, but there is no max_norm that it could belong to; leave it out"),
        ("scale_grad_by_freq", True, "scale_grad_by_freq is True; leave it out, and weigh the loss"),
        ("sparse", True, "sparse is True; leave it out: only the batch's rows have gradients"),
    ],
)
@pytest.mark.parametrize("kind", [ours for ours, _ in KINDS])
def test_what_these_have_not_is_refused_with_advice(
    kind: Any, argument: str, value: Any, advice: str, tmp_path: Path
) -> None:
    """It was a TypeError about an unexpected keyword, which tells nobody what to do."""
    with pytest.raises(ValueError, match=re.escape(advice)):
        kind.from_pretrained(ROWS, **{argument: value}, storage="memmap", path=tmp_path / "table")
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
        kind.from_pretrained(ROWS.to(dtype), freeze, storage="memmap", path=path)
    assert f"embeddings is {dtype}" in str(raised.value)
    assert "embeddings.float(), or look integers up with speedswap.gather_rows(embeddings, ids)" in str(raised.value)
    assert not path.exists()
    module = kind.from_pretrained(ROWS.to(dtype).float(), freeze, storage="memmap", path=path)
    assert torch.equal(module.table.read(), ROWS.to(dtype).float())
    module.table.close()


def test_the_advice_for_integer_rows_works() -> None:
    rows, ids = ROWS.to(torch.int32), torch.tensor([3, 0, 3])
    assert torch.equal(speedswap.gather_rows(rows, ids), rows[ids])
