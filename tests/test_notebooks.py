"""The notebooks: a first cell that installs speedswap where it is missing, and outputs that name no machine."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
RESULTS = ROOT / "benchmarks" / "results"


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def first_cell(notebook: Path) -> str:
    return "".join(code_cells(notebook)[0]["source"])


class Shell:
    """Stands for IPython: notes the magic commands, with variables in braces replaced."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.variables: dict[str, Any] = {"get_ipython": lambda: self}

    def run_line_magic(self, name: str, line: str) -> None:
        self.asked.append((name, line.format_map(self.variables)))


def run_first_cell() -> list[tuple[str, str]]:
    shell = Shell()
    cell = TransformerManager().transform_cell(first_cell(NOTEBOOKS[0]))
    exec(compile(cell, "cell", "exec"), shell.variables)
    return shell.asked


def test_all_notebooks_begin_alike():
    assert len(NOTEBOOKS) >= 4
    assert len({first_cell(notebook) for notebook in NOTEBOOKS}) == 1


@pytest.fixture
def missing(monkeypatch):
    importlib.import_module("speedswap.cli")  # the cell imports it where find_spec finds nothing
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("missing")
def test_where_speedswap_is_missing_it_installs_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT / "colab")
    assert run_first_cell() == [("pip", f'install --quiet "{ROOT}[demo]"')]


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(
    "name", ["speedswap-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "speedswap-1.0.tar.gz", "speedswap-main.zip"]
)
def test_notebook_that_is_uploaded_alone_installs_the_file_beside_it(monkeypatch, tmp_path, name):
    """In Colab it has a folder to itself, /content."""
    folder = tmp_path / "content"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "speedswap-notes").mkdir()
    (folder / name).touch()
    assert run_first_cell() == [("pip", f'install --quiet "{folder / name}[demo]"')]


def test_where_speedswap_is_installed_it_only_says_what_it_found(capsys):
    """Nothing is installed again, and no network is needed."""
    assert run_first_cell() == []
    printed = capsys.readouterr().out
    assert {"kernels", "GPU"} <= set(printed.splitlines())
    assert re.search(r"^  CuPy +\S", printed, flags=re.MULTILINE)


@pytest.mark.usefixtures("missing")
def test_notebook_alone_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        AssertionError, match="put a clone, an archive or a wheel of speedswap into this notebook's folder"
    ):
        run_first_cell()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_small_and_name_no_place(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert outputs
    assert notebook.stat().st_size < 200_000
    assert not any(output.get("name") == "stderr" or output["output_type"] == "error" for output in outputs)
    text = "".join("".join(output.get("text", [])) for output in outputs)
    assert not re.search(r"(?<![\w.])/\w+/", text)


def test_the_benchmark_says_which_machines_its_figures_are_of():
    """Figures of a GPU stand in files of results: with the machine, the date, and what disturbed them."""
    (notebook,) = [each for each in NOTEBOOKS if "benchmark" in each.stem]
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    text = "".join("".join(output.get("text", [])) for output in outputs)
    assert re.search(r"no GPU; \d+ processors, \d+ GiB; torch \S+; \d{4}-\d\d-\d\d\n", text)
    of_gpu = [json.loads((RESULTS / f"{name}-cuda.json").read_text()) for name in ("transfer", "ceilings", "tables")]
    for machine in (document["machine"] for document in of_gpu):
        assert f"{machine['gpu']}; {machine['cores']} processors, " in text
        assert f"torch {machine['torch']}; {machine['date']}\n" in text
    assert of_gpu[0]["note"] in text
    runs = of_gpu[2]["results"]["runs"]
    assert f"{1000 * runs['adam']['trainers']['speedswap, lookahead']['seconds']:5.1f} ms" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3  # this machine's twice, and the GPU's
