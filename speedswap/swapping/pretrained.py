"""Models of transformers over tables whose rows are their checkpoint's, read in place.

transformers' own loader builds the model and loads everything else. It is given a class whose objects are models with
the tables in them already, and tensors without the tables'. Trained rows are saved in a file beside the rest of the
model.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.collectives import of_all_ranks
from speedswap.errors import ConversionError, TableFormatError, WeightError
from speedswap.swapping.attach import attach
from speedswap.swapping.convert import Places, embeddings, places_of, replaced, replacement, require_replaceable
from speedswap.swapping.optimizers import innermost
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.weight import TableWeight
from speedswap.swapping.whole_rows import rows_apart, rows_are_apart
from speedswap.tables import TensorFiles, TensorSource, as_storage
from speedswap.tables.files.place import write_whole
from speedswap.tables.files.tensor_files import absolute_paths, opened_tensors
from speedswap.tables.init import CHUNK_ROWS, OfTensors, found_in, of_tensors, saved_in
from speedswap.tables.rows_file import RowsFile, load_rows, save_rows
from speedswap.tables.whole_table import changed_rows

Tables = str | Iterable[str] | Mapping[str, Mapping[str, Any]]
"""Patterns of module names, in which ``*`` stands for any characters; or the settings of the tables of each."""

ROWS_FILE, BASES_FILE = "speedswap_rows.safetensors", "speedswap_rows.json"
_TRAINING = "RowsCallback"  # in a trainer's state: of what training its checkpoint is
_SHOWN = 8
_OTHER_FILES = ("subfolder", "variant")
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_OTHER_COPIES = ("original/*", "consolidated*")  # of the same tensors, in their makers' own form


@of_all_ranks
def from_pretrained(
    cls: Any,
    folder: str | os.PathLike[str],
    tables: Tables | None = None,
    storage: Places = "auto",
    *,
    base: TensorSource | None = None,
    **settings: Any,
) -> Any:
    """Load a model of transformers, with tables in place of large embeddings, whose rows stay in the checkpoint.

    Rows are read from the checkpoint's files when they are looked up; what training writes goes to ``storage``. No
    memory is allocated for the rest of a table in a place on disk, while other places are filled from the files. All
    else is done by ``cls.from_pretrained``, from names and dtypes to devices and buffers. A bfloat16 model's rows are
    looked up and stored in bfloat16, and stepped in float32, as :func:`speedswap.convert` does.

    Args:
        cls: ``AutoModelForCausalLM`` or another class of transformers (5 or newer).
        folder: a checkpoint of safetensors files, which must stay as they are; or what :func:`save_pretrained` saved:
            trained rows go to ``storage``, and untouched ones are read from the checkpoint that was loaded then. A
            folder of PEFT's adapters loads the model that they are for, without them, and the rows. The name of a
            repository on the Hugging Face Hub, ``"organization/model"``, stands for its folder in the Hub's cache.
        tables: names of the embeddings, such as ``"*.embed_tokens_per_layer"``; a pattern, several, or a dictionary
            from each to keyword arguments of :class:`speedswap.Embedding`: ``storage``, ``stored_dtype``,
            ``state_dtype``, ``rounding``. Tables that :func:`save_pretrained` saved need no name.
        base: for a saved model, where the files of the checkpoint are now, if both were not moved together.
        storage: as for :func:`speedswap.convert`.
        settings: as for ``cls.from_pretrained``, but no ``subfolder`` and ``variant``; ``config`` instead of its single
            values.

    Returns:
        The model, in evaluation mode; what ``cls.from_pretrained`` returns.

    Raises:
        TypeError: ``cls`` is not a class of transformers, or a setting is unknown.
        ValueError: a pattern is the name of no embedding, or no tensors of the checkpoint are the rows of one; or no
            pattern is given, or ``base``, and the folder has no rows; or ``subfolder`` or ``variant`` is given.
        ConversionError: an embedding cannot be replaced; see :func:`speedswap.convert`. Or ``device_map`` has several
            devices.
        FileNotFoundError: the folder does not exist, or has no safetensors files; or a repository is not in the cache,
            and the Hub cannot be reached or does not have it.
        FileExistsError: the path of a table exists.
        TableFormatError: a file is damaged, the checkpoint of a saved model has changed, or saving it was not finished.
            In all cases nothing was created.

    Example::

        place = speedswap.Disk("rows")
        model = speedswap.from_pretrained(AutoModelForCausalLM, folder, "*.embed_tokens_per_layer", place)
    """
    _require_class(cls)
    for name in _OTHER_FILES:
        if settings.get(name):
            raise ValueError(
                f"{name} is {settings[name]!r}, but all of a folder is loaded; give a folder with these files alone, "
                f"by their usual names, without {name}="
            )
    given = os.fspath(folder)
    folder = _local(given, settings)
    saved = bases_of(folder, None if base is None else absolute_paths(base))
    if base is not None and not saved:
        raise ValueError(
            f"base is {base!r}, but {str(folder)!r} has no {ROWS_FILE} over another checkpoint; leave it out"
        )
    given = _model_in(folder) or given
    whole = _local(given, settings)
    skeleton = _skeleton(cls, whole, settings)
    wanted = _matching(skeleton, tables or (), saved)
    sources = _Sources(skeleton, TensorFiles(whole), settings.get("key_mapping"))
    bases = {name: saved.get(name) or of_tensors(whole, sources.of(name)) for name in wanted}
    result = _Loading(skeleton, wanted, bases, storage).load(whole, sources, settings, folder if saved else None)
    model = result[0] if isinstance(result, tuple) else result
    model.name_or_path = model.config.name_or_path = given
    return result


class _Loading:
    """A model being loaded, with tables in place of embeddings.

    Args:
        skeleton: the model on meta.
        wanted: the embeddings, each with its settings.
        bases: their tables' initial values.
        storage: as for :func:`from_pretrained`.
    """

    def __init__(
        self, skeleton: Any, wanted: Mapping[str, Mapping[str, Any]], bases: Mapping[str, OfTensors], storage: Places
    ) -> None:
        self._skeleton = skeleton
        self._settings = {
            name: {"stored_dtype": None, "state_dtype": None, "rounding": None, **options, "init": bases[name]}
            for name, options in wanted.items()
        }
        own = {name: as_storage(each.pop("storage")) for name, each in self._settings.items() if "storage" in each}
        found = self._found(skeleton)
        self._places = {**places_of([each for each in found if each[1][0] not in own], storage, None), **own}
        for place in self._places.values():
            place.require_free()
        for old, names in found:
            settings = self._settings[names[0]]
            settings["init"].require_shape(old.num_embeddings, (old.embedding_dim,))
            require_replaceable(skeleton, [(old, names)], settings, self._places, None)
        self._made: dict[str, TableModule] = {}

    def _found(self, model: nn.Module) -> list[tuple[Any, list[str]]]:
        return [(old, names) for old, names in embeddings(model, False, ()) if names[0] in self._settings]

    def load(self, folder: Path, sources: _Sources, settings: dict[str, Any], rows: Path | None) -> Any:
        """Return what transformers' loader returns, with the trained rows in a folder."""
        real, tensors = type(self._skeleton), sources.but(self._settings)

        def new(_: type, *args: Any, **settings: Any) -> Any:
            return self._with_tables(real(*args, **settings))

        if "generation_config" not in settings and (folder / "generation_config.json").exists():
            from transformers import GenerationConfig

            settings["generation_config"] = GenerationConfig.from_pretrained(folder)
        loader: Any = type(real.__name__, (real,), {"__new__": new, "__module__": real.__module__})
        try:
            with rows_apart():
                result = loader.from_pretrained(None, config=self._skeleton.config, state_dict=tensors, **settings)
            model = result[0] if isinstance(result, tuple) else result
            if rows is not None:
                load_beside(model, rows)
        except BaseException as error:
            for module in self._made.values():
                module.table.remove()
            if isinstance(error, WeightError) and settings.get("device_map") is not None:
                raise ConversionError(
                    "device_map has several devices, between which accelerate would move the rows of tables; give it "
                    'one, such as device_map="cuda:0"'
                ) from error
            raise
        mapped = {each.untyped_storage().data_ptr() for each in tensors.values()}
        others = [each for each in [*model.parameters(), *model.buffers()] if not isinstance(each, TableWeight)]
        for each in others:
            if each.untyped_storage().data_ptr() in mapped:  # the files may be removed
                each.data = each.data.clone()
        for module in self._made.values():
            module.to(others[0].device)
        return result

    def _with_tables(self, model: Any) -> Any:
        def made(old: Any, names: Sequence[str]) -> nn.Module:
            name = names[0]
            settings = {**self._settings[name], "name": name, "seed": 0}  # of rounding, the same when resumed
            new = self._made[name] = replacement(old, settings, self._places[name])
            new.weight._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers draws other values
            return new

        with torch.device("cpu"):
            return replaced(model, self._found(model), made)


