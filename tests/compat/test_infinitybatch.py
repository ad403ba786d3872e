"""InfinityBatch: its three use cases, its whole interface, and the defects that must not come back."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import warnings
import weakref
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import speedswap.compat.infinitybatch as infinitybatch
from speedswap.compat.infinitybatch import InfinityBatch, InfinityBatchError, InfinityBatchWarning
from speedswap.compat.infinitybatch.trainer import devices_equal
from speedswap.errors import BatchError, SpeedswapWarning
from speedswap.monitor import MonitorWarning

EPOCHS = 20  # of the README's 200
FITS = 7  # samples that go through a model at once


class MyModel(nn.Module):
    """A classifier of 6 features in float64 that has memory for few samples."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)).double()

    def forward(self, inputs):
        if len(inputs) > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.layers(inputs)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(50, 6, dtype=torch.float64, generator=generator), torch.randint(3, (50,), generator=generator)


@pytest.fixture
def loader(data):
    return DataLoader(TensorDataset(*data), batch_size=20)


def trained_whole(loader, epochs, criterion, optimizer=torch.optim.Adam, device="cpu"):
    """Train the same model in plain torch with whole batches."""
    model = MyModel().to(device)
    steps = optimizer(model.parameters())
    for _ in range(epochs):
        for inputs, targets in loader:
            criterion(model.layers(inputs.to(device)), targets.to(device)).backward()
            steps.step()
            steps.zero_grad()
    return model


def assert_same(model, expected, tolerance=1e-11):
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@contextmanager
def silence():
    """Turn speedswap's warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedswapWarning)
        yield


# ---------------------------------------------------------------------- the README's use cases

SETUP = """
import infinitybatch
import torch
EPOCHS = 200
device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')
ib = infinitybatch.InfinityBatch()
ib.model = MyModel().to(device)
ib.criterion = torch.nn.CrossEntropyLoss()
ib.optimier = torch.optim.Adam(ib.model.parameters())
ib.dataloader = mydataloader
"""
USE_CASES = {
    "simple": SETUP + "ib(200)\n",
    "epoch": SETUP + "for epoch in range(EPOCHS):\n  ib.epoch()\n",
    "custom": SETUP
    + """
for epoch in range(EPOCHS):
  for inputs, targets in ib.dataloader:
    outputs = ib.batch_()
    loss = ib.criterion(outputs, targets)
    loss.backward()
    ib.step()
    ib.zero_grad()
