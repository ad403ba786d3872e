"""A model whose large embeddings are replaced computes, trains and saves as it did before."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import (
    ConversionError,
    LostUpdateError,
    SpeedswapError,
    SpeedswapWarning,
    TableFormatError,
    TableFullError,
)
from speedswap.kernels import Room
from speedswap.tables.disk.cache import LogCache

ROWS, DIM = 50, 6


class Model(nn.Module):
    """Embeddings at several depths, one of them small, and a dense part."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, padding_idx=3, dtype=dtype)
        self.inner = nn.ModuleDict({"item": nn.Embedding(ROWS + 1, DIM, dtype=dtype)})
        self.bags = nn.ModuleList(
            [
                nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=1, dtype=dtype),
                nn.EmbeddingBag(ROWS, DIM, mode="max", include_last_offset=True, dtype=dtype),
            ]
        )
        self.small = nn.Embedding(7, DIM, dtype=dtype)
        self.head = nn.Linear(DIM, 1, dtype=dtype)
        with torch.no_grad():
            self.users.weight[3] = 5  # some padding rows are not zeros

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.tensor([0, 2, 5], device=ids.device)
        pooled = (
            self.bags[0](ids, offsets).sum() + self.bags[1](ids, torch.cat([offsets, offsets.new_tensor([9])])).sum()
        )
        found = self.users(ids) * self.inner["item"](ids) + self.small(ids % 7)
        return self.head(found).sum() + pooled


def ids_on(device: str) -> Tensor:
    return torch.tensor([3, 7, 7, 49, 1, 0, 30, 3, 12], device=device)


def twins(device: str, **settings: Any) -> tuple[Model, Model]:
    """Return a converted model, and torch's with the same values."""
    theirs = Model().to(device)
    ours = copy.deepcopy(theirs)
    assert speedswap.convert(ours, min_rows=ROWS, **settings) is ours
    return ours, theirs


def embedding(**settings: Any) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(ROWS, DIM, **settings))


# ---------------------------------------------------------------------- the same model


@pytest.mark.parametrize("storage", ["device", "pageable", "disk"])
def test_a_converted_model_saves_and_computes_the_same(storage: str, tmp_path: Path, device: str) -> None:
    settings = {"storage": storage, **({"path": tmp_path / "tables"} if storage == "disk" else {})}
    ours, theirs = twins(device, **settings)
    assert {name: type(module) for name, module in ours.named_modules() if isinstance(module, speedswap.Embedding)} == {
        "users": speedswap.Embedding,
        "inner.item": speedswap.Embedding,
    }
    assert [type(bag) for bag in ours.bags] == [speedswap.EmbeddingBag] * 2
    assert type(ours.small) is nn.Embedding
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    saved, expected = ours.state_dict(), theirs.state_dict()
    assert list(saved) == list(expected)
    for name, values in expected.items():
        assert torch.equal(saved[name].cpu(), values.cpu()), name
    assert torch.equal(ours(ids_on(device)), theirs(ids_on(device)))
    assert ours.users.table.storage == storage


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    ],
    ids=["sgd", "adagrad"],
)
def test_a_converted_model_trains_the_same(make_optimizer: Callable[..., torch.optim.Optimizer], device: str) -> None:
    ours, theirs = twins(device)
    for model in (ours, theirs):
        optimizer = make_optimizer(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(ids_on(device)).square().backward()
            optimizer.step()
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), values.cpu(), rtol=1e-12, atol=1e-12)


def test_the_step_of_an_optimizer_made_before_says_so() -> None:
    """Its gradient reaches no table. An optimizer that holds the old weight for another model steps undisturbed."""
    model, ids = nn.ModuleList([nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)]), torch.tensor([3, 7])
    other = nn.Sequential(model[0])
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    speedswap.convert(model, min_rows=ROWS)
    items, rows = model[0], model[0].read()
    before.step()  # without a gradient there is nothing to lose
    items(ids).sum().backward()
    for _ in range(2):
        with pytest.raises(LostUpdateError, match=r"SGD holds the weight that table '0' has replaced, and .* make"):
            before.step()
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    other(ids).sum().backward()
    before.step()
    after.step()
    torch.testing.assert_close(items.read(ids), rows[ids] - 0.1)
    torch.testing.assert_close(other[0].weight[ids], rows[ids] - 0.1)


