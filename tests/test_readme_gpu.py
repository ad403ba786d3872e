"""The tables of GPU figures, from made-up files."""

from __future__ import annotations

import json

import pytest
import readme_figures
import readme_gpu

pytestmark = pytest.mark.release

MACHINE = {
    "gpu": "made-up GPU",
    "driver": "1.2.3",
    "processor": "made-up processor",
    "cores": 3,
    "memory_gib": 7.9,
    "torch": "9.9",
    "engine": {"CuPy": "8.8"},
    "commit": "abc",
    "date": "2030-01-02",
}


def write(folder, name, results):
    (folder / f"{name}-cuda.json").write_text(json.dumps({"machine": MACHINE, "results": results}))


def point(footprint_gib, row_bytes, **ratios):
    both = dict.fromkeys(("to_device", "from_device"), ratios)
    return {"footprint_bytes": footprint_gib * 2**30, "row_bytes": row_bytes, "ratios": both}


RATIOS = {"zero_copy_over_kernel": 0.95, "best_over_copy_engine": 0.8, "best_over_torch": 3.0}
POINTS = [
    point(1, 128, **{**RATIOS, "best_over_copy_engine": 0.2}),  # narrow rows have no such goal
    point(1, 512, **{**RATIOS, "best_over_speedtorch": 1.6}),
    point(10, 512, **{**RATIOS, "zero_copy_over_kernel": 0.89, "best_over_copy_engine": 0.97}),
    point(1, 1536, **{**RATIOS, "best_over_speedtorch": 1.1}),  # SpeedTorch's method has 0.73 of a copy here
    point(10, 1536, **RATIOS),
]

TABLES = {
    "acceptance": [
        {"what": "sgd", "asked": 6, "unit": "ms", "at_most": True, "reached": 5.5, "full_size": True, "met": True}
        | {"over_floor": 1.25, "over_published": 0.4825},
        {"what": "adam", "asked": 14, "unit": "ms", "at_most": True, "reached": None, "full_size": True, "met": False},
        {"what": "in", "asked": 0.9, "unit": "of a copy", "at_most": False, "reached": 0.8, "full_size": False}
        | {"met": False},
    ],
    "profile": {"swap_hidden": 0.5, "both_directions": 0.75},
}


def cells(text):
    """Split the table into rows of cells: what, asked, reached, met, source."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_without_files_it_says_that_nothing_was_measured(tmp_path):
    assert readme_gpu.table(tmp_path) == readme_gpu.NOTHING


def test_readme_names_the_gpu_that_was_measured(tmp_path):
    assert readme_gpu.status(tmp_path).startswith(readme_gpu.NOTHING)
    write(tmp_path, "ceilings", {"rows": POINTS})
    ran = "Run on a GPU: made-up GPU (3 processors, driver 1.2.3, torch 9.9, CuPy 8.8) on 2030-01-02, at commits abc."
    assert readme_gpu.status(tmp_path).startswith(ran)
    write(tmp_path, "gpu_check", {"parts": [{"name": "tests", "result": "1234 passed, 5 skipped in 3s"}]})
    assert "1,234 tests that ask for a device passed, 5 were skipped." in readme_gpu.ran(tmp_path).replace("\n", " ")


def test_readme_shows_the_steps_over_full_tables_beside_the_published_ones(tmp_path):
    step = {"speedswap, lookahead": {"seconds": 0.005}}
    runs = {
        "adam": {"trainers": step, "full_size": True, "fair_seconds": 0.01},
        "bfloat16-staged-out": {"trainers": step, "full_size": True, "fair_seconds": None},
        "sgd-staged-out": {"trainers": step, "full_size": False, "fair_seconds": None},
    }
    work = {"tables": 2, "rows": 30, "dim": 8, "lookups": 40}
    write(tmp_path, "tables", {"runs": runs, "workload": work, "published": {"gpu": "other GPU", "rows": 99}})
    head, adam, compact = cells(readme_gpu.status(tmp_path))
    assert head[0] == "2 tables of 30 × 8 in host memory, 40 lookups a step"
    assert adam == ["Adam", "5.0 ms", "10.0 ms", "2.0 ×"]
    assert compact[1:] == ["5.0 ms", "–", "–"]
    assert "not measured here" in readme_gpu.status(tmp_path)


def test_ceilings_are_the_worst_of_their_rows(tmp_path):
    write(tmp_path, "ceilings", {"rows": POINTS})
    head, *rows = cells(readme_gpu.table(tmp_path))
    assert head == ["What", "Asked", "Reached", "Met", "Source"]
    assert [row[1:4] for row in rows] == [
        ["≥ 0.90", "to the device 0.95, 0.89; from it 0.95, 0.89", "no"],
        ["≥ 0.85", "to the device 0.80, 0.80; from it 0.80, 0.80", "no"],
        ["≥ 0.75", "to the device 0.80, 0.97; from it 0.80, 0.97", "yes"],
        ["≥ 1.50", "to the device 1.60; from it 1.60", "yes"],
        ["≥ 2.00", "to the device 3.00, 3.00; from it 3.00, 3.00", "yes"],
    ]
    assert all(row[0].endswith("tables of 1, 10 GiB") for row in rows if "SpeedTorch" not in row[0])
    assert {row[4] for row in rows} == {"ceilings-cuda.json"}


def test_steps_stand_beside_what_is_asked_and_published(tmp_path):
    write(tmp_path, "tables", TABLES)
    _, *rows = cells(readme_gpu.table(tmp_path))
    sgd, adam, moved, profile = rows
    reached = "5.50, 1.25 × the bus's floor, 0.48 × FBGEMM as published for an H100, brought to as many rows"
    assert sgd[:4] == ["sgd", "≤ 6 ms", reached, "yes"]
    assert adam[1:4] == ["≤ 14 ms", "not measured", "no"]
    assert moved[1:4] == ["≥ 0.9 of a copy", "0.80, in smaller tables", "no"]
    assert profile[1:4] == ["", "50%; both directions at once 75%", ""]


def test_word2vec_and_the_machine(tmp_path):
    found = {"asked_words_per_second": 10**7, "reached_words_per_second": 9_999_999, "corpus": "20 words"}
    write(tmp_path, "word2vec", found)
    text = readme_gpu.table(tmp_path)
    (_, row) = cells(text)
    assert row == ["word2vec on 20 words", "≥ 10,000,000 words/s", "9,999,999 words/s", "no", "word2vec-cuda.json"]
    said = text.splitlines()[-1]
    assert said.startswith(
        "made-up GPU, driver 1.2.3, made-up processor, 3 cores, 8 GiB, torch 9.9, CuPy 8.8, commit abc"
    )
    assert said.endswith("Not measured: ceilings-cuda.json, tables-cuda.json.")


def test_what_is_between_the_marks_is_replaced():
    text = "before <!-- a --> old <!-- b --> after <!-- c -->"
    assert readme_figures.between(text, "<!-- a -->", "<!-- b -->", "new") == (
        "before <!-- a -->\n\nnew\n\n<!-- b --> after <!-- c -->"
    )
