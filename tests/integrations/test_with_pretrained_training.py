"""Trainers of transformers and TRL, and PEFT's adapters, with tables over a checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.tiny_models import TABLES, tiny
from tensor_files import write

import speedswap
from speedswap.errors import SpeedswapWarning, TableFormatError, WeightError

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]

IDS = torch.randint(3, 512, (2, 9), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 512, (32, 12))]


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint; of Gemma 4 unless the test says another family."""
    tiny(getattr(request, "param", "gemma4")).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def loaded(folder: Path, place: Any = "pageable", tables: Any = None, **settings: Any) -> Any:
    return speedswap.from_pretrained(transformers.AutoModelForCausalLM, folder, tables, place, **settings)


def gemma(folder: Path, place: Any = "pageable") -> Any:
    return loaded(folder, place, TABLES["gemma4"])


def table_of(model: Any) -> Any:
    return next(each for each in model.modules() if isinstance(each, speedswap.Embedding))


def arguments(folder: str, **settings: Any) -> Any:
    given = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "no"} | settings
    return transformers.TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True, **given)


class Ahead(transformers.Trainer):  # type: ignore[name-defined,misc]
    """Takes the ids that the model's memory computes from the next batch's tokens."""

    batches: Any = None

    def get_batch_samples(self, batches: Any, *rest: Any) -> Any:
        if batches is not self.batches:  # a new epoch's
            self.batches, self.ahead = batches, iter(speedswap.lookahead(batches, self.lookups()))
        return super().get_batch_samples(self.ahead, *rest)

    def lookups(self) -> dict[Any, Any]:
        table, tokens = table_of(self.model), self.model.model.layers[1]
        hashes = getattr(getattr(tokens, "ple", None), "ple_embedding", None)
        part = table if hashes is None else lambda ids: hashes(ids, None)
        return {table: lambda batch: speedswap.asked(table, lambda: part(batch["input_ids"]))}


def rows_after(model: Any, trainer: Any = transformers.Trainer, **settings: Any) -> torch.Tensor:
    trainer(model, arguments("run", **settings), train_dataset=DATA).train()
    return table_of(model).read()  # type: ignore[no-any-return]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("base", ["gemma4", "qwen"], indirect=True)
def test_checkpointing_and_lookahead_change_nothing(base: Path, accumulated: int, request: Any) -> None:
    tables = TABLES[request.node.callspec.params["base"]]
    found = [
        rows_after(
            loaded(base, speedswap.Disk(f"{trainer.__name__}{saves}"), tables),
            trainer,
            gradient_checkpointing=saves,
            gradient_accumulation_steps=accumulated,
        )
        for trainer in (transformers.Trainer, Ahead)
        for saves in (False, True)
    ]
    assert not torch.equal(found[0], table_of(loaded(base, "pageable", tables)).read())
    for each in found[1:]:
        assert torch.equal(each, found[0])


