"""AIkit's README as written except for the import, its module paths, and its predecessor's defects."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from importlib.util import find_spec

import pytest
import torch
from children import run_script
from torch import distributed, nn

import speedswap
from speedswap._words import pip_install
from speedswap.compat import aikit, runai
from speedswap.errors import BatchError

README_TABLE = [(1, 4), (2, 2), (4, 1)]  # with 4 GPUs accumulation is not applicable
NINE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "SGD", "Rprop", "RMSprop"]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------------- elastic


@pytest.mark.parametrize("gpus, steps", README_TABLE)
def test_readme_table_of_steps(gpus, steps):
    aikit.elastic.Torch.init(256, 64, gpus)
    assert aikit.elastic.steps == steps
    assert aikit.elastic.batch_size == 64
    assert aikit.elastic.global_batch_size == 256
    assert aikit.elastic.gpus == gpus
    assert aikit.elastic.master is True


def test_modules_import_as_the_readme_writes_them():
    names: dict[str, object] = {}
    exec("import speedswap.compat.aikit.elastic.Torch\nimport speedswap.compat.aikit.ga.Torch.optim", names)
    exec("from speedswap.compat import aikit\naikit.elastic.Torch.init(256, 64)", names)
    assert names["aikit"] is aikit
    names["speedswap"].compat.aikit.elastic._init(256, 64, 2)  # type: ignore[attr-defined]
    assert aikit.elastic.steps == 2


def test_attributes_are_unknown_before_init(monkeypatch):
    for name in ("steps", "batch_size"):
        monkeypatch.delattr(aikit.elastic, name, raising=False)
        with pytest.raises(
            AttributeError,
            match=rf"elastic\.{name} is not known yet; call elastic\.Torch\.init\(global_batch_size, max",
        ):
            getattr(aikit.elastic, name)
    with pytest.raises(AttributeError, match="no attribute 'batchsize'"):
        _ = aikit.elastic.batchsize
    with pytest.raises(AttributeError, match="no attribute 'batchsize'"):
        _ = runai.elastic.batchsize


def test_no_batch_exceeds_the_maximum_is_empty_or_changes_the_global_batch():
    """A quarter of these exceeded the maximum, seven in ten changed the global batch, and some were empty."""
    for gpus in range(9):
        for global_batch_size in range(1, 70):
            for maximum in range(1, 34):
                aikit.elastic._init(global_batch_size, maximum, gpus)
                sizes = [size for worker in aikit.elastic.plan for size in worker]
                assert max(sizes) == aikit.elastic.batch_size <= maximum
                assert min(sizes) >= 1
                assert sum(sizes) == sum(aikit.elastic.micro_batch_sizes) == global_batch_size
                assert len(aikit.elastic.micro_batch_sizes) == aikit.elastic.steps
                assert max(aikit.elastic.micro_batch_sizes) == aikit.elastic.loader_batch_size


@pytest.mark.parametrize(
    "arguments, steps, batch_size, micro_batch_sizes",
    [((100, 64, 1), 2, 50, [50, 50]), ((256, 64, 3), 2, 43, [129, 127]), ((256, 64, 2), 2, 64, [128, 128])],
)
def test_uneven_division_is_said_exactly(arguments, steps, batch_size, micro_batch_sizes):
    aikit.elastic.Torch.init(*arguments)
    assert (aikit.elastic.steps, aikit.elastic.batch_size) == (steps, batch_size)
    assert aikit.elastic.micro_batch_sizes == micro_batch_sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is meant")
@pytest.mark.parametrize("gpus", [None, 0])
def test_machine_without_gpus_is_one_worker(gpus):
    aikit.elastic.Torch.init(256, 64, gpus)
    assert (aikit.elastic.gpus, aikit.elastic.steps) == (1, 4)


@pytest.mark.parametrize(
    "arguments, name", [((256, 0), "max_gpu_batch_size"), ((0, 64), "global_batch_size"), ((256, 64, -1), "gpus")]
)
def test_unfit_sizes_are_refused_by_name(arguments, name):
    with pytest.raises(
        BatchError, match=f"{name} is {arguments[-1] if name != 'global_batch_size' else 0}; it must be"
    ):
        aikit.elastic.Torch.init(*arguments)


@pytest.mark.parametrize("rank, sizes", [(0, [43, 43]), (1, [43, 42]), (2, [43, 42])])
def test_under_torchrun_each_process_is_a_worker(rank, sizes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", str(rank))
    aikit.elastic.Torch.init(256, 64)
    assert (aikit.elastic.gpus, aikit.elastic.steps, aikit.elastic.batch_size) == (3, 2, 43)
    assert aikit.elastic.micro_batch_sizes == sizes
    assert aikit.elastic.master is (rank == 0)
    with pytest.raises(BatchError, match="gpus is 4, but 3 processes share them"):
        aikit.elastic.Torch.init(256, 64, 4)


def test_processes_may_drive_several_gpus_each(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    aikit.elastic.Torch.init(256, 32, 4)
    assert (aikit.elastic.steps, aikit.elastic.batch_size) == (2, 32)
    assert aikit.elastic.micro_batch_sizes == [64, 64]


def test_master_is_rank_0_of_the_process_group(monkeypatch):
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setenv("WORLD_SIZE", "5")  # left over; the group knows better
        monkeypatch.setenv("RANK", "3")
        aikit.elastic.Torch.init(256, 64)
        assert (aikit.elastic.master, aikit.elastic.gpus) == (True, 1)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_readme_data_parallel_example_trains_with_the_global_batch(gpus):
    """A loader of ``batch_size`` would be split again by DataParallel: the true global batch was G / gpus."""
    torch.manual_seed(0)
    data = torch.randn(512, 6, dtype=torch.float64)
    ours, theirs = nn.Linear(5, 1, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())

    aikit.elastic.Torch.init(256, 64, gpus)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    optimizer = aikit.ga.Torch.optim.Optimizer(optimizer, aikit.elastic.steps)
    model = torch.nn.DataParallel(ours)
    for batch in torch.utils.data.DataLoader(data, batch_size=aikit.elastic.loader_batch_size):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[:, :5]), batch[:, 5:]).backward()
        optimizer.step()

    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for batch in data.split(256):
        reference.zero_grad()
        nn.functional.mse_loss(theirs(batch[:, :5]), batch[:, 5:]).backward()
        reference.step()
    assert optimizer.updates == 2
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-14)


def test_uneven_plan_fed_to_the_optimizer_trains_with_the_global_batch():
    data = torch.randn(100, 6, dtype=torch.float64)
    ours, theirs = (nn.Linear(5, 1, dtype=torch.float64) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    aikit.elastic.Torch.init(100, 33)  # 4 steps: 25 each
    aikit.elastic.Torch.init(100, 30, 3)  # 2 steps: 51 and 49 on 3 GPUs
    sizes = aikit.elastic.micro_batch_sizes
    assert sizes == [51, 49]
    optimizer = aikit.ga.Torch.optim.SGD(len(sizes), ours.parameters(), lr=0.1)
    for batch in data.split(sizes):
        nn.functional.mse_loss(ours(batch[:, :5]), batch[:, 5:]).backward()
        optimizer.step(weight=len(batch))
    nn.functional.mse_loss(theirs(data[:, :5]), data[:, 5:]).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-14)


EXAMPLE = """
import torch
import speedswap.compat.aikit.elastic.Torch
import speedswap.compat.aikit.ga.Torch
from speedswap.compat import aikit

