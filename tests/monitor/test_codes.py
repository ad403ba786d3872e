"""Warnings have codes that stay, levels and filters, and one page that documents them; there is one logger."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from speedswap.compat import infinitybatch
from speedswap.errors import SpeedswapWarning
from speedswap.monitor import CODES, LoopWarning, MonitorWarning, WarningPolicy

ROOT = Path(__file__).resolve().parents[2]
PAGE, PACKAGE = ROOT / "docs" / "warnings.md", ROOT / "speedswap"


def entries() -> dict[str, str]:
    """Return the entries of the page, by code."""
    _, *parts = re.split(r"^###? (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return {title: text for title, text in zip(parts[::2], parts[1::2], strict=True) if title.startswith("SW")}


def calls(*names: str) -> Iterator[tuple[Path, ast.Call]]:
    """Yield the package's calls of functions and methods with one of the names."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
                yield path.relative_to(PACKAGE), node


def test_every_entry_has_a_cause_and_a_remedy():
    titles = re.findall(r"^### (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    assert titles == list(entries())
    for code, text in entries().items():
        assert re.fullmatch(r"\s*\S.+\n\n\*\*Remedy:\*\* \S.+", text.strip(), flags=re.DOTALL), code


def test_monitors_codes_are_documented_as_they_are():
    for code, one in infinitybatch.CODES.items():
        meaning = one.meaning[0].upper() + one.meaning[1:]
        assert " ".join(entries()[code].split()).startswith(
            f"{meaning}. Level `{one.level}`, `{one.category.__name__}`. **Remedy:** "
        )


def test_every_warning_of_the_package_has_a_code_and_an_entry():
    """And every entry a warning: an unused code would be a broken promise."""
    source = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    where = {path.as_posix() for path, text in source.items() if re.search(r"\bwarnings\.warn", text)}
    assert where == {"_words.py"}
    said = set()
    for path, call in calls("warn", "warn_once"):
        if path.as_posix() not in ("_words.py", "monitor/codes.py") and not is_of_policy(call):
            assert isinstance(call.args[0], ast.Constant), (path, call.lineno)
            said.add(call.args[0].value)
    for code in infinitybatch.CODES:
        if any(f'"{code}"' in text for path, text in source.items() if path.name != "codes.py"):
            said.add(code)
    assert said == set(entries())


def is_of_policy(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) != "_warnings"


def test_there_is_one_logger_and_the_library_prints_nothing():
    loggers = [(path, ast.unparse(call)) for path, call in calls("getLogger")]
    assert len(loggers) > 10
    assert {text for _, text in loggers} == {"logging.getLogger('speedswap')"}
    printing = {path.as_posix() for path, call in calls("print") if ast.unparse(call.func) == "print"}
    # toma's function prints; that is what it is for
    assert {path for path in printing if not path.startswith("apps/")} == {"cli.py", "compat/toma.py"}


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
