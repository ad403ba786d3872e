"""Move rows between two memories. Knows pointers, strides and streams; nothing of tables or training."""

from speedswap.kernels._compiled import with_compiled_part

__path__ = with_compiled_part(__path__)

from speedswap.kernels.fill import fill_normal, fill_uniform
from speedswap.kernels.host import (
    as_read,
    empty,
    get_num_threads,
    has_memory,
    require_apart,
    require_dense,
    require_memory,
    set_num_threads,
)
from speedswap.kernels.ids import (
    Asked,
    check_ids,
    find_all,
    find_rows,
    first_duplicate,
    last_occurrences,
    require_id_dtype,
    unique,
)
from speedswap.kernels.info import capabilities, compiled_in, cuda_ready
from speedswap.kernels.lines import Lines, read_lines
from speedswap.kernels.records import (
    ENGINES,
    Fence,
    Part,
    Records,
    Stored,
    gather_records,
    prepare_engine,
    round_rows,
    rounding_key,
    scatter_records,
    stored_bytes,
)
from speedswap.kernels.segment_sum import (
    Groups,
    dot_segments,
    expand,
    group,
    max_segments,
    sum_rows,
    sum_segments,
    sum_taken,
    summable,
)
from speedswap.kernels.tensor_rows import gather_rows, scatter_rows
from speedswap.kernels.transfers.cpu import Found, WantedColumn, finish_transfers, prefetch_on_cpu, scatter_on_cpu
from speedswap.kernels.transfers.forward import forward, places_among
from speedswap.kernels.transfers.transfer import Lookup, Transfer, Transfers, in_transfer_thread, used_here

__all__ = [
    "ENGINES",
    "Asked",
    "Fence",
    "Found",
    "Groups",
    "Lines",
    "Lookup",
    "Part",
    "Records",
    "Stored",
    "Transfer",
    "Transfers",
    "WantedColumn",
    "as_read",
    "capabilities",
    "check_ids",
    "compiled_in",
    "cuda_ready",
    "dot_segments",
    "empty",
    "expand",
    "fill_normal",
    "fill_uniform",
    "find_all",
    "find_rows",
    "finish_transfers",
    "first_duplicate",
    "forward",
    "gather_records",
    "gather_rows",
    "get_num_threads",
    "group",
    "has_memory",
    "in_transfer_thread",
    "last_occurrences",
    "max_segments",
    "places_among",
    "prefetch_on_cpu",
    "prepare_engine",
    "read_lines",
    "require_apart",
    "require_dense",
    "require_id_dtype",
    "require_memory",
    "round_rows",
    "rounding_key",
    "scatter_on_cpu",
    "scatter_records",
    "scatter_rows",
    "set_num_threads",
    "stored_bytes",
    "sum_rows",
    "sum_segments",
    "sum_taken",
    "summable",
    "unique",
    "used_here",
]