aikit.elastic.torch.init(256, 64)
samples = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(4, (512,)))
loader = torch.utils.data.DataLoader(samples, batch_size=aikit.elastic.batch_size)
model = torch.nn.DataParallel(torch.nn.Linear(8, 4))
if wrapped:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = aikit.ga.Torch.optim.Optimizer(optimizer, aikit.elastic.steps)
else:
    optimizer = aikit.ga.Torch.optim.SGD(
        aikit.elastic.steps, model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4
    )
loss_fn = torch.nn.CrossEntropyLoss()
for data, target in loader:
    optimizer.zero_grad()
    loss_fn(model(data), target).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("wrapped", [True, False])
def test_aikits_example_runs_though_it_writes_torch_for_what_it_imports_as_torch_with_a_capital(wrapped):
    """``elastic.torch`` was torch itself, which has no ``init``."""
    names = {"wrapped": wrapped}
    exec(EXAMPLE, names)
    assert names["optimizer"].updates == 512 // 256


# Every module path of AIkit and of runai, with a name in it.
PATHS = {
    "aikit.elastic": "Torch",
    "aikit.elastic.Torch": "init",
    "aikit.elastic.torch": "init",
    "aikit.ga": "Torch",
    "aikit.ga.Torch": "optim",
    "aikit.ga.torch": "optim",
    "aikit.ga.Torch.optim": "SGD",
    "aikit.ga.torch.optim": "NAdam",
    "runai.elastic": "torch",
    "runai.elastic.torch": "init",
    "runai.ga": "torch",
    "runai.ga.torch": "optim",
    "runai.ga.torch.optim": "Adam",
}
KERAS_PATHS = {
    "aikit.elastic.TF": "init",
    "aikit.elastic.TF.model": "Model",
    "aikit.elastic.TF.models": "Model",
    "aikit.elastic.models": "Model",
    "aikit.ga.TF": "optimizers",
    "aikit.ga.TF.hooks": "Flush",
    "aikit.ga.TF.optimizers": "SGD",
    "runai.elastic.keras": "models",
    "runai.elastic.keras.models": "Model",
    "runai.ga.keras": "hooks",
    "runai.ga.keras.optimizers": "Adam",
}
IMPORTS = """
import importlib, os, sys
os.environ.setdefault("KERAS_BACKEND", "torch")

def import_first(paths):
    for path, name in paths.items():
        for known in [known for known in sys.modules if known.startswith("speedswap.compat")]:
            del sys.modules[known]
        path = f"speedswap.compat.{path}"
        parent, _, last = path.rpartition(".")
        names = {}
        exec(f"import {path}\\nfrom {path} import {name}\\nfrom {parent} import {last}", names)
        module = eval(path, names)
        assert module is importlib.import_module(path) is names[last], path
        assert getattr(module, name) is names[name], path
        assert module.__spec__.name == module.__name__, path

import_first(PATHS)
assert "keras" not in sys.modules
import_first(KERAS_PATHS)
"""


