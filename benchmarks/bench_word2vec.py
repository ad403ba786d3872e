"""word2vec: words per second and quality of the vectors, compared with gensim in the same run, and the time by part.

    python benchmarks/bench_word2vec.py CORPUS --eval wordsim-353.txt --eval simlex-999.txt --json word2vec.json

Without CORPUS it trains on random words with Zipf's frequencies, which tells the speed alone: on the CPU as text, so
that gensim can read it too, on a GPU, which wants many more, as numbers. Words per second are words of the text, times
epochs, over the seconds of training with batch making, as gensim counts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import speedswap
from speedswap.apps.bench.measure import write_json
from speedswap.apps.options import compute_device
from speedswap.apps.word2vec import Settings, WordVectors, train
from speedswap.apps.word2vec.blocks import BLOCK, Sampler
from speedswap.apps.word2vec.training import SkipGram, open_corpus, skip_gram_loss

WARM_UP_STEPS = 20
TIMED_STEPS = 100
GENSIM_ALPHA = 0.05
"""Better for a corpus of 4 million words than gensim's default of 0.025."""
ASKED_WORDS_PER_SECOND = {"cuda": 10_000_000}
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "tables in pinned memory": {"storage": "pinned"},
    "tables in pinned memory, without lookahead": {"storage": "pinned", "lookahead": 0},
}  # fmt: skip
"""On a GPU, where a step may take as long as its launches: settings besides the default ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="text, plain or gzip, one sentence per line")
    parser.add_argument("--eval", type=Path, action="append", default=[], help="word pairs with human similarity")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, in turn, each with another seed")
    parser.add_argument("--words", type=int, help="without CORPUS: how many")
    parser.add_argument("--quick", action="store_true", help="one epoch, and fewer words")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    device = compute_device(args.device).type
    words = args.words or (500_000 if args.quick else 2_000_000) * (1 if device == "cpu" else 10)
    with TemporaryDirectory() as folder:
        if args.corpus is not None or device == "cpu":
            text = {"corpus": args.corpus or write_synthetic(Path(folder, "synthetic.txt"), words)}
        else:
            text = {"generate": words}
        epochs = args.epochs or (1 if args.quick else 5)
        settings = [Settings(**text, device=args.device, epochs=epochs, seed=seed) for seed in range(args.seeds)]
        # In turn, so that a disturbance of the machine affects both.
        runs = [(run_speedswap(one, args.eval), run_gensim(one, args.eval)) for one in settings]
        ours, peers = [ours for ours, _ in runs], [peer for _, peer in runs if peer]
        report: dict[str, Any] = {
            "corpus": text["corpus"].name if "corpus" in text else f"{words:,} generated words",
            "device": device,
            "torch_threads": torch.get_num_threads(),
            "speedswap": ours,
            "gensim": peers,
            "milliseconds_a_step": time_parts(settings[0]),
        }
        if device == "cuda":
            report["other_ways"] = {
                name: run_speedswap(dataclasses.replace(settings[0], **way), args.eval, name)
                for name, way in OTHER_WAYS.items()
            }
    if peers:
        speeds = [float(np.median([run["words_per_second"] for run in one])) for one in (ours, peers)]
        report["words_per_second_over_gensim"] = round(speeds[0] / speeds[1], 2)
        print(f"speedswap / gensim, medians: {report['words_per_second_over_gensim']}")
    if asked := ASKED_WORDS_PER_SECOND.get(device):
        reached = float(np.median([run["words_per_second"] for run in ours]))
        report["asked_words_per_second"], report["reached_words_per_second"] = asked, reached
        print(f"asked {asked:,} words/s, reached {reached:,.0f} with the default settings")
    if args.json:
        write_json(args.json, "word2vec", report)


def write_synthetic(path: Path, words: int, vocabulary: int = 50_000) -> Path:
    """Write random words with Zipf's frequencies, twenty per line."""
    share = 1 / np.arange(1, vocabulary + 1)
    text = np.random.default_rng(0).choice(vocabulary, size=(words // 20, 20), p=share / share.sum())
    path.write_text("\n".join(" ".join(f"w{word}" for word in line) for line in text.tolist()), encoding="utf-8")
    return path


def run_speedswap(settings: Settings, pair_files: list[Path], way: str = "") -> dict[str, Any]:
    result = train(settings, progress=False)
    result.similarities = [result.vectors.similarity(pairs) for pairs in pair_files]
    found = result.report()
    if found["settings"]["corpus"] is not None:
        found["settings"]["corpus"] = Path(found["settings"]["corpus"]).name
    del found["loss"]
    say("speedswap", way or f"seed {settings.seed}", found)
    result.model.close()
    return found


def run_gensim(settings: Settings, pair_files: list[Path]) -> dict[str, Any] | None:
    """Run gensim on the task with as many workers as torch has threads; None where it or the text is missing."""
    if settings.corpus is None:
        print("gensim: left out, since there is no text")
        return None
    try:
        import gensim
    except ImportError:
        print("gensim: not installed")
        return None
    workers = torch.get_num_threads()
    model = gensim.models.Word2Vec(
        vector_size=settings.dim,
        window=settings.window,
        negative=settings.negative,
        min_count=settings.min_count,
        sample=settings.sample,
        alpha=GENSIM_ALPHA,
        sg=1,
        workers=workers,
        seed=settings.seed + 1,
    )
    sentences = gensim.models.word2vec.LineSentence(str(settings.corpus))
    model.build_vocab(sentences)
    started = time.perf_counter()
    model.train(sentences, total_examples=model.corpus_count, epochs=settings.epochs)
    seconds = time.perf_counter() - started
    vectors = as_word_vectors(model.wv.index_to_key, model.wv.vectors)
    found = {
        "alpha": GENSIM_ALPHA,
        "seed": settings.seed + 1,
        "workers": workers,
        "words_per_second": round(model.corpus_total_words * settings.epochs / seconds),
        "training_seconds": round(seconds, 3),
        "similarity": [vectors.similarity(pairs)._asdict() for pairs in pair_files],
    }
    say("gensim", f"seed {settings.seed + 1}", found)
    return found


def as_word_vectors(words: list[str], matrix: np.ndarray) -> WordVectors:
    """Put gensim's vectors into a table, so that both are compared by the same code."""
    table = speedswap.Table.create(*matrix.shape, storage="pageable")
    table.scatter(torch.arange(len(words)), torch.from_numpy(matrix))
    return WordVectors(words, table)


def say(trainer: str, which: str, found: dict[str, Any]) -> None:
    quality = "".join(f"  {pairs['name']} {pairs['spearman']:.3f}" for pairs in found["similarity"])
    print(f"{trainer:10} {which:17} {found['words_per_second']:>9,} words/s{quality}", flush=True)


def time_parts(settings: Settings) -> dict[str, float]:
    """Time a training step by part in milliseconds, over TIMED_STEPS steps after a warm-up."""
    device = settings.compute_device()
    spent: Counter[str] = Counter()
    clock = 0.0

    def lap(part: str) -> None:
        nonlocal clock
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        spent[part] += now - clock
        clock = now

    with open_corpus(settings) as corpus:
        settings = settings.placed(len(corpus.vocabulary))
        model = SkipGram(len(corpus.vocabulary), settings).to(device)
        optimizer = settings.make_optimizer(model)
        blocks = -(-settings.suited.batch_for(corpus.corpus_words, device) // BLOCK)
        drawn = {"window": settings.window, "sample": settings.sample, "seed": settings.seed}
        batches = Sampler(corpus, device, **drawn).batches(100, blocks)
        clock = time.perf_counter()
        for number, batch in enumerate(batches):
            if number == WARM_UP_STEPS:
                spent.clear()
            if number == WARM_UP_STEPS + TIMED_STEPS:
                break
            lap("batch making")
            weights = model.pair_weights(batch.reach)
            lap("pair weights")
            vectors = model.both(batch.words)
            lap("lookup (unique, gather, expand)")
            loss = skip_gram_loss(vectors, weights, model.pair_weights.signs)
            lap("scores and loss")
            loss.backward()
            lap("backward (products, sum by row)")
            optimizer.step()
            optimizer.zero_grad()
            lap("optimizer and scatter")
    model.close()
    parts = {part: round(1000 * seconds / TIMED_STEPS, 3) for part, seconds in spent.items()}
    total = sum(parts.values())
    for part, milliseconds in parts.items():
        print(f"  {part:34} {milliseconds:7.2f} ms  {milliseconds / total:4.0%}")
    return parts


if __name__ == "__main__":
    main()
