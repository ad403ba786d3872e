"""A model whose embeddings become torch's again computes and trains on as before, and nothing is lost in silence."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import ConversionError, LostUpdateError, SpeedswapWarning, TableTooLargeError

ROWS, DIM = 50, 6
IDS = torch.tensor([[3, 3], [7, 49]])


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, padding_idx=3, dtype=dtype)
        self.inner = nn.ModuleDict({"bag": nn.EmbeddingBag(ROWS + 1, DIM, mode="max", padding_idx=1, dtype=dtype)})
        self.last = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, dtype=dtype)
        self.small = nn.Embedding(7, DIM, dtype=dtype)
        self.head = nn.Linear(DIM, 1, dtype=dtype)
        self.again = self.users

    def forward(self, ids: Tensor) -> Tensor:
        found = self.users(ids).sum(1) + self.inner["bag"](ids) + self.small(ids % 7).sum(1)
        return self.head(found).sum() + self.last(ids.flatten(), torch.tensor([0, 4], device=ids.device)).sum()


def train(model: nn.Module, ids: Tensor, make: Callable[..., torch.optim.Optimizer] = torch.optim.Adagrad) -> None:
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(ids - step).square().backward()
        optimizer.step()


@pytest.mark.parametrize("storage", ["device", "pageable", "disk"])
def test_a_trained_model_goes_back_and_trains_on_as_torchs(storage: str, tmp_path: Path, device: str) -> None:
    theirs = Model().to(device)
    ours = copy.deepcopy(theirs)
    path = tmp_path / "tables" if storage == "disk" else None
    speedswap.convert(ours, min_rows=ROWS, storage=storage, path=path)
    ids = IDS.to(device)
    for model in (ours, theirs):
        train(model, ids)
    if storage == "disk":
        file = ours.users.table.path
    assert speedswap.convert(ours, back=True) is ours
    assert [type(each) for each in ours.modules()] == [type(each) for each in theirs.modules()]
    assert ours.again is ours.users
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], values, rtol=1e-12, atol=1e-12)
    for model in (ours, theirs):
        train(model, ids - 1, torch.optim.Adam)
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], values, rtol=1e-12, atol=1e-12)
    assert repr(ours) == repr(theirs)
    if storage == "disk":  # it was committed, and stays
        with speedswap.Table.open(file) as table:
            assert "sum" in table.columns


def test_what_was_set_on_the_modules_is_kept(device: str) -> None:
    model = Model(torch.float32).to(device).eval()
    speedswap.convert(model, min_rows=ROWS, stored_dtype=torch.bfloat16)
    model.users.weight.requires_grad_(False)
    model.users.weight.no_weight_decay = True
    model.users.note = "kept"
    state = torch.random.get_rng_state()
    rows = model.users.read()
    speedswap.convert(model, back=True, skip=["last"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(model.last) is speedswap.EmbeddingBag
    users = model.users
    assert torch.equal(users.weight.cpu(), rows)
    assert (type(users), users.padding_idx, users.training, users.note) == (nn.Embedding, 3, False, "kept")
    assert (users.weight.requires_grad, users.weight.no_weight_decay) == (False, True)
    assert (type(users.weight), users.weight.device.type) == (nn.Parameter, device)
    assert vars(users).keys() - {"note"} == vars(nn.Embedding(1, 1)).keys()
    assert vars(users.weight) == {"no_weight_decay": True}
    bag = model.inner["bag"]
    assert (type(bag), bag.mode, bag.padding_idx, bag.weight.requires_grad) == (nn.EmbeddingBag, "max", 1, True)
    speedswap.convert(model, min_rows=ROWS)
    assert type(model.users) is speedswap.Embedding


def test_an_embedding_alone_gives_its_replacement() -> None:
    items = speedswap.Embedding(ROWS, DIM, storage="pageable")
    speedswap.attach(torch.optim.SGD(items.parameters(), lr=0.1, weight_decay=0.1), items, idle_rows="dense")
    rows = items.read()
    plain = speedswap.convert(items, back=True)
    assert type(plain) is nn.Embedding
    assert torch.equal(plain.weight, rows)
    assert speedswap.convert(plain, back=True) is plain  # nothing to do


def test_rows_that_lack_steps_take_them_first() -> None:
    items, dense = speedswap.Embedding(ROWS, DIM, dtype=torch.float64), nn.Embedding(ROWS, DIM, dtype=torch.float64)
    items.table.write(0, dense.weight.detach())
    for module in (items, dense):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1, weight_decay=0.1)
        if module is items:
            speedswap.attach(optimizer, items, idle_rows="dense")
        for step in range(3):
            optimizer.zero_grad()
            module(IDS - step).square().sum().backward()
            optimizer.step()
    del optimizer
    torch.testing.assert_close(speedswap.convert(items, back=True).weight, dense.weight)


def test_a_table_is_released_before_the_next_is_copied() -> None:
    model = nn.ModuleList([speedswap.Embedding(ROWS, DIM, storage="pageable") for _ in range(3)])
    tables = [weakref.ref(items.table) for items in model]
    optimizer = torch.optim.Adam(model.parameters())
    sum(items(IDS).sum() for items in model).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(SpeedswapWarning):
        speedswap.convert(model, back=True)
    assert [table() for table in tables] == [None] * 3


MEMORY = """
import resource, torch, speedswap
from torch import nn

