"""The parameter of an embedding whose rows are in a table, and the operations that it supports.

A model and an optimizer hold an embedding's ``weight``, but the tensor behind it has one row, or the rows of the last
batch. So outside an optimizer's step it supports only queries about the whole table (shape, dtype) and the batch's
gradient (``grad``, ``requires_grad``). Filling it in place fills the table. Everything else raises
:class:`speedswap.errors.WeightError`, which names the call to use instead. See docs/design/weight.md for the reasons.

Wrappers for several processes have to leave it alone: the batch's rows differ between ranks.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from speedswap._words import AVERAGE_OTHERS, require_kind
from speedswap.collectives import RankGroup, of_all_ranks
from speedswap.errors import RanksError, WeightError
from speedswap.swapping.whole_rows import OneValue
from speedswap.tables import Table, init
from speedswap.tables.store import require_alike
from speedswap.tables.table import put

NOT_TAKEN_ALONG = (
    "a graph cannot contain a table's rows; export the part of the model that takes embedding(ids) as its input"
)
_COPY = "embedding.read() copies all rows to ordinary memory, embedding.read(ids) only some"
_RESIZE = (
    "for another number of rows (resize_token_embeddings), make a larger embedding, write these rows to it with "
    "larger.table.write(0, embedding.read()), and put it into the model (set_input_embeddings)"
)
_LOOKUP = "embedding.read(ids) copies these rows, embedding(ids) gives them with gradients"
_PENALTY = (
    "compute its value from embedding.read(), a copy of all rows. In a loss, compute it from embedding(ids): no "
    "penalty reaches the whole table, and weight_decay= shrinks only the batch's rows, too"
)
_UPDATE = (
    "rows are trained by an optimizer of torch.optim, or a subclass of torch.optim.Optimizer that calls "
    "super().__init__, and changed by hand with embedding.table.write and embedding.table.scatter"
)
_OTHERWISE = (
    "embedding.read() is a copy of all rows that any function takes, embedding.read(ids) of some; embedding(ids) gives "
    "rows that can be trained"
)
_INIT = (
    "torch.nn.init.trunc_normal_, orthogonal_ and eye_ need the whole matrix and cannot fill a table; call "
    "embedding.reset_parameters(speedswap.init.from_torch(torch.nn.init.trunc_normal_, …)), or give that as init= when "
    "the embedding is made"
)
# The remedy for each kind of use, and the functions of that kind.
_KINDS = {
    "embedding.score(queries, k=…) finds the best rows of the whole table, speedswap.losses has softmax over them": (
        "T __matmul__ __rmatmul__ addmm baddbmm bmm cdist cosine_similarity dot einsum linear mT matmul mm mv t "
        "transpose"
    ),
    _LOOKUP: "embedding embedding_bag gather index_select masked_select select take take_along_dim",
    f"{_LOOKUP}; {_RESIZE}": "__getitem__",
    'embedding.table.scatter(ids, {"weight": rows}) writes these rows, embedding.table.write(start, rows) a range': (
        "__setitem__ index_add_ index_copy_ index_fill_ index_put_ masked_fill_ masked_scatter_ scatter_ scatter_add_"
    ),
    _COPY: "__array__ bfloat16 contiguous cpu cuda double float half item numpy tolist",
    f"{_COPY}; {AVERAGE_OTHERS}": "__reduce_ex__ clone",
    f"{_COPY}; {AVERAGE_OTHERS}; {_RESIZE}": "to",
    _PENALTY: "_foreach_norm abs linalg_norm linalg_vector_norm mean norm pow square std sum var",
    f"{_PENALTY}. {AVERAGE_OTHERS[0].upper()}{AVERAGE_OTHERS[1:]}": "mul",
    f"embedding.table.write(0, rows) copies rows in; {_COPY}; {AVERAGE_OTHERS}": "copy_",
    f"{AVERAGE_OTHERS}; {_UPDATE}": "_foreach_copy_ _foreach_lerp_ _foreach_mul_ lerp lerp_ sub",
    f"{_UPDATE}; {AVERAGE_OTHERS}": "_foreach_add_ _foreach_sub_ add_ addcmul_ sub_",
    "a wrapper for several processes has to leave it alone: fully_shard(model, "
    "ignored_params=speedswap.parameters_to_ignore(model)), "
    "DistributedDataParallel(speedswap.ignore_in_ddp(model))": "chunk is_contiguous stride",
    "ZeroRedundancyOptimizer calls this; it steps each parameter on one rank, but rows are stepped on every rank: give "
    "it the model's other parameters, and speedswap.parameters_to_ignore(model) to one of torch.optim": "type",
    NOT_TAKEN_ALONG: "__dlpack__ __dlpack_device__ storage untyped_storage",
    "it is in no graph; take gradients of embedding(ids), and put hooks there": (
        "backward grad register_hook register_post_accumulate_grad_hook"
    ),
    _INIT: "eye new_tensor",
    f"{_INIT}. A hook goes on what embedding(ids) returns": "view_as",
    _OTHERWISE: "requires_grad_",
}
_REMEDIES = {name: remedy for remedy, names in _KINDS.items() for name in names.split()}


def name_of(func: Any) -> str:
    """Return the name of a torch function, or of the attribute that it reads."""
    of = getattr(func, "__self__", None)
    return str(getattr(of if type(func).__name__ == "method-wrapper" else func, "__name__", func))


def refusal(func: Any, table: Table | None) -> str:
    """Return the message for a function that cannot take a table's weight, with the call to make instead."""
    name = name_of(func)
    remedy = _REMEDIES.get(name, _UPDATE if name.endswith("_") and not name.endswith("__") else _OTHERWISE)
    of = "a table" if table is None else f"table {table.name!r} ({table.num_embeddings:,} × {table.embedding_dim})"
    return f"the weight of the embedding over {of} was used in {name}, but its rows are not on the device: {remedy}"