class Idle(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """Lets rows outside the batch take each step as well."""

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        speedswap.attach(optimizer, model, idle_rows="dense")


@pytest.mark.parametrize(
    ("kind", "before"), [(transformers.Trainer, []), (Ahead, []), (transformers.Trainer, [Idle()])]
)
def test_a_training_resumes_to_the_same_bits(base: Path, kind: Any, before: list[Any]) -> None:
    """Its checkpoints have the rows that changed, with their state, and nothing else of the table."""
    models = []
    for resumed in (None, "run/checkpoint-3"):
        models.append(gemma(base, speedswap.Disk(f"rows of {resumed}".replace("/", " "))))
        given = arguments("run", save_strategy="steps", save_steps=3)
        callbacks = [*before, speedswap.RowsCallback()]
        trainer = kind(models[-1], given, train_dataset=DATA, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resumed)
    straight, again = (table_of(each) for each in models)
    assert torch.equal(straight.read(), again.read())
    assert straight.table.columns.keys() == again.table.columns.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    assert torch.equal(straight.table.read(column="exp_avg"), again.table.read(column="exp_avg"))
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name
    assert not any("per_layer.weight" in name for name in models[0].state_dict())


def resumed(model: Any, output: str, checkpoint: str | None = None, **settings: Any) -> torch.Tensor:
    """Return the rows after a training of four steps that saves two checkpoints, or that goes on from one."""
    given = arguments(output, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "sgd"} | settings)
    data, numbers = {"train_dataset": DATA, "eval_dataset": DATA[:2]}, itertools.count()
    trainer = transformers.Trainer(
        model,
        given,
        callbacks=[speedswap.RowsCallback()],
        compute_metrics=lambda _: {"number": next(numbers)},  # of the evaluation
        **data,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return table_of(model).read()  # type: ignore[no-any-return]


def test_a_checkpoint_is_resumed_with_its_own_rows_in_another_folder(base: Path, tmp_path: Path) -> None:
    """One that is new, one with rows of another training's same step; and the first folder itself, moved."""
    straight = resumed(gemma(base), "run", learning_rate=0.1)
    assert not torch.equal(resumed(gemma(base), "other", learning_rate=0.5), straight)
    for output in ("new", "other"):
        assert torch.equal(resumed(gemma(base), output, "run/checkpoint-2", learning_rate=0.1), straight)
    shutil.move("run", "moved")
    assert torch.equal(resumed(gemma(base), "moved", "moved/checkpoint-2", learning_rate=0.1), straight)
    with pytest.raises(TableFormatError, match=r"after step 2, but other/checkpoint-2 and .*/run/checkpoint-2 has no"):
        resumed(gemma(base), "other", "moved/checkpoint-2")


def test_a_checkpoint_whose_rows_were_not_all_saved_is_not_resumed(base: Path) -> None:
    """As after a kill before their description is written; an earlier training can have left one."""
    resumed(gemma(base), "run")
    description = Path("run/checkpoint-4/speedswap_rows.json")
    earlier = description.read_bytes()
    resumed(gemma(base), "run", "run/checkpoint-2")
    description.write_bytes(earlier)
    for _ in ("of another training", "missing"):
        with pytest.raises(TableFormatError, match=r"resumes after step 4, but run/checkpoint-4 .*; remove the checkp"):
            resumed(gemma(base), "run", "run/checkpoint-4", max_steps=6)
        description.unlink(missing_ok=True)


ADAM = {"optim": "adamw_torch", "lr_scheduler_type": "constant", "learning_rate": 0.01}


@pytest.mark.parametrize("place", ["pageable", "disk"])
def test_a_trained_model_goes_back_to_the_rows_of_a_checkpoint(base: Path, place: str) -> None:
    """Rows that only later steps have changed are the base's again, without state."""
    model = gemma(base, speedswap.Disk("rows") if place == "disk" else place)
    straight = resumed(model, "run", **ADAM)
    assert torch.equal(resumed(model, "run", "run/checkpoint-2", **ADAM), straight)


def test_the_best_model_has_its_rows(base: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "number", "greater_is_better": False}
    first = resumed(gemma(base), "run", **ADAM, **best, eval_strategy="steps", eval_steps=2)
    assert torch.equal(first, resumed(gemma(base), "short", max_steps=2, **ADAM))


def test_a_checkpoint_without_an_optimizer_has_no_state_of_rows(base: Path) -> None:
    """A training that goes on from it begins with initial state in rows, as in everything else."""
    given = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "save_only_model": True, "save_strategy": "steps"}

    def trained(model: Any, output: str, steps: int, checkpoint: str | None = None) -> torch.Tensor:
        chosen = arguments(output, **given, max_steps=steps, save_steps=steps)
        callbacks = [speedswap.RowsCallback()]
        trainer = transformers.Trainer(model, chosen, train_dataset=DATA[:1] * 16, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=checkpoint)
        return table_of(model).read()  # type: ignore[no-any-return]

    trained(gemma(base), "run", 3)
    fresh = trained(loaded(Path("run/checkpoint-3")), "fresh", 1)
    assert torch.equal(trained(gemma(base), "run", 4, "run/checkpoint-3"), fresh)


