"""Tables of ranks on disk: for the commands, for other processes and for saving during training."""

from __future__ import annotations

import pickle
import threading

import saved_scenarios as saved
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from places import owned
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import speedswap


def on_disk(group, folder):
    """Train tables on disk, one with an id map; return the rows by key, and what a pickle of one is."""
    id_map = speedswap.IdMap(50, keys="exact")
    words = speedswap.Embedding(51, 3, id_map=id_map, seed=1, storage=owned(group, path=f"{folder}/words"))
    items = speedswap.Embedding(40, 3, seed=2, storage=owned(group, path=f"{folder}/items"))
    optimizer = torch.optim.Adagrad([*words.parameters(), *items.parameters()], 0.1)
    for number in range(3):
        optimizer.zero_grad()
        keys = [f"key {number + group.rank()}", "other"]
        (words(keys).sum() + items(torch.tensor([number, group.rank()])).sum()).backward()
        optimizer.step()
    keys = [f"key {number}" for number in range(6)]
    rows = words.read(words.id_map.lookup(keys)), items.read()
    said = []
    for module in (items, words):
        try:
            again = pickle.loads(pickle.dumps(module))
            said.append((type(again).__name__, again.num_embeddings, torch.equal(again.read(), module.read())))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    words.table.save(f"{folder}/saved")
    words.table.close()
    items.table.close()
    return rows, said


class SlowWriter(dcp.FileSystemWriter):
    """A writer that begins when it is told to."""

    def __init__(self, path, begins):
        super().__init__(path)
        self._begins = begins

    def write_data(self, plan, planner):
        self._begins.wait()
        return super().write_data(plan, planner)


def save_beside(group, folder):
    """Save while the training goes on; return the errors of the saved and of the trained values."""
    own = dist.new_group(dist.get_process_group_ranks(group))  # group is the whole job
    model, optimizer = saved.training(group)
    saved.train(model, optimizer, range(2), group)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    begins = threading.Event()
    writing = dcp.async_save(states, storage_writer=SlowWriter(folder, begins), process_group=own)
    saved.train(model, optimizer, range(2, 4), group)
    assert not writing.done()
    begins.set()
    saved.train(model, optimizer, range(4, 6), group)
    writing.result()
    off = saved.off_by(model, 6)
    model, optimizer = saved.training(group)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, process_group=own)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    found = saved.off_by(model, 2)
    saved.train(model, optimizer, range(2, 4), group)
    dist.destroy_process_group(own)
    return off, found, saved.off_by(model, 4)
