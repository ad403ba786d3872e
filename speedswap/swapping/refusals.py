"""Errors for using a table's weight as a tensor; each names the call to make instead."""

from __future__ import annotations

from typing import Any

from speedswap._words import AVERAGE_OTHERS
from speedswap.tables import Table

NOT_TAKEN_ALONG = (
    "a graph cannot take a table's rows along; export the part of the model that takes embedding(ids) as its input"
)
_COPY = "embedding.read() copies all rows to ordinary memory, embedding.read(ids) some of them"
_RESIZE = (
    "for another number of rows (resize_token_embeddings), make a larger embedding, write these rows to it with "
    "larger.table.write(0, embedding.read()), and put it into the model (set_input_embeddings)"
)
_LOOKUP = "embedding.read(ids) copies these rows, embedding(ids) gives them with gradients"
_PENALTY = (
    "take it of embedding.read(), a copy of all rows, for its value. In a loss, take it of embedding(ids): no penalty "
    "reaches the whole table, and weight_decay= too shrinks the batch's rows alone"
)
_UPDATE = (
    "rows are trained by an optimizer of torch.optim, or a subclass of torch.optim.Optimizer that calls "
    "super().__init__, and changed by hand with embedding.table.write and embedding.table.scatter"
)
_OTHERWISE = (
    "embedding.read() is a copy of all rows that any function takes, embedding.read(ids) of some; embedding(ids) gives "
    "rows that can be trained"
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
    "ZeroRedundancyOptimizer asks for this, which steps in a parameter on one rank alone, but each steps in rows: give "
    "it the model's other parameters, and speedswap.parameters_to_ignore(model) to one of torch.optim": "type",
    NOT_TAKEN_ALONG: "__dlpack__ __dlpack_device__ storage untyped_storage",
    "it is in no graph; take gradients of embedding(ids), and put hooks there": (
        "backward grad register_hook register_post_accumulate_grad_hook"
    ),
    "torch.nn.init.trunc_normal_, orthogonal_ and eye_ look at the whole matrix, and cannot fill a table; call "
    "embedding.reset_parameters(speedswap.init.from_torch(torch.nn.init.trunc_normal_, …)), or give that as init= when "
    "the embedding is made": "eye new_tensor view_as",
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