def test_what_was_set_on_the_modules_is_kept(device: str) -> None:
    """Mode, padding, training, freezing, dtype, and what other libraries note on modules and parameters."""
    model = Model(torch.float32).to(device).eval()
    model.users.weight.requires_grad_(False)
    model.users.weight.no_weight_decay = True
    model.users.note = "kept"
    speedswap.convert(model, min_rows=ROWS)
    assert (model.users.padding_idx, model.users.training, model.users.note) == (3, False, "kept")
    assert (model.users.weight.requires_grad, model.users.weight.no_weight_decay) == (False, True)
    assert (model.bags[0].mode, model.bags[0].padding_idx, model.bags[0].include_last_offset) == ("sum", 1, False)
    assert (model.bags[1].mode, model.bags[1].padding_idx, model.bags[1].include_last_offset) == ("max", None, True)
    assert model.inner["item"].weight.requires_grad
    assert model.users.table.dtype == torch.float32
    assert model.users.weight.device.type == device
    assert model.inner["item"].table.name == "inner.item"


def test_settings_are_passed_on(tmp_path: Path) -> None:
    """Tables in files are in directories named like their modules."""
    model = Model(torch.float32)
    expected = model.users.weight.detach().to(torch.bfloat16).float()
    settings = {"stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16, "rounding": "nearest"}
    speedswap.convert(model, ROWS, path=tmp_path / "a" / "tables", **settings)
    assert sorted(place.name for place in (tmp_path / "a" / "tables").iterdir()) == [
        "bags.0",
        "bags.1",
        "inner.item",
        "users",
    ]
    assert torch.equal(model.users.read(), expected)
    optimizer = torch.optim.Adam(model.parameters())
    model(ids_on("cpu")).backward()
    optimizer.step()
    assert model.users.table.columns["exp_avg"].stored_dtype == torch.bfloat16
    assert model.users.table.columns["weight"].rounding == "nearest"


def test_settings_of_a_disk_are_passed_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(50_000, 8))
    expected = model[0].weight.detach().clone()
    disk = {"cache_bytes": 500_000, "commit_every": 3, "commit_seconds": None, "scratch": True}
    speedswap.convert(model, ROWS, storage=speedswap.Disk(tmp_path / "tables", **disk))
    assert model[0].table.store.cache_bytes <= 500_000
    assert torch.equal(model[0].read(), expected)
    model[0].table.close()
    assert not [*(tmp_path / "tables").rglob("*.log")]


def test_names_that_files_cannot_have_are_quoted(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a/b": nn.Embedding(ROWS, DIM)})
    speedswap.convert(model, ROWS, path=tmp_path)
    assert [place.name for place in tmp_path.iterdir()] == ["a%2Fb"]


def test_a_frozen_table_can_be_int8() -> None:
    model = embedding().requires_grad_(False)
    rows = model[0].weight.detach()
    speedswap.convert(model, ROWS, stored_dtype=torch.int8)
    assert (model[0].read() - rows).abs().max() <= rows.abs().max() / 127 / 2 * 1.001


def test_an_embedding_alone_gives_its_replacement() -> None:
    old = nn.Embedding(ROWS, DIM)
    new = speedswap.convert(old, min_rows=ROWS)
    assert type(new) is speedswap.Embedding
    assert torch.equal(new.read(), old.weight)


def test_a_module_with_two_names_is_replaced_at_both() -> None:
    shared = nn.Embedding(ROWS, DIM)
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(shared, nn.Linear(DIM, 1))})
    speedswap.convert(model, ROWS)
    assert type(model["encoder"][0]) is speedswap.Embedding
    assert model["encoder"][0] is model["decoder"][0]


def test_random_numbers_are_not_drawn() -> None:
    model = Model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    speedswap.convert(model, ROWS)
    assert torch.equal(torch.rand(3), expected)


def test_converting_twice_changes_nothing_more() -> None:
    model = speedswap.convert(Model(), ROWS)
    before = list(model.modules())
    speedswap.convert(model, ROWS)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_an_old_weight_goes_before_the_next_table_is_made(caplog: pytest.LogCaptureFixture) -> None:
    """So the most that is held is the model and one table."""
    model = nn.ModuleList([nn.Embedding(ROWS, DIM) for _ in range(3)])
    weights = [weakref.ref(module.weight) for module in model]
    alive = []

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            alive.append(sum(weight() is not None for weight in weights))

    handler, log = Count(), logging.getLogger("speedswap")
    log.addHandler(handler)
    gc.disable()
    try:
        with caplog.at_level(logging.INFO, logger="speedswap"):
            speedswap.convert(model, ROWS)
    finally:
        gc.enable()
        log.removeHandler(handler)
    assert alive == [3, 2, 1]  # each is logged while the one that it replaces is still there
    assert [weight() for weight in weights] == [None] * 3
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"{i}: speedswap.Embedding over Table('{i}'" for i in range(3)
    ]


# ---------------------------------------------------------------------- what is refused


