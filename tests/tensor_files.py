"""Safetensors files, written as their specification says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
} | ({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {})


def write(path: Path, tensors: dict[str, Tensor], blanks: int = 0) -> Path:
    """Write a safetensors file as its specification says, with some blanks after the header."""
    header, end = dict[str, Any](), 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": NAMES[values.dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + blanks)
    data = b"".join(
        values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for values in tensors.values()
    )
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
