"""Collections under lookahead and under the batch splitter: the results of the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import speedswap
from speedswap import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, kernels
from speedswap.batching.nested import Batch
from speedswap.errors import BatchError, IdError
from speedswap.swapping.collections.features import steps

BATCH = 6
SIZES = {"user": (9, 4), "item": (30, 4), "word": (7, 6)}


def collection_of(kind: str, device: str, **settings: Any) -> Any:
    settings = {"device": device, **settings}
    if kind == "bags":
        return speedswap.EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, seed=rows, padding_idx=0)
                for name, (rows, dim) in SIZES.items()
            ],
            **settings,
        )
    return speedswap.EmbeddingCollection(
        [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, seed=rows)
            for name, (rows, dim) in SIZES.items()
        ],
        **settings,
    )


def keyed(seed: int, device: str) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (len(SIZES), BATCH), generator=generator)
    values = [
        torch.randint(rows, (int(count),), generator=generator)
        for count, (rows, _) in zip(lengths.sum(1), SIZES.values(), strict=True)
    ]
    batch = KeyedJaggedTensor.from_lengths_sync(list(SIZES), torch.cat(values), lengths.reshape(-1))
    return batch.to(device)


FORMS: dict[str, Callable[[int, str], Any]] = {
    "keyed": keyed,
    "tuples": lambda seed, device: {
        key: (each.values(), each.offsets()[:-1]) for key, each in keyed(seed, device).to_dict().items()
    },
    "jagged": lambda seed, device: keyed(seed, device).to_dict(),
    "one": lambda seed, device: {
        name: torch.randint(rows, (BATCH,), generator=torch.Generator().manual_seed(seed)).to(device)
        for name, (rows, _) in SIZES.items()
    },
}


def output_of(collection: Any, features: Any) -> Tensor:
    found = collection(features)
    if isinstance(found, speedswap.KeyedTensor):
        return found.values()
    return torch.cat([each.values().reshape(-1) for each in found.values()])


def step(collection: Any, optimizer: torch.optim.Optimizer, features: Any) -> Tensor:
    optimizer.zero_grad()
    output = output_of(collection, features)
    (output * torch.arange(1, output.numel() + 1, device=output.device).view_as(output)).square().sum().backward()
    optimizer.step()
    return output.detach().cpu()


def rows_of(collection: Any) -> dict[str, Any]:
    return {
        f"{name}.{column}": table.read(column=column).tolist()
        for name, table in collection.tables.items()
        for column in table.columns
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "depth"), [("bags", 1), ("rows", 3)])
def test_lookahead_trains_as_the_plain_loop(kind: str, form: str, depth: int, device: str) -> None:
    results = []
    for ahead in (0, depth):
        collection = collection_of(kind, device)
        optimizer = torch.optim.Adam(collection.parameters(), lr=0.1)
        batches = [FORMS[form](seed, device) for seed in range(7)]
        loop = speedswap.lookahead(batches, {collection: lambda features: features}, depth=ahead)
        outputs = [step(collection, optimizer, features) for features in loop]
        results.append((outputs, rows_of(collection)))
    (plain, rows), (ours, ours_rows) = results
    assert rows == ours_rows
    for one, other in zip(plain, ours, strict=True):
        assert torch.equal(one, other)


def test_streams_share_no_offsets_that_one_of_them_has_yet_to_make(device: str) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")
    count = 9_999  # of no other test
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(20_000_000)
        steps(count, 2, torch.device(device, 0))
    with torch.cuda.stream(second):
        found = steps(count, 2, torch.device(device, 0)).cpu()
    assert torch.equal(found, torch.arange(count) * 2)


@pytest.mark.parametrize("form", ["keyed", "one"])
def test_features_on_the_cpu_are_announced_for_the_device(form: str, device: str) -> None:
    """A loader's batches are on the CPU still when the lookahead sees them."""
    results = []
    for depth in (0, 1):
        collection = collection_of("bags", device)
        optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
        batches = [FORMS[form](seed, "cpu") for seed in range(4)]
        for features in speedswap.lookahead(batches, {collection: lambda features: features}, depth=depth):
            moved = features.to(device) if form == "keyed" else {key: ids.to(device) for key, ids in features.items()}
            step(collection, optimizer, moved)
        results.append(rows_of(collection))
    assert results[0] == results[1]