""",
}


@pytest.mark.parametrize("case", USE_CASES)
def test_readme_use_case_trains_as_whole_batches_do(case, loader):
    names = run_script(USE_CASES[case], loader)
    device = names["device"]
    assert names["ib"].policy.counts == {"SW901": 1}
    assert names["ib"].micro_batch_size <= FITS
    assert_same(names["ib"].model, trained_whole(loader, EPOCHS, F.cross_entropy, device=device), 1e-9)


@pytest.mark.parametrize("case", range(3))
def test_readme_as_it_was_published(case, loader):
    """The README itself, if it is available: only the import and the number of epochs are changed."""
    seeds = Path(__file__).resolve().parents[3] / "shared" / "seeds"
    readmes = [path for path in seeds.glob("*.txt") if "# infinitybatch" in path.read_text()[:200]]
    if not readmes:
        pytest.skip("needs ../shared/seeds, which is not part of the project")
    code = re.findall(r"``` python\n(.*?)```", readmes[0].read_text(), flags=re.DOTALL)[case]
    names = run_script(code, loader)
    assert_same(names["ib"].model, trained_whole(loader, EPOCHS, F.cross_entropy, device=names["device"]), 1e-9)


def run_script(code, loader):
    code = code.replace("import infinitybatch\n", "import speedswap.compat.infinitybatch as infinitybatch\n")
    code = code.replace("200", str(EPOCHS))
    names = {"MyModel": MyModel, "mydataloader": loader}
    with pytest.warns(InfinityBatchWarning, match="SW901: optimier"):
        exec(compile(code, "README.md", "exec"), names)
    return names


# ---------------------------------------------------------------------- the interface

METHODS = {
    "__call__": ["num_epochs"],
    "train": ["num_epochs"],
    "epoch": [],
    "batch_": ["inputs"],
    "loss": [],
    "backward": [],
    "step": [],
    "zero_grad": [],
    "changemodeldevice": ["device"],
    "updateforwarddevice": [],
    "checkdevices_": [],
    "clearcontainers_": [],
    "epochstart_": [],
}
SETTABLE = ["model", "optimizer", "criterion", "dataloader", "backward_device", "verbose_mode"]
READ_ONLY = ["forward_device", "inputs", "outputs", "targets", "losses"]


def test_constructor_takes_what_it_took_by_place():
    parameters = list(inspect.signature(InfinityBatch).parameters.values())
    assert [(p.name, p.default) for p in parameters[:6]] == [
        ("model", None),
        ("optimizer", None),
        ("criterion", None),
        ("dataloader", None),
        ("backward_device", None),
        ("verbose", True),
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[6:])


@pytest.mark.parametrize("name", METHODS)
def test_method_is_there(name):
    assert list(inspect.signature(getattr(InfinityBatch, name)).parameters)[1:] == METHODS[name]


@pytest.mark.parametrize("name", SETTABLE + READ_ONLY)
def test_property_is_there(name):
    prop = inspect.getattr_static(InfinityBatch, name)
    assert isinstance(prop, property)
    assert (prop.fset is not None) == (name in SETTABLE)


def test_a_new_one_is_empty():
    with silence():
        ib = InfinityBatch()
    assert (ib.model, ib.optimizer, ib.criterion, ib.dataloader) == (None, None, None, None)
    assert (ib.inputs, ib.outputs, ib.targets, ib.losses) == ([], [], [], [])
    assert (ib.backward_device, ib.forward_device) == (torch.device("cpu"), None)
    assert ib.verbose_mode is True


def test_dataloader_is_still_the_loader(loader):
    ib = InfinityBatch(dataloader=loader)
    assert ib.dataloader == loader
    assert len(ib.dataloader) == 3
    assert ib.dataloader.batch_size == 20
    other = InfinityBatch(dataloader=ib.dataloader)
    assert other.dataloader == loader


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ib: ib.epoch(), "model and optimizer and dataloader and criterion missing"),
        (lambda ib: ib.batch_(), "model missing"),
        (lambda ib: ib.step(), "optimizer missing"),
        (lambda ib: ib.loss(), "criterion missing"),
        (lambda ib: ib.evaluate(), "model and dataloader and criterion missing"),
        (lambda ib: ib.count_parameters(), "model missing"),
    ],
)
def test_what_is_missing_is_named(call, message):
    with pytest.raises(InfinityBatchError, match=message):
        call(InfinityBatch())


def test_a_number_of_epochs_that_makes_no_sense_is_an_error():
    with pytest.raises(BatchError, match="num_epochs is -1; it must be an integer of at least 0"):
        InfinityBatch()(-1)


def make(loader=None, criterion=None, seed=0, device="cpu", **options):
    model = options.pop("model", None) or MyModel(seed).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    options.setdefault("micro_batch_size", FITS)
    return InfinityBatch(model, optimizer, criterion or nn.CrossEntropyLoss(), loader, verbose=False, **options)


# ---------------------------------------------------------------------- gradients

CRITERIA = {
    "cross entropy": nn.CrossEntropyLoss(),
    "weighted, smoothed, one class ignored": nn.CrossEntropyLoss(
        weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), ignore_index=1, label_smoothing=0.1
    ),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": F.cross_entropy,
    "couples the batch": lambda outputs, targets: F.cross_entropy(outputs, targets) + outputs.std(0).log().sum(),
    "own mean": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none").mean(),
}


@pytest.mark.parametrize("loop", ["epoch", "custom", "methods"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_gradients_are_those_of_the_whole_batch(loop, criterion, loader, device):
    criterion = copy.deepcopy(CRITERIA[criterion])
    ib = make(loader, criterion, device=device)
    with silence():
        for _ in range(2):
            if loop == "epoch":
                ib.epoch()
                continue
            for _, targets in ib.dataloader:
                outputs = ib.batch_()
                if loop == "custom":
                    ib.criterion(outputs, targets).backward()
                else:
                    ib.loss()
                    ib.backward()
                ib.step()
                ib.zero_grad()
    assert ib.micro_batch_size <= FITS
    assert_same(ib.model, trained_whole(loader, 2, criterion).to(device))


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(), F.mse_loss])
def test_means_over_elements_are_exact_too(criterion, data):
    targets = (data[0][:, :3] > 0).double()
    batches = [(data[0], targets)]
    ib = make(batches, criterion)
    ib.epoch()
    assert_same(ib.model, trained_whole(batches, 1, criterion))
    assert ib.losses[0][0] == (pytest.approx(criterion(MyModel().layers(data[0]), targets).item(), rel=1e-12), 50)


def test_losses_are_those_of_whole_batches(loader):
    ib = make(loader, criterion=nn.CrossEntropyLoss())
    ib(2)
    model = MyModel()
    inputs, targets = next(iter(loader))
    first = F.cross_entropy(model.layers(inputs), targets).item()
    assert [[samples for _, samples in epoch] for epoch in ib.losses] == [[20, 20, 10]] * 2
    assert ib.losses[0][0][0] == pytest.approx(first, rel=1e-12)
    ib.train(1)
    assert len(ib.losses) == 1


@pytest.mark.parametrize(
    "criterion", [nn.CrossEntropyLoss(), lambda outputs, targets: F.cross_entropy(outputs, targets)]
)
def test_p07_custom_loop_with_dropout_replays_the_same_numbers(criterion, data):
    """The gradient belongs to the very outputs that batch_() returned."""
    model = MyModel(dropout=0.5)
    ib = InfinityBatch(model, torch.optim.SGD(model.parameters(), lr=0.0), criterion, [data], verbose=False)
    ib.micro_batch_size = 5
    for _, targets in ib.dataloader:
        torch.manual_seed(3)
        outputs = ib.batch_()
        after = torch.get_rng_state()
        ib.criterion(outputs, targets).backward()
        assert torch.equal(torch.get_rng_state(), after)
        ib.step()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    replay = torch.cat([model(data[0][start : start + 5]) for start in range(0, 50, 5)])
    assert torch.equal(replay, outputs)
    criterion(replay, targets).backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-14)


def test_p08_custom_loop_recovers_from_out_of_memory_in_the_backward_pass(data):
    """The second of the micro-batches that are run again fails once: as if it had not been, and no warning is said."""

    class Fails(MyModel):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            if self.calls == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return self.layers(inputs)

    ib = make([data], model=Fails(), micro_batch_size="auto", warn=infinitybatch_policy("expert", ignore={"SW902"}))
    ib._splitter(None).load_state_dict({"micro_batch_size": 25})
    for _, targets in ib.dataloader:
        ib.criterion(ib.batch_(), targets).backward()
        ib.step()
        ib.zero_grad()
    assert ib.model.calls == 2 + 2 + 5
    assert_same(ib.model, trained_whole([data], 1, F.cross_entropy))
    assert ib.policy.counts == {}


def test_autocast_around_batch_holds_when_it_is_run_again(data):
    model = nn.Linear(6, 3)
    inputs, targets = data[0].float(), data[1]
    ib = InfinityBatch(model, torch.optim.SGD(model.parameters(), lr=0.0), nn.CrossEntropyLoss(), micro_batch_size=50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = ib.batch_(inputs)
        loss = ib.criterion(outputs, targets)
    loss.backward()
    ours = model.weight.grad.clone()
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(ours, model.weight.grad)


# ---------------------------------------------------------------------- the defects


class _Saved:
    """A tensor that autograd has saved; counts how many bytes are alive."""

    live = peak = 0

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # an output that saves itself would keep itself alive
        self.nbytes = tensor.nbytes if tensor.dim() else 0  # what is per sample
        _Saved.live += self.nbytes
        _Saved.peak = max(_Saved.peak, _Saved.live)

    def __del__(self):
        _Saved.live -= self.nbytes


def peak_saved_bytes(model, run):
    """Return the most bytes that autograd has saved at once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    _Saved.live = _Saved.peak = 0

    def pack(tensor):
        return tensor if tensor.untyped_storage().data_ptr() in parameters else _Saved(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor if isinstance(kept, _Saved) else kept):
        run()
    return _Saved.peak


