"""Own the full rows: records, storage and files. Knows nothing of models.

:class:`Table` holds the rows, in a :class:`RowStore`; :class:`Block` is a batch's rows on the compute device;
:class:`Column` names a part of a record; :class:`Commit` and :func:`prefetch` are for several tables at once; ``init``
has the initial values; :func:`gather_rows` and :func:`scatter_rows` take tensors as well; :func:`ngram_rows` hashes
n-grams of tokens to rows.
"""

from speedswap.tables import init
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.tensor_files import TensorFiles, TensorSource
from speedswap.tables.id_map import AskedAhead, IdMap
from speedswap.tables.keys import Keys, as_keys, is_single_key, ngram_rows, select_texts, token_classes
from speedswap.tables.local import LocalStore
from speedswap.tables.many import gather_rows, prefetch, scatter_rows
from speedswap.tables.opening import FileStore
from speedswap.tables.pending import Commit
from speedswap.tables.record import Block, Column
from speedswap.tables.rows_file import merge_rows, save_trainable_tokens
from speedswap.tables.storage import Device, Disk, Pageable, Pinned, Storage, as_storage, opened_place
from speedswap.tables.store import Prefetched, RowStore, WrappedStore
from speedswap.tables.table import Table

__all__ = [
    "AskedAhead",
    "Block",
    "Column",
    "Commit",
    "Device",
    "Disk",
    "FileStore",
    "IdMap",
    "Keys",
    "LocalStore",
    "LogStore",
    "Pageable",
    "Pinned",
    "Prefetched",
    "RowStore",
    "Storage",
    "Table",
    "TensorFiles",
    "TensorSource",
    "WrappedStore",
    "as_keys",
    "as_storage",
    "gather_rows",
    "init",
    "is_single_key",
    "merge_rows",
    "ngram_rows",
    "opened_place",
    "prefetch",
    "save_trainable_tokens",
    "scatter_rows",
    "select_texts",
    "token_classes",
]
