"""ModelFactory and OptimizerFactory: swap rows between collections and a model's weight and an optimizer's state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind, require_kind, warn
from speedswap.collectives import of_all_ranks
from speedswap.errors import LostUpdateError, OptimizerError
from speedswap.swapping.embedding import Embedding
from speedswap.swapping.optimizers import holds, probe
from speedswap.swapping.row_step import step_of
from speedswap.swapping.switchers.collection import (
    Collection,
    RowField,
    place_of,
    read_npz,
    trainable_dtype,
    with_suffix,
    write_npz,
)
from speedswap.tables import Storage
from speedswap.tables import init as initializers
from speedswap.tables.init import CopyOf
from speedswap.tables.record import count


class _NoFile(str):
    """The default ``diskname``, recognized by identity: it names the collection in messages; no file is made."""


_NO_FILE = _NoFile("variable")


class ModelFactory(Collection):
    """A switcher of rows between a full collection and the weight of a model's embedding.

    Call one init method (or :meth:`loadCupy`) first.

    Args:
        model_variable: the model's ``nn.Embedding``, or another module with a 2-D ``weight``. Make it with
            ``sparse=False`` and without ``padding_idx``; its own number of rows does not matter.
        total_classes: rows of the full collection.
        embed_dimension: items in a row, as in ``model_variable``.
        diskname: the directory of a collection in files, a table on disk that the init method makes. It must not exist
            yet; :meth:`loadCupy` opens an existing one again. Without it no file is written.
        datatype: a floating-point dtype of NumPy or torch, or its name, for the collection and the rows in
            ``model_variable``.
        CPUPinn: False keeps the collection on the GPU where there is one, True in pinned host memory. A collection in
            files ignores it: its pages are never pinned, and rows pass through pinned memory.
        storage: where the rows live, in place of ``diskname`` and ``CPUPinn``, as for :class:`speedswap.Embedding`.
            Ranks that own them make each call together, each with its own indexes; if several ranks write a row, the
            last rank's stays. ``model_variable`` has different rows on each rank, so a wrapper of the model must ignore
            its weight.

    Raises:
        ValueError, TypeError: an argument does not fit ``model_variable``, or has the wrong type.

    Example:
        >>> import numpy as np, torch, speedswap
        >>> words = torch.nn.Embedding(4, 8)
        >>> optimizer = torch.optim.Adam(words.parameters(), lr=0.1)
        >>> weights = speedswap.ModelFactory(words, total_classes=1000, embed_dimension=8)
        >>> weights.uniformDistributionInit(-0.1, 0.1)
        >>> state = speedswap.OptimizerFactory(optimizer, 1000, 8, model=torch.nn.ModuleDict({"words": words}),
        ...                                    variable_name="words")
        >>> state.optInit()
        >>> positions = torch.as_tensor(weights.variableTransformer(2, 3))
        >>> ids = np.array([[7, 400, 3], [999, 0, 12]])
        >>> weights.beforeForwardPass(ids); state.beforeForwardPass(ids)
        >>> words(positions).square().sum().backward()
        >>> optimizer.step(); optimizer.zero_grad()
        >>> weights.afterOptimizerStep(ids); state.afterOptimizerStep(ids)
        >>> weights.getNumpyVersion().shape
        (1000, 8)
    """

    init_methods = "zerosInit, uniformDistributionInit, normalDistributionInit, customInit or loadCupy"

    @of_all_ranks
    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        diskname: str | os.PathLike[str] = _NO_FILE,
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        storage: Storage | str | None = None,
    ) -> None:
        super().__init__(
            count("total_classes", total_classes),
            [RowField("weight", (count("embed_dimension", embed_dimension),), trainable_dtype(datatype, "datatype"))],
            place_of(storage, None if diskname is _NO_FILE else diskname, CPUPinn),
            name=os.fspath(diskname),
        )
        _check_variable(model_variable, embed_dimension)
        self.model_variable = model_variable
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.diskname = diskname
        self.datatype = datatype
        self.CPUPinn = CPUPinn

    # ------------------------------------------------------------------ initial values

    @of_all_ranks
    def zerosInit(self) -> None:
        """Make the collection, all zeros; on disk a sparse file, made at once at any size."""
        self.make(initializers.zeros())

    @of_all_ranks
    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Make the collection, uniform on [low, high), seeded by ``torch.manual_seed``."""
        self.make(initializers.uniform(low, high))

    @of_all_ranks
    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Make the collection, normal with that mean and standard deviation, seeded by ``torch.manual_seed``."""
        self.make(initializers.normal(mean, stdDev))

    @of_all_ranks
    def customInit(self, initFunction: Callable[..., Any], *args: Any) -> None:
        """Make the collection with a function that fills a tensor in place.

        Args:
            initFunction: called as ``initFunction(tensor, *args)``. One of ``torch.nn.init`` is applied in chunks of
                rows where that gives the same distribution; any other gets the whole collection as one tensor in host
                memory, which is then copied.
        """
        if getattr(initFunction, "__module__", None) == "torch.nn.init":
            try:
                by_rows = initializers.from_torch(initFunction, *args)
            except ValueError:
                pass  # it needs all rows at once
            else:
                self.make(by_rows)
                return
        whole = torch.empty(self.shape, dtype=self.fields[0].dtype)
        with torch.no_grad():
            initFunction(whole, *args)
        self.make(initializers.zeros())
        self.table.write(0, whole)

    # ------------------------------------------------------------------ a step

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """Return the positions of a batch's rows in the model's weight, to look up instead of ids.

        Args:
            batchSize: samples in a batch.
            posPerBatch: (positive) ids in a sample.
            negPerBatch: negative ids in a sample, if any.

        Returns:
            An int64 array (batchSize, posPerBatch) of 0, 1, …; with ``negPerBatch``, that and an array
            (batchSize, negPerBatch) that continues the count.

        >>> factory = ModelFactory(nn.Embedding(1, 2), 10, 2)
        >>> factory.variableTransformer(2, 1, 3)
        (array([[0],
               [1]]), array([[2, 3, 4],
               [5, 6, 7]]))
        """
        num_positive = batchSize * posPerBatch
        positive = np.arange(num_positive).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return positive
        negative = np.arange(num_positive, num_positive + batchSize * negPerBatch).reshape(batchSize, negPerBatch)
        return positive, negative

    @of_all_ranks
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put rows into the weight of the model variable, one per index, in the order of the indexes.

        Args:
            retrievedPosIndexes: a NumPy or CuPy array or a torch tensor of any integer dtype and any shape.
            retrievedNegIndexes: further indexes; their rows follow.

        Raises:
            IdError: an index is negative or not below ``total_classes``.
            TableFullError: in training, the disk has no room for the rows after their step. Nothing was changed.
        """
        ids = self.checked_ids(retrievedPosIndexes, retrievedNegIndexes)
        if torch.is_grad_enabled():
            self.table.reserve_rows(len(ids))
        weight = _weight_of(self.model_variable)
        _replace_rows(weight, self.gather(ids, weight.device)["weight"])

    @of_all_ranks
    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Write the rows in the weight of the model variable to the collection.

        Args:
            retrievedPosIndexes, retrievedNegIndexes: the ones given to :meth:`beforeForwardPass`. Where an index occurs
                more than once its last row is kept, and a :class:`DuplicateRowsWarning` says so once.

        Raises:
            IdError: an index is negative or not below ``total_classes``.
            ValueError, TypeError: the weight does not have one row per index, or has another dtype. Nothing was
                written.
        """
        ids = self.checked_ids(retrievedPosIndexes, retrievedNegIndexes)
        weight = _weight_of(self.model_variable).detach()
        check_rows(weight, ids, "the weight of model_variable")
        self.scatter(ids, {"weight": weight})


def check_rows(tensor: Tensor, ids: Tensor, what: str) -> None:
    """Raise ValueError if a tensor does not have one row per id."""
    if tensor.dim() == 0 or len(tensor) != len(ids):
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, but there are {len(ids)} indexes; give afterOptimizerStep the "
            "indexes that were given to beforeForwardPass"
        )


def _weight_of(model_variable: nn.Module) -> Tensor:
    weight = getattr(model_variable, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise TypeError(
            f"model_variable is {a_kind(model_variable)} without a 2-D weight; give the model's nn.Embedding"
        )
    return weight


def _check_variable(model_variable: nn.Module, embed_dimension: int) -> None:
    if isinstance(model_variable, Embedding):
        raise TypeError("model_variable is a speedswap.Embedding, which swaps its own rows; it needs no switcher")
    weight = _weight_of(model_variable)
    if weight.shape[1] != embed_dimension:
        raise ValueError(
            f"embed_dimension is {embed_dimension}, but the weight of model_variable has {weight.shape[1]} columns; "
            "give the same for both"
        )
    if getattr(model_variable, "padding_idx", None) is not None:
        warn(
            "SW505",
            f"model_variable has padding_idx {model_variable.padding_idx}, which is a position in the batch here: the "
            "row at that position will not be trained. Make the embedding without padding_idx",
        )


def _replace_rows(weight: Tensor, rows: Tensor) -> None:
    """Put rows, any number of them, into a weight that a model and an optimizer hold.

    Autograd remembers a leaf's shape for as long as any loss computed from it lives, and until then refuses gradients
    of another shape. Changing the leaf's dtype resets it, so the weight takes another dtype for a moment. An older
    graph must not reach the new rows: its gradient is refused, and the weights it saved count as modified.

    Args:
        weight: shape (m, dim); a gradient that does not fit the rows is dropped.
        rows: shape (n, dim); the weight is these rows from now on.
    """
    if weight.requires_grad:
        torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(_refuse_gradient)
    if weight.grad is not None and (weight.grad.shape != rows.shape or weight.grad.dtype != rows.dtype):
        weight.grad = None
    other = torch.float32 if rows.dtype != torch.float32 else torch.float64
    weight.data = torch.empty(0, dtype=other, device=rows.device)
    weight.data = rows
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)


def _refuse_gradient(gradients: Sequence[Tensor]) -> None:
    raise LostUpdateError(
        "a loss was differentiated after the rows it was computed with had been swapped out, so its gradient belongs "
        "to other rows; call loss.backward() before the next beforeForwardPass"
    )


class OptimizerFactory(Collection):
    """A switcher of rows of optimizer state between a full collection and the optimizer.

    A trial on a toy parameter finds the state that has rows and its initial values, so any optimizer that treats rows
    independently works. Other state (``step``) stays in the optimizer and counts its steps. Call :meth:`optInit` (or
    :meth:`loadCupy`) first.

    Args:
        given_optimizer: the optimizer that holds the variable's weight.
        total_classes: rows of the full collection.
        embed_dimension: items in a row of the variable.
        model: the model with the variable.
        variable_name: the name in the model of the embedding (``u_embeddings``; ``encoder.items`` inside a module) or
            of the parameter (``u_embeddings.weight``).
        dtype: of the variable; its state has the dtype that the optimizer gives it.
        CPUPinn: False keeps the collection on the GPU where there is one, True in pinned host memory.
        diskname, storage: as for the :class:`ModelFactory`; without either of the first two the state is in
            memory, wherever the rows are. Ranks own it with the rows.

    Raises:
        OptimizerError: the optimizer mixes rows, takes sparse gradients only, or keeps state that cannot be switched.
        ValueError, TypeError: the variable does not exist or is not in the optimizer, or an argument does not fit it.
    """

    init_methods = "optInit or loadCupy"
    file_suffix = ".npz"
    by_name = True

    @of_all_ranks
    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
        *,
        diskname: str | os.PathLike[str] | None = None,
        storage: Storage | str | None = None,
    ) -> None:
        num_rows = count("total_classes", total_classes)
        width = count("embed_dimension", embed_dimension)
        weight_dtype = trainable_dtype(dtype, "dtype")
        require_kind("given_optimizer", given_optimizer, Optimizer, "a torch.optim.Optimizer")
        require_kind("model", model, nn.Module, "a torch.nn.Module")
        self._weight = _find(model, variable_name, width)
        if not holds(given_optimizer, self._weight):
            raise ValueError(
                f"variable_name is {variable_name!r}, whose weight is not in given_optimizer; make the "
                f"{type(given_optimizer).__name__} with model.parameters()"
            )
        fresh = _as_made(given_optimizer, self._weight)
        try:
            self._row_state = probe(fresh, self._weight, width, weight_dtype)
        except OptimizerError as error:
            if fresh.state or not given_optimizer.state.get(self._weight):
                raise
            raise OptimizerError(
                f"{type(given_optimizer).__name__} has state of earlier steps with {variable_name!r} and cannot be "
                f"tried without it; make its OptimizerFactory before its first step or load_state_dict ({error})"
            ) from error
        for column in self._row_state.columns:
            if isinstance(column.init, CopyOf):
                raise OptimizerError(
                    f"{type(given_optimizer).__name__} starts its state {column.name!r} as a copy of the weight, which "
                    "is in another collection; use speedswap.Embedding, or another optimizer"
                )
        self._stepped = False
        super().__init__(
            num_rows,
            [RowField(column.name, column.row_shape, column.dtype, column.init) for column in self._row_state.columns],
            place_of(storage, diskname, CPUPinn),
            name=f"{variable_name}'s optimizer state",
        )
        self.given_optimizer = given_optimizer
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.model = model
        self.variable_name = variable_name
        self.dtype = dtype
        self.CPUPinn = CPUPinn

    @property
    def optVarList(self) -> list[str]:
        """The names of the optimizer's state that has rows."""
        return [each.name for each in self.fields]

    @of_all_ranks
    def optInit(self) -> None:
        """Make the collection of every row's state, at the optimizer's initial values."""
        if self.fields:
            self.make()
        self._stepped = False

    @of_all_ranks
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the rows' state into the optimizer, with the scalars that it needs before its first step.

        Args:
            retrievedPosIndexes, retrievedNegIndexes: as for :meth:`ModelFactory.beforeForwardPass`.

        Raises:
            IdError: an index is negative or not below ``total_classes``.
            TableFullError: the disk has no room for the rows after their step. Nothing was changed.
        """
        ids = self.checked_ids(retrievedPosIndexes, retrievedNegIndexes)
        if not self.fields:
            return  # e.g. SGD without momentum
        self.table.reserve_rows(len(ids))
        rows = self.gather(ids, self._weight.device)
        state = self.given_optimizer.state[self._weight]
        if self._row_state.from_gradient and not self._stepped and not state:
            return  # it makes this state from its first gradient
        for key, value in self._row_state.scalars.items():
            if key not in state:
                state[key] = value.detach().clone() if isinstance(value, Tensor) else value
        state.update(rows)

    @of_all_ranks
    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Write the rows' state in the optimizer to the collection.

        Args:
            retrievedPosIndexes, retrievedNegIndexes: the ones given to :meth:`beforeForwardPass`. Where an index occurs
                more than once the state of its last row is kept, and a :class:`DuplicateRowsWarning` says so once.

        Raises:
            IdError: an index is negative or not below ``total_classes``.
            OptimizerError: the optimizer keeps more state than it did when this switcher was made.
            ValueError, TypeError: the state does not have one row per index, or has another dtype. Nothing was written.
        """
        ids = self.checked_ids(retrievedPosIndexes, retrievedNegIndexes)
        state = self.given_optimizer.state.get(self._weight, {})
        known = {*self._row_state.scalars, *self.optVarList}
        new = [key for key, value in state.items() if key not in known and isinstance(value, Tensor) and value.dim()]
        if new:
            raise OptimizerError(
                f"{type(self.given_optimizer).__name__} keeps {', '.join(new)} for {self.variable_name!r}, which it "
                "did not when this switcher was made; change its settings before making an OptimizerFactory"
            )
        values = {name: state[name].detach() for name in self.optVarList if isinstance(state.get(name), Tensor)}
        for name, rows in values.items():
            check_rows(rows, ids, f"{name} in the optimizer")
        stepped = bool(values)
        if self.ranks is not None and len(values) < len(self.fields):  # other ranks may have stepped
            ids, values = (
                ids[:0],
                {each.name: torch.empty(0, *each.row_shape, dtype=each.dtype) for each in self.fields},
            )
        if values:
            self.scatter(ids, values)
        self._stepped |= stepped

    # ------------------------------------------------------------------ whole

    @of_all_ranks
    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write every row's state, and scalars (``step``), to one ``.npz`` file.

        The suffix is added where it is missing. The file appears complete or not at all, and replaces one of that name.
        ``numpy.load`` reads it.
        """
        state = self.given_optimizer.state.get(self._weight, {})
        scalars = {key: state[key] for key in self._row_state.scalars if state.get(key) is not None}
        plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in scalars.items()}
        write_npz(with_suffix(saveFileName, self.file_suffix), self.column_arrays(), plain)

    @of_all_ranks
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read every row's state, and scalars (``step``), from a file of :meth:`saveCupy`.

        ``optInit`` is not needed before. A collection on disk also takes an existing collection's directory, which has
        no ``step``; ``given_optimizer`` keeps its own.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError, TypeError: it is from another optimizer, has another shape or dtype, or is damaged or pickled.
                The collection is unchanged.
        """
        super().loadCupy(loadFileName)
        self._stepped = True

    def _read_file(self, path: Path) -> None:
        saved: dict[str, Any] = {}
        scalars = self._row_state.scalars
        self.fill(lambda arrays_by_name: saved.update(read_npz(path, arrays_by_name, scalars)))
        state = self.given_optimizer.state[self._weight]
        for key, initial in scalars.items():
            if key in saved:
                value = saved[key].item()
                state[key] = torch.full_like(initial, value) if isinstance(initial, Tensor) else value


