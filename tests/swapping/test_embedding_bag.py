"""EmbeddingBag gives what torch's gives."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import speedswap
from speedswap.errors import IdError

ROWS, DIM = 12, 5
MODES = ["sum", "mean", "max"]
modes = pytest.mark.parametrize("mode", MODES)


def twins(device: str = "cpu", **kwargs: Any) -> tuple[speedswap.EmbeddingBag, nn.EmbeddingBag]:
    """Return our bag and torch's, with the same rows."""
    ours = speedswap.EmbeddingBag(ROWS, DIM, dtype=torch.float64, **kwargs).to(device)
    theirs = nn.EmbeddingBag(ROWS, DIM, dtype=torch.float64, device=device, **kwargs)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), theirs.detach().cpu(), rtol=1e-12, atol=1e-12)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, *arguments: Any) -> Tensor:
    optimizer.zero_grad()
    out: Tensor = module(*arguments)
    (out.square().sum() + out.sum()).backward()
    optimizer.step()
    return out.detach()


def test_three_bags_to_read(device: str):
    bag = speedswap.EmbeddingBag.from_pretrained(torch.tensor([[1.0, -1.0], [2.0, -2.0], [4.0, -4.0]]), mode="sum")
    ids, offsets = torch.tensor([0, 2, 1], device=device), torch.tensor([0, 2, 2], device=device)
    assert bag(ids, offsets).tolist() == [[5, -5], [0, 0], [2, -2]]
    bag.mode = "mean"
    assert bag(ids, offsets).tolist() == [[2.5, -2.5], [0, 0], [2, -2]]
    bag.mode = "max"
    assert bag(ids, offsets).tolist() == [[4, -1], [0, 0], [2, -2]]


# ---- training --------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_training_equals_torchs(device: str, mode: str, padding_idx: int | None, optimizer: str):
    modules = twins(device, mode=mode, padding_idx=padding_idx)
    optimizers = [getattr(torch.optim, optimizer)(module.parameters(), lr=0.05) for module in modules]
    for k in range(20):
        if k % 2:
            arguments = [torch.randint(ROWS, (6, 4), device=device)]
        else:
            offsets = torch.tensor([0, 0, 4, 9, 9, 24, 25], device=device)
            arguments = [torch.randint(ROWS, (25,), device=device), offsets]
        ours, theirs = (step(module, o, *arguments) for module, o in zip(modules, optimizers, strict=True))
        assert_same(ours, theirs)
    assert_same(modules[0].table.read(), modules[1].weight)


def test_adam_trains_the_rows_of_the_batch_alone(device: str):
    """As torch.optim.SparseAdam does with torch's sparse gradients."""
    ours, _ = twins(device, mode="sum")
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, dtype=torch.float64, device=device)
    theirs.load_state_dict(ours.state_dict())
    optimizers = torch.optim.Adam(ours.parameters(), lr=0.01), torch.optim.SparseAdam(theirs.parameters(), lr=0.01)
    for _ in range(20):
        ids = torch.randint(ROWS, (4, 3), device=device)
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            step(module, optimizer, ids)
    # SparseAdam adds eps before the bias correction of the second moment, Adam after it.
    torch.testing.assert_close(ours.table.read(), theirs.weight.detach().cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("freeze", [False, True])
def test_weights_of_ids_and_their_gradients_are_torchs(device: str, padding_idx: int | None, freeze: bool):
    modules = twins(device, mode="sum", padding_idx=padding_idx)
    ids, offsets = torch.randint(ROWS, (25,), device=device), torch.tensor([0, 0, 4, 9, 24, 25], device=device)
    start = torch.randn(25, dtype=torch.float64, device=device)
    gradients = []
    for module in modules:
        module.weight.requires_grad_(not freeze)
        weights = start.clone().requires_grad_()
        optimizer = torch.optim.SGD([*module.parameters(), weights], lr=0.1)
        step(module, optimizer, ids, offsets, weights)
        gradients.append(weights.grad)
    assert_same(*gradients)
    assert_same(modules[0].table.read(), modules[1].weight)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Return ids, and the sizes of the bags that they form."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=8))
    return draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(sizes), max_size=sum(sizes))), sizes