@pytest.mark.parametrize("loop", ["epoch", "epoch, any criterion", "custom"])
def test_p21_defect_1_activations_are_bounded_by_the_micro_batch(loop):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    peaks = {}
    for samples in (64, 128):
        batch = (torch.randn(samples, 16), torch.randint(2, (samples,)))
        whole = peak_saved_bytes(model, lambda batch=batch: F.cross_entropy(model(batch[0]), batch[1]).backward())
        model.zero_grad()
        criterion = nn.CrossEntropyLoss() if loop != "epoch, any criterion" else lambda x, y: F.cross_entropy(x, y)
        ib = InfinityBatch(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            criterion,
            [batch],
            verbose=False,
            micro_batch_size=8,
        )

        def custom(ib=ib):
            for _, targets in ib.dataloader:
                ib.criterion(ib.batch_(), targets).backward()
                ib.step()
                ib.zero_grad()

        peaks[samples] = peak_saved_bytes(model, custom if loop == "custom" else ib.epoch)
        assert 0 < peaks[samples] <= whole * 8 / samples
    assert peaks[64] == peaks[128]


def test_defect_2_backward_without_a_loss_warns(loader):
    ib = make(loader)
    with pytest.warns(InfinityBatchWarning, match="SW903"):
        ib.backward()


