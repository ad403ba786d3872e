"""Draw the pictures of docs/concepts.md, each for light and for dark pages, under ``docs/pictures/concepts``.

    python tools/concept_pictures.py

A test holds that the files are what is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from readme_pictures import DARK, FONT, LIGHT

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "concepts"
Colors = dict[str, str]


def box(
    colors: Colors, x: int, y: int, width: int, height: int, *lines: str, fill: str = "card", ink: str = "text"
) -> str:
    """Draw a rounded box with lines of text in its middle, the first one bold."""
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    words = "".join(
        f'<text x="{x + width / 2}" y="{top + 18 * place}" fill="{colors[ink]}" text-anchor="middle"'
        f' font-weight="{400 if place else 600}">{escape(line)}</text>'
        for place, line in enumerate(lines)
    )
    style = f'fill="{colors[fill]}" stroke="{colors["line"]}"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" {style}/>{words}'


def arrow(colors: Colors, x: int, y: int, to_x: int, to_y: int, color: str, words: str = "", above: int = 8) -> str:
    """Draw an arrow with a label over its middle."""
    head = f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{colors[color]}" stroke-width="2" marker-end="url(#{color})"/>'
    label = f'<text x="{(x + to_x) / 2}" y="{(y + to_y) / 2 - above}" fill="{colors[color]}" text-anchor="middle">'
    return head + (f"{label}{escape(words)}</text>" if words else "")


def note(colors: Colors, x: int, y: int, words: str, anchor: str = "start", ink: str = "muted") -> str:
    """Write a line of text."""
    return f'<text x="{x}" y="{y}" fill="{colors[ink]}" text-anchor="{anchor}">{escape(words)}</text>'


def step(c: Colors) -> list[str]:
    """Draw a training step between table and device."""
    return [
        note(c, 20, 24, "host memory or disk"),
        box(c, 20, 36, 800, 56, "table: all rows", "each row's record: weight | optimizer state"),
        note(c, 20, 236, "compute device"),
        box(c, 20, 166, 180, 52, "block", "the batch's rows", fill="in_state"),
        box(c, 240, 166, 120, 52, "forward"),
        box(c, 400, 166, 120, 52, "backward"),
        box(c, 560, 166, 260, 52, "optimizer's step", "new weight | new state", fill="state"),
        arrow(c, 110, 96, 110, 160, "in"),
        note(c, 122, 133, "gather: distinct rows, once", ink="in"),
        arrow(c, 202, 192, 236, 192, "muted"),
        arrow(c, 362, 192, 396, 192, "muted"),
        arrow(c, 522, 192, 556, 192, "muted"),
        arrow(c, 690, 162, 690, 98, "out"),
        note(c, 678, 133, "scatter, and then the commit", "end", "out"),
    ]


def lookahead(c: Colors) -> list[str]:
    """Draw three steps whose swaps are hidden behind computation."""
    drawn = []
    for place in range(3):
        x = 150 + 225 * place
        drawn += [
            box(c, x, 84, 215, 40, f"step {place + 1} computes"),
            box(c, x, 36, 150, 34, f"gather batch {place + 2}", fill="in_state"),
        ]
        if place:
            drawn.append(box(c, x, 138, 150, 34, f"scatter batch {place}", fill="state"))
    drawn += [note(c, 140, 58, "to the device", "end"), note(c, 140, 110, "device", "end")]
    drawn += [note(c, 140, 160, "back", "end"), arrow(c, 150, 196, 822, 196, "muted"), note(c, 822, 216, "time", "end")]
    return [*drawn, note(c, 150, 220, "rows that two batches share are forwarded on the device", ink="in")]


def split(c: Colors) -> list[str]:
    """Draw a batch that is tried whole, rolled back and split."""
    return [
        box(c, 20, 40, 300, 46, "batch of 1,024 samples"),
        arrow(c, 324, 63, 396, 63, "out"),
        box(c, 400, 40, 220, 46, "out of memory: rolled back", fill="state"),
        arrow(c, 510, 90, 510, 124, "muted"),
        box(c, 20, 128, 146, 46, "512 samples", fill="in_state"),
        box(c, 174, 128, 146, 46, "512 samples", fill="in_state"),
        arrow(c, 396, 151, 326, 151, "muted"),
        box(c, 400, 128, 220, 46, "the same batch, in halves"),
        arrow(c, 93, 178, 93, 212, "in"),
        arrow(c, 247, 178, 247, 212, "in"),
        box(c, 20, 216, 300, 46, "one gradient: weighed and added up"),
        arrow(c, 324, 239, 396, 239, "in"),
        box(c, 400, 216, 220, 46, "one optimizer step"),
    ]


def commit(c: Colors) -> list[str]:
    """Draw steps, commits and a kill on a line of time."""
    drawn = [note(c, 20, 24, "cache in memory")]
    drawn += [box(c, 20 + 92 * place, 36, 84, 40, f"step {place + 1}") for place in range(8)]
    drawn += [box(c, 756, 36, 74, 40, "killed", fill="out", ink="page")]
    for end, label in ((3, "commit of step 3"), (6, "commit of step 6")):
        x = 12 + 92 * end
        drawn += [arrow(c, x - 34, 80, x - 34, 124, "in"), box(c, x - 190, 128, 190, 40, label, fill="in_state")]
    drawn += [note(c, 20, 192, "log on disk: rows, state, step count, id maps"), arrow(c, 480, 172, 480, 204, "out")]
    return [*drawn, box(c, 350, 208, 480, 40, "opens as of step 6; steps 7 and 8 are taken again")]


def owners(c: Colors) -> list[str]:
    """Draw two ranks that exchange ids, weights and gradients."""
    drawn = []
    for rank, x in ((0, 20), (1, 560)):
        drawn += [
            box(c, x, 30, 260, 44, f"rank {rank}", "its batch, its dense layers"),
            box(
                c,
                x,
                176,
                260,
                62,
                "rows that it owns",
                f"weight | state of ids {'0, 2, 5, …' if not rank else '1, 3, 4, …'}",
                fill="state",
            ),
            arrow(c, x + 130, 78, x + 130, 172, "muted"),
        ]
    drawn += [
        arrow(c, 286, 96, 554, 196, "in"),
        arrow(c, 554, 96, 286, 196, "in"),
        note(c, 420, 66, "ids go to their owners,", "middle", "in"),
        note(c, 420, 84, "weights come back", "middle", "in"),
        note(c, 420, 218, "gradients go to owners,", "middle", "out"),
        note(c, 420, 236, "who step in their rows", "middle", "out"),
    ]
    return drawn


DRAWINGS: dict[str, tuple[Callable[[Colors], list[str]], int, str]] = {
    "step": (step, 250, "A step: gather, compute, scatter"),
    "lookahead": (lookahead, 232, "Lookahead: swaps run while a step computes"),
    "split": (split, 276, "A batch that does not fit, in halves"),
    "commit": (commit, 260, "Commits, and what a kill leaves"),
    "owners": (owners, 252, "Rows owned by ranks"),
}


def drawn() -> dict[str, str]:
    """Return the text of each file, by its name."""
    files = {}
    for name, (draw, height, title) in DRAWINGS.items():
        for theme, colors in (("light", LIGHT), ("dark", DARK)):
            heads = "".join(
                f'<marker id="{color}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" orient="auto">'
                f'<path d="M0 0L8 4L0 8Z" fill="{colors[color]}"/></marker>'
                for color in ("in", "out", "muted")
            )
            size = f'viewBox="0 0 840 {height}" width="840" height="{height}"'
            begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="14" role="img">'
            lines = [begin, f"<title>{escape(title)}</title>", f"<defs>{heads}</defs>", *draw(colors), "</svg>"]
            files[f"{name}-{theme}.svg"] = "\n".join(lines) + "\n"
    return files


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
