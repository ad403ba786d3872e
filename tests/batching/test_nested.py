"""P24: what a batch may be made of, and how it is cut."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from speedswap.batching import BatchSplitter, PerSample, Whole, feed, retry
from speedswap.batching.nested import Batch, joined
from speedswap.compat import toma
from speedswap.errors import BatchError


class Pair(NamedTuple):
    ids: Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    image: Tensor
    label: Tensor
    note: str = "note"
    extra: dict[str, Any] = field(default_factory=dict)


def test_p24_nested_inputs_are_cut_together_and_in_order():
    image = torch.arange(12).view(4, 3)
    batch = Batch(
        (image, None, "words", 3, torch.tensor(7.0), Pair(image, "pair"), (image, [image, image])),
        {
            "sample": Sample(image, image[:, 0], extra={"deep": (image,)}),
            "array": np.arange(8).reshape(4, 2),
            "texts": ["a", "b", "c", "d"],
            "classes": ["cat", "dog"],
            "size": torch.Size([4, 3]),
            "module": nn.Linear(1, 1),
        },
    )
    assert batch.size == 4
    args, kwargs = batch.part(1, 3)
    wanted = image[1:3]
    assert torch.equal(args[0], wanted)
    assert args[1:4] == (None, "words", 3)
    assert args[4] == 7
    assert isinstance(args[5], Pair)
    assert torch.equal(args[5].ids, wanted)
    assert args[5].name == "pair"
    assert torch.equal(args[6][1][1], wanted)
    assert isinstance(kwargs["sample"], Sample)
    assert torch.equal(kwargs["sample"].label, image[1:3, 0])
    assert torch.equal(kwargs["sample"].extra["deep"][0], wanted)
    assert kwargs["sample"].note == "note"
    assert np.array_equal(kwargs["array"], [[2, 3], [4, 5]])
    assert kwargs["texts"] == ["b", "c"]
    assert kwargs["classes"] == ["cat", "dog"]
    assert kwargs["size"] == torch.Size([4, 3])
    assert isinstance(kwargs["module"], nn.Linear)


def test_p24_parts_are_views():
    image = torch.zeros(4, 3)
    args, _ = Batch(({"image": image},)).part(1, 3)
    args[0]["image"].fill_(1)
    assert image.sum(1).tolist() == [0, 3, 3, 0]


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict, lambda items: defaultdict(list, items)])
def test_p24_mappings_keep_their_type_and_order(make):
    value = make({"b": torch.ones(4), "a": torch.zeros(4)})
    (part,), _ = Batch((value,)).part(0, 2)
    assert type(part) is type(value)
    assert list(part) == ["b", "a"]
    assert [len(tensor) for tensor in part.values()] == [2, 2]
    assert [len(tensor) for tensor in value.values()] == [4, 4]


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        ((torch.ones(6), torch.ones(4)), {}, r"batch\[1\] has 4 samples, but batch\[0\] has 6"),
        ((), {"a": torch.ones(6), "b": torch.ones(4)}, r"b has 4 samples, but a has 6"),
        (({"x": (torch.ones(3), torch.ones(2))},), {}, r"batch\[0\]\['x'\]\[1\] has 2 samples"),
        ((torch.ones(2), PerSample([1, 2, 3])), {}, r"batch\[1\] has 3 samples"),
        ((torch.ones(2), np.ones((3, 2))), {}, r"batch\[1\] has 3 samples"),
        ((None, "text", torch.tensor(1)), {}, r"no tensor with a batch dimension"),
        ((torch.ones(0, 3),), {}, r"batch\[0\] has no samples"),
        ((nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),), {}, r"PackedSequence"),
    ],
)
def test_p24_what_does_not_fit_together_is_an_error(args, kwargs, message):
    with pytest.raises(BatchError, match=message):
        Batch(args, kwargs)


WITHOUT_STRIDES = {
    "COO": lambda dense: dense.to_sparse(),
    "hybrid COO": lambda dense: dense.to_sparse(1),
    "CSR": lambda dense: dense.to_sparse_csr(),
    "CSC": lambda dense: dense.to_sparse_csc(),
    "BSR": lambda dense: dense.to_sparse_bsr((2, 2)),
    "MKLDNN": lambda dense: dense.to_mkldnn(),
    "nested": lambda dense: torch.nested.nested_tensor(list(dense)),
}


def padded_or_dense(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0) if tensor.is_nested else tensor.to_dense()


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("name", WITHOUT_STRIDES)
def test_p24_tensors_without_strides_are_refused_with_a_remedy_wherever_they_are_cut(name):
    """By the place, kind and layout; each as a whole, or one by one per sample, is passed on."""
    dense = torch.arange(1.0, 25).view(4, 6)
    tensor = WITHOUT_STRIDES[name](dense)
    splitter = BatchSplitter(nn.Linear(6, 1), micro_batch_size=2)
    refused = rf"is a (nested )?tensor of layout {tensor.layout}, which cannot .* to_(dense\(\)|padded_tensor\(0\))"

    def sums(part: Tensor) -> Tensor:
        return padded_or_dense(part).sum(1)

    def first(value: Any) -> Tensor:
        return torch.zeros(4)

    for place, call in {
        r"batch\[0\]": lambda: splitter.backward(lambda part: sums(part).sum(), tensor),
        r"batch\[1\]\['x'\]\.ids": lambda: splitter.map(lambda a, b: a, dense, {"x": Pair(tensor, "pair")}),
        r"sample\.label": lambda: splitter.map(lambda sample: sample.image, sample=Sample(dense, tensor)),
        r"batch\[1\]": lambda: splitter.backward_coupled([sums, sums], lambda a, b: (a + b).sum(), dense, tensor),
        "the first argument of .*sums": lambda: retry.chunked(sums, initial=2)(tensor),
        "the first argument of .*first": lambda: toma.simple.chunked(first, tensor, 2),
        r"sample 'only'": lambda: list(feed(["only"], lambda _: tensor, 1, budget_bytes=10**6).epoch(0)),
    }.items():
        with pytest.raises(BatchError, match=place + " " + refused):
            call()
    joined_sums = splitter.map(lambda part, whole: part.sum(1) + sums(whole).sum(), dense, Whole(tensor))
    assert torch.equal(joined_sums, dense.sum(1) + dense.sum())
    each = splitter.map(lambda parts: torch.stack([sums(part) for part in parts]), PerSample([tensor] * 4))
    assert torch.equal(each, dense.sum(1).expand(4, 4))
    collated = feed(["a", "b"], lambda _: tensor, 2, budget_bytes=10**6, collate=list)
    assert [len(batch) for batch in collated.epoch(0)] == [2]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", ["CSR", "MKLDNN"])
def test_p24_results_that_cannot_be_joined_are_refused_with_a_remedy(name):
    tensor = WITHOUT_STRIDES[name](torch.ones(2, 2))
    splitter = BatchSplitter(nn.Linear(6, 1), micro_batch_size=2)
    with pytest.raises(BatchError, match=f"the result is a tensor of layout {tensor.layout}.*Whole"):
        splitter.map(lambda part: tensor, torch.ones(4, 6))
    assert len(splitter.map(lambda part: Whole(tensor), torch.ones(4, 6))) == 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_p24_tensors_of_any_other_kind_are_cut_as_ever():
    """Quantized, expanded, conjugated and without memory: they have strides."""
    dense = torch.arange(1.0, 25).view(4, 6)
    quantized = torch.quantize_per_tensor(dense, 0.5, 0, torch.quint8)
    others = (quantized, dense[:1].expand(4, 6), torch.complex(dense, dense).conj(), dense.to("meta"))
    (parts, _) = Batch(others).part(1, 3)
    for part, whole in zip(parts[:3], others, strict=False):
        assert torch.equal(part, whole[1:3])
    assert parts[3].shape == (2, 6)
    assert len(next(feed([1, 2], lambda _: quantized, 2, budget_bytes=10**6).epoch(0))) == 2


def test_p24_scipy_matrices_are_cut_by_rows_or_refused():
    sparse = pytest.importorskip("scipy.sparse")
    dense = np.arange(24.0).reshape(4, 6)
    (part,), _ = Batch((sparse.csr_matrix(dense),)).part(1, 3)
    assert np.array_equal(part.toarray(), dense[1:3])
    for made in (sparse.coo_array, sparse.bsr_array, sparse.dia_array, sparse.coo_matrix):
        with pytest.raises(BatchError, match=r"batch\[0\] is a SciPy matrix in \w+ format, .* tocsr\(\)"):
            Batch((made(dense),))


def test_p24_samples_of_a_shuffled_series_are_its_rows_and_not_its_labels():
    pandas = pytest.importorskip("pandas")
    series = pandas.Series([10, 20, 30, 40], index=[3, 1, 0, 2])
    for value in (series, series.to_frame()):
        batch = Batch((value,))
        assert batch.take([0, 2])[0][0].to_numpy().ravel().tolist() == [10, 30]
        assert batch.part(1, 3)[0][0].to_numpy().ravel().tolist() == [20, 30]


def test_p24_strings_of_samples_in_tuples_are_cut():
    """torch's default_collate leaves the strings of samples that are tuples in a tuple."""
    names = ("a", "b", "c")
    batch = Batch((torch.arange(3), names, ("x", "y")))
    assert batch.part(1, 3)[0][1:] == (("b", "c"), ("x", "y"))
    assert batch.take([2, 0])[0][1:] == (("c", "a"), ("x", "y"))