def test_announced_lookups_are_prefetched(device: str) -> None:
    """The rows come from the lookahead: nothing is gathered in the forward pass, except after a write."""
    collection = collection_of("bags", device)
    gathered: list[str] = []
    for group in collection.groups:
        inner = group.table.store.gather

        def gather(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            gathered.append("gather")
            return inner(*args, **kwargs)

        group.table.store.gather = gather
    for place, features in enumerate(
        speedswap.lookahead([keyed(seed, device) for seed in range(3)], {collection: lambda features: features})
    ):
        if place == 2:
            collection.tables["item"].write(0, torch.zeros(1, 4))  # of the first group of two
        expected = [] if place < 2 else ["gather"]
        collection(features)
        assert gathered == expected


def test_other_keys_with_the_same_ids_are_another_lookup(device: str) -> None:
    collection = collection_of("bags", device)
    lengths = torch.ones(3 * BATCH, dtype=torch.int64)
    ids = torch.randint(7, (3 * BATCH,), generator=torch.Generator().manual_seed(1))
    announced, given = (
        KeyedJaggedTensor.from_lengths_sync(keys, ids.to(device), lengths.to(device))
        for keys in (["user", "item", "word"], ["word", "user", "item"])
    )
    expected = collection(given).values()
    for batch in speedswap.lookahead([announced], {collection: lambda features: features}):
        with torch.no_grad():
            assert torch.equal(collection(given).values(), expected)
            assert not torch.equal(collection(batch).values(), expected)


@pytest.mark.parametrize("form", ["one", "tuples"])
@pytest.mark.filterwarnings("ignore:SW407")
def test_features_changed_in_place_after_they_were_announced_are_looked_up_as_they_are(form: str, device: str) -> None:
    results = []
    for depth in (0, 1):
        collection = collection_of("bags", device)
        optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
        outputs = []
        batches = [FORMS[form](seed, device) for seed in range(4)]
        for place, features in enumerate(
            speedswap.lookahead(batches, {collection: lambda features: features}, depth=depth)
        ):
            if place % 2:
                for each in features.values():
                    ids = each[0] if isinstance(each, tuple) else each
                    ids.copy_((ids + 1) % 7)
            outputs.append(step(collection, optimizer, features))
        results.append((outputs, rows_of(collection)))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, other)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("again", ["same", "views", "copies"])
