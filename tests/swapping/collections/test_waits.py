"""A step of a collection on a GPU waits once, in every form of features: counted; and its results are the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simulated_gpu
import torch
from torch import Tensor

import speedswap
from speedswap import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, kernels
from speedswap.errors import IdError
from speedswap.swapping.collections import features

ROWS, BATCH = 20, 8
POOLINGS = {"sums": ["sum"], "means": ["sum", "mean"], "maxima": ["sum", "max"]}


def collection_of(kind: str, device: str, *, groups: int = 1, shared: int = 0, weighted: bool = False) -> Any:
    """Return five tables in one group or two, of which the first ``shared`` and one more have the same feature."""
    settings = [
        {
            "name": f"t{i}",
            "num_embeddings": ROWS,
            "embedding_dim": 4 + 2 * (i % groups),
            "feature_names": ["f0" if i <= shared else f"f{i}"],
            "padding_idx": 0 if kind == "means" else None,
            "seed": i,
        }
        for i in range(5)
    ]
    where = {"storage": "pinned", "device": device}
    if kind == "rows":
        return speedswap.EmbeddingCollection([EmbeddingConfig(**each) for each in settings], **where)
    poolings = POOLINGS[kind]
    configs = [EmbeddingBagConfig(**each, pooling=poolings[i % len(poolings)]) for i, each in enumerate(settings)]
    return speedswap.EmbeddingBagCollection(configs, is_weighted=weighted, **where)


def jagged(shared: int, seed: int, device: str, longest: int = 3) -> dict[str, JaggedTensor]:
    """Return lists of ids, each with a weight; those of the first feature have at most ``longest``."""
    generator, lists = torch.Generator().manual_seed(seed), {}
    for name in ["f0", *(f"f{i}" for i in range(shared + 1, 5))]:
        lengths = torch.randint(1 + (longest if name == "f0" else 3), (BATCH,), generator=generator)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator)
        lists[name] = JaggedTensor(ids.to(device), weights.to(device), lengths.to(device))
    return lists


def keyed(shared: int, seed: int, device: str, order: int = 1, longest: int = 3) -> KeyedJaggedTensor:
    """Return the same, not known to be sound, as from a loader that makes batches on the GPU."""
    lists = jagged(shared, seed, "cpu", longest)
    sound = KeyedJaggedTensor.from_jt_dict({name: lists[name] for name in list(lists)[::order]})
    values, weights, lengths = (each.to(device) for each in (sound.values(), sound.weights(), sound.lengths()))
    return KeyedJaggedTensor(sound.keys(), values, weights, lengths)


def by_offsets(*args: Any) -> KeyedJaggedTensor:
    batch = keyed(*args)
    return KeyedJaggedTensor(batch.keys(), batch.values(), batch.weights(), offsets=batch.offsets().int())


FORMS: dict[str, Callable[[int, int, str], Any]] = {
    "one id": lambda *args: {name: each.lengths() for name, each in jagged(*args).items()},
    "several ids": lambda *args: {name: each.lengths().view(-1, 2) for name, each in jagged(*args).items()},
    "offsets": lambda *args: {name: (each.values(), each.offsets()[:-1]) for name, each in jagged(*args).items()},
    "jagged": lambda *args: {
        name: JaggedTensor(each.values(), None, each.lengths()) for name, each in jagged(*args).items()
    },
    "keyed": keyed,
    "keyed, by offsets": by_offsets,
    "keyed, in another order": lambda *args: keyed(*args, order=-1),
    "keyed, from the CPU": lambda shared, seed, device: keyed(shared, seed, "cpu").to(device),
}

CASES = [(kind, groups, shared) for kind in ("means", "maxima", "rows") for groups in (1, 2) for shared in (0, 1)]


def step(collection: Any, optimizer: torch.optim.Optimizer, given: Any) -> Tensor:
    optimizer.zero_grad()
    found = collection(given)
    values = [each.values().reshape(-1) for each in found.values()] if isinstance(found, dict) else [found.values()]
    output = torch.cat(values)
    (output * torch.linspace(-1, 2, output.numel(), device=output.device).view_as(output)).square().sum().backward()
    optimizer.step()
    kernels.finish_transfers()  # so that no thread's timing decides how many writes are still pending
    return output.detach().clone()


def waits_of(action: Callable[[], object]) -> int:
    """Return how often the host waits, or asks for numbers that have not arrived but by chance."""
    early, begun, arriving = 0, dict[int, int](), features._Arriving
    begin, numbers = arriving.__init__, arriving.numbers
    with simulated_gpu.counted() as counts, pytest.MonkeyPatch.context() as patch:

        def began(self: Any, *args: Any) -> None:
            begun[id(self)] = len(counts.round_trips)
            begin(self, *args)

        def asked(self: Any) -> list[int]:
            nonlocal early
            result = numbers(self)
            early += begun.get(id(self)) == len(counts.round_trips)
            return result

        patch.setattr(arriving, "__init__", began)
        patch.setattr(arriving, "numbers", asked)
        action()
    return len(counts.round_trips) + early


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_waits_once(form: str, ahead: bool, gpu: str) -> None:
    waits = {}
    for kind, groups, shared in CASES:
        collection = collection_of(kind, gpu, groups=groups, shared=shared)
        optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
        batches = [FORMS[form](shared, seed, gpu) for seed in range(4)]
        loop = iter(speedswap.lookahead(batches, {collection: lambda given: given}) if ahead else batches)
        for _ in range(2):
            step(collection, optimizer, next(loop))
        waits[kind, groups, shared] = waits_of(lambda args=(collection, optimizer): step(*args, next(loop)))  # noqa: B023
        assert len([*loop]) == 1  # writes of a loop that is left would arrive while the next case is counted
    assert waits == dict.fromkeys(CASES, 1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("groups", "shared"), [(2, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["means", "maxima", "rows", "weighted"])
def test_batches_of_unknown_sizes_train_to_the_same_bits(
    kind: str, groups: int, shared: int, order: int, gpu: str
) -> None:
    """The host knows the number of each key's ids from the start, or only after rows are found."""
    results = []
    for is_known in (True, False):
        is_weighted = kind == "weighted"
        settings = {"groups": groups, "shared": shared, "weighted": is_weighted}
        collection = collection_of("sums" if is_weighted else kind, gpu, **settings)
        optimizer = torch.optim.Adam(collection.parameters(), lr=0.1)
        steps = []
        for seed in range(4):
            batch = keyed(shared, seed, gpu, order)
            if is_known:
                batch = batch.to("cpu").to(gpu)
            factors = batch._weights = batch.weights().detach().requires_grad_()
            output = step(collection, optimizer, batch)
            steps.append((output, factors.grad if is_weighted else output))
        rows = [table.read(column=column) for table in collection.tables.values() for column in table.columns]
        results.append((steps, rows))
    (steps, rows), (others, other_rows) = results
    for (output, grad), (other, other_grad) in zip(steps, others, strict=True):
        assert torch.equal(output, other)
        assert torch.equal(grad, other_grad)
    assert all(torch.equal(one, other) for one, other in zip(rows, other_rows, strict=True))