def _require_class(cls: Any) -> None:
    """Raise unless transformers is installed, and has a class."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import rename_source_key  # noqa: F401
    except ImportError as error:
        raise ImportError("speedswap.from_pretrained needs transformers 5 or newer; install it") from error
    if not hasattr(cls, "from_config") and not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel)):
        raise TypeError(f"cls is {cls!r}; give a class of transformers, such as AutoModelForCausalLM")


def _skeleton(cls: Any, folder: Path, settings: dict[str, Any]) -> Any:
    """Return the model on meta, for its class, its configuration and its embeddings."""
    from transformers import AutoConfig

    is_auto = hasattr(cls, "from_config")
    trust = {name: settings[name] for name in ("trust_remote_code",) if name in settings}
    config = settings.pop("config", None) or folder
    if isinstance(config, str | os.PathLike):
        config = (AutoConfig if is_auto else cls.config_class).from_pretrained(config, **trust)
    with torch.device("meta"):
        return cls.from_config(config, **trust) if is_auto else cls(config)


def _local(folder: str, settings: Mapping[str, Any]) -> Path:
    """Return a folder; that of a repository's files in the cache, if it is the name of one on the Hub."""
    if os.path.isdir(folder):
        return Path(folder)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", folder) is None:
        raise FileNotFoundError(f"folder is {folder!r}; give the folder of a downloaded checkpoint")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    options = {name: settings[name] for name in _OF_THE_HUB if name in settings}
    options |= {"allow_patterns": [*_DOWNLOADED], "ignore_patterns": [*_OTHER_COPIES]}
    try:
        return Path(snapshot_download(folder, **options))
    except (FileNotFoundError, RepositoryNotFoundError) as error:
        raise FileNotFoundError(
            f"folder is {folder!r}, which is not a folder here, and as a repository it is neither in the Hub's cache "
            "nor can it be downloaded now; give the folder of a downloaded checkpoint"
        ) from error


