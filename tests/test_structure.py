"""The house: imports go one way, no package touches another's underscore names, and the walk is as documented."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from calls import files_entered

import speedswap
from speedswap.kernels import _C
from speedswap.kernels.cuda.moves import copy
from speedswap.swapping.attach import replaced_weights

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "speedswap"

OPEN_TO_ALL = {"errors", "_machine", "_process", "_words"}
# Each package may import itself and these.
BELOW: dict[str, set[str]] = {
    "kernels": set(),
    "collectives": {"kernels"},
    "tables": {"collectives", "kernels"},
    "swapping": {"collectives", "kernels", "tables"},
    "ranks": {"collectives", "kernels", "swapping", "tables"},
    "losses": {"collectives", "kernels", "swapping", "tables"},
    "optim": {"collectives", "kernels", "swapping", "tables"},
    "batching": {"collectives", "kernels"},
    "monitor": {"batching", "kernels", "tables"},
    "compat": {"batching", "collectives", "kernels", "monitor", "optim", "ranks", "swapping", "tables"},
    "apps": {"batching", "collectives", "kernels", "monitor", "optim", "ranks", "swapping", "tables"},
}


Nodes = tuple[ast.AST, ...]


@cache
def nodes(path: Path) -> Nodes:
    """Return all nodes of a Python file."""
    return (*ast.walk(ast.parse(path.read_text())),)


@cache
def modules(package: str) -> list[tuple[Path, Nodes]]:
    """Return each Python file of a package, with its nodes."""
    return [(path, nodes(path)) for path in sorted((PACKAGE / package).rglob("*.py"))]


def test_every_package_has_its_place():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == BELOW.keys()


@pytest.mark.parametrize("package", BELOW)
def test_imports_go_one_way(package):
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path, found in modules(package)
        for module in imported(found)
        if module.split(".")[1] not in BELOW[package] | OPEN_TO_ALL | {package}
    }
    assert not wrong


def imported(found: Nodes) -> set[str]:
    """Return the full names of what a file imports of speedswap."""
    names: set[str] = set()
    for node in found:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("speedswap.")}


@pytest.mark.parametrize("package", BELOW)
def test_no_modules_import_each_other_in_a_circle(package):
    """Imports within functions and for types alone count, too."""
    names = {module_of(path) for path, _ in modules(package)}
    compiled = "speedswap.kernels._C"
    imports = {
        module_of(path): {
            name if name in names else name.rpartition(".")[0] for name in imported(found) if name != compiled
        }
        & names
        for path, found in modules(package)
    }
    assert len([*TopologicalSorter(imports).static_order()]) == len(names)  # or CycleError


def module_of(path: Path) -> str:
    """Return the full name of a file's module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# A parameter from meta becomes a table's there.
REPLACING = {"speedswap/swapping/weight.py": {"__class__"}}
OF_FRAMES = {"_getframe", "currentframe", "f_back", "f_code", "f_globals", "f_lineno", "f_locals", "co_name"}


def test_what_carries_weight_reads_no_frames_and_replaces_no_class():
    found: dict[str, set[str]] = {}
    for package in ("collectives", "kernels", "ranks", "swapping", "tables"):
        for path, in_file in modules(package):
            attributes = [node for node in in_file if isinstance(node, ast.Attribute)]
            tricks = {node.attr for node in attributes if node.attr in OF_FRAMES}
            replaced = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
            if tricks := tricks | (replaced & {"__class__", "__func__"}):
                found[str(path.relative_to(ROOT))] = tricks
    assert found == REPLACING


def is_underscore(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_underscore_names(package: str) -> set[str]:
    """Return the underscore names that a package gives to its modules, functions, classes, variables and attributes."""
    names = {path.stem for path in (PACKAGE / package).rglob("_*") if is_underscore(path.stem)}
    return names.union(*(underscore_names(found) for _, found in modules(package)))


def underscore_names(found: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in found:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if is_underscore(name)}


def inherited_underscore_names(package: str) -> set[str]:
    """Return the underscore names of the classes that a package's own classes derive from."""
    names: set[str] = set()
    for _, found in modules(package):
        bases = {
            base.id
            for node in found
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name)
        }
        for module, _, name in (full.rpartition(".") for full in imported(found)):
            path = ROOT / (module.replace(".", "/") + ".py")
            if name in bases and path.exists():
                names |= {
                    each
                    for node in nodes(path)
                    if isinstance(node, ast.ClassDef) and node.name == name
                    for each in underscore_names(ast.walk(node))
                }
    return names


# As attributes, these are torch's or a named tuple's.
NOT_OURS = {*dir(torch), *dir(torch.Tensor), *dir(torch.nn.Module()), "_replace", "_asdict", "_fields", "_make"}


@pytest.mark.parametrize("package", BELOW)
def test_underscore_names_stay_in_their_package(package):
    """An attribute counts as another package's if only other packages use that name.

    A class may use those of the classes that it derives from.
    """
    others: set[str] = set().union(*(own_underscore_names(other) for other in BELOW if other != package))
    foreign = others - own_underscore_names(package) - inherited_underscore_names(package) - NOT_OURS
    wrong = set()
    for path, found in modules(package):
        touched = {node.attr for node in found if isinstance(node, ast.Attribute)} & foreign
        touched |= {
            module
            for module in imported(found)
            if module.split(".")[1] != package
            and any(is_underscore(part) and part not in OPEN_TO_ALL for part in module.split("."))
        }
        wrong |= {f"{path.relative_to(ROOT)} touches {name}" for name in touched}
    assert not wrong


def test_lookup_and_scatter_walk_through_the_documented_files(device, monkeypatch):
    """Every file counts whose functions are called, in a process that has done its one-time work."""
    for key in list(replaced_weights):  # of models that something keeps from other tests
        monkeypatch.delitem(replaced_weights, key)
    items = speedswap.Embedding(1000, 8, storage="pageable" if device == "cpu" else "pinned").to(device)
    optimizer = torch.optim.Adam(items.parameters())
    ids = torch.randint(1000, (64,), device=device)
    for _ in range(3):
        items(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    if device == "cpu":
        walk, end = documented_walk("A lookup,"), _C.gather
    else:
        walk, end = documented_walk("The same to a CUDA launch"), copy
    assert files_entered(lambda: losses.append(items(ids).sum()), end) == walk
    losses[0].backward()
    if device == "cpu":
        assert files_entered(optimizer.step, _C.scatter) == documented_walk("A scatter,")


def documented_walk(section: str) -> list[str]:
    """Return the files in the list of docs/architecture.md whose introduction begins with ``section``."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## The walk")[1].split("\n## ")[0]
    block = text.split(f"\n{section}")[1].split("```")[1]
    return [line.split()[0] for line in block.strip().splitlines()]
