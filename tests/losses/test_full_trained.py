"""A softmax over all rows trains all of them, as torch's over a matrix does, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.errors import LostUpdateError, OptimizerError, TableClosedError, WeightError
from speedswap.losses import UniformSampler, full_softmax, sampled_softmax

ROWS, DIM, SAMPLES, CHUNK = 60, 4, 9, 7

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, amsgrad=True),
}


class Pair:
    """The same model twice: items, biases and an encoder, ours in tables and torch's dense, in float64."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], device: str = "cpu", **settings: Any) -> None:
        weight, biases = (torch.randn(ROWS, width, dtype=torch.float64) for width in (DIM, 1))
        self.padding_idx = settings.get("padding_idx")
        if self.padding_idx is not None:
            weight[self.padding_idx] = 0
        self.items = speedswap.Embedding.from_pretrained(weight.clone(), freeze=False, **settings)
        self.bias = speedswap.Embedding.from_pretrained(biases.clone(), freeze=False)
        self.dense = nn.Embedding(ROWS, DIM, self.padding_idx, _weight=weight.to(device))
        self.dense_bias = nn.Embedding(ROWS, 1, _weight=biases.to(device))
        self.encoders = [nn.Linear(DIM, DIM, dtype=torch.float64, device=device) for _ in range(2)]
        self.encoders[1].load_state_dict(self.encoders[0].state_dict())
        self.optimizer, self.theirs = (
            make([each for module in modules for each in module.parameters()])
            for modules in (
                (self.items, self.bias, self.encoders[0]),
                (self.dense, self.dense_bias, self.encoders[1]),
            )
        )
        self.device = device

    def batch(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.randint(1, ROWS, (SAMPLES,), device=self.device) for _ in range(2))  # type: ignore[return-value]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of tied rows: the same are the input and the output."""
        return full_softmax(self.encoders[0](self.items(tokens)), targets, self.items, bias=self.bias, chunk=CHUNK)

    def their_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.encoders[1](self.dense(tokens)) @ self.dense.weight.T + self.dense_bias.weight.T
        if self.padding_idx is not None:
            logits = logits.index_fill(1, torch.tensor([self.padding_idx], device=self.device), -torch.inf)
        return F.cross_entropy(logits, targets)

    def step(self, batches: list[tuple[Tensor, Tensor]] | None = None) -> None:
        batches = batches or [self.batch()]
        for optimizer, loss_of in ((self.optimizer, self.loss), (self.theirs, self.their_loss)):
            for batch in batches:
                loss_of(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def require_alike(self) -> None:
        for ours, theirs in ((self.items, self.dense), (self.bias, self.dense_bias)):
            torch.testing.assert_close(ours.read(), theirs.weight.detach().cpu(), rtol=1e-11, atol=1e-12)
        ours, theirs = (each.weight.detach() for each in self.encoders)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def trained(pair: Pair, steps: int = 20) -> None:
    for _ in range(steps):
        batch = pair.batch()
        ours, theirs = pair.loss(*batch), pair.their_loss(*batch)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
        pair.step([batch])
    pair.require_alike()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_row_trains_as_torchs(name: str, device: str) -> None:
    """Losses, rows, biases and encoder, in a model whose items are tied to its input."""
    trained(Pair(OPTIMIZERS[name], device))


def test_a_padding_row_is_left_out_and_decays(device: str) -> None:
    trained(Pair(OPTIMIZERS["momentum"], device, padding_idx=0))


def test_the_padding_row_as_a_target_has_an_infinite_loss_and_no_gradient(device: str) -> None:
    """As torch's has it where that row's logits are -inf; the other samples train on."""
    pair = Pair(OPTIMIZERS["SGD"], device, padding_idx=3)
    tokens, targets = pair.batch()
    targets[2] = 3
    each = full_softmax(
        pair.encoders[0](pair.items(tokens)), targets, pair.items, bias=pair.bias, chunk=CHUNK, reduction="none"
    )
    assert torch.equal(each == torch.inf, targets == 3)
    assert pair.loss(tokens, targets).item() == pair.their_loss(tokens, targets).item() == torch.inf
    pair.step([(tokens, targets)])
    pair.require_alike()
    skipped = full_softmax(pair.encoders[0](pair.items(tokens)), targets, pair.items, ignore_index=3)
    assert skipped.isfinite()


def test_rows_on_disk_train_and_are_found_again(tmp_path: Path) -> None:
    pair = Pair(OPTIMIZERS["Adam"], path=tmp_path / "items")
    trained(pair, 5)
    pair.items.table.close()
    with speedswap.Table.open(tmp_path / "items") as table:
        torch.testing.assert_close(table.read(), pair.dense.weight.detach(), rtol=1e-11, atol=1e-12)
        squares = pair.theirs.state[pair.dense.weight]["exp_avg_sq"]
        torch.testing.assert_close(table.read(column="exp_avg_sq"), squares, rtol=1e-11, atol=1e-14)


def test_gradients_of_several_batches_add_up() -> None:
    """Also after zero_grad(set_to_none=False), which drops those before it."""
    pair = Pair(OPTIMIZERS["Adam"])
    for _ in range(3):
        batches = [pair.batch() for _ in range(3)]
        pair.loss(*pair.batch()).backward()
        pair.optimizer.zero_grad(set_to_none=False)
        pair.step(batches)
    pair.require_alike()


def test_a_second_backward_pass_counts_again() -> None:
    pair = Pair(OPTIMIZERS["SGD"])
    batch = pair.batch()
    for optimizer, loss in ((pair.optimizer, pair.loss(*batch)), (pair.theirs, pair.their_loss(*batch))):
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        optimizer.step()
    pair.require_alike()


def test_a_gradient_of_hidden_alone_trains_no_rows() -> None:
    pair = Pair(OPTIMIZERS["SGD"])
    hidden = torch.randn(SAMPLES, DIM, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(full_softmax(hidden, pair.batch()[1], pair.items), hidden)
    before = pair.items.read()
    pair.optimizer.step()
    assert torch.equal(pair.items.read(), before)


def test_steps_by_a_closure() -> None:
    pair = Pair(OPTIMIZERS["Adam"])
    for _ in range(3):
        batch = pair.batch()
        for optimizer, loss_of in ((pair.optimizer, pair.loss), (pair.theirs, pair.their_loss)):

            def closure(optimizer: Any = optimizer, loss_of: Any = loss_of, batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = loss_of(*batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    pair.require_alike()


def test_rows_announced_to_a_lookahead_are_those_of_the_last_step() -> None:
    pair = Pair(OPTIMIZERS["Adam"])
    batches = [pair.batch() for _ in range(8)]
    announce = {pair.items: lambda batch: [batch[0], batch[1]], pair.bias: lambda batch: batch[1]}
    for tokens, targets in speedswap.lookahead(batches, announce):
        pair.step([(tokens, targets)])
    pair.require_alike()


def test_with_dense_idle_rows_sampled_and_full_steps_mix() -> None:
    """Rows that a sampled step leaves out take it before the full step that follows."""
    pair = Pair(OPTIMIZERS["AdamW"])
    speedswap.attach(pair.optimizer, nn.ModuleList([pair.items, pair.bias]), idle_rows="dense")
    for number in range(12):
        if number % 3 == 2:
            pair.step()
            continue
        (tokens, targets), negatives = pair.batch(), UniformSampler(5, ROWS).sample()
        for optimizer, encoder, items in (
            (pair.optimizer, pair.encoders[0], pair.items),
            (pair.theirs, pair.encoders[1], pair.dense),
        ):
            sampled_softmax(encoder(items(tokens)), targets, items, negatives).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(pair.items.read(), pair.dense.weight.detach(), rtol=1e-11, atol=1e-12)


def test_no_more_rows_than_a_chunk_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, leased = Pair(OPTIMIZERS["Adam"]), []
    own = speedswap.Table.lease

    def counted(table: speedswap.Table, rows: Tensor, **settings: Any) -> Any:
        leased.append(len(rows))
        return own(table, rows, **settings)

    monkeypatch.setattr(speedswap.Table, "lease", counted)
    full_softmax(torch.randn(2, DIM, dtype=torch.float64), torch.tensor([3, 30]), pair.items, chunk=CHUNK).backward()
    pair.optimizer.step()
    assert max(leased) <= CHUNK
    assert sum(leased) == 2 + 2 + ROWS - 2  # the targets twice: the optimizer's columns came after their lookup


# ---------------------------------------------------------------------- refusals, and steps that fail


def clipped(pair: Pair) -> None:
    torch.nn.utils.clip_grad_norm_(pair.items.parameters(), 1.0)


def replaced(pair: Pair) -> None:
    pair.items.weight.grad = pair.items.weight.grad * 2


def unscaled(pair: Pair) -> None:
    """Change it without a version counter, as all below do."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(pair.optimizer)


def of_its_data(pair: Pair) -> None:
    pair.items.weight.grad.data.mul_(0.5)


def through_numpy(pair: Pair) -> None:
    pair.items.weight.grad.cpu().numpy()[:] *= 2
    pair.bias.weight.grad.data.zero_()


def before_another_backward_pass(pair: Pair) -> None:
    pair.items.weight.grad.data.mul_(0.5)
    pair.loss(*pair.batch()).backward()


@pytest.mark.parametrize(
    "change", [clipped, replaced, unscaled, of_its_data, through_numpy, before_another_backward_pass]
)
def test_a_gradient_that_was_changed_is_refused(change: Callable[[Pair], None]) -> None:
    """Most of it does not exist yet."""
    pair = Pair(OPTIMIZERS["Adam"])
    before = pair.items.read()
    pair.loss(*pair.batch()).backward()
    change(pair)
    with pytest.raises(LostUpdateError, match=r"changed after the backward pass.*clip only the other parameters"):
        pair.optimizer.step()
    assert torch.equal(pair.items.read(), before)
    pair.dense.load_state_dict(pair.items.state_dict())
    pair.optimizer.zero_grad()
    pair.step()  # training goes on
    pair.require_alike()


def test_rows_that_have_changed_since_are_refused() -> None:
    pair = Pair(OPTIMIZERS["Adam"])
    pair.loss(*pair.batch()).backward()
    pair.items.table.write(0, torch.zeros(1, DIM, dtype=torch.float64))
    with pytest.raises(LostUpdateError, match=r"has changed since.*compute the loss again"):
        pair.optimizer.step()


def test_a_second_step_with_the_same_gradient_is_refused() -> None:
    pair = Pair(OPTIMIZERS["SGD"])
    pair.loss(*pair.batch()).backward()
    pair.optimizer.step()
    after = pair.items.read()
    with pytest.raises(LostUpdateError, match=r"valid for one step"):
        pair.optimizer.step()
    assert torch.equal(pair.items.read(), after)


def fails(*_: Any) -> None:
    raise InterruptedError


def test_a_step_that_raised_can_be_tried_again() -> None:
    pair = Pair(OPTIMIZERS["Adam"])
    pair.step()
    batch = pair.batch()
    pair.loss(*batch).backward()
    hook = pair.optimizer.register_step_pre_hook(fails)
    with pytest.raises(InterruptedError):
        pair.optimizer.step()
    hook.remove()
    pair.optimizer.step()
    pair.their_loss(*batch).backward()
    pair.theirs.step()
    pair.require_alike()


class Noisy(torch.optim.SGD):
    """Moves rows at random."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(torch.randn_like(each))


def test_an_optimizer_whose_step_cannot_be_taken_in_parts_is_refused() -> None:
    items = speedswap.Embedding(ROWS, DIM)
    optimizer = Noisy(items.parameters(), lr=1.0)
    full_softmax(torch.randn(SAMPLES, DIM), torch.randint(ROWS, (SAMPLES,)), items).backward()
    with pytest.raises(OptimizerError, match=r"sampled_softmax instead of full_softmax|mixes rows"):
        optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_table_of_a_collection_trains_all_of_its_rows(name: str, device: str) -> None:
    """Items, their biases and users are one group of rows, in which each batch has every user."""
    users, pad = 5, 3
    weights = {
        each: torch.randn(rows, 1, dtype=torch.float64)
        for each, rows in {"before": 4, "item": ROWS, "user": users, "bias": ROWS}.items()
    }
    weights["item"][pad] = 0
    configs = [
        speedswap.EmbeddingConfig(
            name=each,
            num_embeddings=len(rows),
            embedding_dim=1,
            padding_idx=pad if each == "item" else None,
            dtype=torch.float64,
        )
        for each, rows in weights.items()
    ]
    tables = speedswap.EmbeddingCollection(configs)
    for each, rows in weights.items():
        tables.tables[each].write(0, rows)
    item, bias = tables.embeddings["item"], tables.embeddings["bias"]
    dense = {each: nn.Parameter(rows.to(device)) for each, rows in weights.items() if each != "before"}
    ours, theirs = OPTIMIZERS[name](tables.parameters()), OPTIMIZERS[name](dense.values())
    for _ in range(8):
        who, targets = torch.arange(SAMPLES, device=device) % users, torch.randint(ROWS - 1, (SAMPLES,), device=device)
        targets += targets >= pad
        loss = full_softmax(tables.embeddings["user"](who), targets, item, bias=bias, chunk=CHUNK)
        logits = dense["user"][who] @ dense["item"].T + dense["bias"].T
        their_loss = F.cross_entropy(logits.index_fill(1, torch.tensor([pad], device=device), -torch.inf), targets)
        torch.testing.assert_close(loss, their_loss, rtol=1e-11, atol=1e-12)
        for optimizer, each in ((ours, loss), (theirs, their_loss)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
    for each, rows in dense.items():
        torch.testing.assert_close(tables.tables[each].read(), rows.detach().cpu(), rtol=1e-11, atol=1e-12)
    assert torch.equal(tables.tables["before"].read(), weights["before"])  # no loss has it


def test_a_weight_that_was_replaced_is_refused() -> None:
    items = speedswap.Embedding(ROWS, DIM)
    items.forward = lambda hidden, targets: full_softmax(hidden, targets, items)  # type: ignore[assignment]
    values = torch.randn(ROWS, DIM, requires_grad=True)
    given = torch.randn(SAMPLES, DIM), torch.randint(ROWS, (SAMPLES,))
    with pytest.raises(WeightError, match=r"was replaced, as functional_call does"):
        torch.func.functional_call(items, {"weight": values}, given)


def test_a_step_that_fails_among_its_chunks_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(OPTIMIZERS["Adam"], path=tmp_path / "items")
    pair.step()
    table = pair.items.table
    table.flush()
    before = table.read()
    pair.loss(*pair.batch()).backward()
    left, give_back = [3], speedswap.Table.give_back

    def fails_late(*arguments: Any, **settings: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedError
        give_back(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(speedswap.Table, "give_back", fails_late)
        with pytest.raises(InterruptedError):
            pair.optimizer.step()
    with pytest.raises(TableClosedError):
        pair.items(torch.tensor([0]))
    table.close()
    with speedswap.Table.open(tmp_path / "items", "r") as again:
        assert torch.equal(again.read(), before)


@pytest.mark.parametrize("dim", [1, 3])
def test_results_do_not_depend_on_where_rows_are(tmp_path: Path, dim: int) -> None:
    """To the bit: rows lie apart in memory, and in one piece when they come from files."""

    def trained(**settings: Any) -> list[Tensor]:
        torch.manual_seed(0)
        items, layer = speedswap.Embedding(500, dim, seed=3, **settings), nn.Linear(dim, dim)
        optimizer = torch.optim.RMSprop([*items.parameters(), *layer.parameters()], lr=0.01, momentum=0.5)
        for _ in range(8):
            ids = torch.randint(500, (3,))
            full_softmax(layer(items(ids)), ids.flip(0), items).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [items.read(), layer.weight.detach()]

    expected = trained(storage="pageable")
    for cache_bytes in (1 << 14, 1 << 24):
        found = trained(storage=speedswap.Disk(tmp_path / str(cache_bytes), cache_bytes=cache_bytes))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
