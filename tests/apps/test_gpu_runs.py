"""Small runs of ncf and dlrm with the model on a GPU, compared with the same runs on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speedswap.apps import dlrm, ncf

DLRM = {"generate": 3000, "ids": 300, "capacity": 1000, "dim": 8, "bottom": (16,), "top": (16,), "batch": 256}
NCF = {"users": 60, "items": 130, "interactions": 900, "factors": 4, "layers": (8, 4), "batch": 64, "epochs": 2}


@pytest.fixture(autouse=True)
def _on_a_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")


@pytest.mark.parametrize("storage", ["auto", "device"])
def test_dlrm_trains_and_predicts_as_on_the_cpu(device: str, storage: str, tmp_path: Path) -> None:
    samples = dlrm.GeneratedSamples(300, ids=300).read(300)

    def run(on: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result = dlrm.train(dlrm.DlrmSettings(**DLRM, device=on, **settings), output=tmp_path / on, progress=False)
        predicted = result.model.predict(samples.to(torch.device(on)))
        return torch.tensor([point.loss for point in result.curve]), predicted.cpu()

    near, expected = run(device, storage=storage), run("cpu")
    torch.testing.assert_close(near, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("storage", ["auto", "device"])
def test_ncf_trains_as_on_the_cpu(device: str, storage: str) -> None:
    near = ncf.train(ncf.NcfSettings(**NCF, storage=storage, device=device), progress=False)
    far = ncf.train(ncf.NcfSettings(**NCF, device="cpu"), progress=False)
    assert [epoch.loss for epoch in near.epochs] == pytest.approx([epoch.loss for epoch in far.epochs], rel=1e-3)