def _find(model: nn.Module, variable_name: str, width: int) -> nn.Parameter:
    """Return the parameter of a model with a variable's name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weight = parameters.get(f"{variable_name}.weight", parameters.get(variable_name))
    if weight is None:
        choices = ", ".join(name.removesuffix(".weight") for name, p in parameters.items() if p.dim() == 2)
        raise ValueError(f"variable_name is {variable_name!r}, but the model has {choices or 'no 2-D parameters'}")
    if step_of(weight) is not None:
        raise TypeError(
            f"variable_name is {variable_name!r}, a speedswap.Embedding, which keeps its own state without a switcher"
        )
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"embed_dimension is {width}, but {variable_name!r} has a weight of shape {tuple(weight.shape)}; "
            "give the number of its columns"
        )
    return weight


def _as_made(optimizer: Optimizer, weight: nn.Parameter) -> Optimizer:
    """Return the optimizer in its state before the first step with this weight, to find every row's initial state.

    State made by its constructor (Adagrad's) is the same in every row, and one row stands for all. State of earlier
    steps, or loaded state, belongs to other rows and is left out.
    """
    state = dict(optimizer.state.get(weight, {}))
    rows = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.dim() and len(v) == len(weight)}
    made: Optimizer = type(optimizer).__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    made.state = defaultdict(dict)
    if all(len(v) and bool((v == v[:1]).all()) for v in rows.values()):
        made.state[weight] = {**state, **{key: v[:1] for key, v in rows.items()}}
    return made
