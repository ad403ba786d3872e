"""Commands run inside a checkout that is not built: they use an install of the same sources, or say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speedswap.kernels import _C
from speedswap.kernels._compiled import with_compiled_part

ROOT = Path(__file__).resolve().parent.parent
NOT_PYTHON = shutil.ignore_patterns("_C.*.so", "__pycache__")
SITE_PACKAGES = [entry for entry in sys.path if entry.endswith("site-packages")]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the sources without a build, as ``git clone`` gives it."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "speedswap", folder / "speedswap", ignore=NOT_PYTHON)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with the package as ``pip install .`` leaves it."""
    folder = tmp_path / "site"
    shutil.copytree(ROOT / "speedswap", folder / "speedswap", ignore=NOT_PYTHON)
    for file in (Path(_C.__file__), Path(_C.__file__).with_name("_C.sha256")):
        shutil.copy(file, folder / "speedswap" / "kernels")
    return folder


def run_in(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, without what this Python's own site-packages do at start."""
    entries = [*([str(path)] if path else []), *SITE_PACKAGES]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entries), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-S", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_command_in_a_checkout_works_with_an_install_of_the_same_sources(checkout, site):
    """git clone, pip install ., python -m speedswap: nothing about the working directory gets in the way."""
    done = run_in(checkout, "-m", "speedswap", "info", path=site)
    assert done.returncode == 0, done.stderr
    assert f"{checkout / 'speedswap'}, compiled part from {site / 'speedswap'}" in done.stdout


def test_compiled_part_comes_from_the_install_and_python_files_from_the_checkout(checkout, site):
    """An edited file takes effect at the next import."""
    code = "import speedswap; from speedswap.kernels import _C; print(speedswap.__file__); print(_C.__file__)"
    done = run_in(checkout, "-c", code, path=site)
    assert done.stdout.split() == [
        str(checkout / "speedswap" / "__init__.py"),
        str(site / "speedswap" / "kernels" / Path(_C.__file__).name),
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("changed", ["cli.py", "tables/record.py", "new.py"])
def test_install_of_other_python_files_is_refused_in_one_line(checkout, site, changed):
    """A build under Python files it was not made for could compute something else without an error."""
    with open(checkout / "speedswap" / changed, "a") as file:
        file.write("# changed\n")
    done = run_in(checkout, "-m", "speedswap", "info", path=site)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"hides speedswap in {site / 'speedswap'}" in done.stderr
    assert f"change to another directory, or run pip install -e {checkout}" in done.stderr


def test_compiled_part_of_other_cpp_sources_is_refused(checkout):
    """As after git pull in a checkout that pip install -e has built."""
    path = [str(checkout / "speedswap" / "kernels")]
    assert with_compiled_part(path) == path
    with open(checkout / "csrc" / "rows.cuh", "a") as file:
        file.write("// changed\n")
    with pytest.raises(
        ImportError, match=rf"was built from other sources than {checkout}: run pip install -e {checkout}$"
    ):
        with_compiled_part(path)
    with pytest.raises(ImportError, match="was built from other sources"):
        with_compiled_part([str(Path(_C.__file__).parent), *path])  # as an editable install's finder names them


def test_a_project_that_has_the_package_in_it_is_no_checkout(tmp_path):
    """As pip install --target leaves it there."""
    (tmp_path / "csrc").mkdir()
    for file in (tmp_path / "pyproject.toml", tmp_path / "csrc" / "bindings.cpp"):
        file.touch()
    path = [str(tmp_path / "speedswap" / "kernels")]
    assert with_compiled_part(path) == path


@pytest.mark.release
def test_install_of_other_cpp_sources_is_refused(checkout, site):
    with open(checkout / "csrc" / "loops.cpp", "a") as file:
        file.write("// changed\n")
    done = run_in(checkout, "-c", "import speedswap", path=site)
    assert done.returncode == 1
    assert "was built from other sources" in done.stderr.splitlines()[-1]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("words", [("-m", "speedswap", "info"), ("-c", "import speedswap"), ("-m", "pytest", "tests")])
def test_checkout_without_a_build_says_how_to_build_it(checkout, words):
    """Not "most likely due to a circular import"."""
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_import.py").write_text("import speedswap\n")
    done = run_in(checkout, *words)
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert f"{checkout / 'speedswap'} is a source checkout that is not built for Python" in said
    assert f"run pip install -e {checkout}" in said
    assert "circular" not in said


@pytest.mark.release
def test_package_without_a_compiled_part_says_for_which_python(tmp_path, checkout):
    """Such as a site-packages that was copied from another Python's."""
    shutil.copytree(checkout / "speedswap", tmp_path / "elsewhere" / "speedswap")
    done = run_in(tmp_path / "elsewhere", "-c", "import speedswap")
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert f"has no compiled part (_C) for {version}: install it with this Python" in done.stderr.splitlines()[-1]


def test_search_path_is_unchanged_where_the_compiled_part_is_found():
    """Built in place, installed, or found by an editable install: nothing is looked for."""
    assert with_compiled_part(["/somewhere/speedswap/kernels"]) == ["/somewhere/speedswap/kernels"]
