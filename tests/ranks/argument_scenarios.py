"""Calls of all ranks with invalid arguments on one of them."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from outcomes import error_of
from places import owned
from torch import nn

import speedswap
from speedswap import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

ROWS, DIM = 20, 2
IDS = torch.tensor([3, 4, 4, 7])


class Model(nn.Module):
    """Every kind of module over rows that ranks own."""

    def __init__(self, group):
        super().__init__()
        more = {"storage": owned(group)}
        names = {"num_embeddings": ROWS, "embedding_dim": DIM}
        self.rows = speedswap.Embedding(ROWS, DIM, name="rows", **more)
        self.bags = speedswap.EmbeddingBag(ROWS, DIM, mode="sum", name="bags", **more)
        self.means = speedswap.EmbeddingBag(ROWS, DIM, name="means", **more)
        id_map = speedswap.IdMap(ROWS - 1)
        self.keyed = speedswap.Embedding(ROWS, DIM, id_map=id_map, name="keyed", **more)
        configs = [EmbeddingConfig(name=name, seed=1, **names) for name in "ab"]
        self.many = speedswap.EmbeddingCollection(configs, **more)
        configs = [EmbeddingBagConfig(name=name, seed=1, pooling="sum", **names) for name in "ab"]
        self.pooled = speedswap.EmbeddingBagCollection(configs, is_weighted=True, **more)
        configs = [EmbeddingConfig(name="key", embedding_dim=DIM, id_map=speedswap.IdMap(ROWS - 1))]
        self.keys = speedswap.EmbeddingCollection([*configs, EmbeddingConfig(name="id", **names)], **more)


def calls(group, folder):
    """Return pairs of calls by name: one with invalid arguments, and a valid one."""
    torch.manual_seed(0)
    model = Model(group)
    rows, bags, means, keyed, many, pooled = (
        model.rows,
        model.bags,
        model.means,
        model.keyed,
        model.many,
        model.pooled,
    )
    table, keys = rows.table, model.keys
    floats, four = torch.ones(4), torch.arange(0, 4, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    speedswap.attach(optimizer, model)
    splitter = speedswap.BatchSplitter(rows, micro_batch_size=2)
    both = {"a": IDS, "b": IDS}
    lengths = torch.ones(8, dtype=torch.int64)
    jagged = KeyedJaggedTensor(["a", "b"], torch.cat([IDS, IDS]), torch.ones(8), lengths=lengths)
    speedswap.save_checkpoint(f"{folder}/checkpoints", model)
    switcher = speedswap.ModelFactory(nn.Embedding(4, 2), 9, 2, storage=owned(group))
    switcher.zerosInit()
    switcher.saveCupy(f"{folder}/switched.npy")
    spare = speedswap.Embedding(9, 2, storage=owned(group)).table
    column = speedswap.Column("more", (DIM,), torch.float32, speedswap.init.zeros())

    def gradient():
        """Leave a gradient on all ranks, and return it."""
        rows.zero_grad()
        rows(IDS).sum().backward()
        return rows.weight.grad

    def same(batch):
        return batch

    def train_ahead(*arguments):
        for batch in speedswap.lookahead(*arguments[:2], depth=[*arguments, 1][2]):
            rows(batch)

    def one_by_one(function, *arguments):
        """Return pairs of calls with each of some arguments in place of the last one, which fits."""
        *bad, good = arguments
        return [(lambda each=each: function(*each), lambda: function(*good)) for each in bad]

    def named(name, pairs):
        return {f"{name} {number}": pair for number, pair in enumerate(pairs)}

    def features(**changes):
        return {name: value for name, value in {**both, **changes}.items() if value is not None}

    good_bags = (IDS, four)
    tables = {
        "Embedding": one_by_one(
            rows, ([1],), (1,), (None,), ("ids",), (floats,), (IDS.short(),), (IDS.to_sparse(),), (IDS + 99,), (IDS,)
        ),
        "Embedding without a gradient": one_by_one(torch.no_grad()(rows), ([1],), (IDS - 9,), (IDS,)),
        "EmbeddingBag": one_by_one(
            bags,
            ([1],),
            (IDS,),
            (IDS.view(1, 2, 2),),
            (floats, four),
            (IDS, four.flip(0)),
            (IDS, four + 1),
            (IDS, four * 9),
            (IDS, four.float()),
            (IDS, [0, 2]),
            (IDS.view(2, 2), four),
            (IDS, four, floats[:3]),
            (IDS, four, floats.double()),
            (IDS, four, [1.0] * 4),
            (jagged, four),
            (both,),
            (IDS + 99, four),
            good_bags,
        ),
        "EmbeddingBag of means": one_by_one(means, (IDS, four, floats), good_bags),
        "id map": one_by_one(keyed, (floats,), (["a"],), ([1.5],), (None,), (IDS,)),
        "id map without new keys": one_by_one(torch.no_grad()(keyed), (floats,), (["a"],), (IDS,)),
        "IdMap.lookup": one_by_one(keyed.id_map.lookup, (floats,), (["a"],), (IDS,)),
        "IdMap.add": one_by_one(keyed.id_map.add, (floats,), (["a"],), (IDS,)),
        "EmbeddingCollection": one_by_one(
            many,
            (IDS,),
            (features(b=None),),
            (features(c=IDS),),
            (features(b=floats),),
            (features(b=[1, 2]),),
            (features(b=IDS[:3]),),
            (features(b=IDS + 99),),
            (features(b=(IDS, four.flip(0))),),
            (features(b=(IDS, torch.arange(4), floats)),),
            (KeyedJaggedTensor(["a", "c"], torch.cat([IDS, IDS]), lengths=lengths),),
            (both,),
        ),
        "EmbeddingBagCollection": one_by_one(
            pooled,
            (KeyedJaggedTensor(["a", "b"], torch.cat([IDS, IDS]), lengths=lengths),),
            (features(b=(IDS, torch.arange(4), floats[:3])),),
            (features(b=(IDS, torch.arange(4), IDS)),),
            (features(b=IDS + 99),),
            (jagged,),
        ),
        "collection of keys": one_by_one(
            keys,
            ({"key": IDS},),
            ({"key": floats, "id": IDS},),
            ({"key": IDS, "id": IDS + 99},),
            ({"key": IDS, "id": IDS},),
        ),
        "read": one_by_one(rows.read, ([1],), (True,), (floats,), (99,), (IDS,)),
        "read of a part": one_by_one(many.embeddings["b"].read, ([1],), (IDS - 9,), (IDS,)),
        "score": one_by_one(
            rows.score,
            (floats, 1),
            (floats[:2], 0),
            (floats[:2], ROWS + 1),
            (IDS[:2], 1),
            ([1.0, 2.0], 1),
            (floats[:2], 1),
        ),
        "score, leaving out": [
            (lambda: rows.score(floats[:2], 1, exclude=IDS + 99), lambda: rows.score(floats[:2], 1, exclude=IDS))
        ],
        "gather": one_by_one(table.gather, (floats,), (IDS + 99,), (IDS.view(2, 2),), (IDS,)),
        "scatter": one_by_one(
            table.scatter,
            (IDS[2:], floats),
            (IDS[1:3], torch.ones(2, DIM)),
            (IDS[2:], torch.ones(2, DIM, dtype=torch.float64)),
            (IDS[:0], torch.ones(0, DIM)),
        ),
        "reset_rows": one_by_one(table.reset_rows, (IDS[1:3],), (IDS + 99,), (IDS[:0],)),
        "Table.read": one_by_one(table.read, (IDS,), (0, 2)),
        "write": one_by_one(
            table.write,
            (0, floats),
            (ROWS, torch.ones(2, DIM)),
            (0, torch.ones(2, DIM).long()),
            (0, torch.ones(2, DIM)),
        ),
        "add_columns": one_by_one(table.add_columns, ([column, table.columns["weight"]],), ([column],)),
        "reset_columns": one_by_one(
            table.reset_columns,
            ([speedswap.Column("none", (DIM,), torch.float32, speedswap.init.zeros())],),
            ([table.columns["weight"]],),
        ),
        "reset_parameters": one_by_one(rows.reset_parameters, ("normal",), (None,)),
        "weight.data.copy_": one_by_one(rows.weight.data.copy_, (torch.ones(3, DIM),), (torch.ones(ROWS, DIM),)),
        "nn.init": one_by_one(nn.init.uniform_, (rows.weight, "low"), (rows.weight,)),
        "weight of a part": one_by_one(
            many.embeddings["a"].weight.copy_, (torch.ones(3, DIM),), (torch.ones(ROWS, DIM),)
        ),
        "weight in place": [(lambda: rows.weight.add_(1.0), lambda: rows.weight.data.add_(1.0))],
        "load_state_dict": one_by_one(
            rows.load_state_dict, ({"weight": torch.ones(3, DIM)},), ({"weight": torch.ones(ROWS, DIM)},)
        ),
        "state_dict of an optimizer": one_by_one(
            optimizer.load_state_dict, ({**optimizer.state_dict(), "param_groups": []},), (optimizer.state_dict(),)
        ),
        "attach": one_by_one(speedswap.attach, (torch.optim.SGD([torch.ones(1)]), rows), (optimizer, rows)),
        "flush": one_by_one(table.flush, (7,), ()),
        "close": one_by_one(spare.close, (7,), ()),
        "remove": one_by_one(spare.remove, (7,), ()),
        "dtype": [(lambda to=to: nn.Sequential(rows).to(to), lambda: None) for to in (torch.half, torch.float64)],
        "making a splitter": [
            (lambda given=given: speedswap.BatchSplitter(model, **given), lambda: speedswap.BatchSplitter(model))
            for given in ({"micro_batch_size": -1}, {"reduction": "max"}, {"none": 1})
        ],
        "making an average": one_by_one(speedswap.optim.Averaged, (model, 2.0), (nn.Linear(2, 2),)),
        "save": one_by_one(table.save, (folder,), (f"{folder}/saved",)),
        "export": one_by_one(table.export, (f"{folder}/a.none",), (f"{folder}/a.npy",)),
        "norm": [
            (lambda: torch.linalg.vector_norm(gradient(), 2, 7), lambda: torch.linalg.vector_norm(gradient())),
            (lambda: torch.norm(gradient(), "nuc"), lambda: torch.norm(gradient())),
            (lambda: gradient().sum(dim=7), lambda: gradient().sum()),
        ],
        "save_checkpoint": [
            (
                lambda given=given: speedswap.save_checkpoint(*given[:3], **given[3]),
                lambda: speedswap.save_checkpoint(f"{folder}/checkpoints", model),
            )
            for given in (
                (f"{folder}/checkpoints", model, None, {"step": -1}),
                (f"{folder}/checkpoints", model, None, {"keep": -1}),
                (f"{folder}/checkpoints", model, 3, {}),
                (None, model, None, {}),
            )
        ],
        "load_checkpoint": [
            (
                lambda: speedswap.load_checkpoint(f"{folder}/none", model),
                lambda: speedswap.load_checkpoint(f"{folder}/checkpoints", model),
            )
        ],
        "splitter": [
            (lambda: splitter.backward(3, IDS), lambda: splitter.backward(lambda ids: rows(ids).sum(), IDS)),
            (
                lambda: splitter.backward(speedswap.batching.coupled(lambda ids: rows(ids).sum()), IDS),
                lambda: splitter.backward(lambda ids: rows(ids).sum(), IDS),
            ),
            (lambda: splitter.map(rows, "a batch"), lambda: splitter.map(rows, IDS)),
        ],
        "lookahead": one_by_one(
            train_ahead,
            (3, {rows: same}),
            ([IDS], {rows: 3}),
            ([IDS], {rows: same}, -1),
            ([IDS], {rows: lambda batch: 3}),
            ([IDS], {rows: same}),
        ),
        "ModelFactory": [
            (
                lambda: speedswap.ModelFactory(nn.Embedding(9, 3), 9, 2, storage=owned(group)),
                lambda: speedswap.ModelFactory(nn.Embedding(9, 2), 9, 2, storage=owned(group)),
            ),
            *one_by_one(switcher.beforeForwardPass, (floats,), (IDS + 99,), (IDS,)),
            *one_by_one(switcher.afterOptimizerStep, (IDS[:3],), (IDS,)),
            *one_by_one(switcher.loadCupy, (f"{folder}/none.npy",), (f"{folder}/switched.npy",)),
            *one_by_one(switcher.uniformDistributionInit, (-1, "a"), (-1, 1)),
        ],
        "making an Embedding": [
            (
                lambda change=change: speedswap.Embedding(
                    **{"num_embeddings": 9, "embedding_dim": 2, "storage": owned(group), **change}
                ),
                lambda: speedswap.Embedding(9, 2, storage=owned(group)),
            )
            for change in (
                {"num_embeddings": 0},
                {"padding_idx": 9},
                {"reduction": "max"},
                {"path": "taken twice"},
                {"init": "zeros"},
                {"sparse": True},
                {"dtype": torch.int64},
                {"table": "path"},
                {"id_map": 3},
                {"none": 1},
            )
        ],
        "making an EmbeddingBag": [
            (
                lambda: speedswap.EmbeddingBag(9, 2, mode="median", storage=owned(group)),
                lambda: speedswap.EmbeddingBag(9, 2, storage=owned(group)),
            )
        ],
        "from_pretrained": [
            (
                lambda: speedswap.Embedding.from_pretrained(IDS.view(2, 2), storage=owned(group)),
                lambda: speedswap.Embedding.from_pretrained(torch.ones(2, 2), storage=owned(group)),
            )
        ],
        "making a collection": [
            (
                lambda some=some: speedswap.EmbeddingCollection(some, storage=owned(group)),
                lambda: speedswap.EmbeddingCollection(
                    [EmbeddingConfig(name="a", num_embeddings=9, embedding_dim=2)], storage=owned(group)
                ),
            )
            for some in ([], "ab", [EmbeddingConfig(name="a", num_embeddings=9, embedding_dim=2)] * 2)
        ],
        "convert": [
            (
                lambda: speedswap.convert(nn.Embedding(9, 2), min_rows=1, skip=["none"], storage=owned(group)),
                lambda: speedswap.convert(nn.Embedding(9, 2), min_rows=1, storage=owned(group)),
            )
        ],
    }
    return {key: pair for name, pairs in tables.items() for key, pair in named(name, pairs).items()}


def bad_calls(group, folder, only=""):
    """Make many calls with invalid arguments on the last rank and valid ones on the others.

    Args:
        group: the ranks.
        folder: for files, the same on all.
        only: the calls whose name has this.

    Returns:
        For each call its error here and how long it took to come; and whether all ranks go on after it.
    """
    is_bad = group.rank() == group.size() - 1
    watched = speedswap.Embedding(ROWS, DIM, storage=owned(group), init=speedswap.init.zeros())
    found = {}

    def meet():
        watched.read(IDS[:0])

    for name, (bad, good) in calls(group, folder).items():
        if only not in name:
            continue
        begun = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = error_of(bad) if is_bad else error_of(lambda good=good: (good(), meet()))
        took = time.monotonic() - begun
        dist.barrier(group)  # after which ranks are in step only if the error came at once
        found[name] = said, took, error_of(meet)
    return found
