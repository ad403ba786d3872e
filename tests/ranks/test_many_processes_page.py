"""The script of docs/many-processes.md: two ranks under torchrun train the model that one trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from children import FORKED, torchrun

ROOT = Path(__file__).resolve().parents[2]
(SCRIPT,) = (
    code
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "many-processes.md").read_text(), flags=re.DOTALL)
    if "init_process_group" in code
)


def in_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script as the one rank of a job; return what it prints."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


def test_script_of_the_page_trains_on_two_ranks_what_one_trains(tmp_path, monkeypatch, capsys):
    """One epoch on two ranks, and two more by one rank from their checkpoint, are three epochs of one rank."""
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    first = SCRIPT.replace("range(sampler.epoch, 3)", "range(sampler.epoch, 1)")
    assert first != SCRIPT
    (tmp_path / "two" / "train.py").write_text(first)
    monkeypatch.chdir(tmp_path / "two")
    assert torchrun(2, [*FORKED, "train.py"]).startswith("norms of some rows")
    resumed = in_this_process(tmp_path / "two", monkeypatch, capsys)
    whole = in_this_process(tmp_path / "one", monkeypatch, capsys)
    assert resumed == whole
    assert whole.startswith("norms of some rows")
