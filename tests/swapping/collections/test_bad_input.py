"""Invalid input is a clear error, and nothing is read or lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import speedswap
from speedswap import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from speedswap.errors import IdError
from speedswap.tables import RowStore, WrappedStore

# Two stores: an id of the second must be found before the first is read.
BAGS = [
    EmbeddingBagConfig(name="users", num_embeddings=9, embedding_dim=4, feature_names=["user", "friend"]),
    EmbeddingBagConfig(name="items", num_embeddings=5, embedding_dim=4, feature_names=["item"]),
    EmbeddingBagConfig(name="wide", num_embeddings=7, embedding_dim=6, feature_names=["word"]),
]
ROWS = [
    EmbeddingConfig(
        name=each.name,
        num_embeddings=each.num_embeddings,
        embedding_dim=each.embedding_dim,
        feature_names=each.feature_names,
    )
    for each in BAGS
]


def tensor(*items: Any, **kwargs: Any) -> Tensor:
    return torch.tensor(items, **kwargs)


def fitting(device: str = "cpu") -> dict[str, Any]:
    return {
        "user": tensor(1, 2, device=device),
        "friend": (tensor(3, 4, 8, device=device), tensor(0, 1, device=device)),
        "item": tensor([1, 2], [0, 4], device=device),
        "word": tensor(6, 6, device=device),
    }


class Unread(WrappedStore):
    """A store that nothing may be gathered from."""

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("rows were read")

        self.gather = refuse


@pytest.fixture(params=["bags", "rows"])
def collection(request: pytest.FixtureRequest, device: str) -> Any:
    kind: Callable[..., Any] = speedswap.EmbeddingBagCollection
    configs: list[Any] = BAGS
    if request.param == "rows":
        kind, configs = speedswap.EmbeddingCollection, ROWS
    return kind(configs, device=device)


WRONG_IDS = [
    ("user", lambda ids: ids + 7, r"ids\[1\] of feature 'user' is 9, but table 'users' has rows 0 to 8"),
    ("user", lambda ids: ids.int() - 2, r"ids\[0\] of feature 'user' is -1, but table 'users' has rows 0 to 8"),
    ("item", lambda ids: ids + 1, r"ids\[1, 1\] of feature 'item' is 5, but table 'items' has rows 0 to 4"),
    ("word", lambda ids: ids + 2**33, r"ids\[0\] of feature 'word' is 8589934598, but table 'wide' has rows 0 to 6"),
    ("friend", lambda pair: (pair[0] + 1, pair[1]), r"ids\[2\] of feature 'friend' is 9, but table 'users' has rows"),
]


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(("feature", "change", "message"), WRONG_IDS)
def test_ids_outside_of_their_table_are_named(
    feature: str, change: Callable[[Any], Any], message: str, is_trained: bool, collection: Any, device: str
) -> None:
    """Also those that are rows of another table in the same store."""
    for group in collection.groups:
        group.table.store = Unread(group.table.store)
    features = fitting(device)
    with torch.set_grad_enabled(is_trained), pytest.raises(IdError, match=message):
        collection({**features, feature: change(features[feature])})


def keyed(device: str, **changes: Any) -> KeyedJaggedTensor:
    arguments = {
        "keys": ["word", "item", "user", "friend"],
        "values": tensor(6, 0, 4, 1, 2, 8, 8, device=device),
        "lengths": tensor(1, 0, 2, 0, 1, 1, 0, 2, device=device),
    }
    return KeyedJaggedTensor(**{**arguments, **changes})


@pytest.mark.parametrize("moved", [False, True])
def test_ids_of_keyed_tensors_are_named(moved: bool, collection: Any, device: str) -> None:
    collection(keyed(device))
    source = keyed("cpu" if moved else device, values=tensor(6, 0, 5, 1, 2, 8, 8, device="cpu" if moved else device))
    with pytest.raises(IdError, match=r"values\(\)\[1\] of feature 'item' is 5, but table 'items' has rows 0 to 4"):
        collection(source.to(device))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_a_lookup_among_fakes_is_refused_and_leaves_nothing_behind(collection: Any) -> None:
    """No FakeTensor, whose memory is at address 0, is kept for later batches of a shape."""
    ids = torch.tensor([1, 2])
    batches = [dict.fromkeys(["user", "friend", "item", "word"], ids), fitting(), keyed("cpu")]
    for batch in batches:
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((TypeError, RuntimeError)):
            collection(batch)
    for batch in batches:
        collection(batch)


def strided(*lists: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor(list(lists), layout=torch.strided)


def test_ids_without_bags_are_refused_in_every_feature() -> None:
    """They would be looked up, and have a gradient, without a bag to come from."""
    collection = speedswap.EmbeddingBagCollection(BAGS)
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="feature 'user' has 2 ids, but its offsets are empty"):
        collection(dict.fromkeys(["user", "friend", "item", "word"], (tensor(1, 2), none)))
    empty = speedswap.JaggedTensor(none, offsets=none)
    assert collection(dict.fromkeys(["user", "friend", "item", "word"], empty)).values().shape == (0, 18)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"user": None}, TypeError, "feature 'user' is a NoneType"),
    ({"user": [1, 2]}, TypeError, "ids.*|feature 'user'"),
    ({"user": tensor(1.0, 2.0)}, TypeError, "feature 'user' has dtype torch.float32"),
    ({"user": tensor(True, False)}, TypeError, "feature 'user' has dtype torch.bool"),
    ({"user": torch.zeros(2, 1, 1, dtype=torch.int64)}, ValueError, "feature 'user' has shape"),
    ({"user": torch.tensor(3)}, ValueError, "feature 'user' has shape"),
    ({"user": tensor(1, 2, 3)}, ValueError, "'user' has 3 bags|has 2 bags.* but 'user' has 3"),
    ({"friend": (tensor(3, 4), tensor(1, 1))}, ValueError, r"offsets\[0\] of feature 'friend' is 1"),
    ({"friend": (tensor(3, 4), tensor(0, 3))}, ValueError, r"offsets\[1\] of feature 'friend' is 3 after 0"),
    ({"friend": (tensor(3, 4), tensor(0, -1))}, ValueError, r"offsets\[1\] of feature 'friend' is -1 after 0"),
    ({"friend": (tensor(3, 4), torch.zeros(0).long())}, ValueError, "'friend' has 2 ids, but its offsets are empty"),
    ({"friend": (tensor(3, 4), tensor(0.0, 1.0))}, TypeError, "offsets of feature 'friend' has dtype"),
    ({"friend": (tensor([3, 4]), tensor(0, 1))}, ValueError, "both have one dimension"),
    ({"friend": (tensor(3), tensor(0, 0), tensor(1.0), 5)}, ValueError, "tuple of 4"),
    ({"friend": (tensor(3), tensor(0, 0), tensor(1.0))}, ValueError, "'friend' has weights, but is_weighted is False"),
    ({"friend": strided(tensor(3), tensor(4, 5))}, TypeError, "'friend' is a Tensor; give .* or a jagged tensor"),
    ({"users": tensor(1, 2)}, ValueError, "feature 'users' is looked up in no table"),
    ({"user": ...}, ValueError, "feature 'user' is missing"),
    (
        {"friend": speedswap.JaggedTensor(tensor(3, 4), offsets=tensor(0, 1, 1))},
        ValueError,
        "'friend' has offsets up to 1, but 2 ids",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=str)
def test_features_that_do_not_fit_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    features = {name: value for name, value in {**fitting(), **change}.items() if value is not ...}
    with pytest.raises(error, match=message):
        collection(features)
    collection(fitting())


WRONG_KEYED: list[tuple[dict[str, Any], str]] = [
    ({"keys": ["word", "item", "user", "else"]}, "feature 'friend' is missing"),
    ({"keys": ["word", "item", "user", "friend", "else"], "lengths": torch.ones(10).long()}, "'else' is looked up in"),
    (
        {"lengths": tensor(1, 0, 2, 0, 1, 1, 3, -1)},
        "offsets that decrease, from 8 to 7 after bag 1 of feature 'friend'",
    ),
    ({"lengths": tensor(1, 0, 2, 0, 1, 1, 0, 1)}, "offsets from 0 to 6, but 7 ids"),
    ({"lengths": None, "offsets": tensor(1, 1, 1, 3, 3, 4, 5, 5, 7)}, "offsets from 1 to 7, but 7 ids"),
    ({"keys": ["word", "item", "user", "user"]}, "feature 'friend' is missing"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_KEYED, ids=str)
def test_keyed_tensors_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    with pytest.raises(ValueError, match=message):
        collection(keyed("cpu", **change))
    with pytest.raises(ValueError, match=message):
        collection(keyed("cpu", **change).to("cpu"))


def test_a_mean_with_a_feature_twice_is_told() -> None:
    names = ["word", "item", "user", "friend", "user"]
    with pytest.raises(ValueError, match="one of them twice"):
        speedswap.EmbeddingBagCollection(BAGS)(keyed("cpu", keys=names, lengths=torch.zeros(10).long()))


def test_other_objects_are_refused() -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS)
    for features in (tensor(1, 2), [tensor(1, 2)], None):
        with pytest.raises(TypeError, match="pass a mapping from each feature to its ids"):
            collection(features)


def config(**changes: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**{"name": "items", "num_embeddings": 5, "embedding_dim": 4, **changes})


WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name is ''"),
    ({"name": "a.b"}, "name is 'a.b'"),
    ({"num_embeddings": 0}, "num_embeddings is 0"),
    ({"embedding_dim": 2.5}, "embedding_dim is 2.5"),
    ({"feature_names": "item"}, "feature_names is 'item'"),
    ({"padding_idx": 5}, "padding_idx of table 'items' is 5"),
    ({"seed": -1}, "seed of table 'items' is -1"),
    ({"seed": 1.5}, r"seed of table 'items' is 1\.5; give a whole number"),
    ({"group": "../elsewhere"}, "group is '../elsewhere'"),
    ({"pooling": "median"}, "pooling of table 'items' is 'median'"),
    ({"stored_dtype": torch.int8}, "trainable=False"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_CONFIGS, ids=str)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_collections_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="tables is empty"):
        speedswap.EmbeddingBagCollection([])
    with pytest.raises(ValueError, match="tables has 'items' 2 times"):
        speedswap.EmbeddingBagCollection([config(), config()])
    with pytest.raises(TypeError, match=r"give speedswap\.EmbeddingBagConfig objects"):
        speedswap.EmbeddingBagCollection(ROWS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is_weighted is True, but pooling of table 'items' is 'mean'"):
        speedswap.EmbeddingBagCollection([config(pooling="mean")], is_weighted=True)
    with pytest.raises(ValueError, match=r"is_weighted is True, .*; weights go with .* in an EmbeddingBagCollection"):
        speedswap.EmbeddingCollection(ROWS, is_weighted=True)
    alike = [config(feature_names=["a", "a@items"]), config(name="others", feature_names=["a"])]
    with pytest.raises(ValueError, match="2 lookups would be called 'a@items'"):
        speedswap.EmbeddingBagCollection(alike)
    with pytest.raises(ValueError, match="storage is 'nowhere'"):
        speedswap.EmbeddingBagCollection([config()], storage="nowhere")


def test_weights_are_asked_for_and_checked() -> None:
    collection = speedswap.EmbeddingBagCollection(BAGS, is_weighted=True)
    with pytest.raises(ValueError, match="features has no weights, but is_weighted is True"):
        collection(keyed("cpu"))
    weighted = {name: (ids, None, torch.ones(ids.shape)) for name, ids in fitting().items() if name != "friend"}
    ids, offsets = fitting()["friend"]
    for features, name in (
        (dict.fromkeys(fitting(), tensor(0, 3)), "user"),  # all of one shape
        ({**fitting(), "user": weighted["user"]}, "friend"),
        ({**weighted, "friend": JaggedTensor(ids, offsets=tensor(0, 1, 3))}, "friend"),
    ):
        with pytest.raises(
            ValueError, match=rf"feature '{name}' has no weights, but is_weighted is True; give \(ids, "
        ):
            collection(features)
    with pytest.raises(ValueError, match=r"weights of feature 'friend' have shape \(2,\)"):
        collection({**weighted, "friend": (ids, offsets, torch.ones(2))})
    with pytest.raises(TypeError, match=r"weights of feature 'friend' have dtype torch\.int64"):
        collection({**weighted, "friend": (ids, offsets, torch.ones(3, dtype=torch.int64))})
    batch = keyed("cpu", weights=torch.ones(7))
    batch.weights_or_none = lambda: torch.ones(8)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"features\.weights\(\) have shape \(8,\) on cpu, but ids \(7,\)"):
        collection(batch)
    fits = {**weighted, "friend": (ids, offsets, torch.ones(3))}
    assert collection(fits).values().shape == (2, 4 * 3 + 6)
