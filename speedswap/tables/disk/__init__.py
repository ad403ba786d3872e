"""Stores whose rows live in a log on disk: a row cache, commits, and prefetch."""
