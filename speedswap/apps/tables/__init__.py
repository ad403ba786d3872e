"""Tables in files at the command line: described, checked, written to and read from the formats of other programs."""

from speedswap.apps.tables.facts import Verified, table_facts, verify

__all__ = ["Verified", "table_facts", "verify"]
