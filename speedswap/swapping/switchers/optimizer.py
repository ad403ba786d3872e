"""OptimizerFactory: swaps rows of optimizer state between a full collection and the optimizer."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import a_kind
from speedswap.collectives import of_all_ranks
from speedswap.errors import OptimizerError
from speedswap.swapping.optimizers import holds, probe
from speedswap.swapping.row_step import step_of
from speedswap.swapping.switchers import arrays
from speedswap.swapping.switchers.arrays import trainable_dtype
from speedswap.swapping.switchers.collection import Collection, RowField, place_of
from speedswap.swapping.switchers.model import check_rows
from speedswap.tables import Storage
from speedswap.tables.init import CopyOf
from speedswap.tables.record import count


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
        variable_name: the variable's name in the model: that of the embedding (``u_embeddings``), with a path where it
            is inside another module (``encoder.items``), or of the parameter (``u_embeddings.weight``).
        dtype: of the variable; its state has the dtype that the optimizer gives it.
        CPUPinn: False keeps the collection on the GPU where there is one, True in pinned host memory.
        diskname, storage: as for the :class:`ModelFactory`; without either of the first two the state is in
            memory, wherever the rows are. Ranks own it with the rows.

    Raises:
        OptimizerError: the optimizer mixes rows, takes sparse gradients only, or keeps state that cannot be switched.
        ValueError, TypeError: there is no such variable, it is not in the optimizer, or an argument does not fit it.
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
        if not isinstance(given_optimizer, Optimizer):
            raise TypeError(f"given_optimizer is {a_kind(given_optimizer)}; give a torch.optim.Optimizer")
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
            return  # SGD without momentum, for one
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
        """Write every row's state, and scalars such as ``step``, to one ``.npz`` file.

        The suffix is added where it is missing. The file appears complete or not at all, and replaces one of that name.
        ``numpy.load`` reads it.
        """
        state = self.given_optimizer.state.get(self._weight, {})
        scalars = {key: state[key] for key in self._row_state.scalars if state.get(key) is not None}
        plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in scalars.items()}
        arrays.write_npz(arrays.with_suffix(saveFileName, self.file_suffix), self.column_arrays(), plain)

    @of_all_ranks
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read every row's state, and scalars such as ``step``, from a file of :meth:`saveCupy`.

        ``optInit`` is not needed before. A collection on disk also takes the directory of an existing one, which has no
        ``step``: that stays what ``given_optimizer`` has.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: it is from another optimizer, has another shape or dtype, or is damaged or pickled.
                The collection is unchanged.
        """
        super().loadCupy(loadFileName)
        self._stepped = True

    def _read_file(self, path: Path) -> None:
        saved: dict[str, Any] = {}
        scalars = self._row_state.scalars
        self.fill(lambda arrays_by_name: saved.update(arrays.read_npz(path, arrays_by_name, scalars)))
        state = self.given_optimizer.state[self._weight]
        for key, initial in scalars.items():
            if key in saved:
                value = saved[key].item()
                state[key] = torch.full_like(initial, value) if isinstance(initial, Tensor) else value


def _find(model: nn.Module, variable_name: str, width: int) -> nn.Parameter:
    """Return the parameter of a model that a variable's name stands for."""
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
    """Return the optimizer as before its first step with this weight, to find the state that all rows start from.

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
