"""A process ends with its own status, whatever its threads and the other ranks are doing."""

from __future__ import annotations

from children import run_script

START = """
import atexit, os, tempfile, time
import torch, speedswap
import torch.distributed as dist

torch.set_num_threads(1)
place = f"file://{tempfile.mktemp()}"
parent = os.getpid()
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
"""


def test_threads_of_gloo_end_before_python_does():
    """They need the interpreter to release a round's tensors, shortly after the round is over for all others."""
    done = run_script(
        START
        + """
before = set(os.listdir("/proc/self/task"))
table = speedswap.Embedding(100, 4, storage=speedswap.Ranks())
table.read(torch.arange(4))
assert len(set(os.listdir("/proc/self/task")) - before) >= 2
atexit._run_exitfuncs()
assert set(os.listdir("/proc/self/task")) <= before
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_connections_end_with_the_process_group():
    """A process that goes on without its job has neither their threads nor their sockets, once the tables are gone."""
    done = run_script(
        START
        + """
import gc
def held():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
before = held()
table = speedswap.Embedding(100, 4, storage=speedswap.Ranks())
table.read(torch.arange(4))
dist.barrier()
assert held()[0] > before[0] and held()[1] > before[1]
dist.destroy_process_group()
del table
gc.collect()
assert held()[0] <= before[0] and held()[1] <= before[1], (before, held())
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_process_ends_in_a_round_to_which_another_rank_does_not_come():
    """A thread waits there for rows ahead of their step, as long as the job's time limit allows."""
    done = run_script(
        START
        + """
table = speedswap.Embedding(100, 4, storage=speedswap.Ranks())
while rank == 1:
    time.sleep(0.1)
    if os.getppid() != parent:
        os._exit(0)
speedswap._process._SECONDS = 0.5
ahead = table._step.group.ahead
rounds = ahead.lane.rounds
ahead.announce_end(failed=False)
while ahead.lane.rounds == rounds:
    time.sleep(0.01)
""",
        seconds=40,
    )
    assert (done.returncode, done.stderr) == (0, "")
