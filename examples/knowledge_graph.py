"""Predict the missing ends of a knowledge graph's edges, with more entities than fit: ComplEx and shared negatives.

    python examples/knowledge_graph.py [train.tsv test.tsv] [--path entities] [--epochs 100]

A file has a head, a relation and a tail per line, separated by tabs, as FB15k-237 has them; without files, the graph is
made up. The model is that of Trouillon et al., Complex embeddings for simple link prediction, 2016: an edge scores
Re(⟨h, r, conj t⟩) over complex vectors, whose real and imaginary parts are one row of the table side by side. Each edge
also trains as one of the reverse relation (Lacroix et al., 2018), so that only tails are predicted, by a softmax over
the tail and negatives that a batch shares. The result is the filtered mean reciprocal rank: other known tails do not
compete.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import speedswap
from speedswap.losses import UniformSampler, candidates, sampled_softmax, target_ranks


class ComplEx(nn.Module):
    """Queries for the tails of heads and relations.

    Args:
        entities: looks up rows of 2 · dim numbers, real parts first.
        relations: the same for relations and their reverses.
    """

    def __init__(self, entities: nn.Module, relations: nn.Module) -> None:
        super().__init__()
        self.entities, self.relations = entities, relations

    def forward(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Return vectors whose inner product with an entity's row is the edge's score: h ∘ r, (edges, 2 · dim)."""
        h_real, h_imag = self.entities(heads).chunk(2, dim=-1)
        r_real, r_imag = self.relations(relations).chunk(2, dim=-1)
        return torch.cat([h_real * r_real - h_imag * r_imag, h_real * r_imag + h_imag * r_real], dim=-1)


def read(paths: Sequence[Path]) -> tuple[list[Tensor], int, int]:
    """Return the edges of each file, (edges, 3), and the numbers of entities and relations."""
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    edges = []
    for path in paths:
        rows = [line.rstrip("\n").split("\t") for line in path.read_text().splitlines() if line.strip()]
        numbers = [
            (
                entities.setdefault(h, len(entities)),
                relations.setdefault(r, len(relations)),
                entities.setdefault(t, len(entities)),
            )
            for h, r, t in rows
        ]
        edges.append(torch.tensor(numbers))
    return edges, len(entities), len(relations)


def made_up(num_entities: int = 60) -> tuple[list[Tensor], int, int]:
    """Return a circle: relation k leads k + 1 entities on; a tenth of the edges is for the test."""
    heads = torch.arange(num_entities).repeat(4)
    relations = torch.arange(4).repeat_interleave(num_entities)
    edges = torch.stack([heads, relations, (heads + relations + 1) % num_entities], dim=1)
    edges = edges[torch.randperm(len(edges), generator=torch.Generator().manual_seed(0))]
    return list(edges.split([len(edges) - len(edges) // 10, len(edges) // 10])), num_entities, 4


def with_reverses(edges: Tensor, num_relations: int) -> Tensor:
    heads, relations, tails = edges.unbind(1)
    return torch.cat([edges, torch.stack([tails, relations + num_relations, heads], dim=1)])


def train_epoch(
    model: ComplEx, optimizer: torch.optim.Optimizer, edges: Tensor, batch: int, sampler: UniformSampler
) -> float:
    """Take a step for each batch of edges, with the next one's rows prefetched; return the mean loss."""
    loader = [(some, sampler.sample()) for some in edges[torch.randperm(len(edges))].split(batch)]
    steps, losses = loader, []
    if isinstance(model.entities, speedswap.Embedding):
        steps = speedswap.lookahead(
            loader, {model.entities: lambda one: [one[0][:, 0], candidates(one[0][:, 2], one[1])]}
        )
    for some, negatives in steps:
        heads, relations, tails = some.unbind(1)
        loss = sampled_softmax(model(heads, relations), tails, model.entities, negatives)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def mean_reciprocal_rank(model: ComplEx, edges: Tensor, known: Tensor, batch: int) -> float:
    """Return the mean of 1 / rank of each edge's tail among all entities but the other known tails."""
    tails_of = defaultdict(list)
    for head, relation, tail in known.tolist():
        tails_of[head, relation].append(tail)
    reciprocal = []
    for some in edges.split(batch):
        heads, relations, tails = some.unbind(1)
        exclude = [torch.tensor(tails_of[head, relation]) for head, relation, _ in some.tolist()]
        reciprocal.append(1 / target_ranks(model(heads, relations), tails, model.entities, exclude=exclude))
    return torch.cat(reciprocal).mean().item()


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "edges", nargs="*", type=Path, help="edges to train on, and to test; a made-up graph by default"
    )
    parser.add_argument("--path", help="a directory for the entities' table, on disk; in memory by default")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--dim", type=int, default=32, help="complex numbers per entity")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--negatives", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args(argv)
    if len(args.edges) not in (0, 2):
        parser.error("give two files, one to train on and one to test, or none")
    torch.manual_seed(0)
    (train, test), num_entities, num_relations = read(args.edges) if args.edges else made_up()
    train, test = (with_reverses(each, num_relations) for each in (train, test))
    init = speedswap.init.normal(std=0.1)
    entities = speedswap.Embedding(num_entities, 2 * args.dim, init=init, path=args.path)
    relations = nn.Embedding(2 * num_relations, 2 * args.dim)
    model = ComplEx(entities, relations)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    sampler = UniformSampler(args.negatives, num_entities)
    print(f"{len(train):,} edges with their reverses, {num_relations:,} relations: {entities.table!r}")
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, optimizer, train, args.batch, sampler)
        if epoch % max(1, args.epochs // 10) == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    found = mean_reciprocal_rank(model, test, torch.cat([train, test]), args.batch)
    print(f"filtered MRR {found:.4f}")
    entities.table.close()
    return found


if __name__ == "__main__":
    main()
