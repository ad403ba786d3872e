"""Models of transformers whose tables stay in their checkpoint compute, train and are saved as plain models."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.tiny_models import TABLES, tiny
from tensor_files import write
from torch import Tensor

import speedswap
from speedswap.errors import ConversionError, TableFormatError

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]

IDS = torch.randint(3, 512, (2, 9), generator=torch.Generator().manual_seed(0))


class Checkpoints(dict[str, Path]):
    """Each family's checkpoint, of several files."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, family: str) -> Path:
        self[family] = self._folders.mktemp(family)
        try:
            tiny(family).save_pretrained(self[family], max_shard_size="200KB")
        except ImportError:
            pytest.skip(f"this transformers has no {family}")
        return self[family]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Checkpoints(tmp_path_factory)


def plain(folder: Path, **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)


def ours(family: str, folder: Path, storage: Any = None, **settings: Any) -> Any:
    place = storage or speedswap.Disk("rows")
    return speedswap.from_pretrained(transformers.AutoModelForCausalLM, folder, TABLES[family], place, **settings)


def table_of(model: Any) -> tuple[str, Any]:
    return next((name, each) for name, each in model.named_modules() if isinstance(each, speedswap.Embedding))


def generated(model: Any) -> Tensor:
    return model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", TABLES)
def test_logits_and_generated_text_are_those_of_the_plain_model(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    theirs, model = plain(checkpoints[family], dtype=dtype), ours(family, checkpoints[family], dtype=dtype)
    assert type(model) is type(theirs)
    assert torch.equal(model(IDS).logits, theirs(IDS).logits)
    assert torch.equal(generated(model), generated(theirs))
    _, embedding = table_of(model)
    assert embedding.weight.dtype == dtype
    assert embedding.table.dtype == torch.float32
    assert len(list(embedding.table.store.written_rows())) == 0
    for key, value in theirs.named_buffers():  # also those that no file has
        assert torch.equal(dict(model.named_buffers())[key], value), key
    assert model.name_or_path == str(checkpoints[family])


def test_a_name_on_the_hub_is_its_folder_in_the_cache(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As a download leaves it there: links to files that are named by what they contain."""
    repository = tmp_path / "models--tiny--gemma"
    snapshot = repository / "snapshots" / "0123"
    for path in (repository / "refs", repository / "blobs", snapshot):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    for number, file in enumerate(checkpoints["gemma4"].iterdir()):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    model = ours_of("*per_layer", Path("tiny/gemma"), cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(model(IDS).logits, plain(checkpoints["gemma4"])(IDS).logits)
    assert model.name_or_path == "tiny/gemma"
    with pytest.raises(
        FileNotFoundError, match=r"folder is 'tiny/llama', which is not a folder here, .* give the folder"
    ):
        ours_of("*per_layer", Path("tiny/llama"), cache_dir=tmp_path, local_files_only=True)


def test_a_name_that_the_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(name: str, **options: Any) -> str:
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # its constructor takes a server's response

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    with pytest.raises(FileNotFoundError, match="folder is 'tiny/lama', which is not a folder here"):
        ours_of("*per_layer", Path("tiny/lama"))


def same_as_transformers(folder: Path, **settings: Any) -> bool:
    model = ours("gemma4", folder, "pageable", **settings)
    return torch.equal(model(IDS).logits, plain(folder, **settings)(IDS).logits)


def test_of_two_copies_transformers_choice_is_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A model that was saved again as one file: the old index stays, and may name shards that are gone."""
    shutil.copytree(checkpoints["gemma4"], tmp_path / "again")
    tiny("gemma4", torch.float16).save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "again")
    assert same_as_transformers(tmp_path / "again")
    for shard in (tmp_path / "again").glob("model-*.safetensors"):
        shard.unlink()
    assert same_as_transformers(tmp_path / "again")


def test_names_by_a_mapping_and_a_configuration_by_its_folder(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = plain(checkpoints["gemma4"])
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "model.safetensors", {f"old.{name}": each for name, each in model.state_dict().items()})
    found = ours(
        "gemma4", tmp_path / "old", "pageable", config=str(checkpoints["gemma4"]), key_mapping={r"^old\.(.*)": r"\1"}
    )
    assert torch.equal(found(IDS).logits, model(IDS).logits)


def test_an_unused_tensor_of_a_dtype_that_torch_lacks_disturbs_nobody(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["gemma4"], tmp_path / "more")
    file = next((tmp_path / "more").glob("*.safetensors"))
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries, size = json.loads(raw[8:start]), len(raw) - start
    text = json.dumps(entries | {"extra": {"dtype": "F4", "shape": [16], "data_offsets": [size, size + 8]}}).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:] + bytes(8))
    index = tmp_path / "more" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | {"extra": file.name}}))
    model = ours("gemma4", tmp_path / "more")
    assert torch.equal(model(IDS).logits, plain(checkpoints["gemma4"])(IDS).logits)


