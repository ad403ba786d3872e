"""Give a language model more rows than fit: a small transformer that looks up the last two and three tokens.

    python examples/ngram_memory.py [text.txt] [--rows 1000000000 --storage disk --path memory] [--checkpoints folder]

The text has a document per line, plain or gzip; without one, a made-up language is learnt. After the first layer each
token adds what a table has for the n-grams that end there (Cheng et al., Conditional memory via scalable lookup, 2026):
hashed rows, gated by how well they match the hidden state. Tokens are known before their step, and so are rows, which
are fetched while the step before computes. Training resumes from its last checkpoint, bit for bit as if uninterrupted.
The result is the perplexity on every twentieth line; --rows 0 trains without a memory.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap.optim import RowwiseAdagrad
from speedswap.tables import ngram_rows

BEGIN, UNKNOWN = 0, 1  # tokens: of a document, and of words that are not in the vocabulary
ORDERS, HEADS = (2, 3), 4


class Batch(NamedTuple):
    """Windows of the text, and the rows of their n-grams."""

    inputs: Tensor  # (windows, length)
    targets: Tensor  # (windows, length)
    rows: Tensor | None  # (windows, length, orders · heads)


class NgramMemory(nn.Module):
    """The vectors of n-grams, gated by the hidden state. Rows never trained are zeros, and add nothing."""

    def __init__(self, table: speedswap.Embedding, dim: int) -> None:
        super().__init__()
        self.table = table
        width = len(ORDERS) * HEADS * table.embedding_dim
        self.key, self.value = nn.Linear(width, dim, bias=False), nn.Linear(width, dim, bias=False)
        self.key_norm, self.query_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        found = self.table(rows).flatten(-2)
        match = (self.query_norm(hidden) * self.key_norm(self.key(found))).sum(-1, keepdim=True)
        return torch.sigmoid(match * hidden.shape[-1] ** -0.5) * self.value(found)


class LanguageModel(nn.Module):
    """A transformer that predicts the next token, with or without a memory after its first layer."""

    def __init__(self, vocabulary: int, dim: int, layers: int, length: int, memory: speedswap.Embedding | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, max(1, dim // 64), 4 * dim, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.memory = None if memory is None else NgramMemory(memory, dim)
        self.norm = nn.RMSNorm(dim)

    def forward(self, inputs: Tensor, rows: Tensor | None) -> Tensor:
        length = inputs.shape[1]
        hidden = self.tokens(inputs) + self.positions.weight[:length]
        future = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, src_mask=future, is_causal=True)
            if number == 0 and self.memory is not None:
                hidden = hidden + self.memory(hidden, rows)
        return self.norm(hidden) @ self.tokens.weight.T


class Text(NamedTuple):
    """Documents one after the other, and windows of them."""

    tokens: Tensor  # (time,), with BEGIN before each document
    rows: int  # of the memory; 0 without one
    length: int  # of a window

    def batch(self, starts: Tensor) -> Batch:
        """Return a window for each start."""
        before = max(ORDERS) - 1  # tokens that the first n-grams of a window reach back
        places = starts[:, None] + torch.arange(before + self.length + 1)
        tokens, rows = self.tokens[places.to(self.tokens.device)], None
        if self.rows:
            documents = (tokens == BEGIN).cumsum(-1)
            rows = ngram_rows(tokens, ORDERS, HEADS, num_rows=self.rows, document_ids=documents)[:, before:-1]
        return Batch(tokens[:, before:-1], tokens[:, before + 1 :], rows)

    def random_batches(self, size: int, steps: range, seed: int) -> Iterator[Batch]:
        """Yield the batch of each step, which depends on seed and step alone."""
        for step in steps:
            generator = torch.Generator().manual_seed(seed << 32 | step)
            yield self.batch(torch.randint(len(self.tokens) - self.length - 2, (size,), generator=generator))

    def all_batches(self, size: int) -> Iterator[Batch]:
        for starts in torch.arange(0, len(self.tokens) - self.length - 2, self.length).split(size):
            yield self.batch(starts)


def made_up(documents: int = 600, words: int = 30) -> list[list[str]]:
    """Return documents of a language in which two words settle the next one."""
    chance = random.Random(0)
    follow = {(first, second): chance.randrange(words) for first in range(words) for second in range(words)}
    texts = [[chance.randrange(words), chance.randrange(words)] for _ in range(documents)]
    for text in texts:
        while len(text) < 16:
            text.append(follow[text[-2], text[-1]])
    return [[f"word{number}" for number in text] for text in texts]


def read(path: Path | None, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Return the tokens to train on, those of every twentieth document, and how many different ones there are."""
    if path is None:
        texts = made_up()
    else:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            texts = [line.split() for line in lines]
    parts = [text for at, text in enumerate(texts) if at % 20], texts[::20]
    common = Counter(word for text in parts[0] for word in text).most_common(vocabulary - 2)
    numbers = {word: number for number, (word, _) in enumerate(common, UNKNOWN + 1)}
    train, test = (
        torch.tensor([token for text in part for token in [BEGIN, *(numbers.get(word, UNKNOWN) for word in text)]])
        for part in parts
    )
    return train, test, len(numbers) + 2


