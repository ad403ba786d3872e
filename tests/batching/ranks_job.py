"""Checks that the ranks of a job make together: every scenario of some modules, one after the other.

    ranks_job.py DIRECTORY SCENARIOS.py … --world-size N …

It is the parent of a job of each size in turn: it imports torch once and forks the ranks, so that they need not.

Scenarios are the modules' functions whose names begin with "check_", called with this rank and the number of ranks.
Each rank writes ``SIZE/MODULE.NAME.RANK``: "ok", or what went wrong. A scenario that hangs ends the job after seconds.
After one whose name begins with "check_last" there may be no other rank left.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import runpy
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer or wrapper of a rank does this, which takes half a second
import torch.distributed as dist

SECONDS = 30  # for one scenario; the slowest takes two or three on a machine with nothing else to do


def too_long(*_):
    raise TimeoutError(f"more than {SECONDS} s: the ranks wait for each other")


def run(name, scenario, rank, world_size, directory):
    faulthandler.dump_traceback_later(SECONDS + 5, exit=True)  # where Python's own alarm does not get through
    signal.alarm(SECONDS)
    try:
        torch.manual_seed(0)
        scenario(rank, world_size)
        if "check_last" not in name:
            dist.barrier()
        result = "ok"
    except BaseException:
        result = traceback.format_exc()
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    (directory / f"{name}.{rank}").write_text(result)
    if result != "ok":
        sys.stderr.flush()
        os._exit(1)


def run_all(scenarios, directory, rank, world_size, store):
    """Join the job as one rank, and run the scenarios."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    job = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS), **job)
    for name, scenario in scenarios.items():
        run(name, scenario, rank, world_size, directory)
    os._exit(0)  # without a word to ranks that are gone


def fork_ranks(scenarios, directory, world_size):
    """Run a job to its end; a rank that fails takes the others along, as torchrun has it."""
    directory.mkdir()
    with tempfile.TemporaryDirectory() as place:
        ranks = set()
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                try:
                    run_all(scenarios, directory, rank, world_size, Path(place, "store"))
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
            ranks.add(child)
        while ranks:
            child, status = os.wait()
            ranks.discard(child)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("modules", type=Path, nargs="+")
    parser.add_argument("--world-size", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    found = {
        f"{module.stem}.{name}": scenario
        for module in arguments.modules
        for name, scenario in runpy.run_path(str(module)).items()
        if name.startswith("check_")
    }
    gc.collect()
    gc.freeze()  # collections, of which each out-of-memory causes one, look at the scenarios' own objects alone
    for size in arguments.world_size:
        fork_ranks(found, arguments.directory / str(size), size)
