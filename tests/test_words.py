"""Messages that name a type read as English."""

from __future__ import annotations

import pytest
import torch

import speedswap
from speedswap._words import a_kind

AN = "int Adam Embedding OrderedDict object SGD NAdam LSTM RMSprop MLP LBFGS ndarray Unpickler _Iterator"
A = "list str float NamedTuple Linear ReLU Muon RandomSampler Sequential UNet UserDict UnionFind Hook"


@pytest.mark.parametrize(
    "name, article", [*((name, "an") for name in AN.split()), *((name, "a") for name in A.split())]
)
def test_article_is_the_one_that_is_spoken(name, article):
    assert a_kind(type(name, (), {})()) == f"{article} {name}"


def test_errors_name_an_int_and_an_embedding():
    """Wrong arguments are named with the right article."""
    with pytest.raises(TypeError, match="loader is an int; give an iterable"):
        speedswap.lookahead(3, {})
    with pytest.raises(TypeError, match="optimizer is an Embedding; give a torch"):
        speedswap.batching.AccumulatingOptimizer(torch.nn.Embedding(2, 2), 2)
    with pytest.raises(TypeError, match="given_optimizer is an Embedding; give a torch"):
        speedswap.OptimizerFactory(torch.nn.Embedding(2, 2), 10, 2, torch.nn.Embedding(2, 2), "weight", CPUPinn=True)


@pytest.mark.parametrize("ids, said", [(3, "an int"), ([1, 0], "a list"), ((1,), "a tuple")])
def test_ids_that_are_no_tensor_are_refused_in_words(ids, said):
    """Not "'list' object has no attribute 'dim'"."""
    table, matrix = speedswap.Table.create(3, 2, storage="pageable"), torch.ones(3, 2)
    calls = [
        lambda: table.gather(ids),
        lambda: table.scatter(ids, matrix),
        lambda: speedswap.gather_rows(table, ids),
        lambda: speedswap.gather_rows(matrix, ids),
        lambda: speedswap.scatter_rows(table, ids, matrix, duplicates="last"),
        lambda: speedswap.scatter_rows(matrix, ids, matrix),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"ids is {said}; pass a tensor \\(torch.as_tensor"):
            call()