@pytest.mark.release
def test_every_module_path_can_be_imported_first_and_the_torch_half_without_keras():
    keras_paths = KERAS_PATHS if find_spec("keras") else {}
    done = run_script(f"PATHS, KERAS_PATHS = {PATHS}, {keras_paths}\n{IMPORTS}")
    assert done.returncode == 0, done.stderr


def test_unknown_module_paths_are_refused():
    pytest.importorskip("keras")
    for path in ("aikit.elastic.numpy", "aikit.ga.TF.layers", "runai.keras", "runai.elastic.TF2"):
        with pytest.raises(ModuleNotFoundError, match=path.rpartition(".")[2]):
            importlib.import_module(f"speedswap.compat.{path}")


def test_modules_of_torch_are_the_same_in_lower_and_upper_case():
    assert aikit.elastic.torch is aikit.elastic.Torch
    assert aikit.ga.torch is aikit.ga.Torch
    assert aikit.ga.torch.optim.SGD is aikit.ga.Torch.optim.SGD


# ---------------------------------------------------------------------- ga


@pytest.mark.parametrize("name", NINE)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ready_made_optimizers_step_as_torchs_with_the_whole_batch(name, reduction):
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64)) for _ in range(2))
    samples = torch.randn(3, 4, 5, dtype=torch.float64)
    optimizer = getattr(aikit.ga.Torch.optim, name)(4, [ours], lr=0.01, reduction=reduction)
    reference = getattr(torch.optim, name)([theirs], lr=0.01)
    for window in samples:
        for sample in window:
            optimizer.zero_grad()
            (ours * sample).square().sum().backward()
            optimizer.step()
        reference.zero_grad()
        losses = (theirs * window).square().sum(1)
        getattr(losses, reduction)().backward()
        reference.step()
    assert isinstance(optimizer, getattr(aikit.ga.Torch.optim, name))
    assert isinstance(optimizer, torch.optim.Optimizer)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_mean_losses_are_not_scaled_by_the_number_of_steps_unless_sums_are_asked_for():
    for given, expected in (({}, -1.0), ({"reduction": "sum"}, -4.0)):
        weight = nn.Parameter(torch.zeros(()))
        optimizer = aikit.ga.Torch.optim.Optimizer(torch.optim.SGD([weight], lr=1.0), 4, **given)
        for _ in range(4):
            optimizer.zero_grad()
            weight.backward()
            optimizer.step()
        assert weight.item() == expected


