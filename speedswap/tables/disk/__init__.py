"""A log on disk behind the door that every store has: a cache of rows, commits, and rows ahead of their step."""