# Inside this context, a weight acts as the tensor behind it.
as_plain = torch._C.DisableTorchFunctionSubclass
# Inside this context too, torch's C++ code does the same.
in_memory = torch._C._DisableTorchDispatch


def _nobody() -> None:
    """Return None: the weight has no step yet."""


class _Rows:
    """The common base of a table's weight and of views of its rows."""

    _table: weakref.ref[Table]
    _dtype: torch.dtype
    _within: tuple[int, int] | None = None  # rows of the table; all of them by default
    _is_one_row: bool = False
    _keeper: Callable[[], Any] = staticmethod(_nobody)  # a weak reference to the training step

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if stepped := _stepped_among([*args, *kwargs.values()]):
            return _with_batches(stepped, func, args, kwargs)
        if func in _PLAIN:
            with as_plain():
                return func(*args, **kwargs)
        if isinstance(func, FunctionType):  # by transformers, for torch.nn.init's, while it initializes a model
            func = _INITIALIZERS.get(func.__name__, func)
        subject, others = (args[0], args[1:]) if args else (kwargs.pop("tensor", None), ())
        if isinstance(subject, _Rows):
            if func in _ANSWERS:
                return _ANSWERS[func](subject, *others, **kwargs)
            if func in _IN_PLACE:
                return subject._fill(func, *others, **kwargs)
        raise WeightError(refusal(func, _table_among([subject, *others, *kwargs.values()])))

    # ------------------------------------------------------------------ shape and rows

    @property
    def _of(self) -> Table:
        table = self._table()
        if table is None:
            raise WeightError("the embedding of this weight was freed, with its table; keep the module")
        return table

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a single process."""
        return self._of.ranks

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def _bounds(self) -> tuple[int, int]:
        return self._within or (0, self._of.num_embeddings)

    @property
    def _shape(self) -> torch.Size:
        start, stop = self._bounds
        width = self._of.embedding_dim
        return torch.Size((width,) if self._is_one_row else (stop - start, width))

    def _size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def _detached(self) -> TableRows:
        return TableRows(self._of, self.dtype, self._within, self._is_one_row)

    def _select(self, index: Any, func: Any = Tensor.__getitem__) -> TableRows:
        """Return one row, or a range of rows."""
        start, stop = self._bounds
        if not self._is_one_row:
            if index is ...:
                return self._detached()
            if isinstance(index, int) and not isinstance(index, bool):
                if not start - stop <= index < stop - start:
                    raise IndexError(f"index is {index}, but the weight has {stop - start:,} rows")
                row = start + index % (stop - start)
                return TableRows(self._of, self.dtype, (row, row + 1), True)
            if isinstance(index, slice) and index.step in (None, 1):
                first, last, _ = index.indices(stop - start)
                return TableRows(self._of, self.dtype, (start + first, start + max(first, last)))
        raise WeightError(refusal(func, self._of))

    # ------------------------------------------------------------------ filling

    @of_all_ranks
    def _fill(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply an elementwise in-place function to the table, chunk by chunk."""
        self._require_no_graph(func)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (isinstance(value, _Rows) or value.dim()):
                raise WeightError(refusal(func, self._of))
        table, (start, stop) = self._of, self._bounds
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Generator)]
        table.reserve_rows(range(start, stop))
        for first in range(start, stop, init.CHUNK_ROWS):
            last = min(first + init.CHUNK_ROWS, stop)
            if func in _OVERWRITING:
                chunk = torch.empty(last - first, table.embedding_dim, dtype=table.dtype)
            else:
                chunk = table.read(first, last)
            with torch.no_grad():
                func(init.as_rows_of(chunk, table.num_embeddings), *args, **kwargs)
            if first == start:  # once, before the first chunk
                require_alike(table.store, given, f"arguments of {name_of(func)} for")
            put(table, first, chunk)  # owners draw random values
        return self

    @of_all_ranks
    def _copy(self, source: Any, non_blocking: bool = False) -> Any:
        """Copy values from a tensor of this shape, or one number."""
        if not isinstance(source, Tensor) or not source.dim():
            return self._fill(Tensor.fill_, source)
        self._require_no_graph(Tensor.copy_)
        if isinstance(source, _Rows):
            raise WeightError(refusal(Tensor.copy_, source._table()))
        if source.shape != self._shape:
            raise ValueError(
                f"a tensor of shape {tuple(source.shape)} was copied into a weight of shape {tuple(self._shape)}; give "
                "a tensor of that shape, or write some of the rows with embedding.table.write"
            )
        table, (start, stop) = self._of, self._bounds
        values = source.detach().reshape(stop - start, table.embedding_dim)
        table.reserve_rows(range(start, stop))
        require_alike(table.store, values, "values of")
        table.columns["weight"].require_storable(values, start)  # before the first piece is written
        for first in range(0, stop - start, init.CHUNK_ROWS):
            put(table, start + first, values[first : first + init.CHUNK_ROWS].to("cpu", table.dtype))
        return self

    @of_all_ranks
    def _assign(self, index: Any, value: Any) -> None:
        self._require_no_graph(Tensor.__setitem__)
        self._select(index, Tensor.__setitem__)._copy(value)

    def _require_no_graph(self, func: Any) -> None:
        """Raise WeightError for an in-place change that autograd would have to record, as torch does."""
        with as_plain():
            if torch.is_grad_enabled() and self.requires_grad and func not in _FROM_TORCH_INIT:
                raise WeightError(
                    f"weight requires a gradient and was changed in place by {name_of(func)}; do that under "
                    "torch.no_grad(), or to weight.data"
                )

    # ------------------------------------------------------------------ tensors like it, and the gradient

    def _like(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return one value expanded to the table's shape; it takes no more memory until it is written to."""
        with as_plain():
            one = self.new_empty((1,) * len(self._shape))  # type: ignore[attr-defined]
        return func(one, *args, **kwargs).expand(self._shape).as_subclass(OneValue)

    # A property is four times as fast as a torch function; every step reads this and grad.
    @property
    def requires_grad(self) -> bool:
        with as_plain():
            return _tensor.requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        with as_plain():
            _tensor.requires_grad.__set__(self, requires_grad)
        if (keeper := self._keeper()) is not None:
            keeper.batch.requires_grad = requires_grad

    def _requires_grad(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def _set_grad(self, grad: Tensor | None) -> None:
        if (keeper := self._keeper()) is None:
            raise WeightError("the embedding of this weight was freed, with its gradient; keep the module")
        if keeper.group is not None:
            if grad is not None:
                grad = keeper.own_gradient(grad)
            keeper.forget_passes()
        if grad is None or grad.shape == keeper.batch.shape:
            keeper.batch.grad = grad
            return
        if grad.shape != self._shape or not is_one_value(grad) or grad.flatten()[0] != 0:
            raise WeightError(
                f"weight.grad was set to a tensor of shape {tuple(grad.shape)}, but a gradient has the batch's rows; "
                "change the gradient from the backward pass in place, or set it to None"
            )
        self._set_grad(None)  # zeros for the whole table: no row has a gradient

    def __repr__(self) -> str:  # type: ignore[override,unused-ignore]
        table = self._table()
        rows = "" if self._within is None else f", rows {self._within[0]} to {self._within[1] - 1}"
        return f"{type(self).__name__}({'of a freed embedding' if table is None else repr(table)}{rows})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        raise WeightError(refusal(Tensor.clone, self._table()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WeightError(refusal(Tensor.clone, self._table()))


class TableRows(_Rows, torch.Tensor):  # type: ignore[misc, override]
    """Rows of a table that can be filled in place: ``weight.data``, ``weight[3]``."""

    def __new__(
        cls, table: Table, dtype: torch.dtype, within: tuple[int, int] | None = None, is_one_row: bool = False
    ) -> TableRows:
        rows = torch.empty(0, dtype=dtype).as_subclass(cls)
        rows._table, rows._dtype, rows._within, rows._is_one_row = weakref.ref(table), dtype, within, is_one_row
        return rows

    def _requires_grad(self, requires_grad: bool = True) -> Any:  # called by nn.Parameter
        raise WeightError(refusal(Tensor.requires_grad_, self._table()))


class TableWeight(_Rows, nn.Parameter):  # type: ignore[misc, override]
    """The parameter that stands for a table's rows; it does not keep the table alive.

    Its gradient is that of the batch's rows. During its step an optimizer holds a plain parameter with the batch's
    rows, so torch's code costs no more than for any parameter. An optimizer that keeps its parameters elsewhere steps
    with the weight itself, which then passes every call on to the batch's rows.

    Args:
        table: the rows.
        device: the device of the batch's rows.
        lookup_dtype: the dtype of what lookups return, which ``dtype`` reports; the rows' by default. The tensor behind
            the weight, its gradient and optimizer state made for it have the rows' dtype.

    Attributes:
        may_be_taken: True if something has queried it in the way that an optimizer queries its parameters, since it was
            last known to be in an optimizer.
    """

    may_be_taken = False

    def __new__(
        cls, table: Table, device: torch.device | str | None = None, lookup_dtype: torch.dtype | None = None
    ) -> TableWeight:
        one_row = torch.zeros(1, table.embedding_dim, dtype=table.dtype, device=device)
        weight: TableWeight = torch.Tensor._make_subclass(cls, one_row, True)
        return weight._standing_for(table, lookup_dtype)

    @classmethod
    def in_place_of(cls, weight: MetaWeight, table: Table, lookup_dtype: torch.dtype | None) -> TableWeight:
        """Turn a parameter, which an optimizer may already hold, into the weight of the table with its values."""
        weight.data = torch.zeros(1, table.embedding_dim, dtype=table.dtype, device=weight.device)
        weight.__class__ = cls  # type: ignore[assignment]
        return cast(TableWeight, weight)._standing_for(table, lookup_dtype)

    def _standing_for(self, table: Table, lookup_dtype: torch.dtype | None) -> TableWeight:
        self._table, self._dtype = weakref.ref(table), lookup_dtype or table.dtype
        self.may_be_taken = False
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise WeightError for operators that C++ code calls past torch functions, as torch.tensor and vmap do."""
        kwargs = kwargs or {}
        if stepped := _stepped_among([*args, *kwargs.values()]):
            return _with_batches(stepped, func, args, kwargs)
        if func.overloadpacket in _MAKING:
            with in_memory():
                return func(*args, **kwargs)
        raise WeightError(refusal(func.overloadpacket, _table_among([*args, *kwargs.values()])))

    # A property always sees its caller; a torch function may be called by a mode, e.g. under torch.set_default_device.
    @property
    def is_leaf(self) -> bool:  # type: ignore[override,unused-ignore]
        self.may_be_taken = True  # Optimizer.add_param_group reads this
        return True

    @property
    def grad(self) -> Tensor | None:
        keeper = self._keeper()
        return None if keeper is None else keeper.gradient()

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        keeper = self._keeper()
        if grad is None and (keeper is None or keeper.group is None):  # as zero_grad does in every step
            if keeper is not None:
                keeper.batch.grad = None
            return
        self._set_grad(grad)
        if grad is None:  # as zero_grad does
            keeper.sign_batch()

    @grad.deleter
    def grad(self) -> None:
        self._set_grad(None)

    @property
    def gradient_keeper(self) -> Any:
        """The training step that receives gradients, and saves and restores them with their rows."""
        return self._keeper()


class MetaWeight(nn.Parameter):
    """The weight of a module on the meta device, in the table's shape; or the rows that replaced it.

    Libraries create a parameter of the same class from the rows they load, and put it into the module.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> MetaWeight:
        weight: MetaWeight = torch.Tensor._make_subclass(cls, data.detach(), requires_grad)
        return weight


def with_tables(model: nn.Module) -> nn.Module:
    """Return a model once its modules from the meta device have tables; raise WeightError if one has no rows."""
    require_kind("model", model, nn.Module, "a torch.nn.Module")
    for module in model.modules():
        if isinstance(module._parameters.get("weight"), MetaWeight):
            module._step  # noqa: B018
    return model


def is_one_value(tensor: Tensor) -> bool:
    """Return whether a tensor is one value expanded to a larger shape, as ``zeros_like(weight)`` is."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.numel() > 1 and all(step == 0 or size == 1 for step, size in sizes)


def _stepped_among(values: Sequence[Any]) -> list[TableWeight]:
    """Return the weights among a call's arguments, and lists in them, whose optimizer is stepping."""
    found: list[TableWeight] = []
    for value in values:
        if isinstance(value, TableWeight):
            if (keeper := value._keeper()) is not None and keeper.is_stepping:
                found.append(value)
        elif isinstance(value, list | tuple):
            found += _stepped_among(value)
    return found


def _with_batches(
    stepped: Sequence[TableWeight], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function with the batch's rows in place of weights."""
    batches = {id(weight): weight._keeper().batch for weight in stepped}
    args, kwargs = tree_map(lambda value: batches.get(id(value), value), (args, kwargs))
    return func(*args, **kwargs)


def _table_among(values: Sequence[Any]) -> Table | None:
    """Return the table of the first weight, or view of rows, among a call's arguments and lists in them."""
    for value in values:
        if isinstance(value, _Rows):
            return value._table()
        if isinstance(value, list | tuple) and (found := _table_among(value)) is not None:
            return found
    return None


# ---------------------------------------------------------------------- wrappers for several processes

# True in a process of a torch.distributed job.
is_in_job: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
_Model = TypeVar("_Model", bound=nn.Module)


def parameters_to_ignore(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of a model's embeddings that wrappers for several processes must leave alone.

    These weights stand for a batch's rows, which differ between ranks, so they can be neither sharded nor averaged.

    Args:
        model: any module; its :class:`speedswap.Embedding` and :class:`speedswap.EmbeddingBag` are found.

    Returns:
        The ``ignored_params`` of ``fully_shard`` and ``ignored_states`` of ``FullyShardedDataParallel``.

    Example:
        >>> import torch, speedswap
        >>> place = speedswap.Pageable(local_to_rank=True)
        >>> model = torch.nn.Sequential(speedswap.Embedding(1000, 16, storage=place), torch.nn.Linear(16, 1))
        >>> speedswap.parameters_to_ignore(model) == {model[0].weight}
        True
    """
    return {parameter for _, parameter in _weights(model)}


def ignore_in_ddp(model: _Model) -> _Model:
    """Make DistributedDataParallel ignore the weights of a model's embeddings.

    Args:
        model: the module, before it is wrapped. Parameters that are ignored already stay ignored.

    Returns:
        The model.

    Example:
        >>> import torch, speedswap
        >>> place = speedswap.Pageable(local_to_rank=True)
        >>> model = torch.nn.Sequential(speedswap.Embedding(1000, 16, storage=place), torch.nn.Linear(16, 1))
        >>> model = speedswap.ignore_in_ddp(model)  # then DistributedDataParallel(model)
    """
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    for name, _ in _weights(model):
        # A part of DistributedDataParallel prefixes the names of the model's own parameters with a dot.
        ignored += [each for each in (name, name if "." in name else f".{name}") if each not in ignored]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return model


def require_own_table(table: str, weight: nn.Parameter, step_weight: nn.Parameter, local_to_rank: bool) -> None:
    """Check, before a training lookup in a job, that only this process is meant to train the rows.

    Args:
        table: the table's name.
        weight: the module's weight.
        step_weight: the parameter that the table trains.
        local_to_rank: True if the table was declared local to this process.

    Raises:
        RanksError: they are not, or a wrapper would mix them with other ranks'; the message has the remedy.
    """
    if weight is not step_weight:
        raise RanksError(
            f"the weight of the embedding over table {table!r} was replaced by another, as fully_shard does; it "
            "cannot be sharded: make the embedding with storage=speedswap.Pinned(local_to_rank=True), and give "
            "fully_shard ignored_params=speedswap.parameters_to_ignore(model). (torch.func.functional_call takes a "
            "tensor, not an nn.Parameter)"
        )
    if dist.get_world_size() == 1:
        return
    if not local_to_rank:
        raise RanksError(
            f"table {table!r} belongs to this process, rank {dist.get_rank()} of {dist.get_world_size()}: the tables "
            "of the ranks would drift apart in training. Make the embedding with storage=speedswap.Ranks(), so that "
            "they own its rows together; or freeze it with embedding.weight.requires_grad_(False); or, if each rank is "
            "to train a separate table, make it with storage=speedswap.Pinned(local_to_rank=True). Then wrap it with "
            "DistributedDataParallel(speedswap.ignore_in_ddp(model)) or "
            "fully_shard(model, ignored_params=speedswap.parameters_to_ignore(model))"
        )
    wrapped = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapped is not None and any(parameter is weight for parameter in wrapped._module_parameters):
        raise RanksError(
            f"each rank looks up different rows of table {table!r}, but DistributedDataParallel would average them "
            "as if they were the same; wrap DistributedDataParallel(speedswap.ignore_in_ddp(model))"
        )


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that stand for tables, once for every name."""
    for name, parameter in with_tables(model).named_parameters(remove_duplicate=False):
        if isinstance(parameter, TableWeight) and parameter._keeper() is not None:
            yield name, parameter


# ---------------------------------------------------------------------- torch functions by kind


def torch_functions(names: str, *places: Any) -> set[Any]:
    """Return the functions of these names in torch's modules or classes, if there; for an attribute, its getter."""
    found = [getattr(place, name) for place in places for name in names.split() if hasattr(place, name)]
    return {each.__get__ if inspect.isgetsetdescriptor(each) else each for each in found}


def _answered(names: str, answer: Callable[..., Any], *places: Any) -> dict[Any, Callable[..., Any]]:
    return dict.fromkeys(torch_functions(names, *(places or (Tensor,))), answer)


_tensor: Any = Tensor  # untyped: its attributes are used as descriptors

# Have the same answer for the tensor behind a weight and for the whole table, or concern the batch's gradient.
_PLAIN = torch_functions(
    "grad_dtype requires_grad retains_grad is_leaf grad_fn device layout "
    "_version output_nr is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized "
    "is_sparse is_sparse_csr is_vulkan is_xla is_xpu is_complex is_floating_point is_signed is_inference is_conj "
    "is_neg get_device data_ptr is_shared new_empty new_full new_ones new_zeros _is_view "
    "__dir__",
    Tensor,
) | torch_functions("get_device is_complex is_conj is_floating_point is_inference is_neg is_signed", torch)

_MAKING = {torch.ops.aten.new_empty, torch.ops.aten.new_full, torch.ops.aten.new_ones, torch.ops.aten.new_zeros}

_ANSWERS: dict[Any, Callable[..., Any]] = {
    **_answered("shape size", _Rows._size),
    **_answered("dim ndim ndimension", lambda rows: len(rows._shape)),
    **_answered("nelement numel", lambda rows: rows._shape.numel(), Tensor, torch),
    **_answered("dtype", lambda rows: rows.dtype),
    **_answered("element_size itemsize", lambda rows: rows.dtype.itemsize),
    **_answered("nbytes", lambda rows: rows._shape.numel() * rows.dtype.itemsize),
    **_answered("__len__", lambda rows: rows._shape[0]),
    **_answered("__format__", lambda rows, form: format(repr(rows), form)),
    **_answered("data detach", _Rows._detached, Tensor, torch),
    **_answered("copy_", _Rows._copy),
    **_answered("__getitem__", _Rows._select),
    **_answered("__setitem__", _Rows._assign),
    torch.full_like: lambda rows, *args, **kwargs: rows._like(torch.full_like, *args, **kwargs),
    torch.ones_like: lambda rows, **kwargs: rows._like(torch.ones_like, **kwargs),
    torch.zeros_like: lambda rows, **kwargs: rows._like(torch.zeros_like, **kwargs),
    _tensor.data.__set__: lambda rows, values: rows._detached()._copy(values),
    **_answered("grad _grad", lambda rows: rows.grad),
    **_answered("requires_grad_", lambda rows, *args, **kwargs: rows._requires_grad(*args, **kwargs)),
    _tensor.requires_grad.__set__: lambda rows, requires_grad: setattr(rows, "requires_grad", requires_grad),
    _tensor.grad.__set__: lambda rows, grad: rows._set_grad(grad),
    _tensor.grad.__delete__: lambda rows: rows._set_grad(None),
}

_FROM_TORCH_INIT = torch_functions("constant_ kaiming_uniform_ normal_ uniform_", nn.init)
_INITIALIZERS = {function.__name__: function for function in _FROM_TORCH_INIT}
_OVERWRITING = _FROM_TORCH_INIT | torch_functions(
    "bernoulli_ cauchy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_", Tensor
)
# Elementwise functions.
_IN_PLACE = _OVERWRITING | torch_functions(
    "abs_ add_ clamp_ clamp_max_ clamp_min_ clip_ div_ divide_ erfinv_ exp_ log_ mul_ multiply_ nan_to_num_ neg_ pow_ "
    "round_ sigmoid_ sign_ sqrt_ sub_ subtract_ tanh_ true_divide_",
    Tensor,
)
