"""Subclasses of torch's embeddings convert if their ``forward`` computes the same over a table, else are refused."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import ConversionError, TableClosedError

ROWS, DIM = 50, 8
IDS = torch.tensor([[0, 49, 25], [3, 3, 7]])


class Scaled(nn.Embedding):
    """Rows times a buffer that is not saved, as Gemma's."""

    def __init__(self, num_embeddings: int, embedding_dim: int, scale: float = 4.0, **settings: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **settings)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)


class Normed(nn.Embedding):
    """Rows with a trained layer behind them, an own parameter and an own attribute."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.norm = nn.LayerNorm(embedding_dim)
        self.extra = nn.Parameter(torch.ones(embedding_dim))
        self.offset = 2

    def forward(self, input: Tensor) -> Tensor:
        found = self.norm(super().forward(input)) * self.extra
        found[input == self.offset] = self.extra  # in place, as T5Gemma2's
        return found


class ScaledBag(nn.EmbeddingBag):
    def forward(self, input: Tensor, *more: Any) -> Tensor:
        return super().forward(input, *more) * 2


SUBCLASSES: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: Scaled(ROWS, DIM, padding_idx=3),
    "normed": lambda: Normed(ROWS, DIM),
    "bag": lambda: ScaledBag(ROWS, DIM, mode="sum"),
}


def train(module: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(IDS).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_trains_as_before_and_converts_back(name: str) -> None:
    theirs = SUBCLASSES[name]()
    ours = speedswap.convert(copy.deepcopy(theirs), min_rows=ROWS)
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, speedswap.Embedding | speedswap.EmbeddingBag)
    assert torch.equal(ours(IDS), theirs(IDS))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for module in (ours, theirs):
        train(module)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    twin = copy.deepcopy(ours)
    assert torch.equal(twin(IDS), theirs(IDS))
    train(twin)
    assert torch.equal(ours(IDS), theirs(IDS))
    back = speedswap.convert(ours, back=True)
    assert type(back) is type(theirs)
    assert vars(back).keys() == vars(theirs).keys()
    assert torch.equal(back(IDS), theirs(IDS))
    assert dict(back.named_buffers()).keys() == dict(theirs.named_buffers()).keys()


def test_a_state_dict_of_before_loads_into_the_converted() -> None:
    old, other = Normed(ROWS, DIM), Normed(ROWS, DIM)
    train(old)
    new = speedswap.convert(other, min_rows=ROWS)
    new.load_state_dict(old.state_dict())
    assert torch.equal(new(IDS), old(IDS))


def test_a_subclass_is_pickled_by_its_own_class(tmp_path: Path) -> None:
    new = speedswap.convert(Normed(ROWS, DIM), min_rows=ROWS, storage=speedswap.Disk(tmp_path / "rows"))
    train(new)
    new.table.flush()
    again = pickle.loads(pickle.dumps(new))
    assert isinstance(again, Normed)
    assert again.offset == 2
    assert torch.equal(again(IDS), new(IDS))


def test_a_subclass_is_left_out_of_graphs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Scaled(ROWS, DIM)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).sum(1) + 1

    theirs = Model()
    ours = speedswap.convert(copy.deepcopy(theirs), min_rows=ROWS)
    assert torch.equal(torch.compile(ours, backend="eager")(IDS), theirs(IDS))


def test_random_numbers_stay_as_they_were() -> None:
    model = Normed(ROWS, DIM)
    before = torch.get_rng_state()
    speedswap.convert(model, min_rows=ROWS, storage="pageable")
    assert torch.equal(torch.get_rng_state(), before)


class UsesWeight(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight)


class ReturnsWeight(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return self.weight[: input.shape[1]]


class Needs(nn.Embedding):
    def forward(self, input: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input) / lengths


class Overrides(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1)


class Grows(nn.Embedding):
    def grow(self) -> None:
        self.weight = nn.Parameter(torch.cat([self.weight, self.weight]))


class Fails(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        if type(self) is not Fails:
            raise LookupError("nothing to see")
        return super().forward(input)


class CountsRows(nn.Embedding):
    """Its output depends on how it looks rows up."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (0 if type(self) is CountsRows else 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (UsesWeight, "uses its weight, not super"),
        (ReturnsWeight, "uses its weight, not super"),
        (Fails, r"fails over a table \(nothing to see"),
        (Needs, "cannot be tried with ids alone"),
        (Overrides, "overrides reset_parameters"),
        (Grows, "whose grow assigns another weight"),
        (CountsRows, "computes something else"),
    ],
)
def test_other_subclasses_are_refused_with_the_reason(kind: type[nn.Embedding], reason: str) -> None:
    model = nn.Sequential(kind(ROWS, DIM))
    with pytest.raises(ConversionError, match=f"0: is an? {kind.__name__}, .*{reason}") as raised:
        speedswap.convert(model, min_rows=ROWS)
    assert type(model[0]) is kind
    assert len(str(raised.value)) < 250
    with torch.device("meta"):
        model = nn.Sequential(kind(ROWS, DIM))
    with pytest.raises(ConversionError, match=reason):
        speedswap.convert(model, min_rows=ROWS)


