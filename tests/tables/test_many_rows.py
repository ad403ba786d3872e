"""Tables on disk with more rows than 32 bits can count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import speedswap
from speedswap.errors import IdError

NEAR = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1]


@pytest.mark.parametrize(("rows", "dim"), [(5 * 10**9, 128), (9 * 10**9, 3)], ids=["long rows", "groups of rows"])
def test_rows_beyond_32_bits_train_as_those_of_a_small_table(rows: int, dim: int, tmp_path: Path, device: str) -> None:
    """With duplicates, and under lookahead; ids that are equal in their low 32 bits are different rows."""
    items = speedswap.Embedding(
        rows, dim, storage=speedswap.Disk(tmp_path / "t", cache_bytes=1 << 22), seed=5, device=device
    )
    near = torch.tensor([*NEAR, rows - 1, (rows - 1) % 2**32])
    untouched = torch.tensor([7, 2**32 + 7])
    before = items.table.gather(untouched).weight
    generator = torch.Generator().manual_seed(1)
    batches = [torch.cat([near, torch.randint(rows, (50,), generator=generator), near]) for _ in range(3)]
    used = torch.unique(torch.cat(batches))
    initial = items.table.gather(used).weight.cpu()
    small = speedswap.Embedding.from_pretrained(initial, freeze=False, device="cpu")
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (items, small)]
    for batch in speedswap.lookahead([batch.to(device) for batch in batches], {items: lambda ids: ids}, depth=2):
        items(batch).square().sum().backward()
        small(torch.searchsorted(used, batch.cpu())).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    items.table.close()
    with speedswap.Table.open(speedswap.Disk(tmp_path / "t", cache_bytes=1 << 22)) as table:
        # Adam moves a weight by about its learning rate, however small the weight: what a GPU rounds differently in the
        # root, the quotient and the product of a step remains where the weight comes next to zero.
        moved = len(batches) * 0.1 * 4 * torch.finfo(torch.float32).eps / 2
        for name, atol in (("weight", moved), ("exp_avg_sq", 0.0)):
            rtol, atol = (1e-5, atol) if device == "cuda" else (0, 0)
            found = table.gather(used).columns[name]
            torch.testing.assert_close(found, small.table.read(column=name), rtol=rtol, atol=atol)
        assert torch.equal(table.gather(untouched).weight, before.cpu())
        assert not torch.equal(before[0], before[1])
        assert torch.equal(table.read(rows - 3, rows), table.gather(torch.arange(rows - 3, rows)).weight)
        for wrong in (rows, -1, 2**63 - 1):
            with pytest.raises(IdError):
                table.gather(torch.tensor([wrong]))
        table.reset_rows(near[-1:])
        assert torch.equal(table.gather(near[-1:]).weight, initial[torch.searchsorted(used, near[-1:])])
        table.flush()
        assert not table.store.files.verify(lambda share: None).damaged
