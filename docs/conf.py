"""Sphinx's settings: the pages of the checkout where they lie, the notebooks, and the API from the docstrings.

    sphinx-build -c docs . build/site        from the root of the checkout, whose folders are linked with each other

Pages are also read on GitHub: they are Markdown with relative links, and what GitHub shows differently is changed here.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parent.parent

autodoc_mock_imports = []
try:
    import speedswap
except ImportError:  # the compiled part is not installed: docstrings do without
    autodoc_mock_imports.append("speedswap.kernels._C")
    with mock(autodoc_mock_imports):
        import speedswap

project, version = "speedswap", speedswap.__version__
author = copyright = "speedswap contributors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "sphinx_design", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "colab/*.ipynb"]
exclude_patterns = [".*", "**/.*", "build", "bench-output", "demo-output"]
smartquotes_action = "D"  # dashes

# Members of our own base classes, but not those of torch's and Python's.
NOT_OURS = "Module, Optimizer, AveragedModel, TorchDispatchMode, BaseException, OSError, tuple, list, dict, Mapping"
autodoc_default_options = {"inherited-members": NOT_OURS}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True

html_theme = "furo"
html_title = "speedswap"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = False

# Folders that pages link to, and the page about each; those of the package by their first part.
FOLDERS = {
    "colab": "docs/tutorials.md",
    "docs/design": "docs/contributing.md",
    "examples": "docs/tutorials.md",
    "speedswap/apps": "docs/api/apps.rst",
    "speedswap/tables": "docs/api/tables.rst",
}


def as_on_github(app: Sphinx, page: str, source: list[str]) -> None:
    """Give links to folders a page, and let furo choose between the dark and the light form of a picture."""
    folder = (ROOT / page).parent

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        path = (folder / target).resolve()
        if not path.is_dir():
            return found[0]
        parts = path.relative_to(ROOT).parts[:2]
        about = FOLDERS.get("/".join(parts))
        return f"[{words}]({os.path.relpath(ROOT / about, folder)})" if about else words

    def images(found: re.Match[str]) -> str:
        dark, light, rest = found.groups()
        both = f'<img class="only-light" src="{light}"{rest}>\n<img class="only-dark" src="{dark}"{rest}>'
        return f'<div class="picture">\n{both}\n</div>'

    picture = r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img src="([^"]+)"([^>]*)>\s*</picture>'
    source[0] = re.sub(picture, images, re.sub(r"\[([^][]+)\]\(([\w./-]+)\)", link, source[0]))


def as_rst(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Escape the stars in shapes such as (*ids.shape, n), and take returns for text, not ``type: text``."""
    for place, line in enumerate(lines):
        if line.strip() in ("Returns:", "Yields:"):
            lines[place] += f"\n{' ' * (len(line) - len(line.lstrip()) + 4)}\\ "
        elif "``" not in line:
            lines[place] = re.sub(r"(?<=[( ])\*(?=[\w.]+[,)])", r"\\*", line)
    lines[:] = "\n".join(lines).split("\n")


def is_left_out(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which their class lists."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def short_name(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Resolve a name in a docstring that one object alone has; warn where none has it."""
    if node.get("refdomain") != "py":
        return None
    target, kind = node["reftarget"], node["reftype"]
    short, domain = target.removeprefix("speedswap."), env.get_domain("py")
    found = {entry.node_id: entry.docname for _, entry in domain.find_obj(env, None, None, short, kind, 1)}
    if len(found) == 1:
        ((place, docname),) = found.items()
        return make_refnode(app.builder, node["refdoc"], docname, place, content)
    if target.startswith("speedswap.") and kind != "class":  # bases that are internal are classes
        logger.warning("%s is not documented", target, location=node)
    return None


def finish(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that pages have in HTML, and send the site's address to its first page."""
    if error is None and app.builder.name == "html":
        out = Path(app.outdir)
        shutil.copytree(ROOT / "docs" / "pictures", out / "docs" / "pictures", dirs_exist_ok=True)
        (out / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", as_on_github)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", is_left_out)
    app.connect("missing-reference", short_name)
    app.connect("build-finished", finish)
