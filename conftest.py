"""Modules without doctests to collect on this machine: each needs a package that is optional."""

from importlib.util import find_spec

NEED = {"keras": "speedswap/compat/aikit/keras_half.py", "torchinfo": "speedswap/monitor/figures.py"}
collect_ignore_glob = [path for package, path in NEED.items() if not find_spec(package)]
