"""Tables in other programs' formats, written and read in bounded pieces of rows.

========================  =====================  ==========================================================
format                    suffix                 holds
========================  =====================  ==========================================================
``npy``                   ``.npy``               one column as an array
``safetensors``           ``.safetensors``       columns as tensors of their names
``word2vec``              ``.txt``, ``.vec``     keys, and one column as text that reads back to its bits
``word2vec-binary``       ``.bin``               keys, and one float32 column
``parquet``               ``.parquet``, ``.pq``  columns as lists, and keys
========================  =====================  ==========================================================

Only Parquet needs another package (pyarrow). A column that is stored in fewer bytes is written as the values that a
lookup returns. bfloat16 and float8 are written as float32, which is exact, if a format lacks them.
"""

from speedswap.tables.formats.tables import FORMATS, export_rows, import_rows, write_rows

__all__ = ["FORMATS", "export_rows", "import_rows", "write_rows"]
