"""A collection's values in state_dict, one entry per table, and taken over from existing modules."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from children import answer, child, killed_at
from torch import Tensor, nn

import speedswap
import speedswap.tables.storage as places
from speedswap import EmbeddingBagConfig, EmbeddingConfig
from speedswap.errors import LostUpdateError, TableBusyError, TableClosedError
from speedswap.swapping.collections.group import unfinished
from speedswap.tables.files.place import Place

# A table may be called like a method of a dictionary.
ROWS = [
    EmbeddingConfig(name="user", num_embeddings=9, embedding_dim=4, seed=1),
    EmbeddingConfig(name="items", num_embeddings=30, embedding_dim=4, seed=2, padding_idx=3),
    EmbeddingConfig(name="wide", num_embeddings=5, embedding_dim=6, seed=3, feature_names=["a", "b"]),
]
BAGS = [
    EmbeddingBagConfig(name=each.name, num_embeddings=each.num_embeddings, embedding_dim=each.embedding_dim)
    for each in ROWS
]


class Separate(nn.Module):
    """The same tables as separate modules, under the names that a collection gives them."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict()
        for each in ROWS:  # ModuleDict itself refuses "items"
            self.embeddings._modules[each.name] = kind(each.num_embeddings, each.embedding_dim)


@pytest.mark.parametrize("kind", [nn.Embedding, speedswap.Embedding])
def test_state_dicts_are_those_of_separate_modules(kind: Any) -> None:
    collection, separate = speedswap.EmbeddingCollection(ROWS), Separate(kind)
    saved = collection.state_dict()
    assert list(saved) == [f"embeddings.{each.name}.weight" for each in ROWS]
    separate.load_state_dict(saved)
    for name, module in separate.embeddings.items():
        rows = module.table.read() if kind is speedswap.Embedding else module.weight
        assert torch.equal(collection.tables[name].read(), rows)
    other = speedswap.EmbeddingCollection([*reversed(ROWS)])
    fresh = Separate(kind)
    assert not other.load_state_dict(fresh.state_dict()).missing_keys
    for name, values in fresh.state_dict().items():
        assert torch.equal(other.state_dict()[name], values)


def test_configs_are_returned_under_torchrecs_names() -> None:
    rows = speedswap.EmbeddingCollection(ROWS).embedding_configs()
    assert [(each.name, each.feature_names) for each in rows] == [
        ("user", ("user",)),
        ("items", ("items",)),
        ("wide", ("a", "b")),
    ]
    bags = speedswap.EmbeddingBagCollection(BAGS).embedding_bag_configs()
    assert [(each.name, each.pooling, each.embedding_dim) for each in bags] == [
        ("user", "sum", 4),
        ("items", "sum", 4),
        ("wide", "sum", 6),
    ]


def test_bags_have_the_names_of_torchrec() -> None:
    model = nn.ModuleDict({"sparse": speedswap.EmbeddingBagCollection(BAGS), "dense": nn.Linear(2, 2)})
    names = {"sparse.embedding_bags.user.weight", "sparse.embedding_bags.items.weight"}
    names |= {"sparse.embedding_bags.wide.weight", "dense.weight", "dense.bias"}
    assert set(model.state_dict()) == names
    assert len(list(model["sparse"].parameters())) == 2


