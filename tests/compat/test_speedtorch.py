"""SpeedTorch's classes under their own names: signatures, files, and a script that runs once its import is changed."""

from __future__ import annotations

import errno
import importlib
import inspect
import itertools
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import run_script
from torch import nn

import speedswap.compat.speedtorch as SpeedTorch
from speedswap import _words, kernels
from speedswap.errors import DuplicateRowsWarning, IdError, SpeedswapWarning, TableFullError

ROWS, DIM = 30, 4
REQUIRED = inspect.Parameter.empty

MODEL = [("model_variable", REQUIRED), ("total_classes", REQUIRED), ("embed_dimension", REQUIRED)]
OPTIMIZER = [
    ("given_optimizer", REQUIRED),
    ("total_classes", REQUIRED),
    ("embed_dimension", REQUIRED),
    ("model", REQUIRED),
    ("variable_name", REQUIRED),
]
PIN = [("CPUPinn", False)]
WHERE = [("deviceType", "cuda"), ("pinType", False)]
SIGNATURES = {
    "ModelFactory": [*MODEL, ("datatype", "float32"), *PIN],
    "ModelFactoryMM": [*MODEL, ("diskname", "variable"), ("datatype", "float32"), *PIN],
    "PytorchModelFactory": [*MODEL, ("datatype", torch.float), *WHERE],
    "GPUPytorchModelFactory": [*MODEL, ("datatype", torch.float)],
    "CPUPytorchModelFactory": [*MODEL, ("datatype", torch.float)],
    "OptimizerFactory": [*OPTIMIZER, ("dtype", "float32"), *PIN],
    "OptimizerFactoryMM": [*OPTIMIZER, ("dtype", "float32"), *PIN],
    "PytorchOptimizerFactory": [*OPTIMIZER, ("dtype", torch.float), *WHERE],
    "GPUPytorchOptimizerFactory": [*OPTIMIZER, ("dtype", torch.float)],
    "CPUPytorchOptimizerFactory": [*OPTIMIZER, ("dtype", torch.float)],
    "COM": [("total_classes", REQUIRED), ("datatype", "uint32"), *PIN],
    "COMMM": [("total_classes", REQUIRED), ("diskname", "COM"), ("datatype", "uint32"), *PIN],
    "PytorchCOM": [("total_classes", REQUIRED), ("datatype", torch.int32), *WHERE],
    "GPUPytorchCOM": [("total_classes", REQUIRED), ("datatype", torch.int32)],
    "CPUPytorchCOM": [("total_classes", REQUIRED), ("datatype", torch.int32)],
    "DataGadget": [("fileName", REQUIRED), *PIN],
    "DataGadgetMM": [("fileName", REQUIRED), *PIN],
}
INDEXES = [("retrievedPosIndexes", REQUIRED), ("retrievedNegIndexes", None)]
SWAPS = {"beforeForwardPass": INDEXES, "afterOptimizerStep": INDEXES, "getNumpyVersion": []}
CUPY_FILES = {"saveCupy": [("saveFileName", REQUIRED)], "loadCupy": [("loadFileName", REQUIRED)]}
TORCH_FILES = {"saveTorch": [("saveFileName", REQUIRED)], "loadTorch": [("loadFileName", REQUIRED)]}
INITS = {
    "zerosInit": [],
    "uniformDistributionInit": [("low", REQUIRED), ("high", REQUIRED)],
    "normalDistributionInit": [("mean", REQUIRED), ("stdDev", REQUIRED)],
    "variableTransformer": [("batchSize", REQUIRED), ("posPerBatch", REQUIRED), ("negPerBatch", None)],
}
CUSTOM = {"customInit": [("initFunction", REQUIRED), ("args", REQUIRED)]}
METHODS: dict[str, dict[str, Any]] = {
    "ModelFactory": {**SWAPS, **INITS, **CUPY_FILES, "getCupyVar": []},
    "ModelFactoryMM": {**SWAPS, **INITS, **CUPY_FILES, "getCupyMM": []},
    "OptimizerFactory": {**SWAPS, **CUPY_FILES, "optInit": [], "getCupyVar": []},
    "OptimizerFactoryMM": {**SWAPS, **CUPY_FILES, "optInit": [], "getCupyMM": []},
    "COM": {**CUPY_FILES, "comInit": PIN, "getCupyVar": [], "getNumpyVersion": []},
    "COMMM": {**CUPY_FILES, "comInit": PIN, "getCupyMM": [], "getNumpyVersion": []},
    "DataGadget": {
        **CUPY_FILES,
        "gadgetInit": [],
        "getData": [("indexes", REQUIRED)],
        "insertData": [("dataObject", REQUIRED), ("indexes", REQUIRED)],
        "getCupyVar": [],
        "getNumpyVersion": [],
    },
    "DataGadgetMM": {
        **CUPY_FILES,
        "gadgetInit": [],
        "getData": INDEXES,
        "insertData": [("dataObject", REQUIRED), ("indexes", REQUIRED)],
        "getCupyMM": [],
        "getNumpyVersion": [],
    },
    **{
        f"{kind}ModelFactory": {**SWAPS, **INITS, **CUSTOM, **TORCH_FILES, "getTorchVar": []}
        for kind in ("Pytorch", "GPUPytorch", "CPUPytorch")
    },
    **{
        f"{kind}OptimizerFactory": {**SWAPS, **TORCH_FILES, "optInit": [], "getTorchVar": []}
        for kind in ("Pytorch", "GPUPytorch", "CPUPytorch")
    },
    **{
        f"{kind}COM": {**TORCH_FILES, "comInit": [], "getTorchVar": [], "getNumpyVersion": []}
        for kind in ("Pytorch", "GPUPytorch", "CPUPytorch")
    },
}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of files write where the process is."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _what_is_said_where_there_is_no_gpu() -> Iterator[None]:
    with warnings.catch_warnings():
        if not torch.cuda.is_available():
            warnings.filterwarnings("ignore", message=r".* works as '(cpu|pageable)' here", category=SpeedswapWarning)
        yield


