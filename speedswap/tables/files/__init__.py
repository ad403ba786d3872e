"""A table's directory: its location, lock, manifest and data files."""