def _model_in(folder: Path) -> str | None:
    """Return the model that a folder of adapters names; None for a folder of a model."""
    adapters = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not adapters.exists():
        return None
    return str(json.loads(adapters.read_text())["base_model_name_or_path"])


def _matching(model: nn.Module, tables: Tables, saved: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return the names of a model's embeddings that were saved or match patterns, each with its settings."""
    given = [tables] if isinstance(tables, str) else tables
    settings: dict[str, Mapping[str, Any]] = {name: {} for name in saved}
    settings |= given if isinstance(given, Mapping) else {pattern: {} for pattern in given}
    names = [names[0] for _, names in embeddings(model, False, ())]
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, options in settings.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, names, _SHOWN, 0.1)
            raise ValueError(
                f"tables has {pattern!r}, which no embedding of {type(model).__name__} is called; it has "
                f"{', '.join(near or names[:_SHOWN]) or 'none'}"
            )
        found |= {name: {**options} for name in matching}
    if not found:
        raise ValueError(
            f"tables is empty, and the folder has no {ROWS_FILE}; give names or patterns of embeddings of "
            f"{type(model).__name__}, such as {', '.join(names[-_SHOWN:])}"
        )
    return found


class _Sources:
    """The tensors of a checkpoint by the names that transformers gives them in a model.

    Args:
        model: the model.
        files: the checkpoint.
        key_mapping: further names, as transformers takes them.
    """

    def __init__(self, model: Any, files: TensorFiles, key_mapping: dict[str, str] | None) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        changes = get_model_conversion_mapping(model, key_mapping)
        converters = [each for each in changes if isinstance(each, WeightConverter)]
        renamings = [each for each in changes if not isinstance(each, WeightConverter)]
        self._operations = {pattern: each.operations for each in converters for pattern in each.source_patterns}
        self._sources: defaultdict[str, list[tuple[str, str | None]]] = defaultdict(list)
        self._files, self._parameters = files, model.state_dict()
        for source in files.matching("*"):
            named, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, self._parameters)
            self._sources[named].append((source, pattern))

    def of(self, name: str) -> list[str]:
        """Return the tensors whose rows, one tensor after the other, are those of an embedding.

        Raises:
            ValueError: there are none, or they are converted in another way.
        """
        from transformers.core_model_loading import dot_natural_key

        found = self._sources.get(f"{name}.weight")
        if found is None:
            raise ValueError(self._files.missing(f"{name}.weight"))
        operations = [(type(each).__name__, each.dim) for _, p in found[:1] if p for each in self._operations[p]]
        if operations not in ([], [("Concatenate", 0)]):
            raise ValueError(f"{name}: transformers converts its tensors by {operations}, so rows are not in the files")
        return sorted((source for source, _ in found), key=dot_natural_key)

    def but(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return all tensors but those of embeddings, over the files; none that the model and torch do not know."""
        left_out = {f"{name}.weight" for name in names}
        return {
            source: self._files.tensor(source)
            for named, found in self._sources.items()
            if named not in left_out
            for source, _ in found
            if named in self._parameters or self._files.has_dtype(source)
        }


# ---------------------------------------------------------------------- saved as the rows that changed


def tables_apart(model: nn.Module) -> dict[str, TableModule]:
    """Return the embeddings of a model whose tables are over a checkpoint, by name in the model that PEFT wraps.

    Raises:
        ValueError: PEFT has copied one.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    own = getattr(model, "get_base_model", lambda: model)()
    found = {
        name.removesuffix(".base_layer").replace("_orig_mod.", ""): module  # by torch.compile
        for name, module in own.named_modules()
        if isinstance(module, TableModule) and not module._is_on_meta and rows_are_apart(module.table)
    }
    if copied := [name for name in found if ".modules_to_save." in name]:
        raise ValueError(
            f"modules_to_save made {copied[0]}, a copy of a table; leave it out, and train the table itself with "
            "weight.requires_grad_(True) on its embedding after get_peft_model"
        )
    return found


def save_pretrained(model: Any, folder: str | os.PathLike[str], **settings: Any) -> None:
    """Save a model, or PEFT's adapters, as its own ``save_pretrained`` does, and the rows that training changed.

    The rows of tables over a checkpoint are left out of the model's files, and the changed ones written to
    ``speedswap_rows.safetensors``. :func:`speedswap.from_pretrained` finds them and the checkpoint again.

    Args:
        model: a model that :func:`speedswap.from_pretrained` returned, or one of PEFT's around it.
        folder: is created if it does not exist.
        settings: as for ``model.save_pretrained``.

    Raises:
        TypeError: a table has an id map; or ``model`` has no ``save_pretrained``. Nothing was written.
        ValueError: PEFT has copied a table (``modules_to_save``); or ``folder`` has the checkpoint of a table, which
            the model's files would replace. Nothing was written.
        TableFullError: the disk has no room. An older file of rows stays.
    """
    if not hasattr(model, "save_pretrained"):
        raise TypeError(f"model is {a_kind(model)}, which has no save_pretrained; give a model of transformers or PEFT")
    _require_no_base(model, "folder", [Path(folder)])
    _save_rows(model, Path(folder))  # first: then nothing that the model leaves out is lost
    model.save_pretrained(folder, **settings)
    _describe(model, Path(folder))  # last: until then, the rows are not those that an older description names


def _require_no_base(model: Any, argument: str, folders: Iterable[Path]) -> None:
    """Raise ValueError if a model that is saved in a folder would replace the checkpoint of a table."""
    inits = [each.table.columns["weight"].init for each in tables_apart(model).values()]
    bases = {os.path.realpath(file) for init in inits for each in init.bases for file in each.rows.paths}
    for folder in folders:
        found = [path for path in folder.glob("*.safetensors") if os.path.realpath(path) in bases]
        if found and not hasattr(model, "get_base_model"):  # PEFT's adapters are other files
            raise ValueError(
                f"{argument} is {str(folder)!r}, but {found[0]} is the checkpoint of a table, whose untouched rows "
                "would be lost: the model is saved without them; give another folder"
            )


def save_beside(model: nn.Module, folder: Path, *, state: bool = False, training: object = None) -> None:
    """Write the changed rows of a model's tables over a checkpoint, and where that is; errors as for the tables.

    Args:
        model: the model.
        folder: is created if it does not exist.
        state: True to save the optimizer's state, too.
        training: plain data that identifies the training; it is written last, so rows without it are not whole.
    """
    _save_rows(model, folder, state=state)
    _describe(model, folder, training)


def _save_rows(model: nn.Module, folder: Path, *, state: bool = False) -> None:
    if tables := tables_apart(model):
        folder.mkdir(parents=True, exist_ok=True)
        for each in tables.values():
            if state and (idle := each._step.state.idle) is not None:
                idle.bring_up_to_date()  # as rows are that a resumed training loads, to the same bits
        stores = {name: each.table.store for name, each in tables.items()}
        save_rows(stores, folder / ROWS_FILE, state=state, overwrite=True)
        _note_saved(tables)
    else:
        for name in (BASES_FILE, ROWS_FILE):  # of another model, whose files are about to be replaced
            (folder / name).unlink(missing_ok=True)


def _describe(model: nn.Module, folder: Path, training: object = None) -> None:
    """Write what the rows in a folder are over, and their checksums."""
    tables, rows = tables_apart(model), _checksums(folder)
    if tables and rows is not None:
        inits = {name: each.table.columns["weight"].init for name, each in tables.items()}
        bases = {name: saved_in(folder.resolve(), init.to_json()) for name, init in inits.items()}
        about = {"version": 1, "tables": bases, "rows": rows, "training": training}
        with write_whole(folder / BASES_FILE) as file:
            file.write(json.dumps(about, indent=1).encode())


def _checksums(folder: Path) -> str | None:
    """Return those of the rows in a folder; None if it has none, as on another machine than that of rank 0."""
    path = folder / ROWS_FILE
    return opened_tensors(path).metadata.get("crc32", "") if path.exists() else None


def _note_saved(tables: Mapping[str, TableModule]) -> None:
    for each in tables.values():
        each.saved_writes = each.table.store.notes.writes


def load_beside(model: nn.Module, folder: Path, *, state: bool = False) -> None:
    """Write the rows of :func:`save_beside` to a model's tables; errors as for :meth:`speedswap.Table.load_rows`.

    Args:
        model: the model.
        folder: where they are.
        state: True to go back to what was saved: with the optimizer's state, and initial values in all other rows.
    """
    tables, path = tables_apart(model), folder / ROWS_FILE
    load_rows({name: each.table.store for name, each in tables.items()}, path, state=state)
    for name, each in tables.items() if state else ():
        table, saved = each.table, [ids for ids, _ in RowsFile(path).pieces(name, [])]
        with table.lock:
            table.store.flush()
            changed = changed_rows(table.store, [*table.columns])
        others = changed[~torch.isin(changed, torch.cat([changed[:0], *saved]))]
        share = slice(None) if table.ranks is None else slice(table.ranks.rank, None, len(table.ranks))
        for some in torch.split(others, CHUNK_ROWS):
            if len(some):
                table.reset_rows(some[share])
    _note_saved(tables)


def bases_of(folder: Path, base: Sequence[str] | None) -> dict[str, OfTensors]:
    """Return the initial values of the tables whose rows are in a folder, by name; none if it has no rows.

    Args:
        folder: where :func:`save_beside` saved.
        base: where the checkpoint's files are now; by default where they were, also from the folder.

    Raises:
        TableFormatError: the description is damaged.
    """
    path, found = folder / BASES_FILE, _checksums(folder)
    try:
        about = json.loads(path.read_bytes()) if path.exists() else {"tables": {}, "rows": None}
        tables, rows = about["tables"].items(), about["rows"]
        bases = {name: OfTensors.from_json(found_in(folder.resolve(), base, data)) for name, data in tables}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TableFormatError(f"{path} does not describe the tables of {ROWS_FILE}: {error}; copy it again") from error
    if rows != found:
        raise TableFormatError(
            f"{folder / ROWS_FILE} is not the one that a {BASES_FILE} describes, as if saving had been killed before "
            "the model was whole; save it again, or load these rows alone with Table.load_rows"
        )
    return bases


def RowsCallback() -> Any:
    """Return a callback of transformers' ``Trainer``, and TRL's trainers, for tables over a checkpoint.

    Every checkpoint of the trainer gets the rows that training has changed so far, with their optimizer state unless
    ``save_only_model`` leaves the optimizer out, and ``train(resume_from_checkpoint=…)`` loads them, as
    ``load_best_model_at_end`` does. What the trainer saves itself leaves them out.

    Raises:
        ImportError: transformers is not installed.
        ValueError: as training begins: ``output_dir`` has the checkpoint of a table, which would be replaced.
        TableFormatError: as training resumes: the checkpoint's rows are missing, or are not those saved with it.
    """
    from accelerate.utils import broadcast_object_list
    from transformers import TrainerCallback

    class RowsCallback(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
            output, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
            trials = output.glob(f"*/{name}") if state.is_hyper_param_search else ()  # the last is this one's
            folder = max(trials, key=os.path.getmtime, default=output / name)
            training = state.stateful_callbacks.get(_TRAINING)
            save_beside(model, folder, state=not args.save_only_model, training=training)

        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
        ) -> None:
            output, tables = Path(args.output_dir), tables_apart(model)
            _require_no_base(model, "output_dir", [output, *output.glob("checkpoint-*")])
            if tables and state.global_step > 0:
                folder = _resumed(args, state)
                trained = [each for each in tables.values() if each.weight.requires_grad]
                for module in trained:
                    attach(optimizer, module)
                load_beside(model, folder, state=True)
                for module in trained:
                    module._step.state.resume(innermost(optimizer), initial=False)
            for module in tables.values():
                module.saves_rows = True
            training = {"number": secrets.token_hex(8), "output_dir": os.path.abspath(output)}
            state.stateful_callbacks[_TRAINING] = broadcast_object_list([{"attributes": training}])[0]

        def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
            tables = tables_apart(model)
            if tables and args.load_best_model_at_end and state.best_model_checkpoint is not None:
                load_beside(model, Path(state.best_model_checkpoint), state=True)
            for module in tables.values():
                module.saves_rows = False  # what is saved from here on is not followed by the rows

    return RowsCallback()


def _resumed(args: Any, state: Any) -> Path:
    """Return the folder with the rows of the checkpoint that a trainer has loaded.

    Raises:
        TableFormatError: neither ``output_dir`` nor that of the training that saved it has them.
    """
    training = state.stateful_callbacks.get(_TRAINING)
    outputs = [args.output_dir] if training is None else [args.output_dir, training["attributes"]["output_dir"]]
    folders = [Path(each) / f"checkpoint-{state.global_step}" for each in outputs]
    for folder in folders:
        path = folder / BASES_FILE
        if path.exists() and json.loads(path.read_bytes()).get("training") == training:
            return folder
    raise TableFormatError(
        f"training resumes after step {state.global_step}, but {' and '.join(map(str, folders))} has no {ROWS_FILE} "
        f"with the {BASES_FILE} that RowsCallback saves for this checkpoint, as if it had been killed before; remove "
        "the checkpoint and resume from an earlier one, or, if it was moved, give the folder that has it as output_dir"
    )