def loss_of(model: LanguageModel, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs, batch.rows).flatten(0, 1), batch.targets.flatten())


def training(model: LanguageModel, optimizers: Sequence[Optimizer], batches: Iterable[Batch]) -> Iterator[float]:
    """Take a step for each batch, with the next one's rows prefetched; yield its loss."""
    if model.memory is not None:
        batches = speedswap.lookahead(batches, {model.memory.table: lambda batch: batch.rows})
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


@torch.no_grad()
def perplexity(model: LanguageModel, batches: Iterable[Batch]) -> float:
    """Return exp of the mean loss over all tokens."""
    losses = [(loss_of(model, batch).item(), batch.targets.numel()) for batch in batches]
    return math.exp(sum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses))


def memory_of(args: argparse.Namespace) -> speedswap.Embedding | None:
    """Return the memory's table, created or opened again; None without a memory."""
    if not args.rows:
        return None
    place = args.storage if args.path is None else speedswap.Disk(args.path)
    if args.resume and args.path is not None:
        return speedswap.Embedding(args.rows, args.row_dim, table=speedswap.Table.open(place))
    return speedswap.Embedding(args.rows, args.row_dim, storage=place, init=speedswap.init.zeros())


def optimizers_of(model: LanguageModel, lr: float, memory_lr: float) -> list[Optimizer]:
    """Return AdamW for the layers, and for the memory an Adagrad with one number of state per row."""
    layers = [parameter for name, parameter in model.named_parameters() if name != "memory.table.weight"]
    rows = [] if model.memory is None else [RowwiseAdagrad([model.memory.table.weight], lr=memory_lr)]
    return [torch.optim.AdamW(layers, lr=lr), *rows]


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help="a made-up language by default")
    parser.add_argument("--storage", choices=("pageable", "pinned", "disk"), default="pageable", help="of the memory")
    parser.add_argument("--path", help="a directory for the memory, with --storage disk")
    parser.add_argument("--checkpoints", help="a directory; none are saved by default")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    sizes = {"rows": 10**6, "row-dim": 16, "dim": 128, "layers": 2, "length": 64, "vocabulary": 8192, "batch": 16}
    run = {"steps": 300, "lr": 1e-3, "memory-lr": 0.5, "save-every": 100, "seed": 0}
    for name, default in {**sizes, **run}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="%(default)s by default")
    args = parser.parse_args(argv)
    if (args.path is None) == (args.storage == "disk") or (args.resume and args.checkpoints is None):
        parser.error("--path goes with --storage disk, and --resume with --checkpoints")
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, test, vocabulary = read(args.text, args.vocabulary)
    text, held_out = (Text(tokens.to(device), args.rows, args.length) for tokens in (train, test))
    model = LanguageModel(vocabulary, args.dim, args.layers, args.length, memory_of(args)).to(device)
    optimizers = optimizers_of(model, args.lr, args.memory_lr)
    first = speedswap.load_checkpoint(args.checkpoints, model, optimizers).step if args.resume else 0
    print(f"{len(train):,} tokens, {vocabulary:,} different; memory: {model.memory and model.memory.table.table!r}")
    batches = text.random_batches(args.batch, range(first, args.steps), args.seed)
    for step, loss in enumerate(training(model, optimizers, batches), first + 1):
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps):
            speedswap.save_checkpoint(args.checkpoints, model, optimizers, step=step)
    found = perplexity(model, held_out.all_batches(args.batch))
    print(f"perplexity {found:.2f}")
    if model.memory is not None:
        model.memory.table.table.close()
    return found


if __name__ == "__main__":
    main()
