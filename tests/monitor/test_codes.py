"""Warnings have codes that stay, levels and filters, and one table that documents them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from speedswap.compat import infinitybatch
from speedswap.errors import SpeedswapWarning
from speedswap.monitor import CODES, LoopWarning, MonitorWarning, WarningPolicy

TABLE = Path(__file__).resolve().parents[2] / "docs" / "warnings.md"


def test_table_documents_every_code_as_it_is():
    rows = re.findall(r"^\| (SW\d{3}) \| (\w+) \| (\w+) \| (.+) \|$", TABLE.read_text(), flags=re.MULTILINE)
    every = infinitybatch.CODES
    assert [row[0] for row in rows] == sorted(every)
    assert rows == [(code, every[code].level, every[code].category.__name__, every[code].meaning) for code in every]


def test_every_code_is_said_somewhere():
    """An unused code would be a broken promise."""
    source = "".join(
        path.read_text()
        for folder in ("monitor", "compat/infinitybatch")
        for path in (TABLE.parents[1] / "speedswap" / folder).glob("*.py")
        if path.name != "codes.py"
    )
    assert not [code for code in infinitybatch.CODES if f'"{code}"' not in source]


def test_codes_of_tables_are_documented_and_said():
    package = TABLE.parents[1] / "speedswap"
    said = "".join(
        path.read_text() for folder in ("swapping", "ranks", "tables") for path in (package / folder).rglob("*.py")
    )
    documented = re.findall(r"^\| (SW4\d{2}) \|", TABLE.read_text(), flags=re.MULTILINE)
    assert documented == sorted(set(re.findall(r'"(SW4\d{2}): ', said)))


@pytest.mark.parametrize("code", CODES)
def test_category_is_a_speedswap_warning(code):
    assert issubclass(CODES[code].category, MonitorWarning)
    assert issubclass(CODES[code].category, SpeedswapWarning)


def test_levels_say_more_and_more(codes_said):
    heard = {}
    for level in ("off", "user", "expert"):
        policy = WarningPolicy(level)
        with codes_said() as heard[level]:
            for code in CODES:
                policy.warn(code, "it happened")
    assert heard["off"] == []
    assert heard["user"] == [code for code in CODES if CODES[code].level == "user"]
    assert heard["expert"] == list(CODES)


def test_codes_can_be_ignored_and_repeated(codes_said):
    policy = WarningPolicy("user", ignore={"SW101"}, always={"SW103"})
    with codes_said() as said:
        for code in ("SW101", "SW102", "SW103", "SW101", "SW102", "SW103"):
            policy.warn(code, "it happened")
    assert said == ["SW102", "SW103", "SW103"]
    assert policy.counts == {"SW102": 2, "SW103": 2}


def test_pythons_filters_know_the_code():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "SW104")
        WarningPolicy().warn("SW104", "it happened")
        with pytest.raises(LoopWarning, match="SW101: it happened") as raised:
            WarningPolicy().warn("SW101", "it happened")
    assert raised.value.code == "SW101"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("loud",), "level is 'loud'"), (("user",), "'SW999' is not a warning's code")],
)
def test_unknown_levels_and_codes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarningPolicy(*arguments, ignore={"SW999"})