def test_state_dicts_that_do_not_fit_are_errors() -> None:
    collection = speedswap.EmbeddingCollection(ROWS)
    before = collection.state_dict()
    missing = {name: values for name, values in before.items() if "user" not in name}
    with pytest.raises(RuntimeError, match=r"embeddings\.user\.weight"):
        collection.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"embeddings\.other\.weight"):
        collection.load_state_dict({**before, "embeddings.other.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for embeddings\.user\.weight"):
        collection.load_state_dict({**before, "embeddings.user.weight": torch.zeros(8, 4)})
    assert collection.load_state_dict(missing, strict=False).missing_keys == ["embeddings.user.weight"]


def step(collection: Any, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = {
        feature: torch.randint(each.num_embeddings, (6,), generator=generator)
        for each in collection.configs
        for feature in each.feature_names
    }
    optimizer.zero_grad()
    sum(each.values().square().sum() for each in collection(given).values()).backward()
    optimizer.step()


def columns(collection: Any) -> dict[str, list[Any]]:
    return {
        f"{name}.{column}": table.read(column=column).tolist()
        for name, table in collection.tables.items()
        for column in table.columns
    }


def test_model_and_optimizer_resume_from_state_dicts() -> None:
    collections = [speedswap.EmbeddingCollection(ROWS) for _ in range(2)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in collections]
    for seed in range(3):
        step(collections[0], optimizers[0], seed)
    speedswap.attach(optimizers[1], collections[1])
    collections[1].load_state_dict(collections[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for collection, optimizer in zip(collections, optimizers, strict=True):
        step(collection, optimizer, 7)
    assert columns(collections[0]) == columns(collections[1])


def test_a_gradient_outlives_a_load_of_the_rows_as_in_torch() -> None:
    collection = speedswap.EmbeddingCollection(ROWS)
    optimizer = torch.optim.SGD(collection.parameters(), lr=1.0)
    given = {"user": torch.tensor([1]), "items": torch.tensor([2]), "a": torch.tensor([3]), "b": torch.tensor([3])}
    sum(each.values().sum() for each in collection(given).values()).backward()
    state = {name: values + 1 for name, values in collection.state_dict().items()}
    collection.load_state_dict(state)
    optimizer.step()
    moved = {name: state[name] - values for name, values in collection.state_dict().items()}
    for name, expected in (("user", {1: 1}), ("items", {2: 1}), ("wide", {3: 2})):
        rows = moved[f"embeddings.{name}.weight"]
        assert {row: rows[row].mean().item() for row in rows.sum(1).nonzero().squeeze(1).tolist()} == expected


@pytest.mark.parametrize("form", [nn.EmbeddingBag, speedswap.EmbeddingBag])
def test_modules_are_taken_over_with_their_settings(form: Any) -> None:
    modules = {
        "user": form(9, 4, mode="mean"),
        "item": form(30, 4, mode="max", padding_idx=2),
        "frozen": form.from_pretrained(torch.randn(5, 4), mode="sum"),
        "double": form(6, 4, dtype=torch.float64, mode="sum"),
    }
    collection = speedswap.EmbeddingBagCollection.from_modules(modules, feature_names={"user": ["a", "b"]})
    assert [each.pooling for each in collection.configs] == ["mean", "max", "sum", "sum"]
    assert [each.padding_idx for each in collection.configs] == [None, 2, None, None]
    assert [each.trainable for each in collection.configs] == [True, True, False, True]
    assert [group.weight.requires_grad for group in collection.groups] == [True, False, True]
    ids = {"a": torch.tensor([[1, 2], [8, 1]]), "b": torch.tensor([3, 4]), "item": torch.tensor([[2, 2], [7, 2]])}
    ids |= {"frozen": torch.tensor([0, 4]), "double": torch.tensor([5, 5])}
    pooled = collection(ids)
    for key, module in {"a": "user", "b": "user", "item": "item", "frozen": "frozen", "double": "double"}.items():
        found = ids[key] if ids[key].dim() == 2 else ids[key].unsqueeze(1)
        torch.testing.assert_close(pooled[key], modules[module](found).to(pooled[key].dtype))
    with pytest.raises(ValueError, match="came from elsewhere"):
        collection.embedding_bags["user"].reset_parameters()


def test_embeddings_are_taken_over_and_others_refused() -> None:
    modules = {"user": nn.Embedding(9, 4, padding_idx=0), "item": speedswap.Embedding(30, 4)}
    collection = speedswap.EmbeddingCollection.from_modules(modules)
    assert torch.equal(collection.tables["user"].read(), modules["user"].weight)
    assert torch.equal(collection.tables["item"].read(), modules["item"].table.read())
    assert speedswap.EmbeddingBagCollection.from_modules(modules).configs[0].pooling == "sum"
    with pytest.raises(TypeError, match=r"module 'x' is an EmbeddingBag; give an nn\.Embedding"):
        speedswap.EmbeddingCollection.from_modules({"x": nn.EmbeddingBag(3, 4)})
    with pytest.raises(ValueError, match="max_norm"):
        speedswap.EmbeddingCollection.from_modules({"x": nn.Embedding(3, 4, max_norm=1.0)})
    id_map = speedswap.IdMap(3)
    with pytest.raises(ValueError, match=r"module 'x' has an id map.*load the module's state_dict"):
        speedswap.EmbeddingCollection.from_modules({"x": speedswap.Embedding(id_map.num_rows, 4, id_map=id_map)})
    with pytest.raises(ValueError, match="feature_names has 'y'"):
        speedswap.EmbeddingCollection.from_modules({"x": nn.Embedding(3, 4)}, feature_names={"y": ["a"]})


@pytest.mark.parametrize(
    "stored",
    [
        {"stored_dtype": torch.bfloat16},
        {"state_dtype": torch.bfloat16},
        {"stored_dtype": torch.float16, "state_dtype": torch.bfloat16, "rounding": "nearest"},
        {"stored_dtype": torch.int8},
    ],
)
def test_compact_embeddings_are_taken_over_as_they_are_stored(stored: dict[str, Any]) -> None:
    """And train as they did: the weight and the optimizer's state take the same bytes."""
    module = speedswap.Embedding(9, 4, seed=1, **stored)
    ids = torch.tensor([1, 2, 2])
    (config,) = speedswap.EmbeddingCollection.from_modules({"user": module}).configs
    for name in ("stored_dtype", "state_dtype"):
        assert getattr(config, name) == stored.get(name)
    if "stored_dtype" in stored and stored["stored_dtype"] == torch.int8:
        assert not config.trainable
        return
    collection = speedswap.EmbeddingCollection.from_modules({"user": module})
    for each in (module, collection):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        out = each(ids) if each is module else each({"user": ids})["user"].values()
        out.square().sum().backward()
        optimizer.step()
    ours, theirs = collection.tables["user"].columns, module.table.columns
    assert {name: (column.stored, column.rounding) for name, column in ours.items()} == {
        name: (column.stored, column.rounding) for name, column in theirs.items()
    }
    again = speedswap.Embedding(9, 4, table=module.table)  # whose table tells, not the module
    (found,) = speedswap.EmbeddingCollection.from_modules({"user": again}).configs
    assert (found.stored_dtype, found.state_dtype) == (stored.get("stored_dtype"), stored.get("state_dtype"))


def test_one_table_is_read_scored_filled_and_reset() -> None:
    collection = speedswap.EmbeddingCollection(ROWS)
    items, before = collection.embeddings["items"], collection.tables["user"].read()
    alone = speedswap.Embedding(30, 4, seed=2, padding_idx=3)
    assert torch.equal(items.read(torch.tensor([[7, 29]])), alone.read(torch.tensor([[7, 29]])))
    queries = torch.randn(3, 4)
    for found, expected in zip(items.score(queries, k=5), alone.score(queries, k=5), strict=True):
        assert torch.equal(found, expected)
    assert not (items.score(torch.zeros(4), k=29).ids == 3).any()
    nn.init.constant_(items.weight, 2.0)
    assert items.read().unique().tolist() == [2.0]
    assert torch.equal(collection.tables["user"].read(), before)
    items.reset_parameters()
    assert torch.equal(items.read(), alone.read())
    items.weight[4] = torch.ones(4)
    assert items.read(4).tolist() == [1.0] * 4


def test_a_group_is_reset_as_each_of_its_tables() -> None:
    """Padding rows stay zero, and each table has the values that it would have alone."""
    together, apart = speedswap.EmbeddingCollection(ROWS), speedswap.EmbeddingCollection(ROWS)
    for init in (speedswap.init.uniform(2.0, 3.0), nn.init.ones_, None):
        for group in together.groups:
            group.reset_parameters(init)
        for home in apart.embeddings.values():
            if init is not None:
                home.reset_parameters(init)
        expected = apart.state_dict() if init is not None else speedswap.EmbeddingCollection(ROWS).state_dict()
        for name, values in together.state_dict().items():
            assert torch.equal(values, expected[name]), (name, init)
    assert not together.embeddings["items"].read(3).any()


def test_copies_have_rows_of_their_own() -> None:
    collection = speedswap.EmbeddingCollection(ROWS)
    optimizer = torch.optim.Adam(collection.parameters())
    step(collection, optimizer)
    collection.tables["user"].read()
    copied = copy.deepcopy(collection)
    assert columns(copied) == columns(collection)
    before = columns(copied)
    step(collection, optimizer)
    assert columns(copied) == before != columns(collection)
    copied.embeddings["user"].weight.data.fill_(5.0)
    assert copied.tables["user"].read().unique().tolist() == [5.0]
    step(copied, torch.optim.Adam(copied.parameters()))
    assert not (collection.tables["user"].read() == 5.0).any()


def test_files_are_opened_and_saved_and_loaded(tmp_path: Path) -> None:
    collection = speedswap.EmbeddingCollection(ROWS, path=tmp_path / "made")
    assert sorted(each.name for each in (tmp_path / "made").iterdir()) == ["4-float32", "6-float32"]
    optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
    step(collection, optimizer)
    expected = columns(collection)
    collection.save(tmp_path / "saved")
    with pytest.raises(FileExistsError):
        collection.save(tmp_path / "saved")
    collection.save(tmp_path / "saved", overwrite=True)
    again = pickle.loads(pickle.dumps(collection))  # another process looks up in the files
    given = {"user": torch.tensor([1]), "items": torch.tensor([2]), "a": torch.tensor([3]), "b": torch.tensor([3])}
    assert torch.equal(again(given)["items"].values(), collection(given)["items"].values())
    collection.close()
    with pytest.raises(TableClosedError):
        collection(given)
    opened = speedswap.EmbeddingCollection.open(ROWS, tmp_path / "made")
    loaded = speedswap.EmbeddingCollection.load(ROWS, tmp_path / "saved", storage="pageable")
    assert columns(opened) == columns(loaded) == expected
    for each in (opened, loaded):
        step(each, torch.optim.Adagrad(each.parameters(), lr=0.1), 5)
    assert columns(opened) == columns(loaded)
    with pytest.raises(ValueError, match="holds"):
        speedswap.EmbeddingCollection.open([ROWS[1], ROWS[0], ROWS[2]], tmp_path / "saved")
    with pytest.raises(FileNotFoundError):
        speedswap.EmbeddingCollection.open(ROWS, tmp_path / "nowhere")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(loaded)


@pytest.mark.parametrize("name", ["save_store", "publish"])
def test_an_interrupted_save_leaves_a_path_that_can_be_used_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second table is written, or is about to appear."""
    collection, calls = speedswap.EmbeddingCollection(ROWS), itertools.count()
    real = getattr(places if name == "save_store" else Place, name)

    def fails(*args: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(places if name == "save_store" else Place, name, fails)
        with pytest.raises(KeyboardInterrupt):
            collection.save(tmp_path / "saved")
    if name == "save_store":
        assert not [*tmp_path.iterdir()]
    with pytest.raises(FileNotFoundError):
        speedswap.EmbeddingCollection.load(ROWS, tmp_path / "saved")
    collection.save(tmp_path / "saved")
    assert columns(speedswap.EmbeddingCollection.load(ROWS, tmp_path / "saved")) == columns(collection)


def test_a_table_that_cannot_be_replaced_leaves_the_others(tmp_path: Path) -> None:
    first, second = speedswap.EmbeddingCollection(ROWS), speedswap.EmbeddingCollection(ROWS)
    first.save(tmp_path / "saved")
    (tmp_path / "saved" / "6-float32" / "notes").touch()
    second.tables["user"].write(0, torch.ones(9, 4))
    with pytest.raises(FileExistsError, match="'notes' is among"):
        second.save(tmp_path / "saved", overwrite=True)
    assert columns(speedswap.EmbeddingCollection.load(ROWS, tmp_path / "saved")) == columns(first)


def test_one_table_is_saved_without_the_names_of_the_others(tmp_path: Path) -> None:
    """So that it opens as the only table of a collection."""
    collection = speedswap.EmbeddingCollection(ROWS)
    for table in (collection.tables["items"], copy.deepcopy(collection.tables["items"])):
        table.save(tmp_path / "one" / "4-float32", overwrite=True)
        with_one = speedswap.EmbeddingCollection.open([ROWS[1]], tmp_path / "one")
        assert torch.equal(with_one.tables["items"].read(), collection.tables["items"].read())
        with_one.close()


@pytest.mark.parametrize("storage", ["device", "pageable", "auto"])
def test_any_storage_gives_the_same_rows(storage: str, device: str) -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS, storage=storage, device=device)
    collection.load_state_dict(speedswap.EmbeddingBagCollection(BAGS).state_dict())
    given = {each.name: torch.tensor([1, 4, 1], device=device) for each in BAGS}
    pooled = collection(given)
    for key in given:
        assert torch.equal(pooled[key].cpu(), collection.tables[key].read()[[1, 4, 1]])


def test_groups_have_parameters_of_their_own() -> None:
    """One learning rate for some tables, another for the rest, and none for the frozen ones."""
    configs = [
        EmbeddingConfig(name="fast", num_embeddings=6, embedding_dim=2),
        EmbeddingConfig(name="other", num_embeddings=6, embedding_dim=2),
        EmbeddingConfig(name="slow", num_embeddings=6, embedding_dim=2, group="slow"),
        EmbeddingConfig(name="still", num_embeddings=6, embedding_dim=2, trainable=False),
    ]
    collection = speedswap.EmbeddingCollection(configs)
    rates = {"fast": 1.0, "other": 1.0, "slow": 0.125, "still": 0.0}
    optimizer = torch.optim.SGD(
        [
            {"params": collection.parameters_of("fast", "other"), "lr": 1.0},
            {"params": collection.parameters_of("slow"), "lr": 0.125},
        ]
    )
    before = {name: table.read() for name, table in collection.tables.items()}
    given = {name: torch.tensor([5]) for name in rates}
    sum(each.values().sum() for each in collection(given).values()).backward()
    optimizer.step()
    for name, table in collection.tables.items():
        expected = before[name].clone()
        expected[5] -= rates[name]
        assert torch.equal(table.read(), expected)
    assert [each.requires_grad for each in collection.parameters_of("still")] == [False]
    with pytest.raises(ValueError, match=r"'fast' has its parameter in common with other; name these too, or give its"):
        collection.parameters_of("fast")
    with pytest.raises(ValueError, match="'none' is not in the collection"):
        collection.parameters_of("none")
    with pytest.raises(ValueError, match=r"names is empty; give some of fast, .*, or take parameters\(\) for all"):
        collection.parameters_of()


def test_wrappers_for_several_processes_leave_the_parameters_alone() -> None:
    model = nn.ModuleDict({"sparse": speedswap.EmbeddingCollection(ROWS), "dense": nn.Linear(2, 2)})
    assert speedswap.parameters_to_ignore(model) == set(model["sparse"].parameters())


def test_a_group_in_no_optimizer_is_a_lost_update() -> None:
    collection = speedswap.EmbeddingCollection(ROWS)
    optimizer = torch.optim.SGD(collection.parameters_of("user", "items"), lr=0.1)
    step(collection, optimizer)
    with pytest.raises(LostUpdateError, match="6-float32"):
        step(collection, optimizer)


def test_clipping_and_scaling_see_the_gradients_of_all_tables() -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    given = {each.name: torch.tensor([0, 1]) for each in BAGS}
    collection(given).values().sum().backward()
    norm = nn.utils.clip_grad_norm_(collection.parameters(), 1.0)
    assert norm == pytest.approx((2 * (4 + 4 + 6)) ** 0.5)
    total = sum(float(each.grad.square().sum()) for each in collection.parameters() if each.grad is not None)
    assert total == pytest.approx(1.0)


def test_autocast_and_a_grad_scaler(device: str) -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS, device=device)
    twin = copy.deepcopy(collection)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    for each, scaled in ((collection, True), (twin, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        given = {config.name: torch.tensor([0, 1, 1], device=device) for config in BAGS}
        with torch.autocast(device, torch.bfloat16, enabled=scaled):
            loss = each(given).values().square().sum()
        assert loss.dtype == torch.float32
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    for name, table in collection.tables.items():
        assert torch.equal(table.read(), twin.tables[name].read())


def test_rows_are_replaced_for_one_call() -> None:
    collection = speedswap.EmbeddingCollection([ROWS[0]])
    rows = torch.arange(36.0).view(9, 4).requires_grad_()
    found: dict[str, Any] = torch.func.functional_call(
        collection, {"groups.0.weight": rows}, ({"user": torch.tensor([3])},)
    )
    assert found["user"].values().tolist() == [[12.0, 13.0, 14.0, 15.0]]
    found["user"].values().sum().backward()
    assert rows.grad is not None
    assert rows.grad[3].tolist() == [1.0] * 4


def test_initial_values_are_those_of_embeddings() -> None:
    xavier = nn.init.xavier_uniform_
    init = speedswap.init.from_torch(xavier, gain=0.5)
    configs = [
        EmbeddingConfig(name="a", num_embeddings=7, embedding_dim=4, init=init, seed=5),
        EmbeddingConfig(name="b", num_embeddings=9, embedding_dim=4, init=xavier, padding_idx=1, seed=6),
        EmbeddingConfig(name="c", num_embeddings=9, embedding_dim=4),
    ]
    torch.manual_seed(3)
    collection = speedswap.EmbeddingCollection(configs)
    assert len(collection.groups) == 1
    expected = [
        speedswap.Embedding(7, 4, init=init, seed=5),
        speedswap.Embedding(9, 4, 1, init=xavier, seed=6),
    ]
    torch.manual_seed(3)
    expected.append(speedswap.Embedding(9, 4))
    for module, table in zip(expected, collection.tables.values(), strict=True):
        assert torch.equal(module.table.read(), table.read())


def as_lists(pooled: speedswap.KeyedTensor) -> dict[str, Any]:
    return {key: value.tolist() for key, value in pooled.to_dict().items()}


def test_keyed_tensors_have_views_of_their_values() -> None:
    values: Tensor = torch.arange(10.0).view(2, 5).requires_grad_()
    pooled = speedswap.KeyedTensor(["u", "v", "w"], [2, 1, 2], values)
    assert pooled.offset_per_key() == [0, 2, 3, 5]
    assert [each.shape[pooled.key_dim()] for each in pooled.to_dict().values()] == pooled.length_per_key()
    assert as_lists(pooled) == {"u": [[0, 1], [5, 6]], "v": [[2], [7]], "w": [[3, 4], [8, 9]]}
    assert pooled["w"].untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    (both, last) = speedswap.KeyedTensor.regroup([pooled], [["w", "v"], ["u"]])
    assert both.tolist() == [[3, 4, 2], [8, 9, 7]]
    assert last.tolist() == [[0, 1], [5, 6]]
    with pytest.raises(KeyError, match="'x' is not a key"):
        pooled["x"]


def test_files_do_not_depend_on_the_storage_that_their_tables_had(tmp_path: Path) -> None:
    """Tables named for a storage, and those that have the collection's; groups whose names are alike."""
    plain = EmbeddingConfig(name="plain", num_embeddings=6, embedding_dim=2)
    pageable = EmbeddingConfig(name="pageable", num_embeddings=6, embedding_dim=2, storage="pageable")
    other = EmbeddingConfig(name="other", num_embeddings=6, embedding_dim=2, group="2")
    configs = [plain, pageable, other]
    for storage, stores in (("device", 3), ("pageable", 2)):
        collection = speedswap.EmbeddingCollection(configs, storage=storage)
        assert len(collection.groups) == stores
        collection.save(tmp_path / storage)
        assert len(list((tmp_path / storage).iterdir())) == stores
        loaded = speedswap.EmbeddingCollection.load(configs, tmp_path / storage, storage="pageable")
        opened = speedswap.EmbeddingCollection.open(iter(configs), tmp_path / storage)
        for name, table in collection.tables.items():
            assert torch.equal(loaded.tables[name].read(), table.read())
            assert torch.equal(opened.tables[name].read(), table.read())
        opened.close()
    missing = EmbeddingConfig(name="missing", num_embeddings=6, embedding_dim=2)
    with pytest.raises(ValueError, match="table '2-float32' holds pageable, plain, but not 'missing'"):
        speedswap.EmbeddingCollection.load([missing], tmp_path / "pageable")


def test_a_collection_that_cannot_be_made_leaves_no_files(tmp_path: Path) -> None:
    in_the_way = tmp_path / "6-float32"
    in_the_way.mkdir()
    for _ in range(2):
        with pytest.raises(FileExistsError, match="6-float32"):
            speedswap.EmbeddingCollection(ROWS, path=tmp_path)
        assert list(tmp_path.iterdir()) == [in_the_way]
    in_the_way.rmdir()
    speedswap.EmbeddingCollection(ROWS, path=tmp_path).close()


@pytest.mark.release
@pytest.mark.usefixtures("one_thread")
def test_a_collection_whose_maker_is_killed_is_there_or_can_be_made_again(tmp_path: Path) -> None:
    """Between its groups, for example; what is at other names in its directory stays."""
    other = speedswap.Table.create(3, 2, path=tmp_path / "made" / "other")
    other.close()
    expected = columns(speedswap.EmbeddingCollection(ROWS))
    step, found, begun = 0, [], []
    while killed_at(step, lambda: os._exit(speedswap.EmbeddingCollection(ROWS, path=tmp_path / "made").close() or 0)):
        is_begun = (tmp_path / "made" / "4-float32").exists()
        try:
            collection = speedswap.EmbeddingCollection(ROWS, path=tmp_path / "made")
            found.append(False)
        except FileExistsError:
            collection = speedswap.EmbeddingCollection.open(ROWS, tmp_path / "made")
            found.append(True)
        assert columns(collection) == expected
        assert sorted(each.name for each in (tmp_path / "made").iterdir()) == ["4-float32", "6-float32", "other"]
        for group in collection.groups:
            group.table.remove()
        begun.append(is_begun)
        step += 1
    assert found == sorted(found)
    assert {*zip(begun, found, strict=True)} == {(False, False), (True, False), (True, True)}


def test_a_collection_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    def making(connection: Any) -> None:
        with unfinished(tmp_path / "made", ["4-float32"]):
            connection.send("begun")
            connection.recv()

    (tmp_path / "made").mkdir()
    with child(making) as (_, connection):
        assert answer(connection) == "begun"
        with pytest.raises(
            TableBusyError, match=r"path is .*made', where another process is making a collection; wait"
        ):
            speedswap.EmbeddingCollection(ROWS, path=tmp_path / "made")
    with pytest.raises(FileNotFoundError, match="was not finished by the process that made it; make it again"):
        speedswap.EmbeddingCollection.open(ROWS, tmp_path / "made")
    speedswap.EmbeddingCollection(ROWS, path=tmp_path / "made").close()
