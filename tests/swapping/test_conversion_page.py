"""The snippets of docs/conversion.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "conversion.md").read_text()


def test_snippets_of_the_page_run():
    code = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(code) == 4
    exec(compile("import torch, speedswap\n" + "\n".join(code), "conversion.md", "exec"), {})
