"""A stranger's first contact: the package's promises to pip, and a README whose examples run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import readme_figures

import speedswap
from speedswap.kernels import _C

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "speedswap"


def requirement_name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def test_base_install_needs_nothing_heavy():
    required = [line for line in importlib.metadata.requires("speedswap") if "extra ==" not in line]
    assert {requirement_name(line) for line in required} == {"numpy", "torch"}


@pytest.mark.parametrize(("extra", "package"), [("cuda12", "cupy-cuda12x"), ("cuda13", "cupy-cuda13x")])
def test_extra_brings_the_cupy_for_its_cuda(extra, package):
    marked = [line for line in importlib.metadata.requires("speedswap") if re.search(rf"extra == .{extra}\b", line)]
    assert [requirement_name(line) for line in marked] == [package]


def test_installed_version_is_the_packages():
    assert importlib.metadata.version("speedswap") == speedswap.__version__


def test_cuda_sources_are_installed_with_the_package():
    """NVRTC compiles them at first use, so that an install without them would have no CUDA."""
    sources = {path.name for path in (ROOT / "csrc").glob("*.cuh")}
    installed = {path.name for path in (Path(_C.__file__).parent / "cuda").glob("*.cuh")}  # where they are looked for
    assert sources
    assert sources <= installed


def test_build_is_for_every_processor():
    """Instruction sets are chosen at run time: what is installed may run on another machine than it was built on."""
    built_by = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "Makefile"]
    assert not [path.name for path in built_by if "march=native" in path.read_text()]


def test_no_cpp_stream_or_locale_is_used():
    """With libstdc++ linked into the compiled part, as some toolchains do, they crash next to torch's libstdc++."""
    with_locales = "fstream|iomanip|ios|iostream|istream|locale|ostream|regex|spanstream|sstream|streambuf|strstream"
    sources = [path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".h", ".cuh")]
    headers = {path.name: set(re.findall(r"#\s*include\s*<(\w+)", path.read_text())) for path in sources}
    assert "algorithm" in headers["rows_cpu.cpp"]
    assert not {name: found for name, each in headers.items() if (found := each & set(with_locales.split("|")))}


# Functions of older glibcs whose symbols got another version since; 2.34 has those of libpthread and libdl.
RENEWED = {"__libc_single_threaded", "fstat", "fstat64", "lstat", "lstat64", "pthread_sigmask", "stat", "stat64"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_compiled_part_calls_no_function_that_glibc_2_28_lacks():
    """A release builds its wheels with that one."""
    symbols = subprocess.run(["nm", "-D", "-u", _C.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"(\w+)@+GLIBC_2\.(\d+)", symbols)
    assert "memcpy" in {name for name, _ in needed}
    later = {name for name, minor in needed if int(minor) > 28 and minor != "34"} - RENEWED
    assert not [name for name in later if not name.startswith("__isoc23_")]  # strtol and others, by newer headers


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL))
def test_readme_example_runs(code, capsys):
    exec(compile("import torch, speedswap\n" + code, "README.md", "exec"), {})


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    text = page.read_text()
    targets = re.findall(r"\]\((?!\w+:|#)([^)#]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.release
@pytest.mark.parametrize("page", readme_figures.PAGES)
def test_pages_say_what_was_measured(page):
    assert (ROOT / page).read_text() == readme_figures.filled(page)


@pytest.mark.release
def test_pictures_show_what_was_measured():
    stored = {path.name: path.read_text() for path in readme_figures.PICTURES.glob("*.svg")}
    assert stored == readme_figures.drawn()


def test_readme_names_the_commands_of_the_build():
    """The continuous build and newcomers read them from the page."""
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^make \w+", text, flags=re.MULTILINE) == ["make demo", "make test"]


def test_continuous_build_runs_what_the_readme_says():
    assert "make test" in re.findall(r"- run: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_wheels_are_built_for_every_python_that_is_promised():
    """By cibuildwheel, from the oldest that the package takes to the newest that it names."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(settings["project"]["classifiers"]))
    assert f">=3.{named[0]}" == settings["project"]["requires-python"]
    assert settings["tool"]["cibuildwheel"]["build"].split() == [f"cp3{minor}-*" for minor in named]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_repository_has_no_files_that_a_run_has_left():
    """Such as a table's directory, whose files are binary, or a name that no editor can type."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
    assert paths
    assert [path for path in paths if not str(path).isascii() or path.name in ("MANIFEST", "HEAD", "rows.log")] == []