def test_defect_2_epoch_over_nothing_warns():
    ib = make([])
    with pytest.warns(InfinityBatchWarning, match="SW904"):
        ib.epoch()
    assert ib.losses == [[]]


@pytest.mark.parametrize("loop", ["epoch", "custom"])
def test_p10_defect_3_batch_norm_sees_micro_batches_and_never_single_samples(loop):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    batch = (torch.randn(16, 1, 4, 4), torch.randint(4, (16,)))
    ib = make([batch], model=model, micro_batch_size=4)
    if loop == "epoch":
        ib.epoch()
    else:
        for _, targets in ib.dataloader:
            ib.criterion(ib.batch_(), targets).backward()
            ib.step()
    assert model[1].num_batches_tracked == model[4].num_batches_tracked == 4


def test_defect_3_batch_norm_of_a_batch_that_fits_is_torchs():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    twin = copy.deepcopy(model)
    batch = (torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,)))
    ib = make([batch], model=model, micro_batch_size="auto")
    ib.epoch()
    steps = torch.optim.Adam(twin.parameters())
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    steps.step()
    assert infinitybatch.tools.is_equal_network(model, twin)


Named = namedtuple("Named", "logits hidden")


class Many(MyModel):
    """Takes two inputs, returns two outputs."""

    def forward(self, left, right):
        logits = super().forward(left + right)
        return Named(logits, logits.square())


def many_loss(outputs, targets):
    return F.cross_entropy(outputs.logits, targets) + outputs.hidden.mean()


@pytest.mark.parametrize("form", ["tuple", "list", "nested", "dictionary"])
@pytest.mark.parametrize("loop", ["epoch", "custom"])
def test_defect_4_batches_and_outputs_of_many_tensors(form, loop, data):
    inputs, targets = data
    left, right = inputs * 0.25, inputs * 0.75
    batch = {
        "tuple": (left, right, targets),
        "list": [left, right, targets],
        "nested": ((left, right), targets),
        "dictionary": {"left": left, "right": right, "labels": targets},
    }[form]
    ib = make([batch], many_loss, model=Many())
    if loop == "epoch":
        ib.epoch()
    else:
        for _ in ib.dataloader:
            outputs = ib.batch_()
            assert type(outputs) is Named
            ib.criterion(outputs, targets).backward()
            ib.step()
    expected = trained_whole([data], 1, lambda out, y: many_loss(Named(out, out.square()), y))
    assert_same(ib.model, expected)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("loop", ["epoch", "custom"])
def test_defect_4_outputs_of_one_number_a_sample(micro_batch_size, loop):
    class Regressor(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).squeeze()

    torch.manual_seed(0)
    model = Regressor(4, 1)
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(7, 4), torch.randn(7)
    ib = make([(inputs, targets)], nn.MSELoss(), model=model, micro_batch_size=micro_batch_size)
    if loop == "epoch":
        ib.epoch()
    else:
        for _, wanted in ib.dataloader:
            ib.criterion(ib.batch_(), wanted).backward()
            ib.step()
    steps = torch.optim.Adam(twin.parameters())
    F.mse_loss(twin(inputs), targets).backward()
    steps.step()
    assert_same(model, twin, 1e-6)


