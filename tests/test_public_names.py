"""The names that users import."""

from __future__ import annotations

import pytest

import speedswap


def test_the_package_has_few_names() -> None:
    places = {"Device", "Disk", "Pageable", "Pinned", "Ranks"}
    assert len(set(speedswap.__all__) - places) <= 34
    assert all(hasattr(speedswap, name) for name in speedswap.__all__)


def test_a_name_that_never_was() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        speedswap.nothing  # noqa: B018
