"""One sample that does not fit: activations go to the host, modules run again, and the gradients are the same bits."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from splitting import gradients, of_runs, relative_error, same_bits, state
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import speedswap
from speedswap.apps.digits import read_split
from speedswap.batching import LimitedMemory, Padded, escalation
from speedswap.batching.escalation import Activations, Escalation, activations_on_host, checkpointed
from speedswap.batching.rollback import DryRun, has_memory
from speedswap.errors import BatchError

WORDS = 24


class Block(nn.Module):
    """Hidden values and dropout between two layers, added to the input; far more is saved than goes in."""

    def __init__(self, width: int, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(self.norm(x)).sigmoid())))


class Text(nn.Module):
    """A small transformer over text, in stages of some layers each; it predicts each next character."""

    def __init__(self, stages: int, layers: int, width: int = 16) -> None:
        super().__init__()

        def layer() -> nn.Module:
            return nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)

        self.characters, self.out = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.stages = nn.Sequential(*(nn.Sequential(*(layer() for _ in range(layers))) for _ in range(stages)))

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.stages(self.characters(text[:, :-1]))).mT, text[:, 1:])


class Digits(nn.Module):
    """A deep network of convolutions over images of digits."""

    def __init__(self, stages: int, layers: int, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Linear(64 * width, 10)

        def layer() -> nn.Module:
            return nn.Sequential(nn.Conv2d(width, 8 * width, 3, padding=1), nn.SiLU(), nn.Conv2d(8 * width, width, 1))

        self.stages = nn.Sequential(*(nn.Sequential(*(layer() for _ in range(layers))) for _ in range(stages)))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.stages(self.first(images)).flatten(1)), labels)


def blocks(depth: int = 6, width: int = 4, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(Block(width, **options) for _ in range(depth)), nn.Linear(width, 3)).double()


def batch(samples: int = 3, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width, dtype=torch.float64), torch.randint(3, (samples,))


@pytest.fixture
def host_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let activations go to another memory, as from a GPU: what a copy on the host takes is not counted."""
    rungs, copied = Escalation.rungs, escalation._HostCopy.__init__

    def copy_uncounted(self: Any, *args: Any) -> None:
        with _disable_current_modes():
            copied(self, *args)

    monkeypatch.setattr(Escalation, "rungs", lambda self, device: rungs(self, torch.device("cuda")))
    monkeypatch.setattr(escalation._HostCopy, "__init__", copy_uncounted)
    monkeypatch.setattr(escalation, "activations_on_host", partial(activations_on_host, also_from_host=True))


