"""Settings of another type are refused when they are made, by name, value and remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from speedswap.apps import digits, dlrm, ncf, word2vec
from speedswap.apps.errors import SettingsError

SETTINGS = [digits.Settings, dlrm.DlrmSettings, ncf.NcfSettings, word2vec.Settings]


def wrong_values(hint: Any) -> list[Any]:
    """Return values of none of a setting's types."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    tried = {int: 2, float: 0.5, str: "2", bool: True, type(None): None, bytes: b"2", tuple: ({},), list: [object()]}
    fits = {float: {int}, Path: {str}, tuple[str, ...]: {str}}
    allowed = {*kinds}.union(*(fits.get(kind, set()) for kind in kinds))
    return [value for kind, value in tried.items() if kind not in allowed]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: each.__module__.split(".")[2])
def test_a_setting_of_another_type_is_refused_at_once(settings: Any) -> None:
    hints = get_type_hints(settings)
    for one in fields(settings):
        for value in wrong_values(hints[one.name]):
            with pytest.raises(SettingsError, match=f"{one.name} is .*: give "):
                settings(**{one.name: value})


def test_paths_may_be_strings_and_tuples_lists() -> None:
    assert ncf.NcfSettings(ratings="u.data", layers=[8, 4], lr=1) == ncf.NcfSettings(
        ratings=Path("u.data"), layers=(8, 4), lr=1.0
    )
    with pytest.raises(SettingsError, match="batch is '64': give a whole number"):
        digits.Settings(batch="64")
    with pytest.raises(SettingsError, match=r"layers is .*: give a tuple, each of its parts a whole number"):
        ncf.NcfSettings(layers=(8, "4"))


def test_numbers_of_numpy_are_kept_as_pythons() -> None:
    """JSON holds those: settings that are accepted can be saved and loaded again."""
    found = ncf.NcfSettings(factors=np.int64(4), layers=np.array([8, 4]).tolist(), lr=np.float32(0.5))
    assert found == ncf.NcfSettings(factors=4, layers=(8, 4), lr=0.5)
    assert [type(each) for each in (found.factors, found.lr)] == [int, float]
    assert [type(each) for each in ncf.NcfSettings(layers=(np.int32(8), np.int64(4))).layers] == [int, int]
    assert type(dlrm.DlrmSettings(lr=np.int64(1)).lr) is int


@pytest.mark.parametrize(("storage", "near"), [("device", True), ("pageable", None), ("auto", None), ("disk", False)])
def test_rows_are_looked_up_ahead_where_they_come_from_elsewhere(storage: str, near: bool | None, device: str) -> None:
    """By default; ``near`` is None where it depends on the device that computes."""
    near = device == "cpu" if near is None else near
    settings = word2vec.Settings(generate=1000, storage=storage, device=device)
    assert settings.lookahead_depth() == (0 if near else 1)
    assert word2vec.Settings(generate=1000, storage=storage, device=device, lookahead=3).lookahead_depth() == 3
