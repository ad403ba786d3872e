"""docs/gpu-status.md has a line for everything that touches a GPU, and claims no more than the figures show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def lines() -> list[list[str]]:
    """Return the table's cells, row by row."""
    text = (ROOT / "docs" / "gpu-status.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def test_every_cuda_file_is_listed():
    named = {name for what, *_ in lines() for name in re.findall(r"`(\w+\.(?:py|cuh))`", what)}
    files = [*(ROOT / "speedswap" / "kernels" / "cuda").glob("*.py"), *(ROOT / "csrc").glob("*.cuh")]
    assert {path.name for path in files} - {"__init__.py"} == named


def test_what_no_file_shows_was_never_run():
    figures = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    for what, _, _, _, ran in lines():
        shown = set(re.findall(r"[\w-]+\.json", ran))
        assert not any(name.endswith("-cpu.json") for name in shown), what
        assert ran == "never" or (shown and shown <= figures and re.search(r"\d{4}-\d\d-\d\d", ran)), what


def test_tests_that_it_names_exist():
    for cells in lines():
        for path in re.findall(r"`(tests/[\w/.]+)`", " ".join(cells)):
            assert (ROOT / path).exists(), path


# ---- other pages -----------------------------------------------------------------------------------------------------

GENERATED = re.compile(r"<!-- ([\w ]+): tools/readme_figures.py -->.*?<!-- end of \1 -->|```.*?```", re.DOTALL)
NO_GPU = re.compile(r"simulated GPUs?|(?:without a|without|no) GPU", re.IGNORECASE)
RUN = r"\b(?:has|have|had|was|were|been|never|ever|nothing|yet)\b.*\b(?:run|ran|measured|tested|tried|timed)\b|\bran\b"
ON = r"\bon (?:(?:a|an|one|any|real) )*(?:GPUs?|H100|real one)\b"
CLAIM = re.compile(rf"(?:{RUN}|\bmeasured\b).*{ON}|{ON}.*(?:{RUN})", re.IGNORECASE)
DENIAL = re.compile(r"\b(?:never|nothing|not|none|yet)\b|\bno\.", re.IGNORECASE)
MODEL = re.compile(r"\b(?:[ABHV]\d{2}0|GB?\d00|L40S?|T4)\b")


def pages() -> list[Path]:
    """Return all pages but this one, and the changes, which are of their time."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    return sorted(page for page in found if page.name not in ("gpu-status.md", "CHANGELOG.md"))


def contradictions(text: str) -> list[str]:
    """Return what a page says by itself of runs on a GPU, which only its marks, a file or a link may say."""
    gpus = {path.name: json.loads(path.read_text())["machine"]["gpu"] for path in RESULTS.glob("*-cuda.json")}
    wrong = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\||\s*- )", GENERATED.sub("", text)):
        named = [gpus.get(name, "") for name in re.findall(r"([\w-]+-cuda\.json)", paragraph)]
        is_shown = bool(named) and all(named)
        for sentence in re.split(r"(?<=[.;?!])\s+", " ".join(paragraph.split())):
            said = NO_GPU.sub("", sentence)
            is_claim = CLAIM.search(said) and not is_shown
            if is_claim and (DENIAL.search(said) or "gpu-status.md" not in sentence):
                wrong.append(sentence)
            foreign = {model for model in MODEL.findall(said) if not any(model in gpu for gpu in named)}
            if foreign and not re.search(r"published|Published|#\d+|#on-a-gpu", paragraph):
                wrong.append(sentence)
    return wrong


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_only_one_source_says_what_has_run_on_a_gpu(page: Path) -> None:
    assert contradictions(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "**It has never run on a real GPU** ([what was checked](gpu.md)).",
        "**Has it run on a GPU?** No. [On a GPU](gpu.md) says more.",
        "- Nothing has been measured on a GPU yet ([status](gpu-status.md)).",
        "- Nothing here has been run on a GPU yet ([gpu-status.md](gpu-status.md)).",
        "It has run on the host and on the simulated GPU, never on a real one.",
        "The CUDA paths ran on one H100, for half an hour.",
        "On an A100 a step takes 3 ms (`tables-cuda.json`).",
        "Measured on a GPU (`no_such-cuda.json`): 3 ms.",
    ],
)
def test_a_page_that_says_otherwise_is_found(text: str) -> None:
    assert contradictions(text)


def test_marks_links_and_files_may_say_it() -> None:
    block = "<!-- GPU runs: tools/readme_figures.py -->\n\nRun on a GPU: H100\n\n<!-- end of GPU runs -->"
    link, figure = (
        "[GPU status](gpu-status.md) says what has run on a GPU.",
        "Measured on an H100 (`tables-cuda.json`): 3 ms",
    )
    text = "\n\n".join([block, link, figure])
    assert contradictions(text) == []