def test_announced_features_are_read_once(again: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where only a copy has to be read and compared again; memory of the CPU may change unnoticed."""
    merged: list[kernels.FeatureIds] = []
    merge = kernels.merge_ids
    monkeypatch.setattr(kernels, "merge_ids", lambda asked: (merged.append(asked), merge(asked))[1])
    collection = collection_of("bags", device)
    optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
    batches = [FORMS["tuples"](seed, device) for seed in range(5)]
    change = {"same": lambda ids: ids, "views": lambda ids: ids[:], "copies": Tensor.clone}[again]
    for features in speedswap.lookahead(batches, {collection: lambda features: features}):
        step(collection, optimizer, {name: (change(ids), offsets) for name, (ids, offsets) in features.items()})
    if device == "cuda":
        assert len(merged) == len(batches) * (1 + (again == "copies"))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("form", ["tuples", "foreign"])
def test_wrong_offsets_are_told_in_their_turn(form: str, depth: int, device: str) -> None:
    """On a GPU with the answer about the ids: nothing is read for them, and the batches around train as ever."""
    make = SPLIT.get(form) or FORMS[form]
    batches = [make(seed, device) for seed in range(3)]
    if form == "tuples":
        batches[1]["item"][1][2] = -1
        message = r"offsets\[2\] of feature 'item' is -1 after"
    else:
        batches[1].offsets()[3] = 99
        message = "features has offsets that decrease, from 99 to "
    collection = collection_of("bags", device)
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    loop = iter(speedswap.lookahead(batches, {collection: lambda features: features}, depth=depth))
    step(collection, optimizer, next(loop))
    before = rows_of(collection)
    with pytest.raises(ValueError, match=message):
        step(collection, optimizer, next(loop))
    assert rows_of(collection) == before
    step(collection, optimizer, batches[2])


def test_wrong_offsets_of_a_batch_without_ids_are_told(device: str) -> None:
    none, offsets = torch.empty(0, dtype=torch.int64, device=device), torch.tensor([0, 0, 3], device=device)
    with pytest.raises(ValueError, match=r"offsets\[2\] of feature 'user' is 3 after 0, and there are 0 ids"):
        collection_of("bags", device)(dict.fromkeys(SIZES, (none, offsets)))


def test_ids_outside_of_their_table_are_named_in_their_turn(device: str) -> None:
    collection = collection_of("bags", device)
    good, bad = FORMS["one"](0, device), FORMS["one"](1, device)
    bad["user"][3] = 9  # the first row of the next table
    loop = iter(speedswap.lookahead([good, bad, good], {collection: lambda features: features}))
    collection(next(loop))
    batch = next(loop)
    with pytest.raises(IdError, match=r"ids\[3\] of feature 'user' is 9, but table 'user' has rows 0 to 8"):
        collection(batch)
    collection(next(loop))


def test_optimizers_attached_beforehand_share_the_records(device: str) -> None:
    collection = collection_of("rows", device)
    optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
    speedswap.attach(optimizer, collection)
    for group in collection.groups:
        assert len(group.table.store.groups) == 1
    step(collection, optimizer, keyed(0, device))
    assert set(collection.tables["user"].columns) == {"weight", "sum"}


# ---------------------------------------------------------------------- the splitter


class Model(torch.nn.Module):
    """A collection with a layer above it."""

    def __init__(self, collection: Any, width: int) -> None:
        super().__init__()
        self.collection = collection
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, features: Any) -> Tensor:
        return self.layer(self.collection(features).values()).squeeze(1)


def foreign(batch: KeyedJaggedTensor) -> Any:
    """Return a batch as an object of another class with the same methods, made with the same arguments."""

    class Foreign:
        def __init__(
            self, keys: list[str], values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None
        ) -> None:
            self._inner = KeyedJaggedTensor(keys, values, weights, lengths)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    return Foreign(batch.keys(), batch.values(), lengths=batch.lengths())


SPLIT: dict[str, Callable[[int, str], Any]] = {
    "keyed": keyed,
    "foreign": lambda seed, device: foreign(keyed(seed, device)),
    "one": FORMS["one"],
    "nested": lambda seed, device: {
        key: torch.nested.nested_tensor_from_jagged(each.values(), each.offsets())
        for key, each in keyed(seed, device).to_dict().items()
    },
    "padded": lambda seed, device: {
        key: each.to_padded_dense(4) for key, each in keyed(seed, device).to_dict().items()
    },
}


@pytest.mark.parametrize("form", SPLIT)
def test_a_split_batch_has_the_gradients_of_the_whole(form: str, device: str) -> None:
    if form == "nested" and device != "cpu":
        pytest.skip("the simulated GPU has no nested tensors")
    torch.manual_seed(0)
    expected: list[Tensor] = []
    for micro_batch in (None, 2):
        torch.manual_seed(0)
        model = Model(collection_of("bags", "cpu"), 14).to(device)
        features, labels = SPLIT[form](3, device), torch.arange(float(BATCH), device=device)

        def loss_fn(features: Any, labels: Tensor, model: Model = model) -> Tensor:
            return (model(features) - labels).square().mean()

        if micro_batch is None:
            loss_fn(features, labels).backward()
        else:
            splitter = speedswap.BatchSplitter(model, micro_batch_size=micro_batch)
            splitter.backward(loss_fn, features, labels)
        gradients = [each.grad for each in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        found = [
            *(each for each in gradients if each is not None),
            *map(torch.tensor, rows_of(model.collection).values()),
        ]
        if micro_batch is None:
            expected = found
            continue
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def samples(batch: Any) -> Iterator[dict[str, list[int]]]:
    lists = {key: each.to_dense() for key, each in batch.to_dict().items()}
    for index in range(batch.stride()):
        yield {key: each[index].tolist() for key, each in lists.items()}


def test_samples_of_a_keyed_batch(device: str) -> None:
    batch = keyed(5, device)
    weighted = KeyedJaggedTensor(batch.keys(), batch.values(), batch.values() * 0.5, batch.lengths())
    whole = list(samples(weighted))
    split = Batch((weighted, torch.arange(BATCH, device=device)))
    (part, _), _ = split.part(2, 5)
    assert list(samples(part)) == whole[2:5]
    (part, _), _ = split.take([4, 0, 4])
    assert list(samples(part)) == [whole[4], whole[0], whole[4]]
    assert torch.equal(part.weights(), part.values() * 0.5)
    assert split.device == batch.device()
    with pytest.raises(BatchError, match=r"batch\[1\] has 3 samples, but batch\[0\] has 6"):
        Batch((batch, torch.zeros(3)))