def test_trailing_window_is_applied_and_does_not_leak():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = aikit.ga.Torch.optim.SGD(4, [weight], lr=1.0)
    with optimizer.epoch():
        for factor in (1.0, 1.0, 1.0, 1.0, 2.0, 4.0):
            optimizer.zero_grad()
            (weight * factor).backward()
            optimizer.step()
    assert (optimizer.updates, weight.item()) == (2, -4.0)


def test_gradient_scaler_unscales_each_gradient_once():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = aikit.ga.Torch.optim.SGD(2, [weight], lr=1.0, reduction="sum")
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight * 1.0).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.item() == -2.0


def test_wrapping_keeps_state_and_defaults_and_saves_plainly():
    weight = nn.Parameter(torch.zeros(()))
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    weight.backward()
    inner.step()
    optimizer = aikit.ga.Torch.optim.Optimizer(inner, 3)
    assert optimizer.state[weight]["momentum_buffer"].item() == 1.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(()))]})
    assert optimizer.param_groups[1]["lr"] == 0.5
    optimizer.zero_grad(set_to_none=True)
    weight.backward()
    optimizer.step()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    again = aikit.ga.Torch.optim.Optimizer(copy.deepcopy(inner), 3)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert (again.aikit.step, again.aikit.steps, again.pending) == (1, 3, 1)


def test_state_is_seen_under_both_names():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = aikit.ga.Torch.optim.Adam(4, [weight])
    for _ in range(5):
        weight.backward()
        optimizer.step()
    assert (optimizer.aikit.steps, optimizer.aikit.step) == (4, 5)
    assert (optimizer.runai.steps, optimizer.runai.step) == (4, 5)
    assert repr(optimizer.aikit) == "State(steps=4, step=5)"