def test_the_trials_of_a_search_save_their_own_rows(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folders of their checkpoints, which the trainer names by the trial."""
    given = arguments("run", max_steps=2, save_strategy="steps", save_steps=2)
    trainer = transformers.Trainer(
        None, given, model_init=lambda _: gemma(base), train_dataset=DATA, callbacks=[speedswap.RowsCallback()]
    )
    trainer.hp_search_backend = transformers.trainer_utils.HPSearchBackend.OPTUNA  # as hyperparameter_search sets it
    trainer.hp_name, trainer.hp_space = None, lambda trial: trial.params
    monkeypatch.setattr("transformers.integrations.hp_params", trainer.hp_space)
    for number, rate in enumerate((0.1, 0.5)):
        trainer.train(trial=SimpleNamespace(number=number, params={"learning_rate": rate}))
        saved = loaded(Path(f"run/run-{number}/checkpoint-2"))
        assert torch.equal(table_of(saved).read(), table_of(trainer.model).read())


def test_a_bfloat16_model_resumes_to_the_same_bits(base: Path) -> None:
    """Its rows are rounded stochastically, by bits that torch's generator has no part in."""
    found = []
    for resumed in (None, "run/checkpoint-2"):
        torch.manual_seed(len(found))
        model = loaded(base, "pageable", TABLES["gemma4"], dtype=torch.bfloat16)
        given = arguments("run", max_steps=3, save_strategy="steps", save_steps=2, learning_rate=1e-2)
        trainer = transformers.Trainer(model, given, train_dataset=DATA, callbacks=[speedswap.RowsCallback()])
        trainer.train(resume_from_checkpoint=resumed)
        found.append(table_of(model).read())
    assert torch.equal(*found)


def test_a_saved_model_finds_its_rows_and_their_checkpoint(base: Path, tmp_path: Path) -> None:
    model = gemma(base)
    rows_after(model)
    model.eval()
    speedswap.save_pretrained(model, tmp_path / "moved" / "out")
    assert {"speedswap_rows.safetensors", "model.safetensors"} <= {*os.listdir(tmp_path / "moved" / "out")}
    again = loaded(tmp_path / "moved" / "out", speedswap.Disk("rows"))
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    written = torch.cat([ids for ids, _ in table_of(again).table.store.written_rows()])
    assert 0 < len(written) < len(table_of(again).table)
    shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(TableFormatError, match="rows that were never written are those of a base"):
        loaded(tmp_path / "moved" / "out")
    again = loaded(tmp_path / "moved" / "out", base=tmp_path / "elsewhere" / "model.safetensors")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_settings_of_one_table_leave_the_other_saved_ones_tables(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    transformers.BertModel(config).save_pretrained(tmp_path / "base")

    def of(folder: Path, tables: Any) -> Any:
        return speedswap.from_pretrained(transformers.BertModel, folder, tables, "pageable")

    model = of(tmp_path / "base", ["*.word_embeddings", "*.position_embeddings"])
    positions = model.embeddings.position_embeddings
    positions.table.write(0, torch.ones(1, 32))
    speedswap.save_pretrained(model, tmp_path / "out")
    again = of(tmp_path / "out", {"*.word_embeddings": {"state_dtype": torch.bfloat16}})
    assert torch.equal(again.embeddings.position_embeddings.read(), positions.read())


def test_a_compiled_model_is_saved_as_the_model_in_it(base: Path, tmp_path: Path) -> None:
    model = gemma(base)
    rows_after(model, max_steps=1)
    speedswap.save_pretrained(torch.compile(model.eval(), backend="eager"), tmp_path / "out")
    assert torch.equal(table_of(loaded(tmp_path / "out")).read(), table_of(model).read())


def test_a_model_is_not_saved_over_its_tables_checkpoint(base: Path, tmp_path: Path) -> None:
    """Adapters are: their files are others."""
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(base / "model.safetensors")
    model = gemma(base)
    for folder in (base, tmp_path / "linked"):
        with pytest.raises(ValueError, match=r"folder is .*model.safetensors is the checkpoint .* give another folder"):
            speedswap.save_pretrained(model, folder)
    shutil.copytree(base, tmp_path / "run" / "checkpoint-3")
    for folder, start in (("base", base), ("run", tmp_path / "run" / "checkpoint-3")):
        trainer = transformers.Trainer(
            gemma(start), arguments(folder), train_dataset=DATA, callbacks=[speedswap.RowsCallback()]
        )
        with pytest.raises(ValueError, match=f"output_dir is '{folder}.* give another folder"):
            trainer.train()
    speedswap.save_pretrained(lora(model), base)
    assert {name: (base / name).read_bytes() for name in before} == before


def test_a_folder_without_rows_needs_patterns_and_has_no_other_base(base: Path) -> None:
    with pytest.raises(ValueError, match=r"no speedswap_rows.safetensors; give .*model.embed_tokens_per_layer"):
        loaded(base)
    with pytest.raises(
        ValueError, match=r"base is .*elsewhere.*, but .* has no speedswap_rows.safetensors .* leave it"
    ):
        loaded(base, tables=TABLES["gemma4"], base="elsewhere")


def test_a_damaged_description_is_refused(base: Path, tmp_path: Path) -> None:
    speedswap.save_pretrained(gemma(base), tmp_path / "out")
    write(tmp_path / "out" / "speedswap_rows.safetensors", {"rows": torch.zeros(1)})
    with pytest.raises(TableFormatError, match="is not the one"):
        loaded(tmp_path / "out")
    (tmp_path / "out" / "speedswap_rows.json").write_text('{"tables": 1}')
    with pytest.raises(TableFormatError, match="does not describe the tables"):
        loaded(tmp_path / "out")


def test_a_model_without_tables_leaves_no_rows_of_another(base: Path, tmp_path: Path) -> None:
    speedswap.save_pretrained(gemma(base), tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    speedswap.save_pretrained(plain, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("speedswap*")]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, plain(IDS).logits)


def test_new_rows_are_not_loaded_with_the_layers_of_an_older_save(base: Path, tmp_path: Path) -> None:
    """As after a kill between the two: the older model is whole, and the rows are not its."""
    model, out = gemma(base), tmp_path / "out"
    speedswap.save_pretrained(model, out)
    rows_after(model, max_steps=1)

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    saving, model.save_pretrained = model.save_pretrained, killed
    with pytest.raises(Killed):
        speedswap.save_pretrained(model, out)
    for new in (False, True):
        with pytest.raises(TableFormatError, match=r"rows.safetensors is not the one that .*; save it again"):
            loaded(out)
        (out / "speedswap_rows.json").unlink(missing_ok=new)
    model.save_pretrained = saving
    speedswap.save_pretrained(model, out)
    assert torch.equal(table_of(loaded(out)).read(), table_of(model).read())


def test_a_model_without_such_tables_is_saved_as_it_is(base: Path, tmp_path: Path) -> None:
    speedswap.save_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    assert not list((tmp_path / "out").glob("speedswap*"))


# ---------------------------------------------------------------------- adapters


def lora(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings))


def test_adapters_and_rows_are_trained_and_saved_together(base: Path, tmp_path: Path) -> None:
    model = lora(gemma(base))
    assert not table_of(model).weight.requires_grad  # PEFT freezes all that is not an adapter
    table_of(model).weight.requires_grad_(True)
    before = table_of(model).read()
    assert not torch.equal(rows_after(model), before)
    speedswap.save_pretrained(model.eval(), tmp_path / "adapters")
    assert {"adapter_model.safetensors", "speedswap_rows.safetensors"} <= {*os.listdir(tmp_path / "adapters")}
    import peft

    again = peft.PeftModel.from_pretrained(loaded(tmp_path / "adapters"), tmp_path / "adapters").eval()
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_frozen_table_saves_no_rows(base: Path, tmp_path: Path) -> None:
    model = lora(gemma(base))
    rows_after(model)
    speedswap.save_pretrained(model, tmp_path / "adapters")
    assert torch.equal(table_of(loaded(tmp_path / "adapters")).read(), table_of(gemma(base)).read())


def trained_with_callback(model: Any) -> None:
    callbacks = [speedswap.RowsCallback()]
    transformers.Trainer(model, arguments("run"), train_dataset=DATA, callbacks=callbacks).train()


def test_what_is_saved_after_the_training_says_that_it_leaves_rows_out(base: Path) -> None:
    """The callback saves rows beside the trainer's checkpoints, and only those."""
    model = gemma(base)
    given, callbacks = arguments("run", save_strategy="steps", save_steps=3), [speedswap.RowsCallback()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedswapWarning)
        transformers.Trainer(model, given, train_dataset=DATA, callbacks=callbacks).train()
    assert not table_of(model).saves_rows
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedswapWarning)
        model.state_dict()  # the last step's rows are in checkpoint-6
    rows_after(model, max_steps=1)
    with pytest.warns(SpeedswapWarning, match="SW411: state_dict leaves out the rows of table 'model.embed_tokens"):
        model.save_pretrained("later")


