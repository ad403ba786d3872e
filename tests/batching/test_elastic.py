"""The same steps on any number of ranks: in one process with the ranks' variables set, and under a real torchrun."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from speedswap import errors
from speedswap.batching import elastic, plan_accumulation
from speedswap.batching.elastic import ElasticSampler

JOB = Path(__file__).with_name("elastic_job.py")
elastic_job = SimpleNamespace(**runpy.run_path(str(JOB)))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def as_rank(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def shares(sampler, world_size) -> list[list[list[int]]]:
    """Return each rank's shares of the rest of the epoch, from the same position."""
    state, given = sampler.state_dict(), []
    loader = DataLoader(torch.arange(sampler.num_samples), batch_sampler=sampler)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for rank in range(world_size):
            as_rank(monkeypatch, rank, world_size)
            sampler.load_state_dict(state)
            given.append([batch.tolist() for batch in sampler.batches(loader)])
    sampler.load_state_dict(state)
    return given


def joined(sampler, world_size) -> list[list[int]]:
    """Return the global batches of the rest of the epoch: all ranks' shares, in order."""
    return [list(chain(*parts)) for parts in zip(*shares(sampler, world_size), strict=True)]


def test_world_is_what_torchrun_says(monkeypatch):
    assert elastic.world() == elastic.World(rank=0, world_size=1)
    as_rank(monkeypatch, 2, 3)
    assert elastic.world() == elastic.World(rank=2, world_size=3)


def test_an_initialized_process_group_comes_before_the_environment(monkeypatch, tmp_path):
    as_rank(monkeypatch, 2, 3)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert elastic.world() == elastic.World(rank=0, world_size=1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("rank", "world_size"), [("3", "3"), ("-1", "2"), ("0", "0"), ("zero", "2")])
def test_a_job_that_cannot_be_is_refused(monkeypatch, rank, world_size):
    as_rank(monkeypatch, rank, world_size)
    with pytest.raises(errors.BatchError, match="RANK"):
        elastic.world()


def test_plan_is_this_ranks_of_all(monkeypatch):
    for world_size in (1, 2, 3, 7):
        for rank, sizes in enumerate(plan_accumulation(100, 16, world_size)):
            as_rank(monkeypatch, rank, world_size)
            plan = elastic.plan(100, 16)
            assert (plan.rank, plan.world_size, plan.global_batch_size) == (rank, world_size, 100)
            assert list(plan.micro_batch_sizes) == sizes
            assert (plan.batch_size, plan.accumulation_steps) == (sum(sizes), len(sizes))


def test_shares_are_as_large_as_the_plan_says(monkeypatch):
    for world_size in (1, 2, 3, 5):
        planned = [sum(sizes) for sizes in plan_accumulation(13, 2, world_size)]
        assert [len(batches[0]) for batches in shares(ElasticSampler(29, global_batch_size=13), world_size)] == planned


def test_every_sample_once_in_another_order_each_epoch():
    sampler = ElasticSampler(23, global_batch_size=5)
    orders = []
    for epoch in range(3):
        assert (sampler.epoch, sampler.batch) == (epoch, 0)
        orders.append([sample for batch in sampler.batches(sampler) for sample in batch])
        assert sorted(orders[-1]) == list(range(23))
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch, rng):
        torch.manual_seed(rng)
        sampler = ElasticSampler(50, global_batch_size=50, seed=seed)
        sampler.set_epoch(epoch)
        return sampler.global_batch(0)

    assert order(3, 1, rng=0) == order(3, 1, rng=1)
    assert len({tuple(order(seed, epoch, 0)) for seed in range(4) for epoch in range(4)}) == 16  # none is shared


