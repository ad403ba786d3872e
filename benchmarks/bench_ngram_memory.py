"""A language model with a memory of n-grams: its perplexity and the time of its step, compared with the model alone.

    python benchmarks/bench_ngram_memory.py [TEXT] [--seeds 3] [--device cpu|cuda] [--quick] [--json FILE]

The model is that of examples/ngram_memory.py, which says what TEXT is; a made-up language without one. Perplexities are
those on held-out documents after training on the same batches with one thread. Steps are those of two larger models,
with the rows of the next batch prefetched, in turn with those of the model alone: first over a fresh table on disk,
then over tables that hundreds of steps have touched. What a table on disk commits after eight steps is timed by itself.
The file also has the bytes of rows that a step moves, and the floating-point operations of its layers, from which the
share of a GPU's bus can be computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import ngram_memory as model_of
from ngram_memory import Batch, LanguageModel, Text
from torch.optim import Optimizer

import speedswap
from speedswap.apps.bench import cli
from speedswap.apps.bench.measure import steps_in_turn
from speedswap.apps.errors import BenchmarkError
from speedswap.cli import run_command

QUALITY = {"vocabulary": 4096, "dim": 128, "layers": 2, "length": 64, "batch": 16, "steps": 500, "rows": 4_000_000}
STEP = {"vocabulary": 8192, "length": 128, "batch": 8, "steps": 8, "steps_before": 300}
MODELS = ({"dim": 256, "layers": 4, "repeats": 10}, {"dim": 512, "layers": 8, "repeats": 6})
"""Whose steps are timed: the larger a model is, the less its memory adds."""
PLACES = {"pageable": 10_000_000, "disk": 1_000_000_000}
ROW_DIM, LR, MEMORY_LR = 16, 1e-3, 0.5


def made(tokens: int, size: Mapping[str, int], rows: int, place: Any, device: str) -> LanguageModel:
    """Return a model, with a memory in this place unless it has no rows."""
    table = speedswap.Embedding(rows, ROW_DIM, storage=place, init=speedswap.init.zeros(), seed=0) if rows else None
    return LanguageModel(tokens, size["dim"], size["layers"], size["length"], table).to(device)


def perplexities(path: Path | None, seeds: int, quick: bool, device: str) -> list[dict[str, float]]:
    """Train without and with a memory, for each seed; return perplexities and seconds of processor time."""
    size = {**QUALITY, **({"steps": 20, "rows": 100_000} if quick else {})}
    train, test, tokens = model_of.read(path, size["vocabulary"])
    found = []
    for seed in range(seeds):
        found.append({"seed": seed})
        for name, rows in {"without": 0, "with": size["rows"]}.items():
            torch.manual_seed(seed)
            model = made(tokens, size, rows, "auto", device)
            text, held_out = (Text(part.to(device), rows, size["length"]) for part in (train, test))
            begin = time.process_time()
            batches = text.random_batches(size["batch"], range(size["steps"]), seed)
            for _ in model_of.training(model, model_of.optimizers_of(model, LR, MEMORY_LR), batches):
                pass
            found[-1][f"{name}: processor seconds"] = time.process_time() - begin
            found[-1][name] = model_of.perplexity(model, held_out.all_batches(size["batch"]))
            print(f"seed {seed}, {name} a memory: perplexity {found[-1][name]:.1f}", flush=True)
    return found


def steps(path: Path | None, model: Mapping[str, int], quick: bool, device: str) -> dict[str, Any]:
    """Time the steps of a model alone and with its memory in each place."""
    small = {"dim": model["dim"] // 8, "layers": model["layers"] // 4, "steps": 4, "repeats": 1, "steps_before": 2}
    size = {**STEP, **model, **(small if quick else {})}
    train, _, tokens = model_of.read(path, size["vocabulary"])
    with TemporaryDirectory() as folder:
        rows_of = {"without": 0, **PLACES}
        disk = speedswap.Disk(f"{folder}/rows", cache_bytes=1 << 30)
        places = {"without": None, "pageable": "pageable", "disk": disk}
        models = {name: made(tokens, size, rows, places[name], device) for name, rows in rows_of.items()}
        texts = {name: Text(train.to(device), rows, size["length"]) for name, rows in rows_of.items()}
        optimizers = {name: model_of.optimizers_of(model, LR, MEMORY_LR) for name, model in models.items()}

        processor: defaultdict[str, list[float]] = defaultdict(list)
        flushes: list[float] = []

        def loop(name: str, seed: int, repeat: int) -> Iterator[None]:
            numbers = range(repeat * size["steps"], (repeat + 1) * size["steps"])
            batches = texts[name].random_batches(size["batch"], numbers, seed)
            for step, _ in enumerate(model_of.training(models[name], optimizers[name], batches)):
                if step in (1, size["steps"] - 2):  # the steps whose time is measured
                    processor[name].append(time.process_time())
                yield
            if name == "disk":  # or the commit would be written while the model alone takes its turn
                begin = time.perf_counter()
                models[name].memory.table.table.flush()
                flushes.append(time.perf_counter() - begin)

        def timed(name: str, seed: int, repeats: int) -> dict[str, float]:
            loops = {which: partial(loop, which, seed) for which in ("without", name)}
            return steps_in_turn(loops, steps=size["steps"], repeats=repeats)

        fresh = {"disk": timed("disk", 0, 1)}
        for name in PLACES:
            batches = texts[name].random_batches(size["batch"], range(size["steps_before"]), seed=1)
            touch(models[name].memory.table, optimizers[name][1], batches)
        processor.clear()
        flushes.clear()
        seconds = {name: timed(name, 2, size["repeats"]) for name in PLACES}
        processor_seconds = {
            name: statistics.median(end - begin for begin, end in zip(at[::2], at[1::2], strict=True))
            / (size["steps"] - 3)
            for name, at in processor.items()
        }
        table = models["disk"].memory.table.table
        row_bytes = table.nbytes // len(table)
        table.close()
    batches = texts["disk"].random_batches(size["batch"], range(5), 0)
    rows = statistics.mean(len(batch.rows.unique()) for batch in batches)
    parameters = {name: matrices(models[name]) for name in ("without", "disk")}
    for name, took in {"disk, fresh": fresh["disk"], **seconds}.items():
        place = name.removesuffix(", fresh")
        alone, memory = took["without"], took[place]
        print(f"{name:<12} {1e3 * memory:8.1f} ms, alone {1e3 * alone:8.1f} ms: {memory / alone - 1:+.1%}", flush=True)
    for name, took in processor_seconds.items():
        print(f"{name:<12} {took * 1e3:8.1f} ms of processor time", flush=True)
    return {
        "workload": {**size, "row_dim": ROW_DIM, "heads": model_of.HEADS, "orders": model_of.ORDERS},
        "rows": rows_of,
        "seconds": seconds,
        "seconds_of_fresh_tables": fresh,
        "processor_seconds": processor_seconds,
        "flush_seconds": statistics.median(flushes),
        "tokens": size["batch"] * size["length"],
        "rows_per_step": rows,
        "bytes_to_device": rows * row_bytes,
        "bytes_from_device": rows * row_bytes,
        "flops": {name: 6 * count * size["batch"] * size["length"] for name, count in parameters.items()},
    }


def touch(table: speedswap.Embedding, optimizer: Optimizer, batches: Iterator[Batch]) -> None:
    """Write the rows of these batches, without changing them, so that the system has given the table its memory."""
    for batch in batches:
        (0 * table(batch.rows)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def matrices(model: LanguageModel) -> int:
    """Return the parameters that multiply every token: the layers', the memory's, and the output's."""
    of_tables = (model.positions.weight, *(() if model.memory is None else (model.memory.table.weight,)))
    return sum(each.numel() for each in model.parameters() if all(each is not one for one in of_tables))


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the file asked for; return the exit status."""
    device = cli.prepare(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if args.seeds:
        quality = perplexities(args.text, args.seeds, args.quick, device)
    elif args.json is None or not args.json.is_file():
        raise BenchmarkError("seeds is 0, which keeps the perplexities of an earlier run: give its file as --json")
    else:
        quality = json.loads(args.json.read_text())["results"]["quality"]["seeds"]
    torch.set_num_threads(threads)
    print(f"\na training step on {device}, {threads} threads", flush=True)
    found = {"text": args.text.name if args.text else "made up", "quality": {"workload": QUALITY, "seeds": quality}}
    cli.write(
        args.json,
        f"ngram_memory-{device}",
        {**found, "threads": threads, "steps": [steps(args.text, model, args.quick, device) for model in MODELS]},
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="a document per line, plain or gzip")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each; 0 to keep those in the JSON file")
    cli.add_options(parser)
    return run_command(partial(run, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
