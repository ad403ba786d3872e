"""Bases in float8_e4m3fn with scales: the bits of torch's products, rounded once, however scales are laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_files import write
from torch import Tensor

import speedswap
from speedswap import Disk, Table, init, kernels
from speedswap.errors import TableFormatError

ROWS, DIM = 200, 96
EXPONENTS = getattr(torch, "float8_e8m0fnu", None)
needs_exponents = pytest.mark.skipif(EXPONENTS is None, reason="torch 2.6 has no float8_e8m0fnu")


def values(rows: int = ROWS) -> Tensor:
    """Return every byte, NaN as well, in random order."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (rows, DIM), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, and NaN in the same places, whose bits torch does not keep."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    are_numbers = ~one.isnan()
    return torch.equal(are_numbers, ~other.isnan()) and torch.equal(
        one[are_numbers].view(bits), other[are_numbers].view(bits)
    )


@needs_exponents
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_times_every_scale_is_that_of_torch(dtype: torch.dtype) -> None:
    """All 65,536 pairs of a byte and an exponent: subnormal, infinite and NaN products too."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    exponents = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    ids = torch.arange(255, -1, -1)
    out = torch.empty(256, 256, dtype=dtype)
    kernels.decode_rows(raw, exponents, (1, 256), ids, out)
    want = (raw.view(torch.float8_e4m3fn).float() * exponents.view(EXPONENTS).float()).to(dtype)
    assert want.isnan().any()
    assert want.isinf().any()
    assert same(want[ids], out)


FLOATS = {  # shape of the scales, and block=
    "one for all": ((), None),
    "one in a list": ((1,), None),
    "a row": ((ROWS,), None),
    "a row in a column": ((ROWS, 1), None),
    "a block": ((ROWS, 3), None),
    "an uneven block": ((ROWS, 5), 20),
    "a tile": ((7, 3), None),
    "an uneven tile": ((5, 3), 40),
}


@pytest.mark.parametrize("layout", FLOATS)
def test_scales_of_any_layout(layout: str, tmp_path: Path) -> None:
    """Of three tensors as weight_scale_inv, in memory and on disk, in several dtypes."""
    shape, block = FLOATS[layout]
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.01
    wide = torch.ones(ROWS, DIM) * scales.reshape((*shape, 1, 1)[:2]) if len(shape) < 2 else scales
    if len(shape) == 2:
        rows_of_tile = 1 if shape[0] == ROWS else block or 32
        wide = wide.repeat_interleave(rows_of_tile, 0)[:ROWS].repeat_interleave(block or DIM // shape[1], 1)[:, :DIM]
    tensors = {}
    for part in (0, 1):
        tensors[f"m.{part}.weight"] = values()
        tensors[f"m.{part}.weight_scale_inv"] = scales * (part + 1)
    write(tmp_path / "m.safetensors", tensors)
    base = init.of_tensors(tmp_path / "m.safetensors", "m.*.weight", scale="m.*.weight_scale_inv", block=block)
    assert (base.num_embeddings, base.dtype) == (2 * ROWS, torch.float8_e4m3fn)
    want = torch.cat([values().float() * (wide * part) for part in (1, 2)])
    ids = torch.tensor([0, 1, 33, 199, 200, 399])
    for storage in (speedswap.Pageable(), Disk(tmp_path / "float32")):
        assert same(Table.create(2 * ROWS, DIM, init=base, storage=storage).gather(ids).weight, want[ids])
    narrow = Table.create(2 * ROWS, DIM, init=base, dtype=torch.bfloat16, path=tmp_path / "t")
    assert same(narrow.read(), want.bfloat16())
    narrow.close()
    assert same(Table.open(tmp_path / "t").read(), want.bfloat16())
    half = Table.create(2 * ROWS, DIM, init=base, dtype=torch.float16).read()
    assert same(half, want.half())


@needs_exponents
def test_exponents_of_blocks_and_trained_rows(tmp_path: Path) -> None:
    """As of DeepSeek's memories: 32 values have an exponent; trained rows are stored in a wider dtype."""
    exponents = torch.randint(110, 140, (ROWS, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    write(tmp_path / "m.safetensors", {"e.scale": exponents.view(EXPONENTS), "e.weight": values()})
    base = init.of_tensors(tmp_path, "e.weight", scale="e.scale")
    scales = exponents.view(EXPONENTS).float().repeat_interleave(32, 1)
    want = (values().float() * scales).nan_to_num(0.0)
    rows = speedswap.Embedding(ROWS, DIM, init=base, stored_dtype=torch.bfloat16, storage=Disk(tmp_path / "t"))
    ids = torch.tensor([3, 199])
    assert torch.equal(rows(ids).nan_to_num(0.0), want[ids].bfloat16().float())  # exact but for subnormal products
    rows.table.scatter(ids, torch.ones(2, DIM))
    assert torch.equal(rows.read()[ids], torch.ones(2, DIM))
    assert torch.equal(rows.read()[:3].nan_to_num(0.0), want[:3].bfloat16().float())


def test_wrong_scales_are_refused(tmp_path: Path) -> None:
    tensors = {
        "w": values(),
        "other": torch.ones(ROWS, DIM),
        "long": torch.ones(ROWS + 1),
        "ids": torch.ones(ROWS, dtype=torch.int64),
        "unclear": torch.ones(1, 3),
    }
    file = write(tmp_path / "m.safetensors", tensors)
    for names, settings, error, message in [
        ("w", {}, ValueError, "give scale=, their names"),
        ("w", {"scale": ["long", "unclear"]}, ValueError, "2 tensors"),
        ("other", {"scale": "long"}, ValueError, "they have no scales"),
        ("w", {"scale": "long"}, ValueError, r"'long'.*\(201,\).*200 × 96; give block="),
        ("w", {"scale": "ids"}, TypeError, "int64; scales are float32"),
        ("w", {"scale": "weights"}, ValueError, "has no tensor 'weights'"),
    ]:
        with pytest.raises(error, match=message):
            init.of_tensors(file, names, **settings)
    small = write(tmp_path / "small.safetensors", {"w": values(100), "s": torch.ones(1, 1), "t": torch.ones(4, 1)})
    assert init.of_tensors(small, "w", scale="s").num_embeddings == 100
    with pytest.raises(ValueError, match=r"\(4, 1\), and block is None"):
        init.of_tensors(small, "w", scale="t")
    with pytest.raises(ValueError, match="block is 32"):
        init.of_tensors(small, "w", scale="t", block=32)
    with pytest.raises(ValueError, match="block is 0"):
        init.of_tensors(small, "w", scale="t", block=0)


def test_two_blocks_of_a_row_may_be_uneven(tmp_path: Path) -> None:
    """Halves of 48 columns, or 64 and 32: shapes do not say."""
    scales = torch.tensor([[1.0, 2.0]]).expand(ROWS, 2)
    file = write(tmp_path / "m.safetensors", {"w": values(), "s": scales})
    with pytest.raises(ValueError, match=r"\(200, 2\), and block is None, .* give block="):
        init.of_tensors(file, "w", scale="s")
    for block in (48, 64):
        base = init.of_tensors(file, "w", scale="s", block=block)
        want = values().float() * torch.where(torch.arange(DIM) < block, 1.0, 2.0)
        assert same(Table.create(ROWS, DIM, init=base).read(), want)


def with_tensor(path: Path, dtype: str, values: dict[str, Tensor]) -> Path:
    """Write tensors, and before them one of four bytes of a dtype that torch may lack."""
    write(path, values)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    entries: dict[str, Any] = {"x": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}
    for name, entry in header.items():
        entries[name] = entry | {"data_offsets": [at + 4 for at in entry["data_offsets"]]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4) + raw[8 + int.from_bytes(raw[:8], "little") :])
    return path


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F8_E8M0", "NEW"])
def test_dtypes_that_torch_may_lack_disturb_no_other_tensor(dtype: str, tmp_path: Path) -> None:
    file = with_tensor(tmp_path / "m.safetensors", dtype, {"w": torch.ones(3, 2)})
    assert torch.equal(speedswap.Embedding.from_file(file, "w").read(), torch.ones(3, 2))
    assert torch.equal(Table.from_file(file, columns=["w"]).read(), torch.ones(3, 2))
    assert torch.equal(Table.create(3, 2, init=init.of_tensors(file, "w")).read(), torch.ones(3, 2))
    if dtype != "F8_E8M0":
        for refused in (speedswap.Embedding.from_file, init.of_tensors):
            with pytest.raises(TableFormatError, match=f"tensor 'x' has dtype '{dtype}', which is not read"):
                refused(file, "x")
