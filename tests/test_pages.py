"""The snippets of each page run, one after the other, and its figures and pictures are those of the tools."""

from __future__ import annotations

import re
from pathlib import Path

import concept_pictures
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = "cheat-sheet contrastive export gpu growing-ids index many-tables resume warnings".split()
ON_GITHUB = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str) -> None:
    code = ON_GITHUB.findall((DOCS / f"{page}.md").read_text())
    assert code
    exec(compile("import torch, speedswap\n" + "\n".join(code), f"{page}.md", "exec"), {"__name__": "page"})


def test_pictures_of_concepts_are_as_drawn() -> None:
    folder = concept_pictures.FOLDER
    assert {path.name: path.read_text() for path in folder.glob("*.svg")} == concept_pictures.drawn()
