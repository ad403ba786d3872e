"""Tables in files at the command line: described, checked, written to and read from the formats of other programs."""

from speedswap.apps.tables.info import table_facts
from speedswap.apps.tables.verifying import Verified, verify

__all__ = ["Verified", "table_facts", "verify"]