@given(
    batch=batches(),
    mode=st.sampled_from([*MODES, "weighted"]),
    padding_idx=st.none() | st.integers(0, ROWS - 1),
    last=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from([torch.int32, torch.int64])] * 2),
)
def test_any_bags_give_torchs_values_and_gradients(
    batch: tuple[list[int], list[int]],
    mode: str,
    padding_idx: int | None,
    last: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
):
    ids, begins = torch.tensor(batch[0], dtype=dtypes[0]), torch.tensor([0, *batch[1]]).cumsum(0).to(dtypes[1])
    settings = {"mode": "sum" if mode == "weighted" else mode, "padding_idx": padding_idx, "include_last_offset": last}
    ours, theirs = twins(**settings)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    offsets = begins if last else begins[:-1]
    if not last and not len(offsets):
        ids = ids[:0]
    weights = torch.randn(len(ids), dtype=torch.float64) if mode == "weighted" else None
    out = ours(ids, offsets, weights)
    optimizer.zero_grad()
    out.square().sum().backward()
    optimizer.step()
    # torch cannot do without bags, nor with offsets of another dtype than the ids' in every version.
    if len(begins) == 1:
        assert out.shape == (0, DIM)
        return
    expected = theirs(ids.long(), offsets.long(), weights)
    assert_same(out.detach(), expected)
    expected.square().sum().backward()
    assert_same(ours.table.read(), theirs.weight - theirs.weight.grad)


class Tagged(Tensor):
    """A subclass of tensors, as libraries wrap a batch in."""


def test_weights_may_be_of_a_subclass_of_tensors(device: str):
    bag = speedswap.EmbeddingBag(50, 4, mode="sum", device=device)
    ids, offsets, weights = torch.arange(6, device=device), torch.tensor([0, 2], device=device), torch.rand(6)
    expected = bag(ids, offsets, per_sample_weights=weights.to(device))
    found = bag(ids, offsets, per_sample_weights=weights.to(device).as_subclass(Tagged))
    assert torch.equal(found.as_subclass(Tensor), expected)


@modes
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_batches_without_ids(device: str, mode: str, shape: tuple[int, int]):
    bag, _ = twins(device, mode=mode)
    before = bag.table.read()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    out = step(bag, optimizer, torch.empty(shape, dtype=torch.int64, device=device))
    assert torch.equal(out, torch.zeros(shape[0], DIM, dtype=torch.float64, device=device))
    assert torch.equal(bag.table.read(), before)


@modes
def test_a_bag_of_padding_alone_is_empty(device: str, mode: str):
    ours, theirs = twins(device, mode=mode, padding_idx=2)
    ids = torch.tensor([[2, 2], [2, 5]], device=device)
    assert_same(ours(ids).detach(), theirs(ids))
    assert not ours(ids)[0].any()


# ---- what is refused -------------------------------------------------------------------------------------------------

