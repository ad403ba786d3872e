"""What the monitor's tests share: which warnings were said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from speedswap.monitor import MonitorWarning


@contextmanager
def _codes_said() -> Iterator[list[str]]:
    codes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield codes
    codes += [warning.message.code for warning in caught if isinstance(warning.message, MonitorWarning)]


@pytest.fixture
def codes_said():
    """A context manager: the list that it gives has the codes of what was warned of, once it is over."""
    return _codes_said
