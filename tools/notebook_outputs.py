"""Execute a notebook and keep its outputs as a checkout has them: small, and without the names of places.

    python tools/notebook_outputs.py colab/03_transfer_benchmark.ipynb

Pictures get few colours, pieces of printed text are joined, and what goes to standard error is left out. The transfer
benchmark measures: execute it while nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLOURS = 32
SECONDS = 900


def main() -> None:
    """Execute the notebook that the command line names, and write it back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    nbformat.write(notebook, path)


def kept(outputs: list[Any]) -> list[Any]:
    """Return a cell's outputs as they are kept."""
    found: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if output.output_type == "stream":
            output.text = re.sub(r"(installed in +).*", r"\1speedswap", output.text)
            if found and found[-1].output_type == "stream":
                found[-1].text += output.text
                continue
        elif picture := output.get("data", {}).get("image/png"):
            output.data["image/png"] = small(picture)
        found.append(output)
    return found


def small(picture: str) -> str:
    """Return a PNG in base64 with few colours."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    out = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    main()