class OwnForward(nn.Embedding):
    """A subclass that looks rows up in its weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight) * 2


def tied_head() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(ROWS, DIM), "lm_head": nn.Linear(DIM, ROWS, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def tied_data() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(ROWS, DIM), "lm_head": nn.Linear(DIM, ROWS, bias=False)})
    model["lm_head"].weight.data = model["embed"].weight.data
    return model


def tied_embeddings() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(ROWS, DIM), "other": nn.EmbeddingBag(ROWS, DIM)})
    model["other"].weight = model["embed"].weight
    return model


def with_hook(register: Callable[[nn.Embedding], Any]) -> nn.Module:
    model = embedding()
    register(model[0])
    return model


def with_gradient() -> nn.Module:
    model = embedding()
    model(torch.tensor([1])).sum().backward()
    return model


def with_own_forward() -> nn.Module:
    model = embedding()
    model[0].forward = lambda ids: ids
    return model


def parametrized() -> nn.Module:
    model = embedding()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tied_head, r"embed: its weight is tied to 'lm_head.weight'"),
        (tied_data, r"embed: its weight is tied to 'lm_head.weight'"),
        (tied_embeddings, r"embed: .* tied to 'other.weight'.*\n *other: its weight is tied to 'embed.weight'"),
        (lambda: embedding(max_norm=1.0), r"0: max_norm is 1.0"),
        (lambda: embedding(scale_grad_by_freq=True), r"0: scale_grad_by_freq is True"),
        (
            lambda: nn.Sequential(OwnForward(ROWS, DIM)),
            r"0: is an OwnForward, whose forward uses its weight",
        ),
        (parametrized, r"0: its weight is computed"),
        (with_gradient, r"0: its weight has a gradient"),
        (with_own_forward, r"0: it has attributes that its replacement has too: forward"),
        (lambda: embedding().share_memory(), r"0: its weight is in memory shared"),
        (lambda: with_hook(lambda e: e.register_forward_hook(print)), r"0: it has hooks"),
        (lambda: with_hook(lambda e: e.register_full_backward_hook(print)), r"0: it has hooks"),
        (lambda: with_hook(lambda e: e.weight.register_hook(print)), r"0: its weight has hooks"),
        (lambda: with_hook(lambda e: e.register_buffer("b", torch.ones(1))), r"0: it has additional .*: b"),
        (
            lambda: nn.Sequential(
                nn.Embedding(ROWS, DIM, _weight=torch.ones(ROWS, DIM, dtype=torch.int32), _freeze=True)
            ),
            r"0: embeddings is torch.int32",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    before = list(model.modules())
    with pytest.raises(ConversionError, match=message) as raised:
        speedswap.convert(model, ROWS)
    assert isinstance(raised.value, SpeedswapError)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_one_refusal_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """All reasons are named at once, with dotted names; no table is made."""
    model = Model()
    model.inner["item"].max_norm = 2.0
    model.bags[1].scale_grad_by_freq = True
    with pytest.raises(ConversionError, match=r"inner\.item: max_norm is 2\.0(.|\n)*bags\.1: scale_grad_by_freq"):
        speedswap.convert(model, ROWS, path=tmp_path / "tables")
    assert not any(isinstance(module, speedswap.Embedding) for module in model.modules())
    assert not (tmp_path / "tables").exists()


def test_skipped_embeddings_are_left_alone() -> None:
    """The way to convert a model with a tied head: the others."""
    model = nn.ModuleDict({"tied": tied_head(), "users": nn.Embedding(ROWS, DIM)})
    speedswap.convert(model, ROWS, skip=["tied.embed"])
    assert type(model["tied"]["embed"]) is nn.Embedding
    assert type(model["users"]) is speedswap.Embedding
    with pytest.raises(ValueError, match=r"skip has 'user', which is not an embedding; the model has tied.embed"):
        speedswap.convert(model, ROWS, skip=["user"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stored_dtype": torch.int8}, "stored_dtype is torch.int8 and freeze is False"),
        ({"stored_dtype": torch.float64}, "was to be stored as torch.float64"),
        ({"state_dtype": torch.int8}, "state_dtype is torch.int8"),
        ({"rounding": "up"}, "rounding is 'up'"),
        ({"storage": "attic"}, "storage is 'attic'"),
        ({"storage": "disk"}, "storage is 'disk' but path is None"),
        ({"storage": "pageable", "path": "tables"}, "path is 'tables' but storage is 'pageable'"),
    ],
)
def test_settings_that_do_not_fit_change_nothing(settings: dict[str, Any], message: str) -> None:
    model = Model(torch.float32)
    with pytest.raises(ValueError, match=message):
        speedswap.convert(model, ROWS, **settings)
    assert type(model.users) is nn.Embedding


def test_settings_of_a_disk_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    model = Model(torch.float32)
    with pytest.raises(ValueError, match="commit_every is 0; give at least 1"):
        speedswap.convert(model, ROWS, storage=speedswap.Disk(tmp_path / "tables", commit_every=0))
    assert type(model.users) is nn.Embedding
    assert not (tmp_path / "tables").exists()


def test_a_place_that_is_taken_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bags.1").mkdir()
    model = Model()
    with pytest.raises(FileExistsError, match=r"bags.1', which exists; open what is there, or give another path"):
        speedswap.convert(model, ROWS, path=tmp_path)
    assert type(model.users) is nn.Embedding
    assert [place.name for place in tmp_path.iterdir()] == ["bags.1"]


def test_settings_of_the_disk_are_those_of_the_tables(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, 4))
    with pytest.raises(ValueError, match="commit_every is 0; give at least 1 step"):
        speedswap.convert(model, ROWS, storage=speedswap.Disk(tmp_path, commit_every=0))
    assert list(tmp_path.iterdir()) == []
    assert type(model[0]) is nn.Embedding
    speedswap.convert(model, ROWS, storage=speedswap.Disk(tmp_path, cache_bytes=999, scratch=True))
    with pytest.raises(TableFormatError, match="scratch"):
        speedswap.Table.open(tmp_path / "0", "r")


def test_a_full_disk_leaves_the_rest_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second table finds no room: the first is converted, and nothing is left of the second on disk."""
    model = Model()
    make_room = LogCache.make_room

    def full_at_second(self: LogCache, rows: int) -> Room:
        if self.manifest.name != "users":
            raise TableFullError("no room")
        return make_room(self, rows)

    monkeypatch.setattr(LogCache, "make_room", full_at_second)
    with pytest.raises(TableFullError):
        speedswap.convert(model, ROWS, path=tmp_path)
    assert type(model.users) is speedswap.Embedding
    assert type(model.inner["item"]) is nn.Embedding
    assert [place.name for place in tmp_path.iterdir()] == ["users"]


