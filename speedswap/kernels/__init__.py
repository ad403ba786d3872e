"""Move rows between two memories. Knows pointers, strides and streams; nothing of tables or training."""

from speedswap.kernels._compiled import with_compiled_part

__path__ = with_compiled_part(__path__)

from speedswap.kernels._C import IdMapUndo, RowLogDamaged, crc32c
from speedswap.kernels.copies import (
    gather_blocks,
    gather_records,
    gather_rows,
    round_rows,
    rounding_key,
    scatter_blocks,
    scatter_records,
    scatter_rows,
)
from speedswap.kernels.cuda.driver import Fence, capabilities, compiled_in, cuda_ready, dtype_name
from speedswap.kernels.cuda.engines import best_shares
from speedswap.kernels.cuda.hot import HotCounts, HotRecords, HotRows
from speedswap.kernels.host import (
    as_ids,
    as_read,
    deferred_interrupts,
    empty,
    get_num_threads,
    has_memory,
    have_same_bits,
    require_apart,
    require_dense,
    require_memory,
    set_num_threads,
)
from speedswap.kernels.id_map import Cursor, KeyMap, SavedKeys, Texts, add_to_maps, hash_texts, texts_of, texts_of_fixed
from speedswap.kernels.ids import (
    FeatureIds,
    JoinedBags,
    by_owner,
    check_ids,
    find_all,
    find_rows,
    find_together,
    first_duplicate,
    first_fall,
    first_outside,
    join_bags,
    last_occurrences,
    merge_ids,
    order_of,
    require_id_dtype,
    unique,
)
from speedswap.kernels.lines import Lines, read_lines, read_vectors, write_vectors
from speedswap.kernels.records import Part, Records, Shares, Stored, WantedColumn, WantedColumns, stored_bytes
from speedswap.kernels.row_log import Bringing, Room, RowLayout, RowLog, allocate, are_intact
from speedswap.kernels.rows import (
    CURVE_TERMS,
    MissedSteps,
    decode_rows,
    fill_normal,
    fill_uniform,
    read_ahead,
    step_adagrad,
    take_missed_steps,
)
from speedswap.kernels.sums import (
    dot_segments,
    expand,
    group,
    max_segments,
    pair_gradients,
    pair_products,
    sum_rows,
    sum_segments,
    sum_segments_back,
    sum_taken,
)
from speedswap.kernels.transfers import (
    FoundBlocks,
    Lookup,
    Transfer,
    Transfers,
    finish_transfers,
    forward,
    in_transfer_thread,
    near,
    places_among,
    prefetch_on_cpu,
    scatter_on_cpu,
    shared_places,
    used_here,
)