def arguments_of(function: Any) -> list[tuple[str, Any]]:
    parameters = list(inspect.signature(function).parameters.values())
    return [(p.name, p.default) for p in parameters if p.name != "self"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_public_class_has_its_arguments_and_methods(name: str) -> None:
    found = getattr(SpeedTorch, name)
    assert arguments_of(found) == SIGNATURES[name]
    for method, arguments in METHODS[name].items():
        assert arguments_of(getattr(found, method)) == arguments, method


@pytest.mark.parametrize("module", ["CPUCupyPinned", "CPUTorchPinned", "CUPYLive", "GPUTorch", "GenTorch"])
def test_the_modules_of_speedtorch_have_its_classes(module: str) -> None:
    found = importlib.import_module(f"speedswap.compat.speedtorch.{module}")
    assert found is getattr(SpeedTorch, module)
    assert found.ModelFactory is SpeedTorch.ModelFactory


def test_nothing_public_is_missing() -> None:
    assert sorted(SpeedTorch.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", ["PMemory", "my_pinned_allocator", "PMemoryMM", "my_pinned_allocatorMM"])
def test_the_allocators_say_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match="CPUPinn=True"):
        getattr(SpeedTorch, name)
    with pytest.raises(AttributeError, match="has no attribute 'ModelFactoryXX'"):
        SpeedTorch.ModelFactoryXX  # noqa: B018


# ---------------------------------------------------------------------- a script


SCRIPT = """
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import {module} as SpeedTorch

    class SkipGramModel(nn.Module):
        def __init__(self, size, dim):
            super().__init__()
            self.u_embeddings = nn.Embedding(size, dim, sparse=False)
            self.v_embeddings = nn.Embedding(size, dim, sparse=False)

        def forward(self, pos_u, pos_v, neg_v):
            u = self.u_embeddings(pos_u).squeeze(1)
            positive = F.logsigmoid((u * self.v_embeddings(pos_v).squeeze(1)).sum(1))
            negative = F.logsigmoid(-torch.bmm(self.v_embeddings(neg_v), u.unsqueeze(2)).squeeze(2)).sum(1)
            return -(positive + negative).mean()

    torch.manual_seed(0)
    VOCABULARY, DIM, BATCH, NEGATIVE = 100, 16, 32, 5
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model = SkipGramModel(BATCH * (1 + NEGATIVE), DIM).to(device)
    optimizer = torch.optim.{optimizer}

    u_switcher = SpeedTorch.{model_factory}(model.u_embeddings, total_classes=VOCABULARY, embed_dimension=DIM)
    v_switcher = SpeedTorch.{model_factory}(model.v_embeddings, total_classes=VOCABULARY, embed_dimension=DIM)
    u_switcher.uniformDistributionInit(-0.5 / DIM, 0.5 / DIM)
    v_switcher.zerosInit()
    u_opt = SpeedTorch.{optimizer_factory}(optimizer, VOCABULARY, DIM, model, 'u_embeddings')
    v_opt = SpeedTorch.{optimizer_factory}(optimizer, VOCABULARY, DIM, model, 'v_embeddings')
    u_opt.optInit()
    v_opt.optInit()
    pos_u = torch.from_numpy(u_switcher.variableTransformer(BATCH, 1)).to(device)
    pos_v, neg_v = (torch.from_numpy(a).to(device) for a in v_switcher.variableTransformer(BATCH, 1, NEGATIVE))

    rng = np.random.default_rng(3)
    losses = []
    for step in range(150):
        centre = rng.integers(0, VOCABULARY, (BATCH, 1))
        context = (centre + 1) % VOCABULARY          # the text counts up
        negatives = rng.integers(0, VOCABULARY, (BATCH, NEGATIVE))
        u_switcher.beforeForwardPass(centre)
        v_switcher.beforeForwardPass(context, negatives)
        u_opt.beforeForwardPass(centre)
        v_opt.beforeForwardPass(context, negatives)
        optimizer.zero_grad()
        loss = model(pos_u, pos_v, neg_v)
        loss.backward()
        optimizer.step()
        u_switcher.afterOptimizerStep(centre)
        v_switcher.afterOptimizerStep(context, negatives)
        u_opt.afterOptimizerStep(centre)
        v_opt.afterOptimizerStep(context, negatives)
        losses.append(loss.item())

    u, v = u_switcher.getNumpyVersion(), v_switcher.getNumpyVersion()
    u_switcher.{save}('u.saved')
    u_switcher.{load}('u.saved{ending}')
    assert np.array_equal(u_switcher.getNumpyVersion(), u)
    rows = np.arange(VOCABULARY)
    scores = (u * v[(rows + 1) % VOCABULARY]).sum(1), (u * v[(rows + 7) % VOCABULARY]).sum(1)
    print(np.mean(losses[:10]), np.mean(losses[-10:]), scores[0].mean(), scores[1].mean())
"""


@pytest.mark.parametrize(
    "model_factory, optimizer_factory, optimizer",
    [
        ("ModelFactory", "OptimizerFactory", "Adamax(model.parameters(), lr=0.1)"),
        ("ModelFactoryMM", "OptimizerFactoryMM", "RMSprop(model.parameters(), lr=0.02, centered=True, momentum=0.5)"),
        ("PytorchModelFactory", "PytorchOptimizerFactory", "Adagrad(model.parameters(), lr=0.5)"),
        ("CPUPytorchModelFactory", "GPUPytorchOptimizerFactory", "AdamW(model.parameters(), lr=0.05)"),
    ],
)
def test_a_script_runs_after_its_import_is_changed(model_factory: str, optimizer_factory: str, optimizer: str) -> None:
    """word2vec on a text that counts up; it has to learn the order of the words, and to save and load."""
    names: dict[str, Any] = {}
    with pytest.warns(DuplicateRowsWarning, match=r"speedswap\.Embedding sums the gradients") as said:
        exec(script_of(model_factory, optimizer_factory, optimizer), names)
    assert_learned(names["losses"], *(float(score.mean()) for score in names["scores"]))
    assert sum(warning.category is DuplicateRowsWarning for warning in said) == 4  # once for each switcher


def test_a_script_runs_in_a_process_of_its_own() -> None:
    done = run_script(script_of("ModelFactory", "OptimizerFactory", "SGD(model.parameters(), lr=0.1)"))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 4
    assert done.stderr.count("DuplicateRowsWarning:") == 2  # once for each switcher; SGD has no state


def script_of(model_factory: str, optimizer_factory: str, optimizer: str) -> str:
    of_torch = "Pytorch" in model_factory
    return textwrap.dedent(SCRIPT).format(
        module="speedswap.compat.speedtorch",
        model_factory=model_factory,
        optimizer_factory=optimizer_factory,
        optimizer=optimizer,
        save="saveTorch" if of_torch else "saveCupy",
        load="loadTorch" if of_torch else "loadCupy",
        ending="" if of_torch else ".npy",
    )


def assert_learned(losses: list[float], next_word: float, other_word: float) -> None:
    assert np.mean(losses[-10:]) < 0.4 * np.mean(losses[:10])
    assert next_word > other_word + 3


# ---------------------------------------------------------------------- where, and the collection as an array


STORAGES = {
    "ModelFactory": ({}, "device"),
    "ModelFactory, pinned": ({"CPUPinn": True}, "pinned"),
    "ModelFactoryMM": ({}, "disk"),
    "PytorchModelFactory": ({}, "device" if torch.cuda.is_available() else "pageable"),
    "PytorchModelFactory, on the CPU": ({"deviceType": "cpu"}, "pageable"),
    "PytorchModelFactory, pinned": ({"deviceType": "cpu", "pinType": True}, "pinned"),
    "GPUPytorchModelFactory": ({}, "device" if torch.cuda.is_available() else "pageable"),
    "CPUPytorchModelFactory": ({}, "pinned"),
}


@pytest.mark.parametrize("name", STORAGES)
def test_where_rows_live_and_that_they_can_be_seen(name: str) -> None:
    options, storage = STORAGES[name]
    factory = getattr(SpeedTorch, name.split(",")[0])(nn.Embedding(2, DIM), ROWS, DIM, **options)
    factory.normalDistributionInit(0, 1)
    assert factory.table.storage == storage
    for method in ("getCupyVar", "getCupyMM", "getTorchVar"):
        if hasattr(factory, method):
            rows = getattr(factory, method)()
    assert rows.shape == (ROWS, DIM)
    values = factory.getNumpyVersion()
    assert float(rows[3, 2]) == values[3, 2]
    rows[3] = 0.5  # it is the collection itself
    values[3] = 0.5
    np.testing.assert_array_equal(factory.getNumpyVersion(), values)
    factory.beforeForwardPass([3, 1])
    np.testing.assert_array_equal(factory.model_variable.weight.detach().numpy(), values[[3, 1]])


def adam(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    return model, torch.optim.Adam(model.parameters(), **options)


@pytest.mark.parametrize(
    "name, method",
    [
        ("OptimizerFactory", "getCupyVar"),
        ("OptimizerFactoryMM", "getCupyMM"),
        ("PytorchOptimizerFactory", "getTorchVar"),
    ],
)
def test_optimizer_state_goes_by_name(name: str, method: str) -> None:
    model, optimizer = adam(amsgrad=True)
    state = getattr(SpeedTorch, name)(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    seen = getattr(state, method)()
    assert list(seen) == state.optVarList == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    seen["exp_avg_sq"][7] = 2.0
    expected = np.zeros((ROWS, DIM), np.float32)
    expected[7] = 2.0
    found = state.getNumpyVersion()
    np.testing.assert_array_equal(found["exp_avg_sq"], expected)
    assert not found["exp_avg"].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_said_once() -> None:
    _words._said.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            SpeedTorch.PytorchModelFactory(nn.Embedding(2, DIM), ROWS, DIM)
    assert [str(w.message).split(":")[0] for w in said] == ["SW508"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"deviceType": "tpu"}, "deviceType is 'tpu'; choose 'cuda' or 'cpu'"),
        ({"deviceType": "cuda", "pinType": True}, "pinType is True, but deviceType is 'cuda'"),
    ],
)
def test_a_place_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeedTorch.PytorchModelFactory(nn.Embedding(2, DIM), ROWS, DIM, **options)
    with pytest.raises(ValueError, match=message):
        SpeedTorch.PytorchCOM(ROWS, **options)