def test_a_batch_that_looks_keys_up_more_often_than_the_one_before_waits_twice(gpu: str) -> None:
    """There is too little room, once; its rows are those found with room enough."""
    results = []
    for is_known in (True, False):
        collection = collection_of("sums", gpu, shared=3, weighted=True)
        optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
        outputs, waits = [], []
        for seed, longest in enumerate((2, 2, 90, 90)):
            batch = keyed(3, seed, gpu, 1, longest)
            batch = batch.to("cpu").to(gpu) if is_known else batch
            waits.append(waits_of(lambda batch=batch: outputs.append(step(collection, optimizer, batch))))  # noqa: B023
        results.append((waits, outputs))
    (known, outputs), (waits, others) = results
    assert [more - each for more, each in zip(waits, known, strict=True)] == [1, 0, 1, 0]
    assert known[1:] == [1, 1, 1]
    assert all(torch.equal(one, other) for one, other in zip(outputs, others, strict=True))


def test_wrong_batches_of_unknown_sizes_are_named(gpu: str) -> None:
    collection = collection_of("sums", gpu, groups=2, shared=1)
    collection(keyed(1, 0, gpu))
    given = keyed(1, 1, gpu)
    for changed, value, error, message in (
        (
            given.values(),
            ROWS,
            IdError,
            rf"values\(\)\[\d+\] of feature 'f\d' is {ROWS}, but table 't\d' has rows 0 to 19",
        ),
        (given.lengths(), -1, ValueError, "features has offsets that decrease, from"),
        (given.lengths(), 90, ValueError, r"features has offsets from 0 to \d+, but \d+ ids"),
    ):
        before = changed.clone()
        changed[0] = value
        with pytest.raises(error, match=message):
            collection(KeyedJaggedTensor(given.keys(), given.values(), None, given.lengths()))
        changed.copy_(before)
    collection(KeyedJaggedTensor(given.keys(), given.values(), None, given.lengths()))