rows, dim = 1 << 18, 64
nbytes = rows * dim * 4
speedswap.convert(nn.Sequential(speedswap.Embedding(1 << 17, dim)), back=True)  # starts threads
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes * 7 // 2, resource.RLIM_INFINITY))
model = nn.Sequential(speedswap.Embedding(rows, dim, seed=1), speedswap.Embedding(rows, dim, seed=2))
expected = [items(torch.tensor([rows - 1])).tolist() for items in model]
speedswap.convert(model, back=True)
assert [items(torch.tensor([rows - 1])).tolist() for items in model] == expected
model.append(speedswap.Embedding(rows, dim, seed=1))
try:
    speedswap.convert(model, back=True)
except speedswap.errors.TableTooLargeError as error:
    print(type(model[2]).__name__, str(error).partition(" on ")[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_one_weight_more_than_the_tables_is_in_memory() -> None:
    """Two tables of 64 MiB go back in a process that may have 3.5; a third finds no room, and stays."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=False)
    said = "Embedding the rows of table 'table' take 67,108,864 bytes\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_weights_that_do_not_fit_are_refused_with_their_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables in memory are released one by one; those on disk are not in memory."""
    nbytes = ROWS * DIM * 4
    monkeypatch.setattr(sys.modules["speedswap.swapping.convert"], "available_bytes", lambda: int(1.5 * nbytes))
    in_memory = nn.ModuleList([speedswap.Embedding(ROWS, DIM, storage="pageable") for _ in range(3)])
    on_disk = nn.ModuleList([speedswap.Embedding(ROWS, DIM, path=tmp_path / name) for name in "abc"])
    with pytest.raises(
        TableTooLargeError, match=f"need {3 * nbytes:,} more bytes of memory, but {int(1.5 * nbytes):,} are free; no"
    ):
        speedswap.convert(on_disk, back=True)
    assert all(type(items) is speedswap.Embedding for items in on_disk)
    speedswap.convert(in_memory, back=True)
    speedswap.convert(on_disk, back=True, skip=["0", "2"])
    assert [type(items) is nn.Embedding for items in on_disk] == [False, True, False]


# ---------------------------------------------------------------------- optimizers


def test_an_optimizer_of_the_table_is_named_and_its_step_is_an_error() -> None:
    model = nn.ModuleList([speedswap.Embedding(ROWS, DIM), nn.Linear(DIM, 1)])
    elsewhere = nn.Sequential(model[0])
    before = torch.optim.Adam(model.parameters(), lr=0.1)
    model[0](IDS).sum().backward()
    before.step()
    before.zero_grad()
    with pytest.warns(SpeedswapWarning, match=r"0 \(Adam\): an optimizer trains the table"):
        speedswap.convert(model, back=True)
    rows = model[0].weight.detach().clone()
    before.step()  # without a gradient there is nothing to lose
    model[0](IDS).sum().backward()
    for _ in range(2):
        with pytest.raises(LostUpdateError, match=r"Adam holds the weight of table .* make the optimizer after"):
            before.step()
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    after.step()
    torch.testing.assert_close(model[0].weight[7], rows[7] - 0.1)
    after.zero_grad()
    elsewhere(IDS).sum().backward()  # another model has the table still
    before.step()
    assert not torch.equal(elsewhere[0].read(7), rows[7])


# ---------------------------------------------------------------------- refusals


def hooked() -> nn.Module:
    items = speedswap.Embedding(ROWS, DIM)
    items.register_forward_hook(lambda *args: None)
    return items


def with_gradient() -> nn.Module:
    items = speedswap.Embedding(ROWS, DIM)
    items(IDS).sum().backward()
    return items


def shared() -> nn.Module:
    table = speedswap.Table.create(ROWS, DIM)
    return nn.Sequential(*(speedswap.Embedding(ROWS, DIM, table=table) for _ in range(2)))


def closed() -> nn.Module:
    items = speedswap.Embedding(ROWS, DIM)
    items.table.close()
    return items


def ahead() -> nn.Module:
    items = speedswap.Embedding(ROWS, DIM)
    items.kept = iter(speedswap.lookahead([IDS, IDS, IDS], {items: lambda ids: ids}))
    next(items.kept)
    return items


class Own(speedswap.Embedding):
    pass


REFUSED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "a subclass": ("is of type Own, a subclass", lambda: Own(ROWS, DIM)),
    "without rows": ("on the meta device and has no rows yet", lambda: speedswap.Embedding(ROWS, DIM, device="meta")),
    "keys": ("it looks keys up", lambda: speedswap.Embedding(ROWS, DIM, id_map=speedswap.IdMap(ROWS - 1))),
    "hooks": ("it has hooks", hooked),
    "a gradient": ("its weight has a gradient that awaits a step, and would be lost", with_gradient),
    "one table twice": ("another embedding of the model has the same table", shared),
    "a closed table": ("is closed", closed),
    "a lookahead": ("a lookahead or a step is under way", ahead),
    "ignored": (
        "DistributedDataParallel is told to ignore its weight",
        lambda: speedswap.ignore_in_ddp(nn.Sequential(speedswap.Embedding(ROWS, DIM))),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused_by_name_and_changes_nothing(case: str) -> None:
    message, make = REFUSED[case]
    model = nn.ModuleDict({"fine": speedswap.Embedding(ROWS, DIM), "other": make()})
    with pytest.raises(ConversionError, match=rf"(?s)nothing was converted:\n  other.*{message}"):
        speedswap.convert(model, back=True)
    assert type(model["fine"]) is speedswap.Embedding


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage": "pageable"}, "storage is 'pageable', but back is True"),
        ({"stored_dtype": torch.bfloat16}, "stored_dtype is torch.bfloat16, but back is True"),
        ({"checkpoint": "model.safetensors"}, "checkpoint is 'model.safetensors', but back is True"),
        ({"skip": ["head"]}, "skip has 'head', which is not an embedding; the model has users"),
    ],
)
def test_settings_of_the_way_there_are_refused(settings: dict[str, Any], message: str) -> None:
    model = speedswap.convert(Model(), min_rows=ROWS)
    with pytest.raises(ValueError, match=message):
        speedswap.convert(model, back=True, **settings)
    assert type(model.users) is speedswap.Embedding
