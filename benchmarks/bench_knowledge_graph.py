"""ComplEx over a swapped table, as examples/knowledge_graph.py trains it, compared with PyKEEN's.

    python benchmarks/bench_knowledge_graph.py [--device cpu|cuda] [--quick] [--json FILE]

The graphs are two small ones that PyKEEN brings along: Kinships (104 entities) and UMLS (135). Each model has 32
complex numbers per entity, reverse relations, Adagrad at 0.1, batches of 128, and entities that begin with a standard
deviation of 0.1. Ours train with a softmax over 64 uniform negatives that a batch shares, and over all entities;
PyKEEN's with its cross entropy over all entities (LCWA), without a regularizer. The figure is the filtered mean
reciprocal rank over both ends of the test's edges. Graphs so small say nothing of speed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import script
import torch
from peers import find_peer
from torch import Tensor, nn

import speedswap
from speedswap._words import pip_install
from speedswap.apps.bench.measure import show_peers
from speedswap.apps.errors import BenchmarkError
from speedswap.losses import UniformSampler, full_softmax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import knowledge_graph as example

DIM, BATCH, NEGATIVES, LR, STD = 32, 128, 64, 0.1, 0.1


def full_epoch(model: example.ComplEx, optimizer: torch.optim.Optimizer, edges: Tensor) -> None:
    """Take a step over all entities for each batch of edges."""
    for some in edges[torch.randperm(len(edges))].split(BATCH):
        heads, relations, tails = some.unbind(1)
        loss = full_softmax(model(heads, relations), tails, model.entities)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_ours(folder: Path, full: bool, epochs: int, seed: int) -> float:
    """Train the example's model on a graph's files and return its mean reciprocal rank."""
    torch.manual_seed(seed)
    edges, num_entities, num_relations = example.read([folder / f"{part}.txt" for part in ("train", "valid", "test")])
    train, valid, test = (example.with_reverses(each, num_relations) for each in edges)
    entities = speedswap.Embedding(num_entities, 2 * DIM, init=speedswap.init.normal(std=STD), seed=seed)
    model = example.ComplEx(entities, nn.Embedding(2 * num_relations, 2 * DIM))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    sampler = UniformSampler(NEGATIVES, num_entities)
    for _ in range(epochs):
        if full:
            full_epoch(model, optimizer, train)
        else:
            example.train_epoch(model, optimizer, train, BATCH, sampler)
    mrr = example.mean_reciprocal_rank(model, test, torch.cat([train, valid, test]), BATCH)
    entities.table.close()
    return mrr


def train_pykeen(graph: str, epochs: int, seed: int) -> float:
    """Train PyKEEN's model on one of its graphs and return its mean reciprocal rank."""
    from pykeen.pipeline import pipeline

    result = pipeline(
        dataset=graph,
        dataset_kwargs={"create_inverse_triples": True},
        model="complex",
        model_kwargs={
            "embedding_dim": DIM,
            "entity_initializer": partial(nn.init.normal_, std=STD),
            "regularizer": None,
        },
        loss="crossentropy",
        optimizer="adagrad",
        optimizer_kwargs={"lr": LR},
        training_loop="lcwa",
        training_kwargs={"num_epochs": epochs, "batch_size": BATCH, "use_tqdm": False},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=seed,
        device="cpu",
    )
    return result.metric_results.get_metric("both.realistic.inverse_harmonic_mean_rank")


def run(_: str, quick: bool) -> dict[str, Any]:
    """Train every model on both graphs, in turn for each seed."""
    peer = find_peer("pykeen", "pykeen", pip_install("pykeen", extra="benchmarks"))
    show_peers({"pykeen": peer})
    if not peer.present:
        raise BenchmarkError(f"the graphs come with PyKEEN, which is {peer.missing}")
    import pykeen.datasets

    torch.set_num_threads(1)  # for such small layers
    logging.getLogger("pykeen").setLevel(logging.ERROR)
    seeds, epochs = (1, 3) if quick else (3, 50)
    graphs: dict[str, Any] = {}
    for graph in ("kinships", "umls"):
        folder = Path(pykeen.datasets.__file__).parent / graph
        candidates: dict[str, Callable[[int], float]] = {
            f"sampled_softmax, {NEGATIVES} negatives": partial(train_ours, folder, False, epochs),
            "full_softmax": partial(train_ours, folder, True, epochs),
            "PyKEEN": partial(train_pykeen, graph, epochs),
        }
        runs: dict[str, list[float]] = {name: [] for name in candidates}
        for seed in range(seeds):
            for name, train in candidates.items():
                runs[name].append(train(seed))
                print(f"{graph}, seed {seed}, {name}: {runs[name][-1]}", flush=True)
        graphs[graph] = runs
    return {"pykeen": peer._asdict(), "epochs": epochs, "mrr": graphs}


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("knowledge_graph", __doc__, run, argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