class Logging(torch.optim.SGD):
    """The optimizer of runai's own tests, whose methods read the state of the accumulation around it."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.log = []

    def step(self, closure=None):
        self.log.append((self.runai.step, self.aikit.steps))
        return super().step(closure)


@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_an_optimizer_sees_the_state_of_the_accumulation_around_it(copied):
    """runai made one object of the two: an update is the last micro-step of its window, counted from 0."""
    optimizer = runai.ga.torch.optim.Optimizer(Logging([nn.Parameter(torch.zeros(2))], lr=0.1), 3)
    if copied is not None:
        optimizer = copied(optimizer)
        optimizer.optimizer.log = []  # torch saves settings and state alone
    for _ in range(10):
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()
    assert optimizer.log == [(2, 3), (5, 3), (8, 3)]
    assert optimizer.flush()
    assert optimizer.log[3:] == [(10, 3)]


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "SparseAdam"])
def test_torchs_newer_optimizers_are_ready_made_too(name):
    optimizer = getattr(aikit.ga.Torch.optim, name)(2, [nn.Parameter(torch.zeros(2))], lr=0.25)
    assert type(optimizer.optimizer) is getattr(torch.optim, name)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.25
    with pytest.raises(AttributeError, match="no attribute 'Nonesuch'"):
        _ = aikit.ga.Torch.optim.Nonesuch


def test_closure_is_evaluated_at_every_step():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = aikit.ga.Torch.optim.SGD(2, [weight], lr=1.0)
    calls = []

    def closure():
        optimizer.zero_grad()
        weight.backward()
        calls.append(weight.item())
        return weight

    for _ in range(4):
        optimizer.step(closure)
    assert calls == [0.0, 0.0, -1.0, -1.0]


def test_runai_names_are_the_same_things():
    runai.elastic.torch.init(256, 64, gpus=2)
    assert (runai.elastic.steps, aikit.elastic.steps) == (2, 2)
    runai.elastic._init(256, 64)
    assert runai.elastic.batch_size == 64
    assert [getattr(runai.ga.torch.optim, name) for name in NINE] == [
        getattr(aikit.ga.Torch.optim, name) for name in NINE
    ]
    assert issubclass(runai.ga.torch.optim.Optimizer, speedswap.batching.AccumulatingOptimizer)
    for name in ("State", "NAdam", "RAdam", "SparseAdam"):
        assert getattr(runai.ga.torch.optim, name) is getattr(aikit.ga.Torch.optim, name)
    optimizer = runai.ga.torch.optim.NAdam(2, [nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer.runai, runai.ga.torch.optim.State)
    with pytest.raises(AttributeError, match=r"nor has torch\.optim such an optimizer"):
        _ = runai.ga.torch.optim.Nonesuch


def test_state_is_to_be_read_and_is_not_what_is_saved():
    optimizer = aikit.ga.Torch.optim.SGD(2, [nn.Parameter(torch.zeros(()))], lr=1.0)
    with pytest.raises(AttributeError):
        optimizer.aikit.step = 3
    assert optimizer.state_dict()["state"].keys() == set()


def test_gradients_are_cleared_at_every_micro_step():
    """They used to pile up in ``.grad`` until the update; pending gradients are kept elsewhere."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = aikit.ga.Torch.optim.SGD(3, [weight], lr=1.0)
    for pending in (1, 2):
        weight.backward()
        optimizer.step()
        assert (weight.grad, optimizer.pending) == (None, pending)


# ---------------------------------------------------------------------- Keras is optional

WITHOUT_KERAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "keras":
            raise ModuleNotFoundError(f"No module named {name!r}", name="keras")

sys.meta_path.insert(0, Absent())
from speedswap.compat import aikit, runai
aikit.elastic.Torch.init(256, 64)
"""


LINES = [
    "import speedswap.compat.aikit.elastic.TF",
    "from speedswap.compat.aikit.ga.TF import optimizers",
    "aikit.elastic.TF.init(256, 64)",
    "aikit.elastic.keras.init(256, 64)",
    "aikit.elastic.models.Model(None)",
    "aikit.ga.TF.optimizers.Adam(2)",
    "runai.elastic.keras.init(256, 64)",
    "runai.ga.keras.optimizers.Adam(2)",
]


def test_without_keras_the_tensorflow_half_says_what_to_install():
    attempts = [f"try:\n    {line}\nexcept ImportError as error:\n    print(error)\n" for line in LINES]
    done = run_script(WITHOUT_KERAS + "".join(attempts))
    remedy = pip_install("keras", extra="keras")  # with a version where speedswap's own metadata is installed
    said = f"aikit's TensorFlow half works on Keras 3, which is not installed: {remedy}"
    assert done.stdout.splitlines() == [said] * len(LINES), done.stderr