def test_a_place_discards_what_a_failed_conversion_made_in_it() -> None:
    discarded = []

    class Place(speedswap.Pageable):
        def create(self, *args: Any, **kwargs: Any) -> Any:
            raise TableFullError("no room")

        def discard(self) -> None:
            discarded.append(self)

    place = Place()
    with pytest.raises(TableFullError):
        speedswap.convert(Model(), ROWS, storage=place)
    assert discarded == [place]


# ---------------------------------------------------------------------- what is said


def test_that_nothing_is_large_enough_is_said() -> None:
    with pytest.warns(SpeedswapWarning, match=r"has 100,000 rows \(inner.item, the largest, has 51\)"):
        assert speedswap.convert(Model())
    with pytest.warns(SpeedswapWarning, match=r"\(it has none\)"):
        speedswap.convert(nn.Linear(2, 2))


def test_that_gradients_are_no_longer_sparse_is_said() -> None:
    model = embedding(sparse=True)
    with pytest.warns(SpeedswapWarning, match=r"0: sparse was True.*use torch.optim.Adam instead of SparseAdam"):
        speedswap.convert(model, ROWS)
    assert type(model[0]) is speedswap.Embedding


def test_a_tied_head_is_converted_as_its_refusal_says() -> None:
    """One table, looked up as input and, by a sampled softmax, as output, trains as torch's tied weight does."""
    rows = torch.randn(ROWS, DIM, dtype=torch.float64)
    ids, targets = torch.randint(ROWS, (20,)), torch.randint(ROWS, (20,))

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, ROWS, bias=False)).double()
        nn.init.eye_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        model[0].weight = model[2].weight = nn.Parameter(rows.clone())
        return model

    theirs, ours = tied(), tied()
    with pytest.raises(
        ConversionError, match=r"0: .* tied to '2.weight'.*put torch.nn.Identity\(\) in its place, conv"
    ):
        speedswap.convert(ours, ROWS)
    ours[2] = nn.Identity()
    speedswap.convert(ours, ROWS)
    for model in (ours, theirs):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        if model is ours:  # every row is a negative once
            loss = speedswap.losses.sampled_softmax(model(ids), targets, model[0], torch.arange(ROWS))
        else:
            loss = nn.functional.cross_entropy(model(ids), targets)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(ours[0].read(), theirs[0].weight.detach(), rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        found = speedswap.losses.full_softmax(ours(ids), targets, ours[0])
        torch.testing.assert_close(found, nn.functional.cross_entropy(theirs(ids), targets))
