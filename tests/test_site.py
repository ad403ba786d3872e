"""The documentation builds as a site without a warning, its links lead somewhere, and its API has every public name."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import site_links

import speedswap
from speedswap.apps import errors

ROOT = Path(__file__).resolve().parent.parent
INTERNAL = {"collectives", "kernels", "ranks", "swapping", "tables.owners"}  # what they have for users is speedswap's


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make docs`` builds it."""
    missing = [
        name for name in ("sphinx", "furo", "myst_nb", "sphinx_design", "sphinx_copybutton") if not find_spec(name)
    ]
    if missing:
        pytest.skip(f"needs the packages of the extra docs: {', '.join(missing)}")
    out = tmp_path_factory.mktemp("site")
    quick = ["-D", "toc_object_entries=0", "-D", "html_theme=basic", "-d", str(out / "doctrees")]
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *quick, "-c", "docs", ".", str(out / "html")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.slow
def test_every_link_leads_somewhere(site: Path) -> None:
    assert (site / "docs" / "index.html").exists()
    assert not site_links.broken(site)


def documented(site: Path) -> set[str]:
    """Return the names in the site's inventory."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" py:")[0] for line in zlib.decompress(packed).decode().splitlines() if " py:" in line}


def public_modules() -> list[str]:
    """Return the modules that say what is public in them."""
    found = []
    for path in sorted((ROOT / "speedswap").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        inner = name.partition(".")[2]
        internal = any(inner == each or inner.startswith(f"{each}.") for each in INTERNAL) or "._" in name
        assigned = {
            target.id
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if "__all__" in assigned and not internal:
            found.append(name)
    return found


def names_of(module: str, name: str) -> set[str]:
    """Return the full names under which a public name may be documented."""
    value = getattr(importlib.import_module(module), name)
    names = {f"{module}.{name}", f"{module.rpartition('.')[0]}.{name}"}
    if vars(speedswap).get(name) is value:
        names.add(f"speedswap.{name}")
    if isinstance(value, ModuleType):
        names.add(value.__name__)
    elif hasattr(value, "__qualname__"):
        names.add(f"{value.__module__}.{value.__qualname__}")
    return names


@pytest.mark.slow
def test_the_api_has_every_public_name(site: Path) -> None:
    known = documented(site)
    modules = public_modules()
    assert {"speedswap", "speedswap.batching.retry", "speedswap.compat.toma"} <= set(modules)
    missing = [
        f"{module}.{name}"
        for module in modules
        for name in importlib.import_module(module).__all__
        if not names_of(module, name) & known
    ]
    assert not missing
    raised = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]
    assert {f"{each.__module__}.{each.__qualname__}" for each in raised} <= known
    assert "speedswap.Embedding.from_pretrained" in known  # and members
