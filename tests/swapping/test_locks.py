"""One thread at a time uses the rows of a table: the one that holds its lock."""

from __future__ import annotations

import pytest
import torch
from store_locks import unguarded_uses

import speedswap


@pytest.mark.parametrize("idle_rows", ["dense", "lazy"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_whatever_uses_rows_holds_their_lock(tmp_path, on_disk, idle_rows):
    place = speedswap.Disk(tmp_path / "items") if on_disk else "auto"
    model = speedswap.Embedding(50, 3, seed=1, storage=place)
    other = speedswap.Embedding(50, 3, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [torch.randint(50, (6,)) for _ in range(8)]
    with unguarded_uses(model.table, other.table) as found:
        speedswap.attach(optimizer, model, idle_rows=idle_rows)
        for ids in speedswap.lookahead(batches, {model: lambda ids: ids}):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(ids + 0)
        model.score(torch.ones(3), 2)
        model.table.save_rows(tmp_path / "rows.safetensors")
        model.table.save(tmp_path / "copy")
        speedswap.save_checkpoint(tmp_path / "saved", model, optimizer)
        model.table.write(3, torch.ones(2, 3))
        model.table.reset_rows(torch.tensor([7]))
        optimizer.load_state_dict(optimizer.state_dict())
        other.load_state_dict(model.state_dict())
        other.table.load_rows(tmp_path / "rows.safetensors", name=model.table.name, state=False)
        speedswap.load_checkpoint(tmp_path / "saved", model, optimizer)
        if idle_rows == "lazy":
            speedswap.optim.Averaged(model).update_parameters(model)
        speedswap.attach(torch.optim.SGD(model.parameters(), 0.1), model, idle_rows=idle_rows)
    assert not found
    model.table.close()
