"""Checkpoints with changed rows in place: as if the model had been saved with them; and PEFT's trainable tokens."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from children import exit_status, killed_at
from safetensors.torch import load_file, save_file
from tensor_files import write
from torch import Tensor

import speedswap
from speedswap import Disk, Table, init
from speedswap.cli import main
from speedswap.errors import TableFormatError
from speedswap.tables import merge_rows, rows_file, save_trainable_tokens

ROWS, DIM, NAME = 250, 24, "model.ngram.shard_*.weight"


def rows_of(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def checkpoint(folder: Path, rows: Tensor) -> Path:
    """Write a table in twelve tensors of three files, with their index and other files, also in a folder."""
    (folder / "more").mkdir(parents=True)
    shards, weight_map = dict(enumerate(rows.split(21))), {}
    for file in range(3):
        held = {f"model.ngram.shard_{i}.weight": shards[i] for i in reversed(shards) if i % 3 == file}
        name = f"model-{file}.safetensors"
        save_file({**held, f"norm_{file}": torch.full((3,), float(file))}, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys([*held, f"norm_{file}"], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    (folder / "more" / "merges.txt").write_text("a b")
    (folder / ".cache").mkdir()
    return folder


def rows_in(folder: Path) -> Tensor:
    held = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
    return torch.cat([held[f"model.ngram.shard_{i}.weight"] for i in range(12)])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "base", rows_of())


def table_over(base: Path, **options: Any) -> Table:
    over = init.of_tensors(base, NAME)
    given = {"dtype": over.dtype, "storage": "pageable", "name": "ngram", **options}
    return Table.create(over.num_embeddings, over.embedding_dim, init=over, **given)


def trained(table: Table, rows: list[int], value: float) -> Table:
    table.scatter(torch.tensor(rows), torch.full((len(rows), DIM), value, dtype=table.dtype))
    return table


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float32, "stored_dtype": torch.bfloat16}, {"dtype": torch.float32}]
)
def test_a_merged_checkpoint_has_the_rows_and_everything_else(
    options: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_file, "rows_in_piece", lambda forms: 12)
    table = trained(table_over(base, **options), [0, 20, 21, 22, 100, 249], 0.1)
    table.save_rows(tmp_path / "rows")
    merge_rows(base, tmp_path / "rows", tmp_path / "out")
    assert torch.equal(rows_in(tmp_path / "out"), table.read().bfloat16())
    names = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.name != ".cache")
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")) == names
    for name in names:
        ours, theirs = tmp_path / "out" / name, base / name
        if name.endswith(".safetensors"):
            size = int.from_bytes(theirs.read_bytes()[:8], "little") + 8
            assert ours.read_bytes()[:size] == theirs.read_bytes()[:size]
            others = {key: value for key, value in load_file(theirs).items() if key.startswith("norm")}
            assert all(torch.equal(load_file(ours)[key], value) for key, value in others.items())
        elif theirs.is_file():
            assert ours.read_bytes() == theirs.read_bytes()
    assert torch.equal(rows_in(base), rows_of())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "rows"]


def test_of_several_files_the_last_one_counts(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with table_over(base, storage=Disk(tmp_path / "table")) as table:
        trained(table, [1, 2, 3], 1.0).save_rows(tmp_path / "first")
        commit = table.hold()
        trained(table, [3, 4], 2.0).save_rows(tmp_path / "second", since=commit)
        after = table.read()
    assert main(["merge", *map(str, (base, tmp_path / "first", tmp_path / "second", tmp_path / "out"))]) == 0
    assert capsys.readouterr().out == f"saved {tmp_path / 'out'}\n"
    assert torch.equal(rows_in(tmp_path / "out"), after)


def test_a_second_copy_of_the_tensors_stays_as_it_is(tmp_path: Path) -> None:
    """As in whisper-large-v3: model.safetensors counts, as for transformers, and also where a folder is a file's."""
    (tmp_path / "base").mkdir()
    for name in ("model.fp32-00001-of-00001.safetensors", "model.safetensors"):
        save_file({"items.weight": torch.full((5, 2), float(len(name)))}, tmp_path / "base" / name)
    items = speedswap.Embedding.from_file(tmp_path / "base", name="items.weight", storage="pageable")
    assert torch.equal(items.read(), torch.full((5, 2), 17.0))
    items.table.scatter(torch.tensor([3]), torch.ones(1, 2))
    items.table.save_rows(tmp_path / "rows")
    merge_rows(tmp_path / "base", tmp_path / "rows", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["items.weight"], items.read())
    copies = (load_file(tmp_path / each / "model.fp32-00001-of-00001.safetensors") for each in ("base", "out"))
    assert torch.equal(*(each["items.weight"] for each in copies))


