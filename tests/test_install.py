"""Messages about missing optional packages: the advised command works for every kind of install."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

import speedswap
from speedswap._words import pip_install


def test_command_names_packages_in_the_versions_of_the_extra():
    """As pyproject.toml states them; torch has another version there than speedswap itself requires."""
    assert pip_install("gensim", "tqdm", extra="demo") == "pip install 'gensim>=4.3.3' 'tqdm>=4.66'"
    assert pip_install("FBGEMM_gpu_cpu", "torch", extra="benchmarks") == (
        "pip install fbgemm-gpu-cpu==1.8.0 'torch==2.13.*'"
    )


def test_package_that_no_extra_names_is_named_without_a_version():
    """A CUDA that no extra is for."""
    assert pip_install("cupy-cuda11x", extra="cuda11") == "pip install cupy-cuda11x"


def test_source_tree_without_metadata_still_gives_a_command(monkeypatch):
    """PYTHONPATH=checkout: nothing was installed that could be asked."""

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert pip_install("matplotlib", extra="demo") == "pip install matplotlib"


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "demo", "keras"])
def test_every_package_of_an_extra_is_known_by_its_name(extra):
    """The command is made of the metadata's own requirements."""
    lines = [line for line in importlib.metadata.requires("speedswap") if re.search(rf"extra == .{extra}\b", line)]
    assert lines
    for line in lines:
        requirement = line.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", requirement)[0]
        assert shlex.split(pip_install(name, extra=extra)) == ["pip", "install", requirement]


def test_no_message_asks_a_package_index_for_speedswap():
    """It need not be there under that name, or be the one that is installed."""
    package = Path(speedswap.__file__).parent
    advice = re.compile(r"pip install '?speedswap\b")
    assert not [str(file) for file in package.rglob("*.py") if advice.search(file.read_text())]
