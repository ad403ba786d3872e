"""Which modules have no doctests to collect on this machine."""

from importlib.util import find_spec

# They import Keras, which is optional, and say so where it is missing.
NEED_KERAS = ["aikit/keras_extra.py", "aikit/elastic/models.py", "aikit/*/TF", "runai/*/keras"]
collect_ignore_glob = [] if find_spec("keras") else [f"speedswap/compat/{path}" for path in NEED_KERAS]
