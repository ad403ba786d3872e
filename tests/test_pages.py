"""The snippets of each page run, one after the other, and its figures and pictures are those of the tools."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import concept_pictures
import pytest

import speedswap

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = "cheat-sheet contrastive export gpu growing-ids index many-tables resume warnings".split()
ON_GITHUB = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str) -> None:
    code = ON_GITHUB.findall((DOCS / f"{page}.md").read_text())
    assert code
    exec(compile("import torch, speedswap\n" + "\n".join(code), f"{page}.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", "coming-from concepts faq export gpu index which-place cheat-sheet".split())
def test_names_of_ours_exist(page: str) -> None:
    for name in re.findall(r"\bspeedswap(?:\.[A-Za-z_]\w*)+", (DOCS / f"{page}.md").read_text()):
        value: Any = speedswap
        for part in name.split(".")[1:]:
            if not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part)


def test_pictures_of_concepts_are_as_drawn() -> None:
    folder = concept_pictures.FOLDER
    assert {path.name: path.read_text() for path in folder.glob("*.svg")} == concept_pictures.drawn()
