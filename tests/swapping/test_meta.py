"""Modules that are built on the meta device have no rows until these are loaded, and then one table."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import ConversionError, WeightError

ROWS, DIM = 12, 4
IDS = torch.tensor([[3, 3], [7, 0]])


@contextmanager
def emptied() -> Iterator[None]:
    """Move every parameter to meta once it is registered, as accelerate's ``init_empty_weights`` does."""
    register = nn.Module.register_parameter

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            kind, settings = type(module._parameters[name]), dict(vars(module._parameters[name]))
            settings["requires_grad"] = parameter.requires_grad
            module._parameters[name] = kind(module._parameters[name].to("meta"), **settings)

    nn.Module.register_parameter = to_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


CONTEXTS: dict[str, Callable[[], Any]] = {"torch.device": lambda: torch.device("meta"), "accelerate": emptied}


def assign(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """Replace each parameter, as transformers does; each value is freed as soon as it is set."""
    for name, values in rows.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(values.clone()))


def put(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """Put parameters of the same class in place of those on meta, as accelerate does."""
    for name, values in rows.items():
        module, _, attribute = name.rpartition(".")
        parameters = model.get_submodule(module)._parameters
        old = parameters[attribute]
        parameters[attribute] = type(old)(values.clone(), requires_grad=old.requires_grad).to("cpu")


def load(model: nn.Module, rows: dict[str, Tensor]) -> None:
    """Load without ``assign``, which does nothing to torch's layers on meta."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.to_empty(device="cpu")
    model.load_state_dict(rows)


WAYS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "load_state_dict": load,
    "load_state_dict, assign": lambda model, rows: model.load_state_dict(rows, assign=True),
    "setattr": assign,
    "_parameters": put,
}


class Model(nn.Module):
    def __init__(self, package: Any) -> None:
        super().__init__()
        self.items = package.Embedding(ROWS, DIM, padding_idx=0)
        self.bags = package.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.items(ids).sum(1) + self.bags(ids))


def trained(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS).square().sum().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_model_from_meta_has_the_rows_that_are_loaded_and_trains_as_torchs(context: str, way: str) -> None:
    """The optimizer is made before the first lookup, when a table may still have to be made."""
    theirs = Model(nn)
    rows = {name: values.clone() for name, values in theirs.state_dict().items()}
    with CONTEXTS[context]():
        ours = Model(speedswap)
    assert {(name, each.shape, each.is_meta) for name, each in ours.state_dict().items()} == {
        (name, each.shape, True) for name, each in rows.items()
    }
    assert all(each.is_meta for each in ours.parameters())
    assert "no rows yet, on meta" in repr(ours)
    twin = copy.deepcopy(ours)
    WAYS[way](ours, rows)
    expected, found = trained(theirs), trained(ours)
    assert not torch.equal(expected["items.weight"], rows["items.weight"])
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values)
    assert twin.items.weight.is_meta
    WAYS[way](twin, rows)
    torch.testing.assert_close(twin.items.read(), rows["items.weight"])


@pytest.mark.parametrize("context", CONTEXTS)
def test_to_empty_gives_the_initial_values(context: str) -> None:
    with CONTEXTS[context]():
        items = speedswap.Embedding(ROWS, DIM, seed=3, dtype=torch.float64).requires_grad_(False)
    assert items.to_empty(device="cpu").weight.requires_grad is False
    assert torch.equal(items.read(), speedswap.Embedding(ROWS, DIM, seed=3, dtype=torch.float64).read())
    items.reset_parameters()


@pytest.mark.parametrize("way", ["load_state_dict", "load_state_dict, assign", "setattr"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_collection_from_meta(context: str, way: str) -> None:
    """Three tables in two stores; the optimizer trains them as those of a collection with these rows."""
    configs = [
        speedswap.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=dim, padding_idx=0, pooling=pooling)
        for name, dim, pooling in (("a", 4, "sum"), ("b", 4, "mean"), ("c", 3, "max"))
    ]
    real = speedswap.EmbeddingBagCollection(configs)
    with CONTEXTS[context]():
        ours = speedswap.EmbeddingBagCollection(configs)
    rows = real.state_dict()
    assert {name: each.device.type for name, each in ours.state_dict().items()} == dict.fromkeys(rows, "meta")
    WAYS[way](copy.deepcopy(ours), rows)
    WAYS[way](ours, rows)
    for collection in (real, ours):
        optimizer = torch.optim.Adagrad(collection.parameters(), lr=0.1)
        collection(dict.fromkeys("abc", IDS)).values().square().sum().backward()
        optimizer.step()
    for name, values in real.state_dict().items():
        assert not torch.equal(values, rows[name])
        torch.testing.assert_close(ours.state_dict()[name], values)
    with pytest.raises(WeightError, match="table 'a' cannot be tied to another tensor"):
        ours.embedding_bags["a"].weight = nn.Parameter(torch.zeros(ROWS, 4))


def test_keys_and_a_disk_come_with_the_rows(tmp_path: Path) -> None:
    def make(path: str) -> speedswap.Embedding:
        return speedswap.Embedding(ROWS, DIM, id_map=speedswap.IdMap(ROWS - 1), path=tmp_path / path, seed=1)

    keys = torch.tensor([2**60, -5])
    real = make("real")
    rows = real(keys)
    with torch.device("meta"):
        ours = make("ours")
    assert not (tmp_path / "ours").exists()
    ours.load_state_dict(real.state_dict())
    assert torch.equal(ours(keys), rows)
    assert ours.table.path == tmp_path / "ours"


def test_a_table_that_is_given_is_used() -> None:
    table = speedswap.Table.create(ROWS, DIM)
    for context in CONTEXTS.values():
        with context():
            items = speedswap.Embedding(ROWS, DIM, table=table)
            given = speedswap.Embedding.from_pretrained(torch.ones(ROWS, DIM, device="cpu"))
        assert items.table is table
        assert items(IDS).shape == (2, 2, DIM)
        assert bool((given(IDS) == 1).all())


REFUSED: dict[str, tuple[str, Callable[[speedswap.Embedding], Any]]] = {
    "a lookup": ("no rows yet; load a state_dict", lambda items: items(IDS)),
    "a read": ("no rows yet", lambda items: items.read()),
    "its table": ("no rows yet", lambda items: items.table),
    "new values": ("no rows yet", lambda items: items.reset_parameters()),
    "an optimizer": (
        "no rows yet",
        lambda items: speedswap.attach(torch.optim.SGD(items.parameters(), lr=0.1), nn.Sequential(items)),
    ),
    "a wrapper": ("no rows yet", lambda items: speedswap.ignore_in_ddp(nn.Sequential(items))),
    "a move": ("Cannot copy out of meta tensor", lambda items: items.to("cpu")),
    "another dtype": ("are torch.float32 and stay so", lambda items: items.double()),
    "other rows": ("size mismatch for weight", lambda items: items.load_state_dict({"weight": torch.ones(3, 3)})),
    "no rows": ("Missing key", lambda items: items.load_state_dict({})),
    "another parameter": (
        "weight was assigned: size mismatch",
        lambda items: setattr(items, "weight", nn.Parameter(torch.ones(3, 3))),
    ),
    "a tied weight": (
        r"rows of the Embedding cannot be tied to another tensor",
        lambda items: setattr(items, "weight", nn.Parameter(torch.ones(ROWS, DIM, device="meta"))),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_rows_is_refused_and_changes_nothing(case: str) -> None:
    items = speedswap.Embedding(ROWS, DIM, device="meta")
    message, use = REFUSED[case]
    with pytest.raises((WeightError, TypeError, RuntimeError), match=message):
        use(items)
    items.load_state_dict({"weight": torch.ones(ROWS, DIM, device="meta")})  # which are none either
    assert items.weight.is_meta
    items.load_state_dict({"weight": torch.ones(ROWS, DIM)})
    assert bool((items.read() == 1).all())


def test_a_parameter_that_is_held_elsewhere_is_not_a_tied_weight() -> None:
    """Torch would train it through both modules; here each would go its way."""
    items, head = speedswap.Embedding(ROWS, DIM, device="meta"), nn.Linear(DIM, ROWS, bias=False)
    items.weight = head.weight
    with pytest.raises(WeightError, match="something else still holds it"):
        items(IDS)
    del head
    items(IDS).sum().backward()


def test_a_model_on_meta_is_converted() -> None:
    theirs = Model(nn)
    with torch.device("meta"):
        ours = Model(nn)
        tied = Model(nn)
    ours.items.weight.requires_grad_(False)
    speedswap.convert(ours, min_rows=ROWS)
    assert (type(ours.items), type(ours.bags)) == (speedswap.Embedding, speedswap.EmbeddingBag)
    assert ours.items.weight.is_meta
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert (ours.items.weight.requires_grad, ours.bags.weight.requires_grad) == (False, True)
    assert torch.equal(ours(IDS), theirs(IDS))
    tied.bags.weight = tied.items.weight
    with pytest.raises(ConversionError, match=r"items: its weight is tied to 'bags\.weight'"):
        speedswap.convert(tied, min_rows=ROWS)


MEMORY = """
import resource, sys
import numpy as np, torch, speedswap
from torch import nn

rows, dim = 1 << 19, 64
nbytes = rows * dim * 4


def build(way, device):
    if way == "collection":
        config = dict(num_embeddings=rows // 2, embedding_dim=dim)
        return speedswap.EmbeddingCollection(
            [speedswap.EmbeddingConfig(name=name, **config) for name in "ab"], device=device
        )
    if way == "convert":
        return speedswap.convert(nn.Sequential(nn.Embedding(rows, dim, device=device)))[0]
    return speedswap.Embedding(rows, dim, device=device)


def load(model, way):
    if way == "to_empty":
        return model.to_empty(device="cpu")
    values = torch.from_numpy(np.load(sys.argv[1], mmap_mode="r+")[:])  # shared, and so not counted
    if way == "setattr":
        model.weight = nn.Parameter(values)
    elif way == "_parameters":
        model._parameters["weight"] = type(model.weight)(values)
    elif way == "collection":
        model.load_state_dict({f"embeddings.{name}.weight": half for name, half in zip("ab", values.chunk(2))})
    else:
        model.load_state_dict({"weight": values}, assign=way == "assign")


speedswap.Embedding(1 << 17, dim)  # starts the threads that fill a table
nn.Embedding(1, 1, device="meta")  # imports a large part of torch
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes * 13 // 10, resource.RLIM_INFINITY))
for way in ("load_state_dict", "assign", "setattr", "_parameters", "to_empty", "convert", "collection"):
    model = build(way, "meta")
    load(model, way)
    table = model.tables["b"] if way == "collection" else model.table
    assert way == "to_empty" or bool((table.read(len(table) - 1) == 7).all()), way
    try:
        build("another", "cpu")
    except speedswap.errors.TableTooLargeError:
        print(way)
    del model, table
"""


def test_memory_for_the_rows_is_taken_once(tmp_path: Path) -> None:
    """A process that may have 1.3 times a table of 128 MiB builds and loads a model; another table is too much."""
    values = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (1 << 19, 64))
    values[-1] = 7
    values.flush()
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "rows.npy")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    ways = ["load_state_dict", "assign", "setattr", "_parameters", "to_empty", "convert", "collection"]
    assert (done.returncode, done.stdout.split()) == (0, ways), done.stderr


def _of_transformers(package: Any) -> Any:
    """Return a language model's class over one package's embedding."""
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):  # type: ignore[name-defined,misc]
        model_type = "toy"
        vocab_size = ROWS

    class Language(transformers.PreTrainedModel):  # type: ignore[name-defined,misc]
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed = package.Embedding(config.vocab_size, DIM, padding_idx=0)
            self.head = nn.Linear(DIM, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

    return Language


@pytest.mark.filterwarnings("default")
def test_transformers_loads_trains_and_saves_a_model(tmp_path: Path) -> None:
    ours_class, theirs_class = map(_of_transformers, (speedswap, nn))
    theirs = theirs_class(theirs_class.config_class())
    theirs.save_pretrained(tmp_path / "theirs")
    ours = ours_class.from_pretrained(tmp_path / "theirs")
    assert torch.equal(ours.embed.read(), theirs.embed.weight)
    expected, found = trained(theirs), trained(ours)
    torch.testing.assert_close(found["embed.weight"], expected["embed.weight"])
    ours.save_pretrained(tmp_path / "ours")
    back = theirs_class.from_pretrained(tmp_path / "ours")
    assert torch.equal(back.embed.weight, ours.embed.read())
    half = ours_class.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    assert half.embed.table.dtype == torch.bfloat16
    for mean_resizing in (True, False):
        with pytest.raises(
            WeightError, match=r"resize_token_embeddings\), make a larger embedding, .*set_input_embeddings"
        ):
            ours.resize_token_embeddings(ROWS + 3, mean_resizing=mean_resizing)
    larger = speedswap.Embedding(ROWS + 3, DIM)
    larger.table.write(0, ours.embed.read())
    ours.embed = larger
    assert torch.equal(ours.embed(IDS), back.embed(IDS))
    missing = ours_class.from_pretrained(tmp_path / "theirs", vocab_size=99, ignore_mismatched_sizes=True).embed.read()
    assert missing.shape == (99, DIM)
    assert 0.01 < missing[1:].std() < 0.03  # transformers' own initial values
    assert not missing[0].any()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"])
def test_accelerate_dispatches_a_model(device_map: Any, converted: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = Model(nn)
    file = str(tmp_path / "pytorch_model.bin")
    torch.save(theirs.state_dict(), file)
    with accelerate.init_empty_weights():
        ours = Model(nn if converted else speedswap)
    if converted:
        speedswap.convert(ours, min_rows=ROWS)
    accelerate.load_checkpoint_and_dispatch(ours, file, device_map=device_map)
    expected, found = trained(theirs), trained(ours)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values)
