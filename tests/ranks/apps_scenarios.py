"""Runs of the applications on the ranks of a job."""

from __future__ import annotations

import io
import signal
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from places import owned

import speedswap
from speedswap.apps import dlrm, ncf, word2vec
from speedswap.apps.dlrm import training as dlrm_training
from speedswap.apps.ncf import training as ncf_training
from speedswap.apps.ranks import Job
from speedswap.apps.word2vec import training as word2vec_training
from speedswap.cli import main
from speedswap.errors import PeerError


@contextmanager
def watching(module: Any, name: str, losses: list[float], *, raise_at: int | None = None):
    """Note the loss of every step of an application, and have a signal come in one of them."""
    real = getattr(module, name)

    def step(*arguments):
        loss = real(*arguments)
        losses.append(loss.sum().item())
        if len(losses) == raise_at:
            signal.raise_signal(signal.SIGTERM)
        return loss

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, step)
        yield


def train_ncf(group, output=None, *, raise_at=None, raised_by=1, resume=None, **settings):
    """Return each step's loss, the epochs' figures, the tables and the end of a run."""
    losses: list[float] = []
    at = raise_at if group is None or group.rank() == raised_by else None
    with watching(ncf_training, "train_step", losses, raise_at=at):
        result = ncf.train(
            ncf.NcfSettings(device="cpu", **settings), output=output, resume=resume, progress=False, process_group=group
        )
    tables = [module.table for module in (result.model.user, result.model.item)]
    blocks = [table.gather(torch.arange(table.num_embeddings)) for table in tables]
    return {
        "losses": losses,
        "epochs": [epoch[:4] for epoch in result.epochs],
        "columns": [{name: values.numpy() for name, values in block.columns.items()} for block in blocks],
        "layers": [parameter.detach().numpy() for parameter in result.model.dense().values()],
        "steps": result.steps,
        "interrupted": result.interrupted,
    }


def train_word2vec(group, output, *, raise_at=None, **settings):
    """Return the course of a run, whose vectors the first rank saves."""
    losses: list[float] = []
    at = raise_at if group is not None and group.rank() == 1 else None
    with watching(word2vec_training, "step", losses, raise_at=at):
        result = word2vec.train(
            word2vec.Settings(device="cpu", **settings), output=output, progress=False, process_group=group
        )

    def save(table):
        word2vec.WordVectors(result.vectors.words, table).save(Path(output, "vectors.txt"))
        return "written"

    written = Job.of(group).lead(result.vectors.table, save)
    return {
        "course": result.loss,
        "figures": (result.pairs, result.trained_words, result.steps, result.interrupted),
        "steps": len(losses),
        "written": written,
    }


def train_dlrm(group, output=None, *, raise_at=None, **settings):
    """Return the course of a run, its layers, and predictions for samples whose ids are partly new."""
    losses: list[float] = []
    at = raise_at if group is not None and group.rank() == 1 else None
    with watching(dlrm_training, "train_step", losses, raise_at=at):
        result = dlrm.train(
            dlrm.DlrmSettings(device="cpu", **settings), output=output, progress=False, process_group=group
        )
    samples = dlrm.GeneratedSamples(3_000, ids=settings["ids"]).read(3_000).take(torch.arange(0, 3_000, 100))
    return {
        "curve": [*map(tuple, result.curve)],
        "evaluations": [each[:5] for each in result.evaluations],
        "tested": (result.tested_samples, result.base_rate, result.base_loss),
        "known": result.model.embeddings.known(),
        "predictions": result.model.predict(samples).numpy(),
        "layers": [parameter.detach().numpy() for parameter in result.model.dense().values()],
        "end": (len(losses), result.samples, result.interrupted),
    }


def lead_and_fail(group):
    """Return the error of a result that the first rank cannot write, and rows that are read after it."""
    items = speedswap.Embedding(10, 2, seed=1, storage=owned(group))
    job = Job.of(group)

    def fail(table):
        table.gather(torch.tensor([3]), columns=["weight"])
        raise OSError("no room")

    with pytest.raises(OSError if job.leads else PeerError) as error:
        job.lead(items.table, fail)
    return str(error.value), items.read(torch.tensor([group.rank()])).tolist()


def agree(group):
    """Return what a job's ranks agree on."""
    job = Job.of(group)
    share = job.share(7)
    return job.agree(job.rank - 1), job.add_up(0.5 * job.rank, 1.0), (share.start, share.stop)


def run_command(group, *words):
    """Return the exit status of a command, and what this rank says of it."""
    with redirect_stderr(io.StringIO()) as said:
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()