def test_without_shuffling_the_datasets_own_order():
    assert list(ElasticSampler(range(5), global_batch_size=2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_last_batch_has_what_is_left_or_is_dropped():
    kept, dropped = (ElasticSampler(11, global_batch_size=4, drop_last=drop) for drop in (False, True))
    assert [len(batch) for batch in kept] == [4, 4, 3]
    assert [len(batch) for batch in dropped] == [4, 4]
    assert (len(kept), len(dropped)) == (3, 2)


def test_rank_without_a_share_of_the_last_batch_gets_an_empty_one(monkeypatch):
    as_rank(monkeypatch, 2, 3)
    sampler = ElasticSampler(8, global_batch_size=6, shuffle=False)
    data = TensorDataset(torch.arange(8), torch.zeros(8, 4))
    for workers in (0, 1):
        batches = list(sampler.batches(DataLoader(data, batch_sampler=sampler, num_workers=workers)))
        assert batches[0][0].tolist() == [4, 5]
        assert [part.shape for part in batches[1]] == [(0,), (0, 4)]
    with pytest.raises(errors.BatchError, match=r"batch 1 .* fewer samples than ranks \(3\).*drop_last=True"):
        next(iter(DataLoader(data, batch_sampler=sampler)))
    assert len(list(ElasticSampler(8, global_batch_size=6, drop_last=True))) == 1


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_p20_world_size_changes_neither_steps_nor_samples_nor_resume_position(samples, size, lives):
    """Lives of a job, each with its number of ranks and of steps, against one process that is never interrupted."""
    expected = joined(ElasticSampler(samples, global_batch_size=size), 1)
    assert [len(batch) for batch in expected[:-1]] == [size] * (len(expected) - 1)
    state, done = ElasticSampler(samples, global_batch_size=size).state_dict(), []
    for world_size, steps in [*lives, (2, len(expected))]:
        sampler = ElasticSampler(samples, global_batch_size=size)
        sampler.load_state_dict(state)
        if sampler.epoch == 0:
            done += joined(sampler, world_size)[:steps]
            for _ in range(min(steps, len(sampler) - sampler.batch)):
                sampler.advance()
        state = sampler.state_dict()
    assert done == expected
    assert (state["epoch"], state["batch"]) == (1, 0)


@pytest.mark.parametrize("max_micro_batch_size", [1, 3, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_p20_learning_rate_at_each_step(monkeypatch, max_micro_batch_size, world_size):
    """A schedule that steps with the optimizer sees the same steps whatever the micro-batches and ranks."""
    _, optimizer, scheduler = elastic_job.training()
    sampler = ElasticSampler(21, global_batch_size=6)
    rates = []
    as_rank(monkeypatch, world_size - 1, world_size)
    for _ in range(2):
        for share in sampler.batches(DataLoader(torch.arange(21), batch_sampler=sampler)):
            plan = elastic.plan(6, max_micro_batch_size)
            assert len(share) <= plan.batch_size
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
    assert rates == [0.05 * (1 / (1 + 0.1 * step)) for step in range(8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_what_was_handed_out_not_what_was_fetched(workers):
    sampler = ElasticSampler(40, global_batch_size=4)
    loader = DataLoader(torch.arange(40), batch_sampler=sampler, num_workers=workers)
    whole = [batch.tolist() for batch in sampler.batches(loader)]
    sampler.set_epoch(0)
    for step, _batch in enumerate(sampler.batches(loader)):
        if step == 2:
            break
    state = sampler.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 3)
    again = ElasticSampler(40, global_batch_size=4)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again.batches(DataLoader(torch.arange(40), batch_sampler=again))] == whole[3:]


def test_set_epoch_keeps_the_position_in_the_present_epoch():
    sampler = ElasticSampler(9, global_batch_size=3)
    sampler.advance()
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.batch) == (0, 1)
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.batch) == (2, 0)


def test_p25_state_loads_with_weights_only(tmp_path):
    sampler = ElasticSampler(9, global_batch_size=4, seed=3)
    sampler.advance()
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    again = ElasticSampler(9, global_batch_size=4, seed=3)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (again.epoch, again.batch) == (0, 1)
    assert list(again) == list(sampler)


def test_state_of_another_global_batch_is_refused():
    state = ElasticSampler(9, global_batch_size=4).state_dict()
    for other, message in [
        (ElasticSampler(9, global_batch_size=3), "global_batch_size is 3, but the saved position is one of 4"),
        (ElasticSampler(10, global_batch_size=4), "num_samples is 10"),
        (ElasticSampler(9, global_batch_size=4, seed=1), "seed is 1"),
    ]:
        with pytest.raises(errors.BatchError, match=message):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 0, "global_batch_size": 4}, "number of samples is 0"),
        ({"data": 8, "global_batch_size": 0}, "global_batch_size is 0"),
        ({"data": 8, "global_batch_size": 2.5}, "global_batch_size is 2.5"),
        ({"data": 8, "global_batch_size": 2, "seed": -1}, "seed is -1"),
        ({"data": 3, "global_batch_size": 4, "drop_last": True}, "drop_last leaves no batch"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(errors.BatchError, match=message):
        ElasticSampler(**arguments)


# Real jobs.

# torchrun, whose agent has imported what its ranks need when it forks them.
TORCHRUN = "import sys, torch._dynamo, speedswap; from torch.distributed.run import main; main(sys.argv[1:])"


@pytest.fixture
def start(tmp_path) -> Iterator:
    """Starts torchrun agents; whatever they leave behind is killed at the end."""
    agents = []

    def start(*arguments: str, epochs: int, doomed_step: int | None = None) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])}
        if doomed_step is not None:
            environment["DOOMED"] = str(doomed_step)
        with (tmp_path / f"agent{len(agents)}.log").open("w") as log:
            command = [sys.executable, "-c", TORCHRUN, *arguments, "--start-method=fork", "--run-path", JOB]
            command += [tmp_path, str(epochs)]
            agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
        agent.wait()
    kill_doomed(tmp_path)


