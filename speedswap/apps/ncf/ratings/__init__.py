"""Files of ratings, in the columns and with the ids that they happen to have.

``lines`` reads a file in pieces, ``layout`` finds its separator and columns, ``fields`` takes the lines apart,
``values`` makes numbers of the fields, and ``reading`` puts it together.
"""

from speedswap.apps.ncf.ratings.layout import ROLES, check_columns
from speedswap.apps.ncf.ratings.reading import MISSING, Source, read_split

__all__ = ["MISSING", "ROLES", "Source", "check_columns", "read_split"]