IDS = torch.tensor([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IDS, torch.tensor([1, 2])), ValueError, r"offsets\[0\] is 1; the first bag begins at 0"),
        ((IDS, torch.tensor([0, 3, 2])), ValueError, r"offsets\[2\] is 2 after 3; bags lie one after the other"),
        ((IDS, torch.tensor([0, 2, -1])), ValueError, r"offsets\[2\] is -1 after 2"),
        ((IDS, torch.tensor([0, 2, -(2**63), 4])), ValueError, r"offsets\[2\] is -9223372036854775808 after 2"),
        ((IDS, torch.tensor([0, 5])), ValueError, r"offsets\[1\] is 5, but input has 4 ids; a bag begins inside"),
        ((IDS, torch.tensor([0, 2**62])), ValueError, r"offsets\[1\] is 4611686018427387904, but input has 4 ids"),
        ((IDS, torch.tensor([], dtype=torch.int64)), ValueError, "offsets is empty, but input has 4 ids"),
        ((IDS, torch.tensor([[0, 2]])), ValueError, r"offsets has shape \(1, 2\); give one dimension"),
        ((IDS, torch.tensor([0.0, 2.0])), TypeError, r"offsets has dtype torch.float32; convert it to torch.int64"),
        ((IDS, [0, 2]), TypeError, "offsets is a list; pass a tensor"),
        ((IDS,), ValueError, "offsets is None, but input has one dimension"),
        ((IDS.view(2, 2), torch.tensor([0, 2])), ValueError, r"offsets is given, but input has shape \(2, 2\)"),
        ((IDS[0],), ValueError, r"input has shape \(\); give \(bags, ids per bag\)"),
        ((IDS.view(1, 2, 2),), ValueError, r"input has shape \(1, 2, 2\)"),
        ((IDS.float().view(2, 2),), TypeError, r"ids has dtype torch.float32; convert it"),
        (([1, 2],), TypeError, "input is a list; pass a tensor of ids, or a KeyedJaggedTensor"),
        (({"a": 1},), TypeError, "input is a dict; pass a tensor of ids, or a KeyedJaggedTensor"),
        ((IDS.view(2, 2), None, torch.ones(4)), ValueError, r"per_sample_weights has shape \(4,\), but input has \(2"),
        ((IDS.view(2, 2), None, 2.0), TypeError, "per_sample_weights is a float; pass a tensor"),
        (
            (IDS.view(2, 2), None, torch.ones(2, 2)),
            TypeError,
            r"per_sample_weights has dtype torch.float32, but",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_read(
    arguments: tuple[Any, ...], error: type[Exception], message: str
):
    bag, _ = twins(mode="sum")
    gathered: list[Tensor] = []
    bag._look_up = lambda ids, real=bag._look_up: gathered.append(ids) or real(ids)
    with pytest.raises(error, match=message):
        bag(*arguments)
    if "ids has dtype" not in message:
        assert not gathered
    assert bag(IDS.view(2, 2)).shape == (2, DIM)


@pytest.mark.parametrize("offsets", [[0, 2, 3], [0, 5], [0]])
def test_the_last_offset_must_be_the_number_of_ids(offsets: list[int]):
    bag, _ = twins(include_last_offset=True)
    with pytest.raises(ValueError, match=rf"offsets\[{len(offsets) - 1}\] is {offsets[-1]}, but input has 4 ids; with"):
        bag(IDS, torch.tensor(offsets))
    with pytest.raises(ValueError, match="offsets is empty, but include_last_offset is set"):
        bag(IDS[:0], torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_weights_go_with_sums(mode: str):
    bag, _ = twins(mode=mode)
    with pytest.raises(ValueError, match=f"per_sample_weights are given, but mode is '{mode}'; they go with"):
        bag(IDS.view(2, 2), None, torch.ones(2, 2, dtype=torch.float64))


def test_ids_outside_the_table_are_named_by_their_place_in_the_input(device: str):
    bag, _ = twins(device, padding_idx=0)
    with pytest.raises(IdError, match=rf"ids\[1, 0\] is {ROWS}, but table 'table' has rows 0 to {ROWS - 1}"):
        bag(torch.tensor([[0, 1], [ROWS, 0]], device=device))
    with pytest.raises(IdError, match=r"ids\[2\] is -1"):
        bag(torch.tensor([0, 1, -1], device=device), torch.tensor([0, 1], device=device))


@pytest.mark.parametrize("cls", [speedswap.Embedding, speedswap.EmbeddingBag])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"max_norm": 1.0}, "max_norm is 1.0, but a lookup does not change the table; scale the rows it returns"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq is True; leave it out"),
        ({"sparse": True}, "sparse is True; leave it out"),
    ],
)
def test_what_torchs_modules_have_beside_is_refused_with_the_remedy(
    cls: type[nn.Module], argument: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        cls(5, 2, **argument)


def test_constructor_arguments_are_checked():
    with pytest.raises(ValueError, match=r"mode is 'median'; choose \"sum\", \"mean\" or \"max\""):
        speedswap.EmbeddingBag(5, 2, mode="median")
    with pytest.raises(ValueError, match="padding_idx is 5; give one of the table's 5 rows"):
        speedswap.EmbeddingBag(5, 2, padding_idx=5)
    with pytest.raises(ValueError, match=r"embeddings has shape \(3,\)"):
        speedswap.EmbeddingBag.from_pretrained(torch.zeros(3))


# ---- the module ------------------------------------------------------------------------------------------------------


def test_the_state_dict_is_torchs():
    ours, theirs = twins(mode="sum")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        theirs.weight.add_(1)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.table.read(), theirs.weight.detach())


def test_from_pretrained_freezes_by_default():
    rows = torch.randn(4, 3)
    frozen = speedswap.EmbeddingBag.from_pretrained(rows, mode="max")
    assert frozen.mode == "max"
    assert torch.equal(frozen.table.read(), rows)
    assert not frozen(torch.tensor([[1, 2]])).requires_grad
    assert speedswap.EmbeddingBag.from_pretrained(rows, freeze=False)(torch.tensor([[1]])).requires_grad


def test_a_pickled_bag_is_the_same_bag(tmp_path: Path):
    bag = speedswap.EmbeddingBag(
        ROWS, DIM, mode="max", include_last_offset=True, padding_idx=1, storage="disk", path=tmp_path / "rows"
    )
    bag.table.flush()
    text = pickle.dumps(bag)
    expected = bag(IDS, torch.tensor([0, 1, 4])).detach()
    bag.table.close()
    again = pickle.loads(text)
    assert (again.mode, again.include_last_offset, again.padding_idx) == ("max", True, 1)
    assert torch.equal(again(IDS, torch.tensor([0, 1, 4])).detach(), expected)


