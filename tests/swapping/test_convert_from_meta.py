"""Models on the meta device get their tables from initial values or a checkpoint's files, and no memory but theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_files import write
from torch import Tensor, nn

import speedswap
from speedswap.errors import ConversionError, SpeedswapWarning, TableFormatError

ROWS, DIM = 12, 4
IDS = torch.tensor([[3, 3], [7, 0]])


class Model(nn.Module):
    """Embeddings of both kinds, a small one, and a dense part with a tied weight and buffers."""

    def __init__(self, package: Any = nn, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"item": package.Embedding(ROWS, DIM, padding_idx=0, dtype=dtype)})
        self.bags = package.EmbeddingBag(ROWS + 1, DIM, mode="sum", dtype=dtype)
        self.small = nn.Embedding(ROWS, DIM, dtype=dtype)
        self.first, self.second = (nn.Linear(DIM, DIM, dtype=dtype) for _ in range(2))
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(DIM, dtype=dtype)
        self.bags.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.encoder["item"](ids).sum(1) + self.bags(ids) + self.small(ids).sum(1)
        return self.norm(self.second(self.first(found)))


def on_meta(*args: Any, **kwargs: Any) -> Model:
    with torch.device("meta"):
        return Model(*args, **kwargs)


@pytest.fixture
def theirs() -> Model:
    model = Model()
    model.norm.running_mean.fill_(0.5)
    return model


@pytest.fixture
def folder(theirs: Model, tmp_path: Path) -> Path:
    """The model's checkpoint in two shards; a tied weight is in it once."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {name: values.detach() for name, values in theirs.state_dict().items() if name != "second.weight"}
    index = {}
    for file, some in (("1.safetensors", [*tensors][:3]), ("2.safetensors", [*tensors][3:])):
        write(folder / file, {name: tensors[name] for name in some})
        index |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def convert(model: nn.Module, **settings: Any) -> nn.Module:
    skip = ["small"] if isinstance(getattr(model, "small", None), nn.Embedding) else []
    return speedswap.convert(model, min_rows=ROWS, skip=skip, **settings)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("package", [nn, speedswap], ids=["torch", "speedswap"])
@pytest.mark.parametrize("storage", ["pageable", "disk"])
def test_a_checkpoint_fills_tables_and_the_dense_part(
    storage: str, package: Any, theirs: Model, folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The model computes and trains as the one that was saved; a tied weight stays tied, a frozen one frozen."""
    ours = on_meta(package)
    path = tmp_path / "tables" if storage == "disk" and package is nn else None
    convert(ours, checkpoint=folder, storage=storage if path or storage != "disk" else "auto", path=path)
    assert (type(ours.encoder["item"]), type(ours.bags)) == (speedswap.Embedding, speedswap.EmbeddingBag)
    assert (type(ours.small), ours.bags.weight.requires_grad) == (nn.Embedding, False)
    assert ours.second.weight is ours.first.weight
    assert not [name for name, each in [*ours.named_parameters(), *ours.named_buffers()] if each.is_meta]
    for name, values in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], values), name
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS).square().sum().backward()
            optimizer.step()
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], values)
    assert not [each.message for each in recwarn if issubclass(each.category, SpeedswapWarning)]


def test_values_get_the_dtype_of_the_model(theirs: Model, folder: Path) -> None:
    ours = on_meta(dtype=torch.bfloat16)
    convert(ours, checkpoint=[folder / "2.safetensors", folder / "1.safetensors"])
    assert ours.bags.weight.dtype == ours.first.weight.dtype == torch.bfloat16
    assert torch.equal(ours.bags.read(), theirs.bags.weight.bfloat16().float())
    assert torch.equal(ours.first.weight, theirs.first.weight.bfloat16())


def test_only_what_is_on_meta_is_loaded(theirs: Model, folder: Path) -> None:
    """A head that was made for another task keeps its values, though the checkpoint has others of its name."""
    ours = on_meta()
    ours.norm = nn.BatchNorm1d(DIM)
    convert(ours, checkpoint=folder)
    assert torch.equal(ours.norm.running_mean, torch.zeros(DIM))
    assert torch.equal(ours.encoder["item"].read(), theirs.encoder["item"].weight)


def test_a_buffer_on_meta_that_no_checkpoint_has_is_refused(folder: Path) -> None:
    ours = on_meta()
    ours.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(ConversionError, match=r"angles: is a buffer on meta .*init_empty_weights"):
        convert(ours, checkpoint=folder)
    assert ours.encoder["item"].weight.is_meta
    ours.angles = torch.ones(3)
    assert torch.equal(convert(ours, checkpoint=folder).angles, torch.ones(3))


def test_an_embedding_alone_gets_its_rows(tmp_path: Path) -> None:
    rows = torch.randn(ROWS, DIM)
    file = write(tmp_path / "items.safetensors", {"weight": rows})
    items = speedswap.convert(nn.Embedding(ROWS, DIM, device="meta"), min_rows=ROWS, checkpoint=file)
    assert torch.equal(items.read(), rows)


def test_a_collection_on_meta_is_loaded_before(folder: Path) -> None:
    config = speedswap.EmbeddingConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a"])
    ours = on_meta()
    with torch.device("meta"):
        ours.more = speedswap.EmbeddingCollection([config])
    with pytest.raises(ConversionError, match=r"more\.groups\.0: is of a collection on meta; call its load_state_dict"):
        convert(ours, checkpoint=folder)
    ours.more.load_state_dict({"embeddings.a.weight": torch.ones(ROWS, DIM)})
    convert(ours, checkpoint=folder)
    assert bool((ours.more.tables["a"].read() == 1).all())


def test_initial_values_are_those_of_an_embedding_with_them() -> None:
    ours = on_meta()
    torch.manual_seed(3)
    convert(ours, init=speedswap.init.normal(std=0.02))
    torch.manual_seed(3)
    alone = speedswap.Embedding(ROWS, DIM, padding_idx=0, init=speedswap.init.normal(std=0.02))
    rows = ours.encoder["item"].read()
    assert torch.equal(rows, alone.read())
    assert not rows[0].any()
    assert ours.first.weight.is_meta
    ours.to_empty(device="cpu")
    ours.first.reset_parameters()
    assert torch.equal(ours.encoder["item"].read(), rows)
    ours.encoder["item"](IDS).sum().backward()


# ---------------------------------------------------------------------- memory


MEMORY = """
import resource, sys, torch, speedswap
from torch import nn

rows, dim = 1 << 18, 64
nbytes = rows * dim * 4
with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(rows, dim), nn.Embedding(rows, dim))
speedswap.Embedding(1 << 17, dim)  # starts the threads that fill a table
nn.Embedding(1, 1, device="meta")
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
# Two tables, the mapping of their file, and half a table.
resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes * 9 // 2, resource.RLIM_INFINITY))
speedswap.convert(model, checkpoint=sys.argv[1])
print([float(items(torch.tensor([rows - 1]))[0, 0]) for items in model])
try:
    more = [nn.Embedding.from_pretrained(torch.empty(rows, dim)) for _ in range(3)]