# ---------------------------------------------------------------------- files


def test_collections_in_files_take_the_first_free_number(tmp_path: Path) -> None:
    first = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), ROWS, DIM)
    second = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), ROWS, DIM, datatype="float64")
    assert list(tmp_path.iterdir()) == []
    first.zerosInit()
    second.uniformDistributionInit(1, 2)
    model, optimizer = adam()
    state = SpeedTorch.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    matrix = SpeedTorch.COMMM(ROWS)
    matrix.comInit()
    assert [first.fileName, second.fileName] == ["variable0.memmap", "variable1.memmap"]
    names = ["COM0.memmap", "variable0.memmap", "variable1.memmap", "wordsAdam0.memmap"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert second.getNumpyVersion().dtype == np.float64


def test_a_file_takes_its_full_size_before_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a store into a hole of a mapped file would end the process; nothing is left of one that fails."""
    matrix = SpeedTorch.COMMM(300)
    matrix.comInit()
    size = os.stat("COM0.memmap/weight.npy")
    assert size.st_blocks * 512 >= size.st_size > 300 * 300 * 4
    matrix.table.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kernels, "allocate", full)
    with pytest.raises(TableFullError):
        SpeedTorch.COMMM(300).comInit()
    with pytest.raises(TableFullError):
        SpeedTorch.COMMM(300).loadCupy("COM0.memmap")
    assert [path.name for path in tmp_path.iterdir()] == ["COM0.memmap"]


def test_collections_in_files_can_be_opened_again() -> None:
    factory = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), ROWS, DIM, "rows")
    factory.normalDistributionInit(0, 1)
    model, optimizer = adam()
    state = SpeedTorch.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    state.getCupyMM()["exp_avg_sq"][3] = 1.5
    expected = factory.getNumpyVersion(), state.getNumpyVersion()
    factory.table.close()
    state.table.close()
    np.testing.assert_array_equal(np.load("rows0.memmap/weight.npy"), expected[0])
    again = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), ROWS, DIM, "rows")
    again.loadCupy("rows0.memmap")
    np.testing.assert_array_equal(again.getNumpyVersion(), expected[0])
    state_again = SpeedTorch.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "words")
    state_again.loadCupy("wordsAdam0.memmap")
    assert state_again.getNumpyVersion()["exp_avg_sq"][3].tolist() == [1.5] * DIM
    for name, values in state_again.getNumpyVersion().items():
        np.testing.assert_array_equal(values, expected[1][name])
    again.table.close()
    with pytest.raises(ValueError, match="was it another optimizer's"):
        SpeedTorch.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "words").loadCupy("rows0.memmap")
    Path("none").mkdir()
    with pytest.raises(ValueError, match=r"'none' has no weight\.npy"):
        state_again.loadCupy("none")


def test_files_of_torch(tmp_path: Path) -> None:
    factory = SpeedTorch.PytorchModelFactory(nn.Embedding(2, DIM), ROWS, DIM)
    factory.customInit(nn.init.normal_)
    factory.saveTorch("rows.pt")
    saved = torch.load("rows.pt", weights_only=True)
    np.testing.assert_array_equal(saved.numpy(), factory.getNumpyVersion())
    fresh = SpeedTorch.CPUPytorchModelFactory(nn.Embedding(2, DIM), ROWS, DIM)
    fresh.loadTorch("rows.pt")
    np.testing.assert_array_equal(fresh.getNumpyVersion(), saved.numpy())

    before = fresh.getNumpyVersion()
    for wrong, error, message in (
        (torch.zeros(ROWS, DIM + 1), ValueError, r"shape \(30, 5\), but the collection has \(30, 4\)"),
        (
            torch.zeros(ROWS, DIM, dtype=torch.float64),
            TypeError,
            r"is torch\.float64, but the collection is torch\.float32; convert it with Tensor\.to",
        ),
        ([torch.zeros(ROWS, DIM)] * 2, ValueError, "2 tensors"),
        ({"other": torch.zeros(ROWS, DIM)}, ValueError, r"has \['other'\], but \['weight'\] is needed"),
    ):
        torch.save(wrong, "wrong.pt")
        with pytest.raises(error, match=message):
            fresh.loadTorch("wrong.pt")
        np.testing.assert_array_equal(fresh.getNumpyVersion(), before)
    torch.save(Path("/"), "pickle.pt")
    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported"):
        fresh.loadTorch("pickle.pt")


def test_a_file_of_torch_is_not_rounded_to_bfloat16() -> None:
    """NumPy has no bfloat16, so that its arrays cannot tell the two apart."""
    factory = SpeedTorch.PytorchModelFactory(nn.Embedding(2, DIM, dtype=torch.bfloat16), ROWS, DIM, torch.bfloat16)
    factory.zerosInit()
    torch.save(torch.ones(ROWS, DIM), "wrong.pt")
    with pytest.raises(TypeError, match=r"is torch\.float32, but the collection is torch\.bfloat16"):
        factory.loadTorch("wrong.pt")
    assert not factory.getTorchVar().any()


def test_files_of_torch_for_optimizers() -> None:
    model, optimizer = adam()
    state = SpeedTorch.PytorchOptimizerFactory(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    state.getTorchVar()["exp_avg"][4] = 1.0
    state.saveTorch("state.pt")
    assert sorted(torch.load("state.pt", weights_only=True)) == ["exp_avg", "exp_avg_sq"]
    fresh = SpeedTorch.GPUPytorchOptimizerFactory(optimizer, ROWS, DIM, model, "words")
    fresh.loadTorch("state.pt")
    assert fresh.getNumpyVersion()["exp_avg"].sum() == DIM
    # A list in the order of the optimizer's state, as SpeedTorch wrote it.
    torch.save([torch.full((ROWS, DIM), 2.0), torch.full((ROWS, DIM), 3.0)], "list.pt")
    fresh.loadTorch("list.pt")
    assert fresh.getNumpyVersion()["exp_avg_sq"].tolist() == [[3.0] * DIM] * ROWS


# ---------------------------------------------------------------------- co-occurrence


@pytest.mark.parametrize("name", ["COM", "COMMM", "PytorchCOM", "GPUPytorchCOM", "CPUPytorchCOM"])
def test_counting_in_a_co_occurrence_matrix(name: str) -> None:
    matrix = getattr(SpeedTorch, name)(7)
    with pytest.raises(RuntimeError, match="call comInit"):
        matrix.getNumpyVersion()
    matrix.comInit()
    method = {"COM": "getCupyVar", "COMMM": "getCupyMM"}.get(name, "getTorchVar")
    text = [0, 3, 3, 6, 1, 3, 6]
    expected = np.zeros((7, 7), np.int64)
    for word, following in itertools.pairwise(text):
        getattr(matrix, method)()[word, following] += 1
        expected[word, following] += 1
    found = matrix.getNumpyVersion()
    assert found.dtype == (np.uint32 if name in ("COM", "COMMM") else np.int32)
    np.testing.assert_array_equal(found, expected)
    save, load, file = ("saveTorch", "loadTorch", "m.pt") if "Torch" in method else ("saveCupy", "loadCupy", "m.npy")
    getattr(matrix, save)(file)
    fresh = getattr(SpeedTorch, name)(7)
    getattr(fresh, load)(file)
    np.testing.assert_array_equal(fresh.getNumpyVersion(), expected)


def test_a_pinned_co_occurrence_matrix() -> None:
    for matrix, init in (
        (SpeedTorch.COM(3, CPUPinn=True), {}),
        (SpeedTorch.COM(3, "int64"), {"CPUPinn": True}),
        (SpeedTorch.PytorchCOM(3, torch.int64, "cpu", True), {}),
    ):
        matrix.comInit(**init)
        assert matrix.table.storage == "pinned"


# ---------------------------------------------------------------------- data


GADGETS = ["DataGadget", "DataGadgetMM"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(9, 3), (9,), (9, 2, 3)])
@pytest.mark.parametrize("name", GADGETS)
def test_data_comes_and_goes_in_its_own_dtype_and_shape(name: str, shape: tuple[int, ...], dtype: str) -> None:
    values = (np.random.default_rng(0).random(shape) * 200).astype(dtype)
    np.save("data.npy", values)
    gadget = getattr(SpeedTorch, name)("data.npy")
    gadget.gadgetInit()
    ids = np.array([8, 0, 3, 0])
    rows = gadget.getData(ids)
    assert isinstance(rows, torch.Tensor)
    assert rows.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    np.testing.assert_array_equal(rows.cpu().numpy(), values[ids])
    expected = values.copy()
    expected[[5, 1]] = values[[8, 0]]
    gadget.insertData(rows[:2], torch.tensor([5, 1], dtype=torch.int16))
    np.testing.assert_array_equal(gadget.getNumpyVersion(), expected)
    gadget.saveCupy("saved.npy")
    np.testing.assert_array_equal(np.load("saved.npy"), expected)
    assert np.load("saved.npy").dtype == values.dtype
    on_disk = np.load("data.npy")
    np.testing.assert_array_equal(on_disk, expected if name == "DataGadgetMM" else values)


def gadget_of(values: np.ndarray, name: str = "DataGadget", **options: Any) -> Any:
    np.save("data.npy", values)
    gadget = getattr(SpeedTorch, name)("data.npy", **options)
    gadget.gadgetInit()
    return gadget


def test_data_of_indexes_of_any_shape() -> None:
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    gadget = gadget_of(values, CPUPinn=True)
    assert gadget.table.storage == "pinned"
    ids = np.array([[1, 5], [0, 1], [2, 2]], np.uint32)
    assert gadget.getData(ids).shape == (3, 2, 4)
    np.testing.assert_array_equal(gadget.getData(ids).cpu().numpy(), values[ids])
    np.testing.assert_array_equal(gadget.getData(slice(1, None, 2)).cpu().numpy(), values[1::2])
    new = torch.full((2, 2, 4), 7.0)
    gadget.insertData(new, np.array([[1, 5], [0, 2]]))
    values[[1, 5, 0, 2]] = 7
    np.testing.assert_array_equal(gadget.getNumpyVersion(), values)
    gadget.insertData(np.zeros(8, np.float64), [3, 4])  # as many elements, converted
    values[[3, 4]] = 0
    np.testing.assert_array_equal(gadget.getNumpyVersion(), values)
    gadget.insertData(nn.Parameter(torch.ones(1, 4)), [3])
    assert gadget.getNumpyVersion()[3].tolist() == [1, 1, 1, 1]


def test_two_lists_of_indexes_for_a_gadget_in_a_file() -> None:
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    gadget = gadget_of(values, "DataGadgetMM")
    found = gadget.getData(np.array([[5], [1]]), [[0, 2]])
    np.testing.assert_array_equal(found.cpu().numpy(), values[[5, 1, 0, 2]])


@pytest.mark.parametrize("name", GADGETS)
def test_equal_indexes_in_data(name: str) -> None:
    gadget = gadget_of(np.zeros((4, 2), np.float32), name)
    new = torch.arange(6.0).view(3, 2)
    with pytest.warns(DuplicateRowsWarning) as said:
        gadget.insertData(new, [1, 3, 1])
    assert len(said) == 1
    gadget.insertData(new, [1, 3, 1])  # any further warning would be an error
    assert said[0].filename == __file__
    assert gadget.getNumpyVersion().tolist() == [[0, 0], [4, 5], [0, 0], [2, 3]]


@pytest.mark.parametrize("name", GADGETS)
def test_data_that_cannot_be_inserted_changes_nothing(name: str) -> None:
    gadget = gadget_of(np.zeros((4, 2), np.int32), name)
    for data, indexes, error, message in (
        (torch.ones(2, 2, dtype=torch.int32), [1, 4], IdError, r"indexes: ids\[1\] is 4, but the data of 'data.npy'"),
        (torch.ones(2, 2, dtype=torch.int32), [-1, 2], IdError, r"ids\[0\] is -1"),
        (torch.ones(3, 2, dtype=torch.int32), [1, 2], ValueError, r"shape \(3, 2\), .* of shape \(2, 2\)"),
        (torch.ones(2, 2), [1, 2], TypeError, "dataObject is torch.float32, but the data is torch.int32"),
    ):
        with pytest.raises(error, match=message):
            gadget.insertData(data, indexes)
    with pytest.raises(IdError):
        gadget.getData([4])
    assert not gadget.getNumpyVersion().any()


@pytest.mark.parametrize("name", GADGETS)
def test_files_that_are_no_data(name: str) -> None:
    gadget_class = getattr(SpeedTorch, name)
    with pytest.raises(RuntimeError, match="call gadgetInit"):
        gadget_class("data.npy").getData([0])
    with pytest.raises(FileNotFoundError):
        gadget_class("data.npy").gadgetInit()
    for values, error, message in (
        (np.float32(1), ValueError, "holds no rows"),
        (np.zeros((0, 3)), ValueError, "holds no rows"),
        (np.array(["a", "b"]), TypeError, "the dtype of 'data.npy' is"),
    ):
        np.save("data.npy", values)
        with pytest.raises(error, match=message):
            gadget_class("data.npy").gadgetInit()
    np.save("data.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"(?i)python objects|allow_pickle"):
        gadget_class("data.npy").gadgetInit()


def test_foreign_orders_are_converted_or_refused() -> None:
    values = np.arange(12, dtype=">f4").reshape(4, 3)
    for foreign in (values, np.asfortranarray(values.astype(np.float32))):
        gadget = gadget_of(foreign)
        np.testing.assert_array_equal(gadget.getData([2, 0]).cpu().numpy(), values[[2, 0]].astype(np.float32))
        with pytest.raises(ValueError, match="use DataGadget, which converts it"):
            SpeedTorch.DataGadgetMM("data.npy").gadgetInit()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_data_that_may_not_be_written_can_be_read() -> None:
    gadget_of(np.ones((3, 2), np.float32))
    Path("data.npy").chmod(0o444)
    gadget = SpeedTorch.DataGadgetMM("data.npy")
    gadget.gadgetInit()
    assert gadget.getData([1]).tolist() == [[1, 1]]
    with pytest.raises(PermissionError, match="may not be written"):
        gadget.insertData(torch.zeros(1, 2), [1])


@pytest.mark.parametrize("name", GADGETS)
def test_another_file_can_be_loaded(name: str) -> None:
    gadget = gadget_of(np.zeros((4, 2), np.float32), name)
    np.save("other.npy", np.arange(6).reshape(2, 3))
    gadget.loadCupy("other.npy")
    assert gadget.getNumpyVersion().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert gadget.getData([1]).tolist() == [[3, 4, 5]]


def test_data_in_a_file_is_as_before_where_another_file_cannot_be_used() -> None:
    gadget = gadget_of(np.arange(8, dtype=np.float32).reshape(4, 2), "DataGadgetMM")
    np.save("other.npy", np.asfortranarray(np.zeros((9, 3), np.float32)))
    with pytest.raises(ValueError, match="Fortran"):
        gadget.loadCupy("other.npy")
    assert gadget.getData([3]).tolist() == [[6, 7]]
    with pytest.raises(IdError):
        gadget.getData([4])