def test_a_loss_differentiated_after_its_rows_were_trained_is_refused_where_it_needs_them():
    """The gradient of the weights is made of the rows as they were."""
    ours, theirs = twins(mode="sum")
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        step(module, optimizer, IDS.view(2, 2))  # attaches
        optimizer.zero_grad()
        weights = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        out = module(IDS.view(2, 2), None, weights)
        out.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_lookahead_gives_the_same_bits(device: str, mode: str):
    """The ids that are announced are those of the input, padding among them."""
    batches = [torch.randint(ROWS, (6, 4), device=device) for _ in range(8)]
    results = []
    for depth in (0, 2):
        bag = speedswap.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=1, seed=3).to(device)
        optimizer = torch.optim.Adam(bag.parameters(), lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a lookup that the lookahead was not told of
            for ids in speedswap.lookahead(batches, {bag: lambda ids: ids}, depth=depth):
                step(bag, optimizer, ids)
        results.append(bag.table.read())
    assert torch.equal(*results)


def test_a_keyed_tensor_is_announced_by_its_values():
    bag, _ = twins(mode="sum")
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    for keyed in speedswap.lookahead([Keyed(SAMPLES)] * 3, {bag: lambda keyed: keyed.values()}):
        step(bag, optimizer, keyed)


# ---- keyed bags ------------------------------------------------------------------------------------------------------


class Keyed:
    """The part of torchrec.KeyedJaggedTensor that is used."""

    def __init__(self, samples: dict[str, list[list[int]]], weights: Tensor | None = None) -> None:
        self._samples, self._weights = samples, weights

    def keys(self) -> list[str]:
        return list(self._samples)

    def values(self) -> Tensor:
        return torch.tensor([i for bags in self._samples.values() for bag in bags for i in bag], dtype=torch.int64)

    def lengths(self) -> Tensor:
        return torch.tensor([len(bag) for bags in self._samples.values() for bag in bags], dtype=torch.int32)

    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths().cumsum(0)])

    def stride(self) -> int:
        return len(next(iter(self._samples.values()), []))

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def variable_stride_per_key(self) -> bool:
        return False


SAMPLES = {"movie": [[1, 2], []], "series": [[3], [4, 5, 1]]}


class OnlyLengths:
    """The least that is needed."""

    def __init__(self, keyed: Keyed) -> None:
        self.keys, self.values, self.stride, self.lengths = keyed.keys, keyed.values, keyed.stride, keyed.lengths


@modes
@pytest.mark.parametrize("make", [Keyed, lambda samples: OnlyLengths(Keyed(samples))], ids=["all", "lengths"])
def test_a_keyed_tensor_gives_its_keys_side_by_side(mode: str, make: Any):
    ours, theirs = twins(mode=mode)
    optimizers = [torch.optim.Adagrad(module.parameters(), lr=0.1) for module in (ours, theirs)]
    out = step(ours, optimizers[0], make(SAMPLES))
    flat = torch.tensor([1, 2, 3, 4, 5, 1])
    expected = step(theirs, optimizers[1], flat, torch.tensor([0, 2, 2, 3]))  # movie's two bags, then series'
    assert out.shape == (2, 2 * DIM)
    assert_same(out[0], torch.cat([expected[0], expected[2]]))
    assert_same(out[1], torch.cat([expected[1], expected[3]]))
    assert_same(ours.table.read(), theirs.weight)


def test_a_keyed_tensor_of_one_key_is_its_bags():
    ours, theirs = twins(mode="sum")
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    out = ours(Keyed({"movie": SAMPLES["movie"]}, weights))
    assert_same(out.detach(), theirs(torch.tensor([1, 2]), torch.tensor([0, 2]), weights))
    assert ours(Keyed({})).shape == (0, 0)


def test_a_keyed_tensor_that_does_not_fit_is_refused():
    bag, _ = twins(mode="sum")
    keyed = Keyed(SAMPLES)
    with pytest.raises(ValueError, match="input is keyed and has offsets and weights of its own"):
        bag(keyed, torch.tensor([0]))
    keyed.stride = lambda: 3
    with pytest.raises(ValueError, match="input has 2 keys and a stride of 3, but 4 bags"):
        bag(keyed)
    keyed.variable_stride_per_key = lambda: True
    with pytest.raises(ValueError, match=r"a stride for each of its keys; look the keys up one by one, keyed\[key\]"):
        bag(keyed)
    wrong = Keyed(SAMPLES)
    wrong.offsets = lambda: torch.tensor([0, 2, 1, 3, 6])
    with pytest.raises(ValueError, match=r"offsets\[2\] is 1 after 2"):
        bag(wrong)
    wrong.values = lambda: [1]
    with pytest.raises(TypeError, match=r"input.values\(\) is a list; pass a tensor"):
        bag(wrong)
