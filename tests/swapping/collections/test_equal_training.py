"""A collection computes and trains, bit for bit, as a module for each of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap import EmbeddingBagConfig, EmbeddingConfig

BATCH = 7
Ids = dict[str, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "rowwise": lambda parameters: speedswap.optim.RowwiseAdagrad(parameters, lr=0.1),
}

BAGS = [
    EmbeddingBagConfig(name="user", num_embeddings=9, embedding_dim=4, seed=1),
    EmbeddingBagConfig(name="item", num_embeddings=30, embedding_dim=4, seed=2, pooling="mean", padding_idx=3),
    EmbeddingBagConfig(name="wide", num_embeddings=5, embedding_dim=6, seed=3, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="best", num_embeddings=11, embedding_dim=4, seed=4, pooling="max", padding_idx=0),
    EmbeddingBagConfig(name="words", num_embeddings=40, embedding_dim=4, seed=5, pooling="mean", group="own"),
]


def features_of(configs: Iterable[EmbeddingConfig]) -> dict[str, EmbeddingConfig]:
    return {feature: config for config in configs for feature in config.feature_names}


def bags(seed: int, device: str = "cpu") -> dict[str, tuple[Tensor, Tensor]]:
    """Return ids and offsets of each feature; some bags are empty, and ids occur often."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for feature, config in features_of(BAGS).items():
        lengths = torch.randint(4, (BATCH,), generator=generator)
        ids = torch.randint(config.num_embeddings, (int(lengths.sum()),), generator=generator)
        drawn[feature] = ids.to(device), (lengths.cumsum(0) - lengths).to(device)
    return drawn


def keyed(given: Mapping[str, tuple[Tensor, Tensor]], order: Iterable[str]) -> speedswap.KeyedJaggedTensor:
    order = list(order)
    lengths = [
        torch.cat([offsets, offsets.new_tensor([len(ids)])]).diff() for ids, offsets in (given[key] for key in order)
    ]
    values = torch.cat([given[key][0] for key in order])
    return speedswap.KeyedJaggedTensor.from_lengths_sync(order, values, torch.cat(lengths))


FORMS: dict[str, Callable[[dict[str, tuple[Tensor, Tensor]]], Any]] = {
    "tuples": lambda given: given,
    "keyed": lambda given: keyed(given, given),
    "keyed-otherwise": lambda given: keyed(given, sorted(given, reverse=True)),
    "jagged": lambda given: keyed(given, given).to_dict(),
    "nested": lambda given: {
        key: torch.nested.nested_tensor_from_jagged(each.values(), each.offsets())
        for key, each in keyed(given, given).to_dict().items()
    },
}


CASES = [("adam", form) for form in FORMS] + [(name, "tuples") for name in OPTIMIZERS if name != "adam"]


def separate(configs: list[EmbeddingBagConfig], device: str) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            config.name: speedswap.EmbeddingBag(
                config.num_embeddings,
                config.embedding_dim,
                mode=config.pooling,
                seed=config.seed,
                padding_idx=config.padding_idx,
                device=device,
            )
            for config in configs
        }
    )


def look_up_separately(modules: nn.ModuleDict, given: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return what a collection would; a table's features in one call, as their gradients are added up in one."""
    pooled = []
    for config in BAGS:
        ids = torch.cat([given[feature][0] for feature in config.feature_names])
        begins, offsets = 0, []
        for feature in config.feature_names:
            offsets.append(given[feature][1] + begins)
            begins += len(given[feature][0])
        found = modules[config.name](ids, torch.cat(offsets))
        pooled += found.split(BATCH)
    return torch.cat(pooled, 1)


def assert_same(one: Tensor, other: Tensor, device: str) -> None:
    """Assert the same bits; on a GPU torch's kernels add up in another order for another number of rows."""
    tolerance = 0.0 if device == "cpu" else 1e-5
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def loss_of(output: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 2, output.numel(), device=output.device).view_as(output)).square().sum()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_bags_train_as_separate_modules(name: str, form: str, device: str) -> None:
    if form == "nested" and device != "cpu":
        pytest.skip("the simulated GPU has no nested tensors")
    collection = speedswap.EmbeddingBagCollection(BAGS, device=device)
    modules = separate(BAGS, device)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (collection, modules)]
    for step in range(5):
        given = bags(step, device)
        pooled = collection(FORMS[form](given))
        assert pooled.keys() == ["user", "item", "a", "b", "best", "words"]
        assert pooled.length_per_key() == [4, 4, 6, 6, 4, 4]
        expected = look_up_separately(modules, given)
        assert_same(pooled.values(), expected, device)
        for optimizer, output in zip(optimizers, (pooled.values(), expected), strict=True):
            optimizer.zero_grad()
            loss_of(output).backward()
            optimizer.step()
    for key, table in collection.tables.items():
        other = modules[key].table
        assert list(table.columns) == list(other.columns)
        for column in table.columns:
            assert_same(table.read(column=column), other.read(column=column), device)


