"""Dot products of pairs of vectors, compared with torch's matrix products."""

from __future__ import annotations

import pytest
import torch

from speedswap.kernels import get_num_threads, pair_gradients, pair_products, set_num_threads


def by_torch(first, rest):
    vectors = torch.cat([first.unsqueeze(1), rest], dim=1)
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
    return torch.cat([first, (vectors @ vectors.transpose(1, 2))[:, rows, columns]], dim=1)


def some(count, others, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator), torch.randn(count, others, width, generator=generator)


def test_a_sample_written_out():
    """Vectors (1, 2), (1, 0) and (3, 1): the first, then its products with both, and theirs."""
    first, rest = torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [3.0, 1.0]]])
    assert pair_products(first, rest).tolist() == [[1, 2, 1, 5, 3]]
    grad_first, grad_rest = pair_gradients(torch.tensor([[7.0, 8.0, 1.0, 10.0, 100.0]]), first, rest)
    assert grad_first.tolist() == [[7 + 1 + 30, 8 + 0 + 10]]
    assert grad_rest.tolist() == [[[1 + 300, 2 + 100], [10 + 100, 20]]]


@pytest.mark.parametrize("width", [1, 4, 16, 19])
@pytest.mark.parametrize("others", [0, 1, 7, 26])
@pytest.mark.parametrize("count", [1, 150])
def test_products_and_gradients_are_those_of_torch(count, others, width):
    first, rest = (tensor.requires_grad_() for tensor in some(count, others, width))
    expected = by_torch(first, rest)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(grad)
    with torch.no_grad():
        torch.testing.assert_close(pair_products(first, rest), expected, rtol=1e-5, atol=1e-5)
        found = pair_gradients(grad, first, rest)
    torch.testing.assert_close(found, (first.grad, rest.grad), rtol=1e-4, atol=1e-4)


def test_strided_and_empty_arguments():
    first, rest = some(10, 5, 6)
    expected = pair_products(first, rest)
    assert pair_products(first.T.contiguous().T, rest.transpose(0, 1).contiguous().transpose(0, 1)).equal(expected)
    grad = torch.randn(10, 21).T.contiguous().T
    for ours, theirs in zip(
        pair_gradients(grad, first, rest), pair_gradients(grad.contiguous(), first, rest), strict=True
    ):
        assert ours.equal(theirs)
    assert pair_products(first[:0], rest[:0]).shape == (0, 21)
    assert pair_products(first[:, :0], rest[..., :0]).equal(torch.zeros(10, 15))


def test_neither_threads_nor_instruction_set_change_a_bit(run_with_isa):
    first, rest = some(300, 26, 19)
    grad = torch.randn(300, 19 + 351, generator=torch.Generator().manual_seed(2))
    expected = [pair_products(first, rest), *pair_gradients(grad, first, rest)]
    threads = get_num_threads()
    try:
        for number in (1, 2, 5):
            set_num_threads(number)
            found = [pair_products(first, rest), *pair_gradients(grad, first, rest)]
            assert all(map(torch.equal, found, expected))
    finally:
        set_num_threads(threads)
    program = """
import torch, test_pairs
first, rest = test_pairs.some(300, 26, 19)
grad = torch.randn(300, 19 + 351, generator=torch.Generator().manual_seed(2))
for each in (test_pairs.pair_products(first, rest), *test_pairs.pair_gradients(grad, first, rest)):
    print(each.contiguous().numpy().tobytes().hex())
"""
    for isa in ("sse2", "avx2"):
        found = run_with_isa(isa, program).split()
        assert found == [each.contiguous().numpy().tobytes().hex() for each in expected]


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"first": torch.zeros(3, 4, dtype=torch.float64)},
            TypeError,
            "first is torch.float64 on cpu; pass torch.float",
        ),
        ({"first": torch.zeros(2, 4)}, ValueError, r"first has shape \(2, 4\), but the others need \(3, 4\)"),
        ({"rest": torch.zeros(3, 4)}, ValueError, "it must have three dimensions"),
        ({"rest": torch.zeros(3, 2, 4).to_sparse()}, TypeError, "rest has layout"),
        ({"grad": torch.zeros(3, 6)}, ValueError, r"grad has shape \(3, 6\), but the others need \(3, 7\)"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    given = {"grad": torch.zeros(3, 7), "first": torch.zeros(3, 4), "rest": torch.zeros(3, 2, 4)} | change
    with pytest.raises(error, match=message):
        pair_gradients(**given)
