"""The rules for docstrings, comments and pages, and the whole checkout held to them."""

from __future__ import annotations

import english
import pytest

pytestmark = pytest.mark.release


@pytest.mark.parametrize(
    "source, broken",
    [
        ('def f():\n    """Return the rows."""', False),
        ('def f():\n    """The rows."""', True),
        ('def f():\n    """Whether it is open."""', True),
        ('def f():\n    """Returns the rows."""', True),
        ('def f():\n    """Press on."""', False),
        ('@property\ndef f(self):\n    """The rows."""', False),
        ('@property\ndef f(self):\n    """What it has."""', True),
        ('def test_f():\n    """Three lookups move a row once."""', False),
        ('def test_f():\n    """Where a user errs."""', True),
        ('class C:\n    """A table of rows."""', False),
        ('class C:\n    """Something with rows."""', True),
        ("x = 1  # the memory that there is", True),
        ("# buffers that\n# nobody uses\nx = 1", True),
        ('x = ("memory cannot "\n    "be had")', True),
        ("x = 1  # there is no memory, and this is no longer true", False),
        ('def f():\n    """Run it in a process of its own."""', True),
        ('def f():\n    """Time steps beside each other."""', True),
        ("# rows of another store than\n# another one\nx = 1", True),
        ("x = 1  # looked up anew", True),
        ("anew = 1  # a part of its own step", False),
        ("x = 1  # ready-made anew", False),
        ("x = 1  # ready-made anew, then made anew", True),
        ("x = 1  # after so many steps", True),
    ],
)
def test_rule(tmp_path, source, broken):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert bool(english.violations(path)) == broken


@pytest.mark.parametrize("text, broken", [("Seconds per row.", False), ("One burst a row,\nas it is.", True)])
def test_phrases_are_found_in_pages(tmp_path, text, broken):
    path = tmp_path / "page.md"
    path.write_text(text)
    assert bool(english.violations(path)) == broken


def test_the_checkout_follows_the_rules():
    found = [
        f"{path.relative_to(english.ROOT)}:{line}: {complaint}"
        for path in english.everything()
        for line, complaint in english.violations(path)
    ]
    assert not found, "\n".join(found)