_Make = Callable[[Any], Optimizer]
TORCHS: dict[str, tuple[bool, _Make, _Make]] = {
    "sgd": (False, lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (False, lambda p: torch.optim.Adagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "sparse-sgd": (True, lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sparse-adagrad": (True, lambda p: torch.optim.Adagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    # With an eps that does not matter: SparseAdam adds it before the correction of the bias.
    "sparse-adam": (
        True,
        lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-16),
        lambda p: torch.optim.SparseAdam(list(p), lr=0.1, eps=1e-16),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", TORCHS)
def test_bags_train_as_torchs_modules(name: str) -> None:
    """Bit for bit with dense gradients; torch rounds otherwise with sparse ones, which it does not sum up first."""
    is_sparse, ours, theirs = TORCHS[name]

    def assert_like(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(
            one, other, **({"rtol": 1e-5, "atol": 1e-5} if is_sparse else {"rtol": 0, "atol": 0})
        )

    # Torch multiplies a sum by a rounded 1 / n for the mean.
    sums = [replace(config, pooling="sum") if config.pooling == "mean" else config for config in BAGS]
    configs = [config for config in sums if not (is_sparse and config.pooling == "max")]
    modules = nn.ModuleDict(
        {
            config.name: nn.EmbeddingBag(
                config.num_embeddings,
                config.embedding_dim,
                mode=config.pooling,
                padding_idx=config.padding_idx,
                sparse=is_sparse,
            )
            for config in configs
        }
    )
    collection = speedswap.EmbeddingBagCollection.from_modules(
        dict(modules.items()), feature_names={"wide": ["a", "b"]}
    )
    optimizers = ours(collection.parameters()), theirs(modules.parameters())
    names = features_of(configs)
    for step in range(5):
        given = {feature: each for feature, each in bags(step).items() if feature in names}
        # One feature per table: torch adds the gradients of two calls in its own order.
        given["b"] = given["b"][0][:0], torch.zeros(BATCH, dtype=torch.int64)
        outputs = (
            collection(given).values(),
            torch.cat([modules[config.name](*given[feature]) for feature, config in names.items()], 1),
        )
        assert_like(*outputs)
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            loss_of(output).backward()
            optimizer.step()
    for key, table in collection.tables.items():
        assert_like(table.read(), modules[key].weight.detach())


ROWS = [
    EmbeddingConfig(name="user", num_embeddings=9, embedding_dim=4, seed=1),
    EmbeddingConfig(name="item", num_embeddings=30, embedding_dim=4, seed=2, padding_idx=3),
    EmbeddingConfig(name="wide", num_embeddings=5, embedding_dim=6, seed=3, feature_names=["a", "b"]),
    EmbeddingConfig(name="best", num_embeddings=11, embedding_dim=4, seed=4, padding_idx=0),
    EmbeddingConfig(name="words", num_embeddings=40, embedding_dim=4, seed=5),
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_rows_train_as_separate_modules(name: str, form: str, device: str) -> None:
    if form == "nested" and device != "cpu":
        pytest.skip("the simulated GPU has no nested tensors")
    collection = speedswap.EmbeddingCollection(ROWS, device=device)
    modules = {
        config.name: speedswap.Embedding(
            config.num_embeddings,
            config.embedding_dim,
            padding_idx=config.padding_idx,
            seed=config.seed,
            device=device,
        )
        for config in ROWS
    }
    parameters = [module.weight for module in modules.values()]
    optimizers = OPTIMIZERS[name](collection.parameters()), OPTIMIZERS[name](parameters)
    for step in range(5):
        given = bags(step, device)
        found = collection(FORMS[form](given))
        assert list(found) == ["user", "item", "a", "b", "best", "words"]
        expected = {}
        for config in ROWS:
            ids = [given[feature][0] for feature in config.feature_names]
            together = modules[config.name](torch.cat(ids))
            expected |= dict(zip(config.feature_names, together.split([len(each) for each in ids]), strict=True))
        for feature, each in found.items():
            assert torch.equal(each.values(), expected[feature])
            assert torch.equal(each.offsets()[:-1], given[feature][1])
        values = [each.values() for each in found.values()], [expected[feature] for feature in found]
        for optimizer, outputs in zip(optimizers, values, strict=True):
            optimizer.zero_grad()
            loss_of(torch.cat([each.reshape(-1) for each in outputs])).backward()
            optimizer.step()
    for key, table in collection.tables.items():
        other = modules[key].table
        for column in table.columns:
            assert_same(table.read(column=column), other.read(column=column), device)


def test_one_id_per_sample_and_ids_with_padding(device: str) -> None:
    configs = [
        EmbeddingBagConfig(name="user", num_embeddings=9, embedding_dim=4, seed=1),
        EmbeddingBagConfig(name="words", num_embeddings=9, embedding_dim=4, seed=2, padding_idx=-1, pooling="mean"),
    ]
    collection = speedswap.EmbeddingBagCollection(configs)
    user = torch.tensor([4, 4, 0], dtype=torch.int32, device=device)
    words = torch.tensor([[1, 2, 8, 8], [8, 8, 8, 8], [5, 8, 5, 5]], device=device)
    pooled = collection({"words": words, "user": user})
    tables = {name: table.read() for name, table in collection.tables.items()}
    assert torch.equal(pooled["user"].cpu(), tables["user"][[4, 4, 0]])
    expected = nn.functional.embedding_bag(words.cpu(), tables["words"], mode="mean", padding_idx=8)
    assert torch.equal(pooled["words"].cpu(), expected)
    pooled["words"].sum().backward()
    (weight,) = collection.parameters()
    assert weight.grad is not None
    assert weight.grad.shape == (2 + 4, 4)  # 0 and 4; 1, 2, 5 and the padding
    assert not weight.grad[-1].any()


def test_weights_of_ids_are_factors_and_have_gradients(device: str) -> None:
    configs = [EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, seed=i) for i, name in enumerate("uv")]
    collection = speedswap.EmbeddingBagCollection(configs, is_weighted=True)
    ids, offsets = torch.tensor([1, 2, 1, 7], device=device), torch.tensor([0, 1, 1], device=device)
    factors = torch.tensor([0.5, 2.0, -1.0, 3.0], device=device, requires_grad=True)
    forms = [
        {
            "u": (ids, offsets, factors),
            "v": (torch.tensor([3, 3, 4], device=device), None, torch.ones(3, device=device)),
        },
        speedswap.KeyedJaggedTensor.from_lengths_sync(
            ["v", "u"],
            torch.tensor([3, 3, 4, 1, 2, 1, 7], device=device),
            torch.tensor([1, 1, 1, 1, 0, 3], device=device),
            torch.cat([torch.ones(3, device=device), factors]),
        ),
    ]
    tables = {name: table.read().to(device) for name, table in collection.tables.items()}
    for form in forms:
        pooled = collection(form)
        other = factors.detach().clone().requires_grad_()
        expected = nn.functional.embedding_bag(ids, tables["u"], offsets, mode="sum", per_sample_weights=other)
        torch.testing.assert_close(pooled["u"], expected)
        alone = speedswap.EmbeddingBag.from_pretrained(tables["u"], mode="sum")
        assert_same(pooled["u"], alone(ids, offsets, other), device)
        assert torch.equal(pooled["v"], tables["v"][[3, 3, 4]])
        factors.grad = None
        pooled["u"].square().sum().backward()
        expected.square().sum().backward()
        assert factors.grad is not None
        torch.testing.assert_close(factors.grad, other.grad)


@pytest.mark.parametrize("stride", [0, 2])
def test_batches_without_ids_give_zeros_and_train_nothing(stride: int, device: str) -> None:
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=4),
        EmbeddingBagConfig(name="b", num_embeddings=9, embedding_dim=4, pooling="mean", padding_idx=3),
        EmbeddingBagConfig(name="c", num_embeddings=9, embedding_dim=4, pooling="max"),
    ]
    collection = speedswap.EmbeddingBagCollection(configs, device=device)
    before = collection.state_dict()
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.1)
    ids, lengths = torch.empty(0, dtype=torch.int32), torch.zeros(3 * stride, dtype=torch.int32)
    batch = speedswap.KeyedJaggedTensor.from_lengths_sync(list("abc"), ids, lengths).to(device)
    starts = torch.zeros(stride, dtype=torch.int32)
    for features in (batch, {name: (ids.to(device), starts.to(device)) for name in "abc"}):
        pooled = collection(features).values()
        assert torch.equal(pooled.cpu(), torch.zeros(stride, 12))
        optimizer.zero_grad()
        pooled.sum().backward()
        optimizer.step()
    assert all(torch.equal(before[name], rows) for name, rows in collection.state_dict().items())


def test_gradients_of_two_batches_add_up(device: str) -> None:
    """As those of separate modules do: each batch's sums are added to the sums before."""
    collection, modules = speedswap.EmbeddingBagCollection(BAGS, device=device), separate(BAGS, device)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (collection, modules)]
    for seed in range(4):
        for output in (collection(bags(seed, device)).values(), look_up_separately(modules, bags(seed, device))):
            loss_of(output).backward()
        for optimizer in optimizers if seed % 2 else ():
            optimizer.step()
            optimizer.zero_grad()
    for key, table in collection.tables.items():
        assert_same(table.read(), modules[key].table.read(), device)


def test_one_feature_in_several_tables_and_twice_in_one(device: str) -> None:
    configs = [
        EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a", "b", "a"]),
        EmbeddingBagConfig(name="u", num_embeddings=12, embedding_dim=4, feature_names=["a"]),
    ]
    collection = speedswap.EmbeddingBagCollection(configs, device=device)
    ids = torch.tensor([1, 1, 8], device=device)
    one_by_one = {"a": ids, "b": ids}
    lengths = torch.ones(6, dtype=torch.int64, device=device)
    together = speedswap.KeyedJaggedTensor.from_lengths_sync(["b", "a"], torch.cat([ids, ids]), lengths)
    for features in (one_by_one, together):
        pooled = collection(features)
        assert pooled.keys() == ["a@t", "b", "a@t", "a@u"]
        rows = {name: table.read()[ids.cpu()] for name, table in collection.tables.items()}
        assert torch.equal(pooled.values().cpu(), torch.cat([rows["t"], rows["t"], rows["t"], rows["u"]], 1))
    before = {name: table.read() for name, table in collection.tables.items()}
    optimizer = torch.optim.SGD(collection.parameters(), lr=1.0)
    collection(one_by_one).values().sum().backward()
    optimizer.step()
    for name, times in {"t": 3, "u": 1}.items():
        expected = before[name].clone()
        expected[1] -= 2 * times
        expected[8] -= times
        torch.testing.assert_close(collection.tables[name].read(), expected)


def test_a_group_looks_up_rows_of_all_its_tables(device: str) -> None:
    """In one lookup, of any shape, whose gradient is that of the tables; a row past the last one is an error."""
    configs = [EmbeddingConfig(name=name, num_embeddings=5 + seed, embedding_dim=4, seed=seed) for seed, name in TWO]
    collection, twin = (speedswap.EmbeddingCollection(configs, device=device) for _ in range(2))
    group: Any = collection.groups[0]
    assert group.first_rows == (0, 5)
    found = group(torch.tensor([[0, 5], [10, 4], [5, 5]], device=device))
    given = {"t": [0, 4], "u": [0, 5, 0, 0]}
    t, u = (twin.embeddings[name](torch.tensor(ids, device=device)) for name, ids in given.items())
    assert torch.equal(found, torch.stack([t[0], u[0], u[1], t[1], u[2], u[3]]).view(3, 2, 4))
    for model, values in ((collection, [found]), (twin, [t, u])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sum(each.square().sum() for each in values).backward()
        optimizer.step()
    for name, table in collection.tables.items():
        assert torch.equal(table.read(), twin.tables[name].read())
    with pytest.raises(speedswap.errors.IdError, match=r"ids\[0\] is 11, but table '4-float32' has rows 0 to 10"):
        group(torch.tensor([11], device=device))


TWO = ((0, "t"), (1, "u"))


def test_compact_columns_are_those_of_separate_tables(device: str) -> None:
    """Rounded to nearest; what stochastic rounding draws depends on a row's place in its store."""
    settings = {"stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16, "rounding": "nearest"}
    configs = [replace(config, pooling="sum", **settings) for config in BAGS[:2]]
    configs.append(EmbeddingBagConfig(name="few", num_embeddings=9, embedding_dim=4, seed=9))
    collection = speedswap.EmbeddingBagCollection(configs, device=device)
    names = ["4-float32-as-bfloat16-state-bfloat16-nearest", "4-float32"]
    assert [group.table.name for group in collection.groups] == names
    separate = [
        speedswap.EmbeddingBag(
            config.num_embeddings,
            config.embedding_dim,
            mode="sum",
            seed=config.seed,
            padding_idx=config.padding_idx,
            stored_dtype=config.stored_dtype,
            state_dtype=config.state_dtype,
            rounding=config.rounding,
            device=device,
        )
        for config in configs
    ]
    parameters = [module.weight for module in separate]
    optimizers = [torch.optim.Adam(collection.parameters(), lr=0.1), torch.optim.Adam(parameters, lr=0.1)]
    for seed in range(4):
        ids = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(seed)).to(device)
        given = dict(zip(("user", "item", "few"), ids, strict=True))
        outputs = (
            collection(given).values(),
            torch.cat([m(x.unsqueeze(1)) for m, x in zip(separate, ids, strict=True)], 1),
        )
        assert_same(*outputs, device)
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            loss_of(output).backward()
            optimizer.step()
    for module, table in zip(separate, collection.tables.values(), strict=True):
        for column in table.columns:
            assert_same(table.read(column=column), module.table.read(column=column), device)


def test_weights_are_converted_to_the_dtype_of_each_table(device: str) -> None:
    """One keyed batch has weights of one dtype, and so has what a layer under autocast returns."""
    dtypes = {"narrow": torch.float32, "wide": torch.float64}
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, dtype=dtype) for name, dtype in dtypes.items()
    ]
    collection = speedswap.EmbeddingBagCollection(configs, is_weighted=True)
    ids, lengths = torch.tensor([1, 2, 7], device=device), torch.tensor([1, 2], device=device)
    factors = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float16, device=device, requires_grad=True)
    batch = speedswap.KeyedJaggedTensor.from_lengths_sync(list(dtypes), ids, lengths, factors)
    pooled = collection(batch)
    rows = {name: table.read().to(device) for name, table in collection.tables.items()}
    torch.testing.assert_close(pooled["narrow"].float(), rows["narrow"][[1]] * 0.5)
    torch.testing.assert_close(pooled["wide"], (2 * rows["wide"][2] - rows["wide"][7]).unsqueeze(0))
    pooled.values().sum().backward()
    assert factors.grad is not None
    assert bool(factors.grad.all())
    ones = torch.ones(3, dtype=torch.float16, device=device)
    assert torch.equal(collection(dict.fromkeys(dtypes, (ids, None, ones)))["wide"], rows["wide"][ids.cpu()].to(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_beside_sums_count_all_ids_in_half_precision(dtype: torch.dtype, device: str) -> None:
    """Bfloat16 has no 259, and float16 no 2,049."""
    one = speedswap.init.constant(1.0)
    configs = [
        EmbeddingBagConfig(name=pooling, num_embeddings=2, embedding_dim=4, dtype=dtype, init=one, pooling=pooling)
        for pooling in ("mean", "sum")
    ]
    collection = speedswap.EmbeddingBagCollection(configs, device=device)
    count = 259 if dtype == torch.bfloat16 else 2049
    ids = torch.zeros(1, count, dtype=torch.int64, device=device)
    pooled = collection({"mean": ids, "sum": ids[:, :2]})
    assert pooled["mean"].dtype == dtype
    assert pooled.values().tolist() == [[1.0] * 4 + [2.0] * 4]
