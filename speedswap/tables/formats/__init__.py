"""Tables in the formats of other programs, written and read a bounded piece of rows at a time.

========================  =====================  ==========================================================
format                    suffix                 holds
========================  =====================  ==========================================================
``npy``                   ``.npy``               one column as an array
``safetensors``           ``.safetensors``       columns as tensors of their names
``word2vec``              ``.txt``, ``.vec``     keys, and one column as text that reads back to its bits
``word2vec-binary``       ``.bin``               keys, and one float32 column
``parquet``               ``.parquet``, ``.pq``  columns as lists, and keys
========================  =====================  ==========================================================

All but Parquet (pyarrow) need nothing else installed. A column that is stored in fewer bytes is written as the values
that a lookup gives. bfloat16 and float8 are written as float32 where a format does not have them: the same numbers.
"""

from speedswap.tables.formats.tables import FORMATS, export_table, import_table, write_rows

__all__ = ["FORMATS", "export_table", "import_table", "write_rows"]