def test_defect_4_batch_without_argument_and_the_misspelt_optimizer(loader):
    ib = make(loader)
    with pytest.raises(InfinityBatchError, match="batch_\\(\\) has no inputs"):
        ib.batch_()
    for inputs, _ in ib.dataloader:
        assert torch.equal(ib.batch_().detach(), ib.batch_(inputs).detach())
    other = torch.optim.SGD(ib.model.parameters(), lr=1.0)
    with pytest.warns(InfinityBatchWarning, match="SW901") as said:
        ib.optimier = other
    assert said[0].message.code == "SW901"
    assert ib.optimizer is other
    assert ib.optimier is other


def test_defect_4_what_is_no_batch_is_refused():
    with pytest.raises(InfinityBatchError, match="keys left, right"):
        make([{"left": 1, "right": 2}]).epoch()
    with pytest.raises(InfinityBatchError, match="is a Tensor"):
        make([torch.ones(3)]).epoch()
    ib = make([{"x": torch.ones(4, 6, dtype=torch.float64)}], unpack=lambda b: (b["x"], torch.zeros(4).long()))
    ib.epoch()
    assert ib.losses[0][0][1] == 4


@pytest.mark.parametrize("loop", ["epoch", "custom"])
def test_defect_5_nothing_of_a_batch_is_kept(loop):
    alive = []

    def batches():
        for _ in range(3):
            batch = (torch.randn(10, 6, dtype=torch.float64), torch.zeros(10).long())
            alive.append(weakref.ref(batch[0]))
            yield batch

    ib = make(batches())
    if loop == "epoch":
        ib.epoch()
    else:
        for _, targets in ib.dataloader:
            outputs = ib.batch_()
            alive.append(weakref.ref(outputs))
            loss = ib.criterion(outputs, targets)
            loss.backward()
            ib.step()
            ib.zero_grad()
        del targets, outputs, loss, _
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)
    assert [len(ib.outputs[0]), len(ib.inputs[0]), len(ib.targets[0])] == [0, 0, 0]


def test_defect_8_loss_and_backward_in_a_loop_of_ones_own(loader):
    ib = make(loader)
    for _ in ib.dataloader:
        ib.batch_()
        loss = ib.loss()
        ib.backward()
        ib.step()
        ib.zero_grad()
    assert [samples for _, samples in ib.losses[0]] == [20, 20, 10]
    assert ib.losses[0][-1][0] == loss.item()
    with pytest.raises(InfinityBatchError, match="loss\\(\\) has no outputs"):
        ib.loss()


def test_defect_9_devices_are_checked_whenever_they_change():
    model = MyModel()
    policy = infinitybatch_policy("expert", always={"SW902"})
    ib = InfinityBatch(warn=policy)
    for change in (
        lambda: setattr(ib, "model", model),
        lambda: setattr(ib, "backward_device", "cpu"),
        lambda: ib.changemodeldevice("cpu"),
        ib.updateforwarddevice,
        ib.checkdevices_,
    ):
        with pytest.warns(InfinityBatchWarning, match="SW902"):
            change()
    with silence():
        ib.backward_device = "meta"
        ib.backward_device = torch.device("meta")
    ib.model.requires_grad_(False)
    with pytest.warns(InfinityBatchWarning, match="SW905"):
        ib.updateforwarddevice()
    assert ib.forward_device is None


def infinitybatch_policy(level, **options):
    from speedswap.monitor import WarningPolicy

    return WarningPolicy(level, codes=infinitybatch.CODES, **options)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("cuda", "cuda:0", True), ("cpu", "cpu:0", True), ("cuda", "cpu", False), ("cuda:1", "cuda:0", False)],
)
def test_defect_9_a_device_has_one_identity(one, other, equal):
    if one == "cuda" and torch.cuda.is_available() and torch.cuda.current_device():
        pytest.skip("the current device is another one")
    assert devices_equal(torch.device(one), torch.device(other)) is equal


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_defect_9_optimizer_state_moves_with_the_model(loader):
    ib = make(loader)
    ib.epoch()
    ib.changemodeldevice("cuda")
    state = ib.optimizer.state[next(ib.model.parameters())]
    assert ib.forward_device.type == state["exp_avg"].device.type == "cuda"
    with silence():
        ib.epoch()


