"""Callbacks that record and print what happens while batches are split."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import speedswap
from speedswap.monitor import Progress, SplitRecorder


@pytest.fixture
def model(device):
    return nn.Linear(4, 1).to(device)


def train(model, callbacks, limit=5, batches=(16, 16, 4)):
    """Batches through a splitter that runs out of memory above ``limit`` samples. Returns the losses."""

    def loss_fn(inputs):
        if len(inputs) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(inputs).square().mean()

    splitter = speedswap.BatchSplitter(model, callbacks=callbacks)
    device = model.weight.device
    return [float(splitter.backward(loss_fn, torch.randn(samples, 4, device=device))) for samples in batches]


def test_recorder_has_size_loss_memory_and_failures_of_each_batch(model, tmp_path):
    recorder = SplitRecorder(tmp_path / "stats.jsonl", device=model.weight.device)
    losses = train(model, [recorder])
    recorder.close()
    assert recorder.column("step") == [0, 1, 2]
    assert recorder.column("batch_size") == [16, 16, 4]
    assert recorder.column("micro_batch_size") == [4, 4, 4]
    assert recorder.column("micro_batches") == [4, 4, 1]
    assert recorder.column("out_of_memory") == [2, 0, 0]
    assert recorder.column("loss") == pytest.approx(losses)
    assert all(memory > 0 for memory in recorder.column("memory_bytes"))
    assert recorder.column("seconds") == sorted(recorder.column("seconds"))
    assert [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()] == recorder.rows


def test_recorder_is_bounded_and_writes_csv(model, tmp_path):
    recorder = SplitRecorder(limit=2, device="cpu")
    train(model, [recorder])
    assert recorder.column("step") == [1, 2]
    recorder.to_csv(tmp_path / "stats.csv")
    assert (tmp_path / "stats.csv").read_text().splitlines()[0].startswith("step,seconds,batch_size,micro_batch_size")


def test_progress_goes_where_the_printer_puts_it(model):
    lines = []
    losses = train(model, [Progress(lines.append, every=2)])
    assert lines == [
        "micro-batch size 16 → 8",
        "micro-batch size 8 → 4",
        f"batch 2: 32 samples, loss {losses[1]:.4g}",
    ]
