"""The pages of docs/with: their programs, run as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[2] / "docs" / "with"


def code_of(name: str, *parts: str) -> str:
    """Return a page's Python: all blocks, or those in which one of these texts is."""
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
    return "\n".join(block for block in blocks if not parts or any(part in block for part in parts))


def run_page(name: str, *parts: str) -> dict[str, Any]:
    """Run a page's Python, as of :func:`code_of`, in the present folder; return the names that it made."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code_of(name, *parts), f"{name}.md", "exec"), names)
    return names
