"""Move rows between two memories. Knows pointers, strides and streams; nothing of tables or training."""

from speedswap.kernels._compiled import with_compiled_part

__path__ = with_compiled_part(__path__)

from speedswap.kernels.bringing import Bringing
from speedswap.kernels.features import FeatureIds, first_outside, merge_ids
from speedswap.kernels.fill import fill_normal, fill_uniform
from speedswap.kernels.host import (
    as_ids,
    as_read,
    empty,
    get_num_threads,
    has_memory,
    require_apart,
    require_dense,
    require_memory,
    set_num_threads,
)
from speedswap.kernels.id_map import (
    Cursor,
    IdMapUndo,
    KeyMap,
    SavedKeys,
    Texts,
    add_to_maps,
    hash_texts,
    texts_of,
    texts_of_fixed,
)
from speedswap.kernels.ids import (
    Asked,
    by_owner,
    check_ids,
    find_all,
    find_rows,
    first_duplicate,
    first_fall,
    last_occurrences,
    require_id_dtype,
    unique,
)
from speedswap.kernels.info import capabilities, compiled_in, cuda_ready
from speedswap.kernels.lines import Lines, read_lines
from speedswap.kernels.pairs import pair_gradients, pair_products
from speedswap.kernels.records import (
    ENGINES,
    Fence,
    Part,
    Records,
    Stored,
    gather_records,
    round_rows,
    rounding_key,
    scatter_records,
    stored_bytes,
)
from speedswap.kernels.room import Room
from speedswap.kernels.row_log import RowLayout, RowLog, RowLogDamaged, are_intact, crc32c
from speedswap.kernels.segment_sum import (
    Groups,
    dot_segments,
    expand,
    group,
    max_segments,
    sum_rows,
    sum_segments,
    sum_segments_back,
    sum_taken,
    summable,
)
from speedswap.kernels.tensor_rows import gather_rows, scatter_rows
from speedswap.kernels.transfers.cpu import Found, WantedColumn, finish_transfers, prefetch_on_cpu, scatter_on_cpu
from speedswap.kernels.transfers.forward import forward, places_among
from speedswap.kernels.transfers.transfer import Lookup, Transfer, Transfers, in_transfer_thread, used_here
from speedswap.kernels.vectors import Vectors, read_vectors, write_vectors

__all__ = [
    "ENGINES",
    "Asked",
    "Bringing",
    "Cursor",
    "FeatureIds",
    "Fence",
    "Found",
    "Groups",
    "IdMapUndo",
    "KeyMap",
    "Lines",
    "Lookup",
    "Part",
    "Records",
    "Room",
    "RowLayout",
    "RowLog",
    "RowLogDamaged",
    "SavedKeys",
    "Stored",
    "Texts",
    "Transfer",
    "Transfers",
    "Vectors",
    "WantedColumn",
    "add_to_maps",
    "are_intact",
    "as_ids",
    "as_read",
    "by_owner",
    "capabilities",
    "check_ids",
    "compiled_in",
    "crc32c",
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
    "first_fall",
    "first_outside",
    "forward",
    "gather_records",
    "gather_rows",
    "get_num_threads",
    "group",
    "has_memory",
    "hash_texts",
    "in_transfer_thread",
    "last_occurrences",
    "max_segments",
    "merge_ids",
    "pair_gradients",
    "pair_products",
    "places_among",
    "prefetch_on_cpu",
    "read_lines",
    "read_vectors",
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
    "sum_segments_back",
    "sum_taken",
    "summable",
    "texts_of",
    "texts_of_fixed",
    "unique",
    "used_here",
    "write_vectors",
]
