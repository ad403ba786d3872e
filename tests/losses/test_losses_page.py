"""The snippets of docs/losses.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()


def test_snippets_of_the_page_run(capsys):
    code = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(code) == 5
    exec(compile("import torch, speedswap\n" + "\n".join(code), "losses.md", "exec"), {})
    assert re.match(r"loss \d+\.\d{3}, mean reciprocal rank 0\.\d{6}, hits ", capsys.readouterr().out)
