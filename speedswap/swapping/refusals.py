"""Errors for using a table's weight as a tensor; each names the call to make instead."""

from __future__ import annotations

from typing import Any

from speedswap._words import AVERAGE_OTHERS
from speedswap.tables import Table

_SCORES = (
    "T __matmul__ __rmatmul__ addmm baddbmm bmm cdist cosine_similarity dot einsum linear mT matmul mm mv t transpose"
)
_COPIES = "__array__ __reduce_ex__ bfloat16 clone contiguous cpu cuda double float half item numpy to tolist"
_PENALTIES = "_foreach_norm abs linalg_norm linalg_vector_norm mean mul norm pow square sum"
_HOOKS = "backward grad register_hook register_post_accumulate_grad_hook"
_MEMORY = "__dlpack__ __dlpack_device__ storage untyped_storage"
NOT_TAKEN_ALONG = (
    "a graph cannot take a table's rows along; export the part of the model that takes embedding(ids) as its input"
)
_SHARDING = "chunk is_contiguous stride"
_AVERAGES = "_foreach_add_ _foreach_copy_ _foreach_lerp_ _foreach_mul_ _foreach_sub_ add_ addcmul_ copy_ lerp lerp_ sub"
_RESIZE = (
    "for another number of rows (resize_token_embeddings), make a larger embedding, write these rows to it with "
    "larger.table.write(0, embedding.read()), and put it into the model (set_input_embeddings)"
)
_NO_PENALTY = (
    "no penalty reaches the whole table; one on embedding(ids) shrinks the batch's rows, as weight_decay= does too. "
    "embedding.read(ids) copies rows"
)
_UPDATE = (
    "rows are trained by an optimizer of torch.optim, or a subclass of torch.optim.Optimizer that calls "
    "super().__init__, and changed by hand with embedding.table.write and embedding.table.scatter"
)
_OTHERWISE = (
    "embedding(ids) gives rows that can be trained, embedding.score(queries, k=…) the best ones of the whole table, "
    "embedding.read(ids) a copy; embedding.table.write and .scatter change rows"
)
_REMEDIES = {
    "new_tensor": "torch.nn.init.trunc_normal_ looks at the values that it draws, and cannot fill a table; call "
    "embedding.reset_parameters(speedswap.init.from_torch(torch.nn.init.trunc_normal_, …)), or give that as init= when "
    "the embedding is made",
    **dict.fromkeys(
        _SCORES.split(),
        "embedding.score(queries, k=…) finds the best rows of the whole table, speedswap.losses has softmax over them, "
        "embedding(ids) gives rows that can be trained",
    ),
    **dict.fromkeys(
        _COPIES.split(),
        f"embedding.read(ids) copies rows, embedding.read() all of them; {AVERAGE_OTHERS}; {_RESIZE}",
    ),
    **dict.fromkeys(_PENALTIES.split(), _NO_PENALTY),
    "mul": f"{_NO_PENALTY}; {AVERAGE_OTHERS}",
    **dict.fromkeys(_AVERAGES.split(), f"{_UPDATE}; {AVERAGE_OTHERS}"),
    "__getitem__": f"{_OTHERWISE}; {_RESIZE}",
    **dict.fromkeys(
        _SHARDING.split(),
        "a wrapper for several processes has to leave it alone: fully_shard(model, "
        "ignored_params=speedswap.parameters_to_ignore(model)), "
        "DistributedDataParallel(speedswap.ignore_in_ddp(model))",
    ),
    "type": "ZeroRedundancyOptimizer asks for this, which steps in a parameter on one rank alone, but each steps "
    "in rows: give it the model's other parameters, and speedswap.parameters_to_ignore(model) to one of torch.optim",
    **dict.fromkeys(_MEMORY.split(), NOT_TAKEN_ALONG),
    **dict.fromkeys(_HOOKS.split(), "it is in no graph; take gradients of embedding(ids), and put hooks there"),
}


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