except RuntimeError:
    print("no more")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_checkpoint_is_loaded_without_a_second_copy_of_any_table(tmp_path: Path) -> None:
    """Two tables of 64 MiB in a process that may have them, and 32 MiB more besides the mapping of the file."""
    rows = {f"{place}.weight": torch.full((1 << 18, 64), place + 0.5) for place in range(2)}
    words = [sys.executable, "-c", MEMORY, str(write(tmp_path / "model.safetensors", rows))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "[0.5, 1.5]\nno more\n"), done.stderr


# ---------------------------------------------------------------------- refusals


def changed(folder: Path, name: str, values: Tensor | None) -> Path:
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    file = names.pop(name)
    if values is not None:
        write(folder / "other.safetensors", {name: values})
        names[name] = "other.safetensors"
    index.write_text(json.dumps({"weight_map": names}))
    assert file
    return folder


REFUSED: dict[str, tuple[str, type[Exception], Callable[[Path], dict[str, Any]]]] = {
    "a tensor that is missing": (
        r"has no tensor 'bags\.weight', but .*small\.weight",
        ConversionError,
        lambda folder: {"checkpoint": changed(folder, "bags.weight", None)},
    ),
    "a buffer that is missing": (
        "has no tensor 'norm.running_var'",
        ConversionError,
        lambda folder: {"checkpoint": changed(folder, "norm.running_var", None)},
    ),
    "another shape": (
        r"bags\.weight: the checkpoint has \(3, 4\) of torch.float32, and the model \(13, 4\)",
        ConversionError,
        lambda folder: {"checkpoint": changed(folder, "bags.weight", torch.ones(3, 4))},
    ),
    "numbers with a scale elsewhere": (
        r"first\.weight: the checkpoint has \(4, 4\) of torch.float8_e4m3fn, and the model \(4, 4\) of torch.float32",
        ConversionError,
        lambda folder: {
            "checkpoint": changed(folder, "first.weight", torch.ones(4, 4).to(torch.float8_e4m3fn)),
        },
    ),
    "a shard that was cut short": (
        "damaged: it has",
        TableFormatError,
        lambda folder: {
            "checkpoint": folder,
            "init": (folder / "1.safetensors").write_bytes((folder / "1.safetensors").read_bytes()[:-1]) and None,
        },
    ),
    "no checkpoint": (
        "does not exist; give a safetensors file, its index",
        FileNotFoundError,
        lambda folder: {"checkpoint": folder / "none"},
    ),
    "both": (
        "init and checkpoint are given",
        ValueError,
        lambda folder: {"checkpoint": folder, "init": speedswap.init.zeros()},
    ),
    "an init that is none": ("init", TypeError, lambda folder: {"init": 3}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_does_not_fit_changes_nothing(case: str, theirs: Model, folder: Path, tmp_path: Path) -> None:
    message, kind, settings = REFUSED[case]
    ours = on_meta()
    with pytest.raises(kind, match=message):
        convert(ours, path=tmp_path / "tables", **settings(folder))
    assert type(ours.encoder["item"]) is nn.Embedding
    assert all(each.is_meta for each in ours.parameters())
    assert not (tmp_path / "tables").exists()


def test_values_for_what_has_values_are_refused(theirs: Model, folder: Path) -> None:
    with pytest.raises(ValueError, match="nothing in the model is on meta, so it keeps its values"):
        convert(theirs, checkpoint=folder)
    with pytest.raises(ConversionError, match=r"encoder\.item: init is given, but its weight is on cpu and keeps its"):
        convert(theirs, init=speedswap.init.zeros())
    assert type(theirs.bags) is nn.EmbeddingBag


# ---------------------------------------------------------------------- places


def test_places_by_name_and_by_prefix(tmp_path: Path) -> None:
    model = Model()
    model.encoder["more"] = nn.ModuleDict({"words": nn.Embedding(ROWS, DIM), "tags": nn.Embedding(ROWS, DIM)})
    storage = {
        "encoder.item": speedswap.Disk(tmp_path / "items"),
        "encoder": speedswap.Disk(tmp_path / "others"),
        "": "pageable",
    }
    speedswap.convert(model, min_rows=ROWS, storage=storage)
    assert model.encoder["item"].table.path == tmp_path / "items"
    assert model.encoder["more"]["words"].table.path == tmp_path / "others" / "encoder.more.words"
    assert model.encoder["more"]["tags"].table.path == tmp_path / "others" / "encoder.more.tags"
    assert (model.bags.table.storage, model.small.table.storage) == ("pageable", "pageable")


def test_places_by_size(tmp_path: Path) -> None:
    seen = {}

    def place(name: str, nbytes: int) -> Any:
        seen[name] = nbytes
        return speedswap.Disk(tmp_path / name) if nbytes > ROWS * DIM * 4 else "pageable"

    model = on_meta()
    speedswap.convert(model, min_rows=ROWS, storage=place, init=speedswap.init.zeros())
    assert seen == {name: (ROWS + (name == "bags")) * DIM * 4 for name in ("encoder.item", "bags", "small")}
    assert model.bags.table.path == tmp_path / "bags"
    assert model.small.table.storage == "pageable"


WRONG_PLACES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "none for one": ("storage has no place for 'bags'; add it, or", lambda path: {"storage": {"encoder": "pageable"}}),
    "a name of none": (
        "storage has 'itm', but the embeddings to be converted are encoder.item, bags, small",
        lambda path: {"storage": {"itm": "pageable", "": "pageable"}},
    ),
    "a prefix of letters": (
        "no place for 'encoder.item'",
        lambda path: {"storage": {"enc": "pageable", "bags": "auto"}},
    ),
    "one that is none": ("storage is 'nowhere'; choose one of", lambda path: {"storage": {"": "nowhere"}}),
    "one twice": (
        "storage gives several tables the directory",
        lambda path: {"storage": lambda name, nbytes: speedswap.Disk(path / "same")},
    ),
    "a path besides": (
        "path is .*, but storage says where",
        lambda path: {"storage": {"": "auto"}, "path": path / "t"},
    ),
}


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_places_that_do_not_fit_change_nothing(case: str, tmp_path: Path) -> None:
    message, settings = WRONG_PLACES[case]
    model = Model()
    with pytest.raises(ValueError, match=message):
        speedswap.convert(model, min_rows=ROWS, **settings(tmp_path))
    assert type(model.bags) is nn.EmbeddingBag
    assert not [*tmp_path.iterdir()]


SMALL = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_transformers_models_compute_the_same_bits(name: str, tmp_path: Path) -> None:
    """Position ids and rotary frequencies are in no checkpoint."""
    transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    config, cls = getattr(transformers, f"{name}Config")(**SMALL), getattr(transformers, f"{name}Model")
    theirs = cls(config).eval()
    theirs.save_pretrained(tmp_path)
    with torch.device("meta"):
        refused = cls(config)
    with pytest.raises(ConversionError, match=r"(position_ids|inv_freq): is a buffer on meta"):
        speedswap.convert(refused, min_rows=300, checkpoint=tmp_path)
    with accelerate.init_empty_weights():
        ours = cls(config).eval()
    assert all(each.is_meta for each in ours.parameters())
    ours = speedswap.convert(ours, min_rows=300, checkpoint=tmp_path)
    assert sum(isinstance(each, speedswap.Embedding) for each in ours.modules()) == 1
    ids = torch.randint(300, (2, 7))
    with torch.no_grad():
        assert torch.equal(ours(ids)[0], theirs(ids)[0])