def test_places_and_settings_of_a_table(checkpoints: dict[str, Path]) -> None:
    theirs = plain(checkpoints["gemma4"])
    tables = {"*per_layer": {"storage": "pageable", "stored_dtype": torch.bfloat16}}
    model, info = speedswap.from_pretrained(
        transformers.AutoModelForCausalLM,
        checkpoints["gemma4"],
        tables,
        device_map={"": "cpu"},
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    _, embedding = table_of(model)
    assert embedding.table.storage == "pageable"
    assert torch.equal(embedding.read(), theirs.model.embed_tokens_per_layer.weight.bfloat16().float())


def test_a_class_with_other_names_than_the_checkpoints(checkpoints: dict[str, Path]) -> None:
    """The base model's names lack the prefix that a language model's have."""
    theirs = transformers.AutoModel.from_pretrained(checkpoints["gemma4"])
    model = speedswap.from_pretrained(type(theirs), checkpoints["gemma4"], "embed_tokens_per_layer", "pageable")
    assert torch.equal(model(IDS).last_hidden_state, theirs(IDS).last_hidden_state)


def test_all_else_is_in_memory(checkpoints: dict[str, Path]) -> None:
    model = ours("gemma4", checkpoints["gemma4"])
    maps = Path("/proc/self/maps").read_text()
    in_files = [
        range(*(int(each, 16) for each in found))
        for found in re.findall(rf"^(\w+)-(\w+) .*{re.escape(str(checkpoints['gemma4']))}", maps, re.MULTILINE)
    ]
    assert in_files  # the table's
    others = [each for name, each in model.named_parameters() if "per_layer.weight" not in name]
    for each in [*others, *model.buffers()]:
        assert not any(each.data_ptr() in some for some in in_files)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 40) -> list[float]:
    model.train()
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        ids = torch.randint(3, 512, (2, 12), generator=draw)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def differences(model: Any, theirs: Any) -> list[Tensor]:
    """Return the difference of each parameter, and of the table's rows."""
    wanted = dict(theirs.named_parameters())
    name, embedding = table_of(model)
    rest = {key: value for key, value in model.named_parameters() if key != f"{name}.weight"}
    pairs = [(embedding.read(), wanted[f"{name}.weight"]), *((value, wanted[key]) for key, value in rest.items())]
    assert len(pairs) == len(wanted)
    return [(mine - torchs).detach().abs().max() for mine, torchs in pairs]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", TABLES)
def test_adagrad_trains_to_the_bits_of_torch(checkpoints: dict[str, Path], family: str) -> None:
    theirs, model = plain(checkpoints[family]), ours(family, checkpoints[family])
    losses = [trained(each, torch.optim.Adagrad(each.parameters(), lr=0.01)) for each in (theirs, model)]
    assert losses[0] == losses[1]
    assert max(differences(model, theirs)) == 0
    assert max(differences(model, plain(checkpoints[family]))[:1]) > 0.01


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", TABLES)
def test_adamw_trains_as_torch_if_idle_rows_take_its_steps(checkpoints: dict[str, Path], family: str) -> None:
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}  # the only one in float64
    theirs, model = plain(checkpoints[family], **settings), ours(family, checkpoints[family], **settings)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0) for each in (theirs, model)]
    speedswap.attach(optimizers[1], model, idle_rows="dense")
    for each, optimizer in zip((theirs, model), optimizers, strict=True):
        trained(each, optimizer)
    assert max(differences(model, theirs)) < 1e-12


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_one_device_of_a_map(checkpoints: dict[str, Path], device_map: Any) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    theirs = plain(checkpoints["gemma4"], device_map=device_map)
    model = ours("gemma4", checkpoints["gemma4"], device_map=device_map)
    assert torch.equal(model(IDS.to(model.device)).logits, theirs(IDS.to(theirs.device)).logits)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_has_its_tables_rows_as_they_are(checkpoints: dict[str, Path], bits: int) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    quantized = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    theirs = plain(checkpoints["gemma4"], quantization_config=quantized)
    model = ours("gemma4", checkpoints["gemma4"], quantization_config=quantized)
    assert {type(each) for each in model.modules()} >= {type(each) for each in theirs.modules()} - {torch.nn.Embedding}
    assert torch.equal(model(IDS).logits, theirs(IDS).logits)
    trained(model, torch.optim.Adagrad(table_of(model)[1].parameters(), lr=0.1))
    assert not torch.equal(model(IDS).logits, theirs(IDS).logits)