@pytest.mark.parametrize("name", ["model", "optimizer", "criterion"])
def test_defect_10_everything_may_be_set_again_and_to_none(name, loader):
    ib = make(loader)
    ib.epoch()
    other = MyModel(seed=5)
    new = {"model": other, "optimizer": torch.optim.SGD(ib.model.parameters(), lr=0.1), "criterion": nn.NLLLoss()}[name]
    setattr(ib, name, new)
    assert getattr(ib, name) is new
    assert [(change.name, change.kind) for change in ib.changes] == [(name, "replaced")]
    if name == "model":
        ib.optimizer = torch.optim.Adam(other.parameters())
    with silence():
        ib.epoch()
    setattr(ib, name, None)
    assert getattr(ib, name) is None
    with pytest.raises(InfinityBatchError, match=f"{name} missing"):
        ib.epoch()


def test_defect_10_an_optimizer_of_another_model_is_noticed(loader):
    ib = make(loader)
    ib.model = MyModel(seed=5)
    with pytest.warns(MonitorWarning) as said:
        ib.batch_(torch.zeros(2, 6, dtype=torch.float64))
    assert [warning.message.code for warning in said] == ["SW106", "SW107"]


def test_defect_10_scheduler_steps_once_an_epoch(loader):
    ib = make(loader)
    ib.scheduler = torch.optim.lr_scheduler.StepLR(ib.optimizer, step_size=1, gamma=0.5)
    ib.train(3)
    assert ib.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 8)
    ib.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(ib.optimizer, patience=0, threshold=1e9)
    ib.train(2)
    assert ib.optimizer.param_groups[0]["lr"] < 1e-3 / 8


def test_defect_10_scaler_may_be_set_later(data):
    ib = make([(data[0].float(), data[1])], model=nn.Linear(6, 3))
    ib.epoch()
    seen = []
    ib.model.weight.register_hook(lambda grad: seen.append(grad.abs().sum().item()))
    ib.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    ib.epoch()
    scaled, seen[:] = seen[:], []
    ib.scaler = None
    ib.epoch()
    assert min(scaled) > 1000 * max(seen)


@pytest.mark.parametrize("loop", ["epoch", "epoch, any criterion", "methods"])
def test_p12_defect_10_grad_scaler_sums_and_skips_whole_batches(loop, data):
    """Scaled and unscaled training give the same parameters; a batch with an infinity in one sample is skipped."""
    inputs, targets = data[0].float(), data[1]
    broken = inputs.clone()
    broken[33] = float("inf")
    batches = [(inputs, targets), (broken, targets), (inputs, targets)]
    model = nn.Linear(6, 3)
    twin = copy.deepcopy(model)
    criterion = nn.CrossEntropyLoss() if loop != "epoch, any criterion" else lambda x, y: F.cross_entropy(x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ib = make(batches, criterion, model=model, micro_batch_size=8, scaler=scaler)
    if loop == "methods":
        for _ in ib.dataloader:
            ib.batch_()
            ib.loss()
            ib.backward()
            ib.step()
            ib.zero_grad()
    else:
        ib.epoch()
    steps = torch.optim.Adam(twin.parameters())
    for _ in range(2):
        F.cross_entropy(twin(inputs), targets).backward()
        steps.step()
        steps.zero_grad()
    assert_same(model, twin, 1e-6)
    assert scaler.get_scale() == 2.0**9


def test_defect_10_autocast_runs_the_model_in_half_precision(data, device):
    model = nn.Linear(6, 3).to(device)
    seen = set()
    model.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    ib = make([(data[0].float(), data[1])], model=model, autocast=torch.bfloat16)
    ib.epoch()
    assert seen == {torch.bfloat16}
    assert model.weight.dtype == torch.float32


def test_outputs_lie_on_the_backward_device_whatever_the_forward_device(loader, device):
    ib = make(loader, device=device)
    for inputs, targets in ib.dataloader:
        outputs = ib.batch_()
        assert outputs.device.type == inputs.device.type == targets.device.type == "cpu"
        assert outputs.requires_grad
    assert ib.forward_device.type == device