@pytest.mark.parametrize("kind", [UsesWeight, CountsRows, Scaled])
def test_the_trials_table_is_closed(kind: type[nn.Embedding], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[speedswap.Table] = []
    create = speedswap.Table.create

    def noted(*args: Any, **settings: Any) -> speedswap.Table:
        made.append(create(*args, **settings))
        return made[-1]

    monkeypatch.setattr(speedswap.Table, "create", noted)
    with suppress(ConversionError):
        speedswap.convert(kind(ROWS, DIM), min_rows=ROWS)
    trial = next(each for each in made if len(each) == 17)
    with pytest.raises(TableClosedError):
        trial.read()


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_on_meta_is_tried_and_loaded(name: str) -> None:
    theirs = SUBCLASSES[name]()
    with torch.device("meta"):
        ours = speedswap.convert(SUBCLASSES[name](), min_rows=ROWS)
    if name == "scaled":
        ours.scale = theirs.scale  # which no state_dict has
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert torch.equal(ours(IDS), theirs(IDS))
    ours.to_empty(device="cpu")
    assert not any(each.is_meta for each in [*ours.parameters(), *ours.buffers()])


def test_a_subclass_on_meta_leaves_it_with_all_its_parts() -> None:
    with torch.device("meta"):
        ours = speedswap.convert(Normed(ROWS, DIM), min_rows=ROWS)
    ours.to_empty(device="cpu")
    assert [name for name, each in ours.named_parameters() if each.is_meta] == []
    assert [*ours.state_dict()] == [*Normed(ROWS, DIM).state_dict()]


TRANSFORMERS = {
    "gemma4": ("Gemma4TextScaledWordEmbedding", (0, 4.0)),
    "gemma3n": ("Gemma3nTextScaledWordEmbedding", (0, 4.0)),
    "gemma3": ("Gemma3TextScaledWordEmbedding", (0, 4.0)),
    "bart": ("BartScaledWordEmbedding", (1, 3.0)),
    "mbart": ("MBartScaledWordEmbedding", (1, 3.0)),
    "t5gemma2": ("T5Gemma2TextScaledWordEmbedding", (0, 4.0, 40)),
    "xglm": ("XGLMScaledWordEmbedding", (1, 3.0)),
    "m2m_100": ("M2M100ScaledWordEmbedding", (1, 3.0)),
    "seamless_m4t": ("SeamlessM4TScaledWordEmbedding", (1, 3.0)),
    "inkling": ("InklingNormedEmbedding", (0, 1e-6)),
    "muse_glimmer": ("MuseGlimmerTextNormedEmbedding", (0,)),
    "ovis2": ("Ovis2VisualEmbeddingTable", ()),
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_those_of_transformers_convert(family: str) -> None:
    pytest.importorskip("transformers")
    name, arguments = TRANSFORMERS[family]
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family}")
    theirs = getattr(module, name)(ROWS, DIM, *arguments)
    with torch.no_grad():
        theirs.weight.normal_()
    ours = speedswap.convert(copy.deepcopy(theirs), min_rows=ROWS)
    assert torch.equal(ours(IDS), theirs(IDS))
    for each in (ours, theirs):
        train(each)
    assert torch.equal(ours.read(), theirs.weight)