# ---------------------------------------------------------------------- refused


def test_a_map_of_several_devices_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    names = ("model.embed_tokens", "model.norm", "model.layers", "model.rotary_emb", "lm_head")
    names += ("model.per_layer_model_projection", "model.per_layer_projection_norm")
    several = {"model.embed_tokens_per_layer": "disk"} | dict.fromkeys(names, "cpu")
    with pytest.raises(ConversionError, match=r"device_map has several devices, .* give it one"):
        ours("gemma4", checkpoints["gemma4"], device_map=several, offload_folder=tmp_path / "offloaded")
    assert not Path("rows").exists()


def test_a_quantization_that_is_not_there_says_so(checkpoints: dict[str, Path]) -> None:
    """transformers' own error, before anything is created."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    quantized = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ImportError, match="bitsandbytes"):
        ours("gemma4", checkpoints["gemma4"], quantization_config=quantized)
    assert not Path("rows").exists()


def test_names_that_match_nothing_are_refused_with_those_that_are_there(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"tables has '\*.per_layer', .*it has .*model.embed_tokens_per_layer"):
        ours_of("*.per_layer", checkpoints["gemma4"])
    with pytest.raises(ValueError, match="tables is empty"):
        ours_of([], checkpoints["gemma4"])


def ours_of(tables: Any, folder: Path, cls: Any = transformers.AutoModelForCausalLM, **settings: Any) -> Any:
    return speedswap.from_pretrained(cls, folder, tables, speedswap.Disk("rows"), **settings)


def test_other_classes_and_folders_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"cls is <class 'torch.nn.modules.linear.Linear'>; give a class of transf"):
        ours_of("*", checkpoints["gemma4"], torch.nn.Linear)
    with pytest.raises(FileNotFoundError, match="folder is 'nowhere'; give the folder of a downloaded checkpoint"):
        ours_of("*", Path("nowhere"))
    (tmp_path / "empty").mkdir()
    shutil.copy(checkpoints["gemma4"] / "config.json", tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors files"):
        ours_of("*.embed_tokens_per_layer", tmp_path / "empty")


@pytest.mark.parametrize("setting", ["subfolder", "variant"])
def test_other_files_than_a_folders_usual_ones_are_refused(checkpoints: dict[str, Path], setting: str) -> None:
    """They were ignored, and another model was loaded."""
    with pytest.raises(ValueError, match=f"{setting} is 'fp16', but .* give a folder with these files alone"):
        ours("gemma4", checkpoints["gemma4"], **{setting: "fp16"})
    assert not Path("rows").exists()


def test_a_tied_embedding_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConversionError, match=r"embed_tokens: its weight is tied to 'lm_head.weight'"):
        ours_of("*.embed_tokens", checkpoints["gemma4"])
    assert not Path("rows").exists()


def test_an_unknown_setting_of_a_table_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConversionError, match="unexpected keyword argument 'speed'"):
        ours_of({"*per_layer": {"speed": 1}}, checkpoints["gemma4"])


def test_a_place_that_exists_is_refused(checkpoints: dict[str, Path]) -> None:
    ours("gemma4", checkpoints["gemma4"])
    with pytest.raises(FileExistsError):
        ours("gemma4", checkpoints["gemma4"])


def test_a_failed_load_leaves_no_table(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        ours("gemma4", checkpoints["gemma4"], no_such_argument=1)
    assert not Path("rows").exists()


def test_a_damaged_file_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["gemma4"], tmp_path / "damaged")
    for file in (tmp_path / "damaged").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(TableFormatError, match="damaged"):
        ours("gemma4", tmp_path / "damaged")