def test_adapters_that_copy_a_table_are_refused(base: Path) -> None:
    copied = {"modules_to_save": ["embed_tokens_per_layer"]}
    with pytest.raises(TypeError, match="lies in files, which are not copied implicitly"):
        lora(gemma(base, speedswap.Disk("rows")), **copied)
    for use in (lambda model: speedswap.save_pretrained(model, "out"), trained_with_callback):
        with pytest.raises(ValueError, match=r"modules_to_save made .*, a copy of a table; leave it out"):
            use(lora(gemma(base), **copied))
    with pytest.raises(WeightError, match="rows are not on the device"):
        lora(gemma(base), trainable_token_indices={"embed_tokens_per_layer": [3]})


@pytest.mark.parametrize("with_adapters", [False, True])
def test_trls_trainer_trains_rows(base: Path, with_adapters: bool) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = tokenizers.models.WordLevel({str(word): word for word in range(512)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="1"
    )
    model = gemma(base)
    if with_adapters:
        model = lora(model)
        table_of(model).weight.requires_grad_(True)
    before = table_of(model).read()
    config = trl.SFTConfig(
        "sft",
        max_steps=4,
        save_steps=4,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )
    rows = datasets.Dataset.from_dict({"input_ids": [each["input_ids"].tolist() for each in DATA]})
    callbacks = [speedswap.RowsCallback()]
    trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks).train()
    after = table_of(model).read()
    assert not torch.equal(after, before)
    fresh = table_of(gemma(base))
    fresh.table.load_rows(
        "sft/checkpoint-4/speedswap_rows.safetensors", name="model.embed_tokens_per_layer", state=False
    )
    assert torch.equal(fresh.read(), after)