def test_a_whole_table_merges_into_the_tensor_of_its_name(tmp_path: Path) -> None:
    """It needs no base, since no row is left out."""
    (tmp_path / "base").mkdir()
    save_file({"items.weight": torch.zeros(5, 2)}, tmp_path / "base" / "model.safetensors")
    items = speedswap.Embedding.from_pretrained(torch.arange(10.0).view(5, 2), freeze=False)
    items.table.save_rows(tmp_path / "rows", name="items")
    merge_rows(tmp_path / "base", [tmp_path / "rows"], tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["items.weight"], torch.arange(10.0).view(5, 2))
    items.table.save_rows(tmp_path / "others", name="users")
    with pytest.raises(ValueError, match=r"has no tensor 'users.weight', but items.weight"):
        merge_rows(tmp_path / "base", tmp_path / "others", tmp_path / "other")
    Table.create(5, 2, init=init.normal(), name="items").save_rows(tmp_path / "some")
    with pytest.raises(ValueError, match=r"some rows of 'items', whose others are not those of .*init.of_tensors"):
        merge_rows(tmp_path / "base", tmp_path / "some", tmp_path / "other")


def test_what_does_not_fit_is_refused_and_leaves_nothing(base: Path, tmp_path: Path) -> None:
    table, file = trained(table_over(base, dtype=torch.float32), [3], 1.0), tmp_path / "rows"
    table.save_rows(file)
    other = checkpoint(tmp_path / "other", rows_of() * 2)
    small = tmp_path / "small"
    save_file({f"model.ngram.shard_{i}.weight": torch.zeros(1, 2) for i in range(12)}, small_file(small))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "there").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    for given, error, message in [
        ((other, file), ValueError, "rows of a checkpoint with the fingerprint .*, but that of .*other is"),
        ((small, file), ValueError, "fingerprint"),
        ((base, damaged), TableFormatError, "damaged"),
        ((base, base / "model-0.safetensors"), TableFormatError, "is not a file of rows"),
        ((base / "model-0.safetensors", file), NotADirectoryError, "give the folder of a checkpoint"),
        ((tmp_path / "none", file), NotADirectoryError, "give the folder of a checkpoint"),
    ]:
        with pytest.raises(error, match=message):
            merge_rows(*given, tmp_path / "out")
    with pytest.raises(FileExistsError, match="which exists; give another path"):
        merge_rows(base, file, tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def small_file(folder: Path) -> Path:
    folder.mkdir()
    return folder / "model.safetensors"


def test_a_row_that_would_become_infinite_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", rows_of(torch.float16))
    trained(table_over(base, dtype=torch.float32), [3, 7], 1e5).save_rows(tmp_path / "rows")
    with pytest.raises(
        ValueError, match=r"row 3 of 'ngram' has a value beyond the range of torch.float16; scale the rows"
    ):
        merge_rows(base, tmp_path / "rows", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "rows"]


def test_a_base_of_float8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    tensors = {"w": torch.ones(40, 32).to(torch.float8_e4m3fn), "s": torch.ones(40)}
    write(tmp_path / "base" / "model.safetensors", tensors)
    over = init.of_tensors(tmp_path / "base", "w", scale="s")
    table = Table.create(40, 32, init=over, storage="pageable")
    table.scatter(torch.tensor([3]), torch.ones(1, 32))
    table.save_rows(tmp_path / "rows")
    with pytest.raises(
        TypeError, match=r"'w' of .* is torch.float8_e4m3fn with scales, .*; keep the rows in .*rows, or"
    ):
        merge_rows(tmp_path / "base", tmp_path / "rows", tmp_path / "out")


def test_rows_go_onto_a_base_that_was_moved_and_onto_no_other(base: Path, tmp_path: Path) -> None:
    table = trained(table_over(base), [3, 5], 1.0)
    table.save_rows(tmp_path / "rows")
    moved = table_over(shutil.copytree(base, tmp_path / "moved"), storage=Disk(tmp_path / "t"))
    moved.load_rows(tmp_path / "rows")
    assert torch.equal(moved.read(), table.read())
    other = table_over(checkpoint(tmp_path / "other", rows_of() * 2))
    with pytest.raises(ValueError, match=r'"fingerprint".*make the table over the same checkpoint'):
        other.load_rows(tmp_path / "rows")


def test_a_killed_merge_leaves_the_whole_folder_or_none(base: Path, tmp_path: Path) -> None:
    table = trained(table_over(base), [3, 200], 1.0)
    table.save_rows(tmp_path / "rows")
    out, step, after = tmp_path / "out", 0, table.read()
    torch.set_num_threads(1)
    while killed_at(step, lambda: merge_rows(base, tmp_path / "rows", out)):
        if out.exists():
            assert torch.equal(rows_in(out), after)
            shutil.rmtree(out)
        step += 3
        merge_rows(base, tmp_path / "rows", out)  # removes what the killed one left
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "rows"]
        shutil.rmtree(out)
    assert step > 20


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Neither with its size nor with the number of changed rows: 200 MB of either."""
    for name, count in (("small", 10), ("large", 400_000)):
        (folder := tmp_path / name).mkdir()
        save_file({"w": torch.zeros(count, 128)}, folder / "model.safetensors")
        with Table.create(count, 128, init=init.of_tensors(folder, "w"), path=tmp_path / f"{name}_table") as table:
            table.write(0, torch.ones(count, 128))
            table.save_rows(tmp_path / f"{name}_rows", name="table")

    def peak_after(name: str) -> int:
        merge_rows(tmp_path / name, tmp_path / f"{name}_rows", tmp_path / f"{name}_out")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def work() -> bool:
        before = peak_after("small")
        return peak_after("large") - before < 64 << 20

    torch.set_num_threads(1)
    assert exit_status(work) == 0
    assert load_file(tmp_path / "large_out" / "model.safetensors")["w"].min() == 1


# ---- with transformers and PEFT


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    return transformers.LlamaForCausalLM


@pytest.fixture
def tokens(llama: Any, tmp_path: Path) -> Table:
    over = init.of_tensors(tmp_path / "base", "model.embed_tokens.weight")
    table = Table.create(over.num_embeddings, over.embedding_dim, init=over, storage="pageable")
    table.scatter(torch.tensor([3, 50, 51, 119]), torch.randn(4, 32, generator=torch.Generator().manual_seed(1)))
    table.save_rows(tmp_path / "rows", name="model.embed_tokens")
    return table


def expected_logits(llama: Any, folder: Path, rows: Tensor, ids: Tensor) -> Tensor:
    model = llama.from_pretrained(folder).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rows)
        logits: Tensor = model(ids).logits
    return logits


def test_transformers_loads_the_merged_model(llama: Any, tokens: Table, tmp_path: Path) -> None:
    assert len([*(tmp_path / "base").glob("*.safetensors")]) > 1
    merge_rows(tmp_path / "base", tmp_path / "rows", tmp_path / "out")
    ids = torch.tensor([[3, 50, 7, 119, 0]])
    with torch.no_grad():
        logits = llama.from_pretrained(tmp_path / "out").eval()(ids).logits
    assert torch.equal(logits, expected_logits(llama, tmp_path / "base", tokens.read(), ids))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about a name that PEFT uses
@pytest.mark.parametrize("beside_lora", [False, True])
def test_peft_has_the_same_logits(beside_lora: bool, llama: Any, tokens: Table, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT loads the trainable tokens")
    adapter, ids = None, torch.tensor([[3, 50, 7, 119, 0]])
    if beside_lora:
        adapter = tmp_path / "lora"
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(llama.from_pretrained(tmp_path / "base"), lora).save_pretrained(adapter)
    save_trainable_tokens(tmp_path / "rows", tmp_path / "out", adapter=adapter)
    model = llama.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(model, tmp_path / "out").eval()(ids).logits
        plain = llama.from_pretrained(tmp_path / "base")
        plain.model.embed_tokens.weight.copy_(tokens.read())
        if adapter is not None:
            plain = peft.PeftModel.from_pretrained(plain, adapter)
        assert torch.equal(logits, plain.eval()(ids).logits)


def test_trainable_tokens_are_the_rows(base: Path, tmp_path: Path) -> None:
    """In the files that PEFT reads, whether it is installed or not."""
    table = trained(table_over(base), [3, 8], 1.0)
    table.save_rows(tmp_path / "rows", name="model.ngram")
    save_trainable_tokens(tmp_path / "rows", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["peft_type"] == "TRAINABLE_TOKENS"
    assert (config["target_modules"], config["token_indices"]) == (["model.ngram"], [3, 8])
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert torch.equal(found["base_model.model.model.ngram.trainable_tokens_delta"], torch.ones(2, DIM).bfloat16())
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({"r": 2}))
    save_file({"lora_A": torch.ones(2)}, lora / "adapter_model.safetensors")
    (lora / "README.md").write_text("mine")
    save_trainable_tokens(tmp_path / "rows", tmp_path / "both", adapter=lora)
    config = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    assert config == {"r": 2, "trainable_token_indices": {"model.ngram": [3, 8]}}
    found = load_file(tmp_path / "both" / "adapter_model.safetensors")
    assert found.keys() == {"lora_A", "base_model.model.model.ngram.token_adapter.trainable_tokens_delta"}
    assert (tmp_path / "both" / "README.md").read_text() == "mine"
    with pytest.raises(ValueError, match="which has trainable tokens already"):
        save_trainable_tokens(tmp_path / "rows", tmp_path / "again", adapter=tmp_path / "both")
    rows_file.save_rows({"a": table.store, "b": table.store}, tmp_path / "two")
    with pytest.raises(ValueError, match="with 2 tables; PEFT takes several only beside LoRA"):
        save_trainable_tokens(tmp_path / "two", tmp_path / "again")