def kill_doomed(directory: Path) -> None:
    for mark in directory.glob("doomed.*"):
        with contextlib.suppress(ProcessLookupError):  # its agent has ended it
            os.kill(int(mark.suffix[1:]), signal.SIGKILL)
        mark.unlink()


def kill_when_doomed(directory: Path, agent: subprocess.Popen, workers: int) -> None:
    """SIGKILL a whole node in the middle of a step: its agent and its ranks."""
    until = time.monotonic() + 60
    while len(list(directory.glob("doomed.*"))) < workers:
        assert time.monotonic() < until, "the job never got to its step\n" + logs(directory)
        assert agent.poll() is None, logs(directory)
        time.sleep(0.05)
    agent.kill()
    agent.wait()
    kill_doomed(directory)


def logs(directory: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(directory.glob("agent*.log")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def uninterrupted(epochs: int) -> torch.nn.Module:
    """Train in one process on whole global batches, with plain torch."""
    model, optimizer, scheduler = elastic_job.training()
    _, features, targets = elastic_job.data().tensors
    sampler = ElasticSampler(elastic_job.SAMPLES, global_batch_size=elastic_job.GLOBAL_BATCH, seed=elastic_job.SEED)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in range(len(sampler)):
            samples = sampler.global_batch(batch)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features[samples]), targets[samples]).backward()
            optimizer.step()
            scheduler.step()
    return model


@pytest.mark.release
@pytest.mark.slow
def test_job_that_loses_a_node_and_is_killed_trains_on_with_other_numbers_of_ranks(start, tmp_path):
    """Three ranks on two nodes; one node is lost and torchrun restarts the other alone; then all is killed, and started
    again with two ranks. The parameters are those of one process that was never interrupted."""
    port, epochs = free_port(), 3
    # On a busy machine the second node needs seconds to come; without it the first would begin alone.
    rendezvous = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=5,is_host="
    together = ["--nnodes=1:2", "--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    together += ["--rdzv-id=job", "--monitor-interval=0.1", "--local-addr=localhost"]
    # The survivor is doomed too, but only where it would begin epoch 1.
    survivor = start(*together, f"--rdzv-conf={rendezvous}1", "--nproc-per-node=1", epochs=epochs, doomed_step=8)
    lost = start(*together, f"--rdzv-conf={rendezvous}0", "--nproc-per-node=2", epochs=epochs, doomed_step=3)
    kill_when_doomed(tmp_path, lost, workers=2)
    kill_when_doomed(tmp_path, survivor, workers=1)

    again = start("--standalone", "--nproc-per-node=2", epochs=epochs)
    assert again.wait(timeout=60) == 0, logs(tmp_path)

    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    history = saved["history"]
    assert [step["world_size"] for step in history] == [3] * 3 + [1] * 5 + [2] * 10
    for epoch in range(epochs):
        steps = [step for step in history if step["epoch"] == epoch]
        assert [len(step["seen"]) for step in steps] == [8, 8, 8, 8, 8, 1]
        assert sorted(sample for step in steps for sample in step["seen"]) == list(range(elastic_job.SAMPLES))
    assert [step["lr"] for step in history] == [0.05 * (1 / (1 + 0.1 * step)) for step in range(18)]
    expected = uninterrupted(epochs).state_dict()
    for name, value in saved["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
