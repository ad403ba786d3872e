"""The quality of models whose idle rows take every step (idle_rows="dense"), compared with lazy ones.

    python benchmarks/bench_idle_quality.py --corpus TEXT --pairs PAIRS --ratings RATINGS [--only NAME] --json FILE

Word vectors (agreement with human judgement of similarity), NCF (HR@10 and NDCG@10) and DLRM (AUC and log loss on
made-up clicks), each with Adam and its default settings but for the sizes, three seeds. Lazy and dense runs see the
same batches from the same initial values. The runs are short: they compare the two, and are not the best that each can
do.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap.apps import dlrm, ncf, word2vec
from speedswap.apps.bench.measure import write_json
from speedswap.apps.run import Run

SEEDS = range(3)
Figures = dict[str, float]


def trained(kind: type[Run[Any, Any]], settings: Any, idle_rows: str) -> Any:
    """Return a finished run."""

    class Chosen(kind):  # type: ignore[misc,valid-type]
        def build(self) -> None:
            super().build()
            speedswap.attach(self.optimizer, self.model, idle_rows=idle_rows)

    return Chosen.train(settings, progress=False)


def vectors(corpus: Path | None, pairs: Path | None, seed: int, idle_rows: str) -> Figures:
    settings = word2vec.Settings(
        corpus=corpus, optimizer="adam", epochs=10, dim=50, plain_words=True, seed=seed, device="cpu"
    )
    run = trained(word2vec.Run, settings, idle_rows)
    found = {"training_loss": run.loss[-1][1]}
    if pairs is not None:
        found["spearman"] = float(run.vectors.similarity(pairs).spearman)
    run.close()
    return found


def preferences(ratings: Path | None, seed: int, idle_rows: str) -> Figures:
    settings = ncf.Settings(ratings=ratings, optimizer="adam", epochs=10, seed=seed, device="cpu")
    run = trained(ncf.Run, settings, idle_rows)
    best = run.best
    found = {"hr@10": best.hr, "ndcg@10": best.ndcg}
    run.close()
    return found


def clicks(seed: int, idle_rows: str) -> Figures:
    settings = dlrm.Settings(
        optimizer="adam", generate=400_000, capacity=20_000, batch=1024, dim=16, seed=seed, device="cpu"
    )
    run = trained(dlrm.Run, settings, idle_rows)
    last = run.evaluations[-1]
    found = {"auc": last.auc, "log_loss": last.log_loss}
    run.close()
    return found


def shortened(corpus: Path, words: int, folder: Path) -> Path:
    """Write the first words of a text, by lines; return the file."""
    into = folder / "corpus.txt"
    with gzip.open(corpus, "rt") if corpus.suffix == ".gz" else corpus.open() as text, into.open("w") as out:
        for line in text:
            out.write(line)
            words -= len(line.split())
            if words <= 0:
                break
    return into


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="text, of which the first words are used (default: gensim's)")
    parser.add_argument("--words", type=int, default=2_000_000, help="of the corpus")
    parser.add_argument("--pairs", type=Path, help="pairs of words and people's judgement, as WordSim's")
    parser.add_argument("--ratings", type=Path, help="as for speedswap ncf (default: made up)")
    parser.add_argument("--only", choices=("word2vec", "ncf", "dlrm"), help="one of the three")
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="it measures the CPU alone")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = None if args.corpus is None else shortened(args.corpus, args.words, Path(folder))
        applications: dict[str, Callable[[int, str], Figures]] = {
            "word2vec": lambda seed, idle_rows: vectors(corpus, args.pairs, seed, idle_rows),
            "ncf": lambda seed, idle_rows: preferences(args.ratings, seed, idle_rows),
            "dlrm": clicks,
        }
        for name, run in applications.items():
            if args.only not in (None, name):
                continue
            runs: dict[str, list[Figures]] = {"lazy": [], "dense": []}
            for seed in SEEDS:
                for idle_rows, figures in runs.items():
                    begun = time.perf_counter()
                    figures.append(run(seed, idle_rows))
                    seconds = time.perf_counter() - begun
                    print(f"{name:9} seed {seed} {idle_rows:6} {json.dumps(figures[-1])} {seconds:.0f} s", flush=True)
            means = {
                way: {each: statistics.mean(one[each] for one in figures) for each in figures[0]}
                for way, figures in runs.items()
            }
            found[name] = {"runs": runs, "mean": means}
    if args.json is not None:
        write_json(args.json, "idle-quality-cpu", found)


if __name__ == "__main__":
    main()
