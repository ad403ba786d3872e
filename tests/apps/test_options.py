"""Settings of another type are refused when they are made, by name, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from speedswap.apps import digits, dlrm, ncf, word2vec
from speedswap.apps.errors import SettingsError
from speedswap.cli import main

TRAININGS = {
    "digits": digits.Settings,
    "dlrm": dlrm.DlrmSettings,
    "ncf": ncf.NcfSettings,
    "word2vec": word2vec.Settings,
}
SETTINGS = [*TRAININGS.values()]


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


def settings_that_can_be_wrong() -> Iterator[tuple[str, str, str]]:
    """Yield each option of a training that checks its value, with a value that it refuses."""
    values = {"seed": "-1", "lr": "0", "lookahead": "-1", "scratch": "no/such", "sample": "-1"}
    for command, settings in TRAININGS.items():
        for each in fields(settings):
            if each.metadata["check"] is not None and "nargs" not in each.metadata["more"]:
                yield command, f"--{each.name.replace('_', '-')}", values.get(each.name, "0")


@pytest.mark.parametrize(("command", "option", "value"), [*settings_that_can_be_wrong()])
def test_a_command_names_a_wrong_setting_as_it_was_typed(command: str, option: str, value: str, capsys: Any) -> None:
    assert main([command, f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"speedswap: {option} is "), said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("bench step --device tpu", "--device"),
        ("bench step --threads 0", "--threads"),
        ("bench step --folder no/such", "--folder"),
        ("bench mine ids.npy --dim 0", "--dim"),
        ("bench mine ids.npy --batch 0", "--batch"),
        ("bench mine ids.npy --optimizer none", "--optimizer"),
        ("doctor --rows 1.5", "--rows"),
        ("doctor --rows=", "--rows"),
        ("doctor --batch 0", "--batch"),
        ("doctor --dim=", "--dim"),
        ("doctor --path no/such", "--path"),
        ("doctor --model no.such:model", "--model"),
        ("recommend run --user 1 --storage none", "--storage"),
        ("recommend run --user 1 --device none", "--device"),
        ("ncf ratings.csv --columns user=1,user=2", "--columns"),
        ("dlrm --test none.tsv", "--test"),
        ("word2vec text --generate 10", "corpus is text and --generate"),
        ("ncf ratings.csv --users 5", "ratings is ratings.csv and --users"),
        ("word2vec text --output /dev/null", "--output"),
    ],
)
def test_so_does_a_command_that_finds_the_mistake_elsewhere(words: str, option: str, capsys: Any) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"speedswap: {option} is ")


def test_python_names_the_setting_as_python_does() -> None:
    """Also after a command has run in the process."""
    main(["digits", "--micro-batch-size", "0"])
    with pytest.raises(SettingsError, match=r"^micro_batch_size is 0: "):
        digits.Settings(micro_batch_size=0)