class Crowded:
    """A loss that runs out of memory beyond one sample, and some times with one; a trial keeps nothing, and fits."""

    def __init__(self, model: nn.Module, failures: int) -> None:
        self.model, self.failures = model, failures

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if any(isinstance(mode, DryRun) for mode in modes):
            return loss
        if len(x) > 1 or self.failures:
            self.failures -= len(x) == 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def one_by_one(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    splitter = speedswap.BatchSplitter(model, micro_batch_size=1, check=False, **options)
    return splitter.backward(lambda x, y: F.cross_entropy(model(x), y), x, y)


# ---------------------------------------------------------------------- each rung


class Averaged(nn.Module):
    """A layer that scales by a running mean, for which each pass puts another tensor in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean(0)
        return x / self.mean


def with_spectral_norm() -> nn.Module:
    model = blocks()
    for block in model[:-1]:
        nn.utils.parametrizations.spectral_norm(block.up)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: blocks(dropout=0.5),
    "running mean": lambda: blocks(norm=Averaged),
    "spectral norm": with_spectral_norm,
    "one block thrice": lambda: nn.Sequential(*[Block(4, 0.5)] * 3, nn.Linear(4, 3)).double(),
    "stages": lambda: nn.Sequential(*(blocks(6, dropout=0.5)[:-1] for _ in range(4)), nn.Linear(4, 3)).double(),
}


@pytest.mark.sweep(13)
@pytest.mark.usefixtures("host_apart")
@pytest.mark.parametrize("rung", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_each_rung_trains_as_single_samples_do_bit_for_bit(name: str, rung: int, known: bool) -> None:
    """Gradients, buffers and random numbers; what dropout leaves out is the same in a second run."""
    if rung == 3 and name != "stages":
        pytest.skip("has no modules inside of those that are checkpointed")
    model, (x, y) = MODELS[name](), batch()
    twin = copy.deepcopy(model)
    splitter = speedswap.BatchSplitter(model if known else None, check=False)
    for seed in range(2):
        torch.manual_seed(seed)
        loss = splitter.backward(Crowded(model, rung - splitter.rung), x, y)
        numbers = torch.get_rng_state()
        assert splitter.rung == rung
        torch.manual_seed(seed)
        assert torch.equal(loss, one_by_one(twin, x, y))
        assert same_bits(state(model), state(twin))
        assert torch.equal(numbers, torch.get_rng_state())


def test_running_statistics_move_once() -> None:
    """Each sample has several positions, over which BatchNorm normalizes."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.SiLU()) for _ in range(4))).double()
    twin, x = copy.deepcopy(model), torch.randn(3, 4, 20, dtype=torch.float64)
    splitter = speedswap.BatchSplitter(model, check=False, escalate=model)
    splitter.backward(Crowded(nn.Sequential(model, nn.Flatten()), 1), x, torch.tensor([1, 0, 2]))
    assert splitter.rung == 1
    one_by_one(nn.Sequential(twin, nn.Flatten()), x, torch.tensor([1, 0, 2]))
    assert same_bits(state(model), state(twin))


@pytest.mark.usefixtures("host_apart")
@pytest.mark.parametrize("rung", [1, 2])
def test_each_rung_keeps_the_precision_of_autocast(rung: int) -> None:
    model, (x, y) = blocks(dropout=0.5).float(), batch()
    twin = copy.deepcopy(model)
    splitter = speedswap.BatchSplitter(model, check=False)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        loss = splitter.backward(Crowded(model, rung), x.float(), y)
        torch.manual_seed(0)
        assert torch.equal(loss, one_by_one(twin, x.float(), y))
    assert splitter.rung == rung
    assert same_bits(state(model), state(twin))


@pytest.mark.usefixtures("host_apart")
@pytest.mark.parametrize("rung", [1, 2])
def test_coupled_losses_and_differentiable_calls_escalate_too(rung: int) -> None:
    model, x = blocks(), batch()[0]
    twin = copy.deepcopy(model)

    def encode(crowded: Crowded, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            crowded(x, torch.zeros(len(x), dtype=torch.long))
        return crowded.model(x)

    def contrast(out: Tensor) -> Tensor:
        return (out @ out.T).logsumexp(1).mean()

    contrast(twin(x)).backward()
    splitter = speedswap.BatchSplitter(model)
    splitter.backward_coupled(partial(encode, Crowded(model, rung)), contrast, x)
    assert splitter.rung == rung
    assert relative_error(gradients(model), gradients(twin)) < 1e-12
    model.zero_grad()
    splitter = speedswap.BatchSplitter(model)
    contrast(splitter.forward(partial(encode, Crowded(model, rung)), x)).backward()
    assert splitter.rung == rung
    assert relative_error(gradients(model), gradients(twin)) < 1e-12


# ---------------------------------------------------------------------- what is checkpointed


def trial_of(model: nn.Module, *args: Any, call: Callable[..., Any] | None = None) -> Activations:
    activations = Activations({one.untyped_storage().data_ptr() for one in model.parameters() if has_memory(one)})
    with DryRun(activations, keeps_graph=True):
        (call or model)(*args)
    return activations


def test_a_trial_counts_what_autograd_saves_and_keeps_none_of_it() -> None:
    model, (x, _) = blocks(depth=3), batch()
    with LimitedMemory() as whole:
        out = model(x)
    with LimitedMemory() as memory:
        trial = trial_of(model, x)
    saved = whole.live_bytes - out.nbytes + x.nbytes  # x is saved too, and the output is not
    assert trial.nbytes == pytest.approx(saved, rel=0.05)
    assert memory.peak_bytes < whole.peak_bytes / 2
    assert memory.live_bytes == 0


def test_the_modules_that_hold_most_are_found() -> None:
    model, (x, _) = blocks(depth=3), batch()
    held, modules = trial_of(model, x).cheapest(1)
    assert set(modules) == set(model[:-1])
    assert held < trial_of(model, x).nbytes / 2
    stages = MODELS["stages"]()
    (once, outer), (twice, both) = (trial_of(stages, x).cheapest(depth) for depth in (1, 2))
    assert twice < once
    assert set(outer) < set(both)


class InPlace(nn.Module):
    """A module that overwrites its argument, or that of a module inside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers, self.inside = nn.Sequential(nn.Sigmoid(), nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4)), inside

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return self.layers(x.mul_(0.5))
        x = x * 0.5
        x += self.layers(x)  # which nothing in a plain pass needs
        return x


@pytest.mark.parametrize("inside", [True, False])
def test_modules_whose_arguments_are_overwritten_are_left_alone(inside: bool) -> None:
    model = nn.Sequential(nn.Tanh(), *(nn.Sequential(nn.Linear(4, 4), InPlace(inside)) for _ in range(4))).double()
    twin, (x, y) = copy.deepcopy(model), batch()
    _, modules = trial_of(model, x).cheapest(1)
    assert modules
    assert not {one if inside else one.layers for one in model.modules() if isinstance(one, InPlace)} & {*modules}
    speedswap.BatchSplitter(model, check=False).backward(Crowded(model, 1), x, y)
    one_by_one(twin, x, y)
    assert same_bits(gradients(model), gradients(twin))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", ["compile()", "torch.compile", "torch.jit.script"])
def test_compiled_modules_are_whole_or_left_alone(how: str) -> None:
    """Leave out the modules inside of a compiled one, which does not call them."""
    model = blocks(depth=4)
    twin, (x, y) = copy.deepcopy(model), batch()
    if how == "compile()":
        model[1].compile(backend="eager")
    elif how == "torch.compile":
        model[1] = torch.compile(model[1], backend="eager")
    else:
        model[1] = torch.jit.script(model[1])
    _, modules = trial_of(model, x).cheapest(1)
    inside = {*model[1].modules()} - ({model[1]} if how == "torch.compile" else set())
    assert modules
    assert not inside & {*modules}
    splitter = speedswap.BatchSplitter(model, check=False)
    splitter.backward(Crowded(model, 1), x, y)
    assert splitter.rung == 1
    one_by_one(twin, x, y)
    assert relative_error(gradients(model), gradients(twin)) < 1e-12  # compiled code may round otherwise


def test_rows_that_are_looked_up_elsewhere_are_not_looked_up_again() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = speedswap.Embedding(5, 4)
            self.block = Block(4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.block(self.items(ids))

    model = nn.Sequential(Rows(), Block(4), Block(4), nn.Linear(4, 3))
    _, modules = trial_of(model[1:], torch.randn(2, 4)).cheapest(1)
    assert set(modules) == {model[1], model[2]}
    _, modules = trial_of(model, torch.tensor([0, 4])).cheapest(1)
    assert set(modules) == {model[0].block, model[1], model[2]}
    model.zero_grad()
    splitter = speedswap.BatchSplitter(model, check=False)
    splitter.backward(Crowded(model, 1), torch.tensor([0, 4, 4]), torch.tensor([0, 1, 2]))
    assert splitter.rung == 1
    found, rows = gradients(model[1:]), model[0].items.weight.grad.to_dense()
    model.zero_grad()
    one_by_one(model, torch.tensor([0, 4, 4]), torch.tensor([0, 1, 2]))
    assert same_bits([*found, rows], [*gradients(model[1:]), model[0].items.weight.grad.to_dense()])


def test_modules_are_left_as_they_were_whatever_happens() -> None:
    """Of the same class, with the same state, hooks and methods; hooks of a checkpointed module run once."""
    model, (x, y) = blocks(), batch()
    calls: list[bool] = []
    hook = model[0].register_forward_hook(lambda *_: calls.append("forward" in model[0].__dict__))
    inside = functools.partial(model[1].forward)
    model[1].forward = inside  # somebody else's
    names = [*model.state_dict()], [id(one) for one in model.parameters()]
    before = [dict(vars(block)) for block in model]
    with pytest.raises(RuntimeError, match="expected input with shape"), checkpointed(model):
        model(x.T)
    splitter = speedswap.BatchSplitter(model, check=False)
    splitter.backward(Crowded(model, 1), x, y)
    assert splitter.rung == 1
    assert ([*model.state_dict()], [id(one) for one in model.parameters()]) == names
    assert [dict(vars(block)) for block in model] == before
    assert calls.count(True) == len(x)
    assert not torch.nn.modules.module._has_any_global_hook()
    hook.remove()
    loss = Crowded(model, 0)
    loss.failures = 10**9
    with pytest.raises(torch.OutOfMemoryError):
        splitter.backward(loss, x, y)
    assert model[1].forward is inside
    assert "forward" not in model[0].__dict__


def test_the_user_names_the_modules() -> None:
    model, (x, y) = blocks(), batch()
    seen: list[list[int]] = []
    model.register_forward_hook(lambda *_: seen.append([i for i, one in enumerate(model) if "forward" in vars(one)]))
    splitter = speedswap.BatchSplitter(model, escalate=[model[1], model[4]], check=False)
    splitter.backward(Crowded(model, 1), x, y)
    assert splitter.rung == 1
    assert seen[-3:] == [[1, 4]] * 3


# ---------------------------------------------------------------------- up and down


def test_less_is_tried_again_where_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "speedswap")
    model, (x, y) = MODELS["stages"](), batch(4)
    splitter = speedswap.BatchSplitter(model, grow_after=2, check=False)
    loss = Crowded(model, 2)
    rungs = []
    for _ in range(12):
        splitter.backward(loss, x, y)
        rungs.append(splitter.rung)
    assert rungs == [2, 2, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]  # with two samples it keeps running out
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "all but 2." in said[0]
    assert "at the cost of one more forward pass of 24 × Block" in said[0]
    assert re.search(r"at the cost of two more forward passes of \d × Sequential, 24 × Block$", said[1])
    assert "micro-batches of one sample, rung 1 → 0: it fits" in caplog.text


@pytest.mark.usefixtures("host_apart")
def test_the_log_says_what_goes_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = blocks(), batch()
    splitter = speedswap.BatchSplitter(model, check=False)
    for _ in range(3):
        splitter.backward(Crowded(model, 1 - splitter.rung), x, y)
    said = [record.getMessage() for record in caplog.records if "one sample does not fit" in record.getMessage()]
    assert len(said) == 1
    assert "activations, 3.6 KiB, are copied to host memory, and back for the backward pass" in said[0]


def test_a_resumed_run_begins_on_its_rung() -> None:
    model, (x, y) = blocks(), batch()
    first = speedswap.BatchSplitter(model, check=False)
    first.backward(Crowded(model, 1), x, y)
    assert first.state_dict() == {"micro_batch_size": 1, "rung": 1}
    second = speedswap.BatchSplitter(model, check=False)
    second.load_state_dict(first.state_dict())
    loss = Crowded(model, 0)
    second.backward(loss, x, y)
    assert (second.micro_batch_size, second.rung) == (1, 1)
    assert loss.failures == 0
    with pytest.raises(BatchError, match=r"state\['rung'\] is -1; it must be at least 0"):
        second.load_state_dict({"micro_batch_size": 1, "rung": -1})


@pytest.mark.parametrize(
    ("escalate", "reason"),
    [
        (False, "micro-batches of 3 samples had run out of memory before"),
        (
            True,
            "micro-batches of 3, 1 samples had run out of memory before, and so does one sample with its "
            "activations checkpointed, then checkpointed twice: shorten or crop it, divide the module that holds most "
            "into smaller ones, or give the batch more memory",
        ),
    ],
)
def test_the_error_says_what_was_tried_and_what_may_help(escalate: bool, reason: str) -> None:
    model, (x, y) = MODELS["stages"](), batch()
    splitter = speedswap.BatchSplitter(model, escalate=escalate, check=False)
    before = state(model)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        splitter.backward(Crowded(model, 9), x, y)
    error: BaseException = raised.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert str(error) == reason
    assert same_bits(state(model), before)


def test_a_given_size_is_not_escalated() -> None:
    model, (x, y) = blocks(), batch()
    with pytest.raises(torch.OutOfMemoryError):
        speedswap.BatchSplitter(model, micro_batch_size=1).backward(Crowded(model, 1), x, y)


# ---------------------------------------------------------------------- where samples differ in length


class Lines(nn.Module):
    """The sum of a small text model's losses; it notes the shape of each call, and whether modules will run again."""

    def __init__(self, long: int = 0) -> None:
        super().__init__()
        self.text, self.long = Text(4, 1).double(), long
        self.seen: list[tuple[int, int, bool]] = []

    def forward(self, text: Tensor) -> Tensor:
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if not any(isinstance(mode, DryRun) for mode in modes):
            escalates = any("forward" in vars(one) for one in self.text.modules())
            self.seen.append((*text.shape, escalates))
            if self.long and text.shape[1] >= self.long and not escalates:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.text.loss(text) * text[:, 1:].numel()


def lines(lengths: list[int]) -> Padded:
    return Padded(torch.randint(1, WORDS, (len(lengths), max(lengths))), lengths)


def sum_of_losses(model: Lines, batch: Padded) -> list[Tensor]:
    """Return the gradients of single samples without limits, each without its padding."""
    twin = copy.deepcopy(model)
    twin.long = 0
    for row, length in zip(batch.value, batch.lengths.tolist(), strict=True):
        twin(row[None, :length]).backward()
    return gradients(twin)


def peak_of(model: Lines, text: Tensor) -> int:
    twin = copy.deepcopy(model)
    with LimitedMemory() as memory:
        twin(text).backward()
    return memory.peak_bytes


SHORT_LINES = [9] * 16


@pytest.mark.parametrize("own_budget", [True, False])
def test_one_long_sample_escalates_and_the_others_stay_together(own_budget: bool) -> None:
    """In counted memory that holds six short samples and their gradients, and not the long one."""
    torch.manual_seed(0)
    model = Lines()
    batch = lines([*SHORT_LINES, 97])
    limit = peak_of(model, batch.value[:6, :9])
    assert limit < peak_of(model, batch.value[-1:]) / 1.5
    splitter = speedswap.BatchSplitter(
        model, micro_batch_tokens="auto", reduction="sum", check=False, memory=limit if own_budget else None
    )
    for _ in range(2):
        model.zero_grad()
        model.seen.clear()
        with LimitedMemory(None if own_budget else limit):
            splitter.backward(model, batch)
        assert relative_error(gradients(model), sum_of_losses(model, batch)) < 1e-12
        assert splitter.rung > 0
    (alone, *together) = model.seen  # the second time, nothing fails
    assert alone == (1, 97, True)
    assert sum(samples for samples, _, _ in together) == len(SHORT_LINES)
    assert all(length == 9 and not escalates for _, length, escalates in together)
    assert len(together) <= 8
    assert splitter.micro_batch_size is not None
    assert 2 * 9 <= splitter.micro_batch_size < 97


def test_batches_without_long_samples_are_packed_as_before_and_say_nothing_about_them() -> None:
    torch.manual_seed(0)
    model = Lines(long=90)
    splitter = speedswap.BatchSplitter(
        model, micro_batch_tokens="auto", reduction="sum", check=False, grow_after=3, escalate=model.text.stages
    )
    failures = []
    for lengths in [[97, 9, 9, 9]] * 3 + [[9] * 4] * 6 + [[97, 9, 9, 9]] * 3:
        model.seen.clear()
        splitter.backward(model, lines(lengths))
        failures.append(sum(length >= 90 and not escalates for _, length, escalates in model.seen))
        assert model.seen[-1] in [(3, 9, False), (4, 9, False)]
    assert failures[:3] == [2, 0, 0]  # in four samples padded to 97, and by itself
    assert failures[3:9] == [0] * 6
    assert sum(failures[9:]) == 1  # the trial that is due
    assert splitter.rung == 1


def test_long_samples_stop_escalating_where_there_is_room() -> None:
    model = Lines(long=90)
    splitter = speedswap.BatchSplitter(
        model, micro_batch_tokens="auto", reduction="sum", check=False, grow_after=2, escalate=model.text.stages
    )
    batch = lines([97, 9, 9, 9])
    splitter.backward(model, batch)
    assert splitter.rung == 1
    model.long = 0
    rungs = []
    for _ in range(4):
        splitter.backward(model, batch)
        rungs.append(splitter.rung)
    assert rungs == [1, 0, 0, 0]


def test_a_resumed_run_escalates_the_same_samples() -> None:
    model = Lines(long=90)
    options: dict[str, Any] = {"micro_batch_tokens": "auto", "reduction": "sum", "escalate": model.text.stages}
    first = speedswap.BatchSplitter(model, check=False, **options)
    batch = lines([97, 9, 9, 9])
    first.backward(model, batch)
    saved = first.state_dict()
    assert saved == {"micro_batch_size": 96, "rung": 1, "escalates_from": 97}
    second = speedswap.BatchSplitter(model, check=False, **options)
    second.load_state_dict(saved)
    model.seen.clear()
    second.backward(model, batch)
    assert model.seen == [(1, 97, True), (3, 9, False)]
    assert second.state_dict() == saved


def test_coupled_losses_and_differentiable_calls_escalate_long_samples_alone() -> None:
    torch.manual_seed(0)
    model, batch = Lines(long=90), lines([9, 97, 9, 9])

    def encode(text: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            model(text)
        return model.text.stages(model.text.characters(text)).mean(1)

    def contrast(out: Tensor) -> Tensor:
        return (out @ out.T).logsumexp(1).mean()

    splitter = speedswap.BatchSplitter(model, micro_batch_tokens="auto", check=False)
    found = []
    for call in (
        lambda: splitter.backward_coupled(encode, contrast, batch),
        lambda: contrast(splitter.forward(encode, batch)).backward(),
    ):
        model.zero_grad()
        call()
        assert splitter.rung == 1
        assert model.seen[-2:] == [(1, 97, True), (3, 9, False)]
        found.append(gradients(model))
    twin = copy.deepcopy(model)
    twin.zero_grad()
    alone = [row[None, :length] for row, length in zip(batch.value, batch.lengths.tolist(), strict=True)]
    contrast(torch.cat([twin.text.stages(twin.text.characters(one)).mean(1) for one in alone])).backward()
    for one in found:
        assert relative_error(one, gradients(twin)) < 1e-12


# ---------------------------------------------------------------------- training on a budget


def losses_of_training(
    model: nn.Module, batches: list[tuple[Tensor, ...]], memory: int | None
) -> tuple[list[float], speedswap.BatchSplitter]:
    splitter = speedswap.BatchSplitter(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for one in batches:
        optimizer.zero_grad()
        with LimitedMemory(memory):
            losses.append(float(splitter.backward(model.loss, *one)))
        optimizer.step()
    return losses, splitter


@pytest.mark.parametrize("task", ["text", "digits"])
def test_training_on_samples_of_ten_times_what_fits_is_that_of_unlimited_memory(task: str) -> None:
    """Activations of one sample take ten times the memory left for them; no step is left out."""
    torch.manual_seed(0)
    model: nn.Module
    if task == "text":
        text = (Path(torch.__file__).parent / "functional.py").read_bytes()[: 3 * 2 * 65]
        batches = [(one,) for one in (torch.tensor([*text]) % WORDS).view(3, 2, 65)]
        model = Text(5, 5).double()
    else:
        images = read_split(0).train[:6]
        batches = list(zip(images.pixels.double().split(2), images.labels.split(2), strict=True))
        model = Digits(6, 6).double()
    twin = copy.deepcopy(model)
    activations = trial_of(model, *(each[:1] for each in batches[0]), call=model.loss).nbytes
    expected, _ = losses_of_training(twin, batches, None)
    budget = sum(one.nbytes for one in model.parameters()) + activations // 10
    found, splitter = losses_of_training(model, batches, budget)
    assert len(found) == len(expected) == 3
    assert found == pytest.approx(expected, rel=1e-9)
    assert relative_error([*model.state_dict().values()], [*twin.state_dict().values()]) < 1e-6
    assert splitter.rung > 0


def test_snippets_of_the_page_run() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "does-not-fit.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(code) >= 3
    exec(compile("import torch, speedswap\n" + "\n".join(code), "does-not-fit.md", "exec"), {})


# ---------------------------------------------------------------------- failures anywhere


class Failing(nn.Module):
    """A layer that runs out of memory with several samples, and at random with one, in either pass."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self.generator, self.failures = generator, 0

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.generator.random() if self.generator is not None else 1.0
        if self.generator is not None and (len(x) > 1 or chosen < 0.15):
            self._fail(x)
        if chosen < 0.3 and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._fail)
        return x

    def _fail(self, _: Tensor) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def run(seed: int) -> tuple[int, int]:
    """Train on one batch twice against single samples, and all at once; return the last rung and the failures."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    dropout, norm = generator.choice([0.0, 0.5]), generator.choice([nn.LayerNorm, Averaged])
    stages = [blocks(generator.randint(2, 4), dropout=dropout, norm=norm)[:-1] for _ in range(generator.randint(1, 3))]
    failing = Failing(generator)
    stages.insert(generator.randint(0, len(stages)), failing)
    model = nn.Sequential(*stages, nn.Linear(4, 3)).double()
    (x, y), reduction = batch(generator.randint(1, 4)), generator.choice(["mean", "sum"])
    failing.generator = None
    twin = copy.deepcopy(model)
    failing.generator = generator

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y, reduction=reduction)

    known = model if generator.random() < 0.5 else None
    splitter = speedswap.BatchSplitter(known, reduction=reduction, grow_after=1, check=False)
    for _ in range(2):
        before, numbers = state(model), torch.get_rng_state()
        try:
            splitter.backward(partial(loss, model), x, y)
        except torch.OutOfMemoryError:
            assert same_bits(state(model), before), seed
            assert torch.equal(torch.get_rng_state(), numbers), seed
            break
        after = torch.get_rng_state()
        torch.set_rng_state(numbers)
        size = splitter.micro_batch_size
        assert size is not None
        plain = speedswap.BatchSplitter(twin, micro_batch_size=size, reduction=reduction, check=False)
        plain.backward(partial(loss, twin), x, y)
        assert same_bits(state(model), state(twin)), seed
        assert torch.equal(torch.get_rng_state(), after), seed
        if not dropout and norm is nn.LayerNorm:
            found = gradients(model)
            twin.zero_grad()
            loss(twin, x, y).backward()
            assert relative_error(found, gradients(twin)) < 1e-12, seed
        model.zero_grad()
        twin.zero_grad()
    assert all("forward" not in vars(one) for one in model.modules()), seed
    return splitter.rung, failing.failures


@pytest.mark.slow
@pytest.mark.usefixtures("host_apart")
def test_whatever_fails_gradients_are_those_of_the_whole_batch() -> None:
    rungs, failures = zip(*of_runs(run, range(60)), strict=True)
    assert {*rungs} == {0, 1, 2, 3}
    assert sum(failures) > 120


@pytest.mark.release
@pytest.mark.usefixtures("host_apart")
@pytest.mark.parametrize("first", range(60, 10_060, 1000))
def test_whatever_fails_gradients_are_those_of_the_whole_batch_in_a_thousand_runs(first: int) -> None:
    assert sum(failures for _, failures in of_runs(run, range(first, first + 1000))) > 2000
