"""Jagged tensors alone: what TorchRec's users call, with the results that TorchRec gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from speedswap import JaggedTensor, KeyedJaggedTensor

VALUES, LENGTHS = torch.arange(10, 16), torch.tensor([2, 0, 1, 1, 0, 2])


def keyed(keys: str = "abc", **changes: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**{"keys": list(keys), "values": VALUES, "lengths": LENGTHS, **changes})


def lists(jagged: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [each.tolist() for each in of_key.to_dense()] for key, of_key in jagged.to_dict().items()}


@pytest.mark.parametrize("make", [JaggedTensor, lambda *args, **more: KeyedJaggedTensor(["a"], *args, **more)])
@pytest.mark.parametrize("name", ["lengths", "offsets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_lengths_and_offsets_are_integers(make: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    """Lengths of 1.5 would be taken for 1."""
    with pytest.raises(TypeError, match=f"{name} has dtype {dtype}; give integers"):
        make(VALUES, **{name: torch.tensor([1.5, 2.5]).to(dtype)})
    make(VALUES[:0], lengths=torch.empty(0))  # of no samples, as torch makes it by default
    make(VALUES, lengths=LENGTHS.to(torch.uint8))


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("weights", [None, torch.arange(6) / 2])
def test_keys_are_divided_and_put_together(by: str, weights: torch.Tensor | None) -> None:
    segments = {"lengths": LENGTHS, "offsets": torch.tensor([0, 2, 2, 3, 4, 4, 6])}
    whole = keyed(**{"lengths": None, "weights": weights, by: segments[by]})
    first, none, rest = whole.split([1, 0, 2])
    assert lists(first) == {"a": [[10, 11], []]}
    assert (none.keys(), none.stride(), none.values().numel()) == ([], 2, 0)
    assert lists(rest) == {"b": [[12], [13]], "c": [[], [14, 15]]}
    for again in (KeyedJaggedTensor.concat([first, none, rest]), KeyedJaggedTensor.from_jt_dict(whole.to_dict())):
        assert lists(again) == lists(whole)
        assert (again.stride(), again.keys()) == (2, ["a", "b", "c"])
        if weights is None:
            assert again.weights_or_none() is None
        else:
            assert torch.equal(again.weights(), weights)


def test_without_keys() -> None:
    empty = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert (empty.keys(), empty.stride(), empty.values().dtype) == ([], 0, torch.int64)
    assert (empty.weights().dtype, empty.lengths().dtype, empty.to_dict()) == (torch.float64, torch.int32, {})
    assert KeyedJaggedTensor.empty().weights_or_none() is None


def test_what_does_not_go_together() -> None:
    concat = KeyedJaggedTensor.concat
    for wrong, message in (
        (lambda: concat([]), "kjt_list is empty"),
        (lambda: concat([keyed(), keyed("ab")]), r"kjt_list has \[2, 3\] samples"),
        (lambda: concat([keyed(), keyed(weights=VALUES)]), "partly without weights"),
        (lambda: KeyedJaggedTensor.from_jt_dict({"a": keyed()["a"], "b": keyed("ab")["b"]}), "has .2, 3. samples"),
        (lambda: keyed().split([1, 1]), r"segments is \[1, 1\], but there are 3 keys"),
        (lambda: keyed().split([4, -1]), r"segments is \[4, -1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