def test_p24_what_belongs_to_no_sample_and_lists_of_samples():
    weights, images = torch.ones(10), [torch.ones(3, 2, 2), torch.ones(3, 5, 5), torch.ones(3, 1, 1)]
    batch = Batch((torch.arange(3), Whole(weights), PerSample(images)))
    args, _ = batch.part(1, 3)
    assert args[1] is weights
    assert [tuple(image.shape) for image in args[2]] == [(3, 5, 5), (3, 1, 1)]
    args, _ = batch.part(0, 3)
    assert args[1] is weights
    assert args[2] == images


def test_p24_whole_batch_is_passed_unchanged():
    tensor = torch.ones(4)
    args, _ = Batch((tensor,)).part(0, 4)
    assert args[0] is tensor


leaves = st.sampled_from(["tensor", "none", "scalar", "text"])
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


def grown(tree: Any, size: int) -> Any:
    if isinstance(tree, list):
        return tuple(grown(item, size) for item in tree)
    if isinstance(tree, dict):
        return {key: grown(item, size) for key, item in tree.items()}
    return {"tensor": torch.randn(size, 2), "none": None, "scalar": torch.tensor(1.0), "text": "t"}[tree]


def flat(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flat(item)]
    return [value]


def has_strings_of_samples(value: Any, size: int) -> bool:
    """Return whether a tuple of strings, which is cut, is not joined again: only a list of them is."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    is_cut = isinstance(value, tuple) and len(value) == size and all(isinstance(item, str) for item in value)
    return is_cut or any(has_strings_of_samples(item, size) for item in items)


@given(trees, st.integers(1, 7), st.data())
def test_p24_any_nesting_comes_together_again(tree, size, data):
    value = (grown(tree, size), torch.randn(size))
    assume(not has_strings_of_samples(value, size))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    batch = Batch(value)
    parts = [batch.part(start, stop)[0] for start, stop in pairwise(cuts)]
    together = joined(parts, [stop - start for start, stop in pairwise(cuts)])
    for found, wanted in zip(flat(together), flat(value), strict=True):
        if isinstance(wanted, Tensor) and wanted.dim():
            assert torch.equal(found, wanted)
        elif isinstance(wanted, Tensor):
            assert torch.equal(found, wanted.expand(len(parts)))
        else:
            assert found == (None if wanted is None else [wanted] * len(parts))


def test_parts_of_different_structure_cannot_be_joined():
    with pytest.raises(BatchError, match="structure"):
        joined([(torch.ones(1),), (torch.ones(1), torch.ones(1))], [1, 1])
    with pytest.raises(BatchError, match="of different types in the micro-batches: NoneType, Tensor"):
        joined([torch.ones(1), None], [1, 1])


def test_parts_of_jagged_tensors_are_padded_to_their_own_longest():
    """Without its greatest length torch would pad a part to the sum of its lengths."""
    lists = torch.nested.as_nested_tensor([torch.ones(n) for n in (3, 5, 2)], layout=torch.jagged)
    (part,), _ = Batch((lists,)).part(1, 3)
    assert part.to_padded_tensor(0).tolist() == [[1.0] * 5, [1.0, 1.0, 0.0, 0.0, 0.0]]
