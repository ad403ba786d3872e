"""A cache of hot rows on the GPU changes the bytes that cross the bus, and no bit of the result."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import simulated_gpu
import simulated_gpu.device
import torch
from pinned_places import PINNED
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap import EmbeddingBagConfig, Pinned, Table, kernels
from speedswap.errors import SpeedswapWarning
from speedswap.kernels import HotCounts, HotRows
from speedswap.kernels.cuda import engines, hot
from speedswap.kernels.cuda.driver import side_stream
from speedswap.monitor import hot_rows
from speedswap.optim import RowwiseAdagrad
from speedswap.tables import memory as sizes

ROWS, DIM, SLOTS = 24, 4, 5
CACHED = Pinned(hot_bytes=SLOTS / ROWS + 1e-9)
BY_WAY = {way: replace(PINNED[way], hot_bytes=CACHED.hot_bytes) for way in ("zero_copy", "staged out", "split out")}

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rowwise": lambda parameters: RowwiseAdagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, weight_decay=0),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
}


@pytest.fixture
def gpu(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a GPU, or the simulated one: SPEEDSWAP_TEST_DEVICE=simulated")
    return device


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admissions after every scatter, of three rows at most, also where a batch is larger than the cache.

    Scatters are forgotten after every third admission, so that rows keep changing places.
    """
    for name, value in {"EVERY": 1, "EVERY_AT_FIRST": 1, "LEAST_LIMIT": 3}.items():
        monkeypatch.setattr(hot, name, value)
    monkeypatch.setattr(sizes, "BATCHES", 0)
    admit = HotRows.admit

    def forgetful(rows: HotRows, expected: Sequence[Tensor] = ()) -> None:
        admit(rows, expected)
        rows.times = getattr(rows, "times", 0) + 1
        if rows.times % 3 == 0:
            rows._words.bitwise_and_(hot.MOST_SLOTS)

    monkeypatch.setattr(HotRows, "admit", forgetful)


def walk(steps: int, seed: int = 0, size: int = 7) -> list[Tensor]:
    """Return batches of rows that wander through the table: every third has the same neighbourhood."""
    generator = torch.Generator().manual_seed(seed)
    far = torch.randint(ROWS, (steps, size), generator=generator)
    turn = torch.arange(steps)[:, None]
    close = (turn // 6 + 8 * (turn % 3) + torch.randint(4, (steps, size), generator=generator)) % ROWS
    return list(torch.where(torch.rand(steps, size, generator=generator) < 0.6, close, far).cuda())


def embedding(place: Any = CACHED, dim: int = DIM, **more: Any) -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, dim, storage=place, device="cuda", seed=1, **more)


def train(
    model: nn.Module, batches: Sequence[Tensor], optimizer: str = "adam", depth: int = 0, stop: int | None = None
) -> Optimizer:
    """Train on batches; raise in the forward pass of step ``stop``."""
    optim = OPTIMIZERS[optimizer](model.parameters())
    speedswap.attach(optim, model)
    steps(model, optim, speedswap.lookahead(batches, {model: lambda batch: batch}, depth=depth), stop)
    return optim


def steps(model: nn.Module, optimizer: Optimizer, batches: Iterable[Tensor], stop: int | None = None) -> None:
    for step, ids in enumerate(batches):
        loss = model(ids).pow(2).sum()
        if step == stop:
            raise ZeroDivisionError
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def columns_of(table: Table) -> dict[str, Tensor]:
    return {name: table.read(column=name) for name in table.columns}


def require_same(one: Table, other: Table) -> None:
    require_columns(one, columns_of(other))


def require_columns(table: Table, expected: dict[str, Tensor]) -> None:
    found = columns_of(table)
    assert found.keys() == expected.keys()
    for name, column in found.items():
        assert torch.equal(column, expected[name]), name


def counts_of(model: nn.Module) -> HotCounts:
    (counts,) = hot_rows(model).values()
    return counts


# ---- the same bits


def test_records_know_the_cache_from_its_beginning_to_its_end():
    """A gather that did not would read rows at home that have moved."""
    group, hot = Table.create(10, 4, storage="pageable").store.groups[0], object()
    group.use(hot)
    assert group.records.hot is hot
    assert group.records_ahead.hot is hot
    group.use(None)
    assert group.records.hot is None
    assert group.records_ahead.hot is None


@pytest.mark.sweep(6)
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_walk_through_the_table_trains_to_the_same_bits(gpu: str, tiny: None, optimizer: str, depth: int):
    """Five slots, batches of about six rows, and three admissions at every step."""
    plain, model = embedding(Pinned()), embedding()
    train(plain, walk(25), optimizer)
    train(model, walk(25), optimizer, depth)
    torch.cuda.synchronize()
    counts = counts_of(model)
    assert counts.slots == SLOTS
    assert counts.evicted > 5
    assert min(counts.scattered_hits, counts.scattered_misses, counts.gathered_misses) > 10
    assert depth or counts.gathered_hits > 10  # rows that batches share are forwarded, from anywhere
    require_same(model.table, plain.table)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ["late", "ahead", "eager", *(f"random-{seed}" for seed in range(5))])
@pytest.mark.parametrize("way", BY_WAY)
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_in_any_order_of_the_streams(gpu: str, tiny: None, order: str, depth: int, way: str):
    """With two record groups, the weights' and the optimizer's, whose rows change places together."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU has an order of its own")
    with simulated_gpu.policy("eager"):
        plain = in_two_groups(Pinned())
        train(plain, walk(25))
    name, _, seed = order.partition("-")
    with simulated_gpu.policy(name, int(seed or 0)):
        model = in_two_groups(BY_WAY[way])
        train(model, walk(25), depth=depth)
        require_same(model.table, plain.table)


def in_two_groups(place: Any = CACHED) -> speedswap.Embedding:
    model = embedding(place)
    model.table.write(0, torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(2)))
    return model


def gathered_during_an_admission(comes_first: str, progress: int) -> bool:
    """Return whether a gather ahead returns every row right, while an admission has done some of its work."""
    with simulated_gpu.policy("eager"):
        model = in_two_groups()
        train(model, walk(9))
    store, cache, rows = model.table.store, model.table.store.notes.hot, torch.arange(ROWS, device="cuda")
    expected, held = columns_of(model.table), (cache._words & hot.MOST_SLOTS) > 0
    coming = rows[~held][:3].clone()
    cache._words.bitwise_and_(hot.MOST_SLOTS)
    blocks: dict[str, Tensor] = {}
    there, here = side_stream(0, "rows out"), torch.cuda.Stream()  # a gather ahead waits for no write of the former

    def gather() -> None:
        with torch.cuda.stream(here):
            for group in store.groups:
                parts = []
                for name, field in group.fields().items():
                    blocks[name] = torch.empty(ROWS, *field.row_shape, dtype=field.dtype, device="cuda")
                    parts.append(kernels.Part(field.offset, blocks[name], field.stored))
                kernels.gather_records(group.records._replace(ahead=True), rows, parts)

    with simulated_gpu.policy("late"):
        torch.cuda.synchronize()
        if comes_first == "gather":
            gather()
        with torch.cuda.stream(there):
            cache.admit([coming])
            done = there.record_event()
        for _ in range(progress):
            done.query()  # each time, the stream does one more piece of its work
        if comes_first == "admission":
            gather()
        here.synchronize()
        right = all(torch.equal(block.cpu(), expected[name]) for name, block in blocks.items())
        torch.cuda.synchronize()
    assert bool(((cache._words[coming] & hot.MOST_SLOTS) > 0).all())
    require_columns(model.table, expected)
    return right


PROGRESS = range(12)


@pytest.mark.parametrize("comes_first", ["admission", "gather"])
def test_gathers_and_admissions_wait_for_each_other(gpu: str, tiny: None, comes_first: str):
    """torchrec#4191: a race between streams left NaN in a cache."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU cannot be stopped within an admission")
    assert all(gathered_during_an_admission(comes_first, progress) for progress in PROGRESS)


@pytest.mark.parametrize("comes_first", ["admission", "gather"])
def test_a_missing_wait_is_found(gpu: str, tiny: None, comes_first: str, monkeypatch: pytest.MonkeyPatch):
    """Without either wait some gather reads a slot that has been overwritten and is still said to hold the row."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU cannot be stopped within an admission")
    real = HotRows._wait_until_settled

    def forgets(rows: HotRows, stream: Any) -> None:
        rows._settled = torch.cuda.Event()
        rows._ahead.clear()
        real(rows, stream)

    monkeypatch.setattr(HotRows, "_wait_until_settled", forgets)
    assert not all(gathered_during_an_admission(comes_first, progress) for progress in PROGRESS)


def test_no_row_changes_places_while_the_host_writes_some(gpu: str, tiny: None, monkeypatch: pytest.MonkeyPatch):
    """Rows at home are staged: one that came into the cache meanwhile would lose its write."""
    model = embedding(BY_WAY["staged out"])
    train(model, walk(9))
    cache, real = model.table.store.notes.hot, engines.Ring.scatter
    came: list[Thread] = []

    def admitted_meanwhile(ring: engines.Ring, *arguments: Any) -> None:
        came.append(Thread(target=cache.admit))
        came[-1].start()
        came[-1].join(0.2)
        assert came[-1].is_alive()
        real(ring, *arguments)

    monkeypatch.setattr(engines.Ring, "scatter", admitted_meanwhile)
    rows = torch.arange(ROWS, device=gpu)
    model.table.scatter(rows, torch.arange(float(ROWS), device=gpu)[:, None].expand(-1, DIM).contiguous())
    (thread,) = came
    thread.join()
    assert model.table.read()[:, 0].tolist() == list(range(ROWS))


@pytest.mark.parametrize(
    "stored",
    [
        {"stored_dtype": torch.bfloat16},
        {"stored_dtype": torch.float16, "rounding": "stochastic"},
        {"state_dtype": torch.bfloat16},
        {"state_dtype": torch.bfloat16, "rounding": "stochastic", "dim": 16},  # both move in one launch
        {"dtype": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", BY_WAY)
@pytest.mark.parametrize("depth", [0, 2])
def test_compact_columns_and_other_dtypes(gpu: str, tiny: None, stored: dict[str, Any], depth: int, way: str):
    """Stochastic rounding draws by row and number of the write, not by where the row is."""
    plain, model = embedding(Pinned(), **stored), embedding(BY_WAY[way], **stored)
    train(plain, walk(25))
    train(model, walk(25), depth=depth)
    require_same(model.table, plain.table)


@pytest.mark.parametrize("way", BY_WAY)
@pytest.mark.parametrize("dim", [1, 3, 5, 16])
def test_records_of_any_alignment(gpu: str, tiny: None, dim: int, way: str):
    """Words of 16, 4 and 1 bytes."""
    places, tables = (Pinned(), BY_WAY[way]), []
    for place in places:
        model = speedswap.Embedding(ROWS, dim, storage=place, device=gpu, seed=1, dtype=torch.float16)
        train(model, walk(12), "sgd", depth=1)
        tables.append(model.table)
    require_same(*tables)


@pytest.mark.parametrize("depth", [0, 3])
def test_bags_of_a_collection(gpu: str, tiny: None, depth: int):
    def trained(place: Any) -> list[Tensor]:
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, pooling="sum") for i in range(2)
        ]
        torch.manual_seed(1)
        model = speedswap.EmbeddingBagCollection(configs, storage=place, device=gpu)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        offsets = torch.tensor([0, 2, 5], device=gpu)
        batches = [{"t0": (ids, offsets), "t1": (ids.flip(0), offsets)} for ids in walk(20)]
        for batch in speedswap.lookahead(batches, {model: lambda batch: batch}, depth=depth):
            sum(each.pow(2).sum() for each in model(batch).to_dict().values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert bool(hot_rows(model)) == (place is CACHED)
        return [table.read() for table in model.tables.values()]

    for ours, expected in zip(trained(CACHED), trained(Pinned()), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_of_an_id_map_that_start_over(gpu: str, tiny: None, depth: int):
    def trained(place: Any) -> Table:
        model = embedding(place, id_map=speedswap.IdMap(ROWS, evict="lru"))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        keys = [ids * 1000 + step // 4 for step, ids in enumerate(walk(20))]
        steps(model, optimizer, speedswap.lookahead(keys, {model: lambda batch: batch}, depth=depth))
        return model.table

    require_same(trained(CACHED), trained(Pinned()))


# ---- whatever else touches the rows


def test_the_host_reads_and_writes_in_between(gpu: str, tiny: None, tmp_path: Path):
    """Rows come home before the host reads its records, and the slots are emptied before it writes them."""

    def trained(place: Any, depth: int) -> list[Tensor]:
        model = embedding(place)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        speedswap.attach(optimizer, model)
        seen = []
        batches = speedswap.lookahead(walk(40), {model: lambda batch: batch}, depth=depth)
        some = torch.tensor([3, 9, 20])
        for step, ids in enumerate(batches):
            model(ids).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 9 == 3:
                seen.append(model.table.read(column="exp_avg"))
            if step % 9 == 4:
                seen.append(model.table.gather(some).weight)
            if step % 9 == 5:
                model.table.scatter(some, torch.full((3, DIM), float(step)))
            if step % 9 == 6:
                model.table.write(8, torch.full((4, DIM), float(step)))
            if step % 9 == 7:
                model.table.reset_rows(some[:2])
            if step % 9 == 8:
                model.table.flush()
                model.table.save(tmp_path / f"{place.hot_bytes}-{depth}-{step}")
        for path in sorted(tmp_path.glob(f"{place.hot_bytes}-{depth}-*")):
            with Table.open(path, mode="r") as saved:
                seen += columns_of(saved).values()
        return [*seen, *columns_of(model.table).values()]

    expected = trained(Pinned(), 0)
    for depth in (0, 2):
        for ours, column in zip(trained(CACHED, depth), expected, strict=True):
            assert torch.equal(ours, column)


def test_columns_that_copy_rows_of_the_cache(gpu: str, tiny: None):
    """New columns read the old ones' records, which are brought home first; then another cache begins."""

    def trained(place: Any) -> Table:
        model = embedding(place)
        train(model, walk(10), "sgd")
        train(model, walk(10, seed=1), "adam")
        model.table.add_columns(
            [speedswap.tables.Column("before", (DIM,), torch.float32, speedswap.tables.init.CopyOf("weight"))]
        )
        train(model, walk(10, seed=2), "adam", depth=2)
        model.table.reset_columns([model.table.columns["before"]])
        return model.table

    require_same(trained(CACHED), trained(Pinned()))


def test_a_view_of_the_rows_ends_the_cache(gpu: str, tiny: None):
    model, plain = embedding(), embedding(Pinned())
    for each in (model, plain):
        train(each, walk(10))
    view = model.table.view()
    require_same(model.table, plain.table)
    for each in (model, plain):
        train(each, walk(10, seed=1))
    assert hot_rows(model) == {}
    torch.cuda.synchronize()
    assert torch.equal(view, plain.table.read())


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_exception_leaves_the_last_step(gpu: str, tiny: None, depth: int):
    plain, model = embedding(Pinned()), embedding()
    train(plain, walk(25)[:11])
    with pytest.raises(ZeroDivisionError):
        train(model, walk(25), depth=depth, stop=11)
    require_same(model.table, plain.table)
    for each in (plain, model):
        train(each, walk(12, seed=3), depth=depth)
    require_same(model.table, plain.table)


def test_checkpoints(gpu: str, tiny: None, tmp_path: Path):
    plain, model = embedding(Pinned()), embedding()
    for each in (plain, model):
        optimizer = train(each, walk(10))
        speedswap.save_checkpoint(tmp_path / str(id(each)), each, optimizer)
        expected = columns_of(each.table)
        steps(each, optimizer, walk(5, seed=1))
        speedswap.load_checkpoint(tmp_path / str(id(each)), each, optimizer)
        for name, column in columns_of(each.table).items():
            assert torch.equal(column, expected[name])
        steps(each, optimizer, walk(5, seed=2))
    require_same(model.table, plain.table)


def test_a_copy_of_the_table(gpu: str, tiny: None):
    """It has the cached rows, and a cache of its own from its first step on."""
    model = embedding()
    train(model, walk(10))
    with copy.deepcopy(model.table) as copied:
        require_same(copied, model.table)
        assert copied.store.facts.hot_bytes == CACHED.hot_bytes


@pytest.mark.parametrize("ends", ["closed", "freed"])
@pytest.mark.parametrize("order", ["late", "ahead", "random-1", "random-2"])
def test_memory_stays_until_the_last_move_is_done(gpu: str, tiny: None, ends: str, order: str):
    """torchrec#4218: a cache's storage was freed during a copy. The simulated GPU reports such a write or read."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU may not report it")
    name, _, seed = order.partition("-")
    with simulated_gpu.policy(name, int(seed or 0)):
        model = embedding()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        turns = iter(speedswap.lookahead(walk(20), {model: lambda batch: batch}, depth=2))
        for _ in range(6):
            steps(model, optimizer, [next(turns)])
        if ends == "closed":
            model.table.close()
        del turns, model, optimizer
        gc.collect()
        torch.full((500,), 7.0, device=gpu)
        torch.cuda.synchronize()


# ---- rows that are hot


def test_a_cache_of_the_whole_table_misses_nothing(gpu: str, monkeypatch: pytest.MonkeyPatch):
    """dynamicemb: sets of slots miss by conflict even where everything would fit. A row may take any slot."""
    monkeypatch.setattr(hot, "EVERY", 1)
    model = embedding(Pinned(hot_bytes=1 << 20))
    optimizer = train(model, [torch.arange(ROWS, device=gpu)] * 4)
    torch.cuda.synchronize()
    before = counts_of(model)
    assert before.admitted == before.slots == ROWS
    steps(model, optimizer, walk(70))
    torch.cuda.synchronize()
    after = counts_of(model)
    assert after.gathered_hits > before.gathered_hits
    assert after[2:] == (before.gathered_misses, before.gathered_bytes, after.scattered_hits, *before[5:])


def test_a_cache_below_two_batches_is_none(gpu: str):
    """TorchRec: at about one batch a cache is slower than none."""
    model = embedding(Pinned(hot_bytes=9 / ROWS + 1e-9), name="items")
    message = (
        r"SW404: hot_bytes=0\.37\d+ of table 'items' makes room for 9 rows, fewer than 2 batches of 5; give 480 bytes "
        "or more: it trains without a cache of hot rows"
    )
    with pytest.warns(SpeedswapWarning, match=message):
        train(model, [torch.arange(5, device=gpu)] * 5)
    assert hot_rows(model) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = embedding(Pinned(hot_bytes=10 / ROWS + 1e-9))
        train(model, [torch.arange(5, device=gpu)] * 5)
    assert counts_of(model).slots == 10


@pytest.mark.parametrize(
    ("stored", "row_bytes"),
    [
        ({}, 3 * DIM * 4),
        ({"state_dtype": torch.bfloat16}, 2 * DIM * 4),
        ({"state_dtype": torch.bfloat16, "dim": 16}, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", BY_WAY)
def test_bytes_are_those_of_rows_at_home(gpu: str, tiny: None, stored: dict[str, Any], row_bytes: int, way: str):
    """FBGEMM#2359: wrong counts of conflicts gave wrong output. Here words tell what moves, and are what is counted."""
    model = embedding(BY_WAY[way], **stored)
    optimizer = train(model, walk(3))
    cache = model.table.store.notes.hot
    misses = hits = 0
    torch.cuda.synchronize()
    before = counts_of(model)
    for ids in walk(20, seed=1):
        held = (cache._words[ids.unique()] & hot.MOST_SLOTS) > 0
        hits, misses = hits + int(held.sum()), misses + int((~held).sum())
        steps(model, optimizer, [ids])
    torch.cuda.synchronize()
    found = [after - begun for after, begun in zip(counts_of(model), before, strict=True)]
    assert found[1:7] == [hits, misses, misses * row_bytes] * 2
    assert hits
    assert found[7] == found[8] > 0


def test_rows_of_batches_to_come_are_admitted_first(gpu: str, tiny: None, monkeypatch: pytest.MonkeyPatch):
    """FBGEMM#1201: a prefetch evicted the one before. What the next batches have counts as scattered once more."""
    given: list[list[set[int]]] = []
    admit = HotRows.admit

    def watched(rows: HotRows, expected: Sequence[Tensor] = ()) -> None:
        given.append([set(each.tolist()) for each in expected])
        admit(rows, expected)

    monkeypatch.setattr(HotRows, "admit", watched)
    batches = walk(20)
    train(embedding(), batches, depth=3)
    sets = [set(ids.tolist()) for ids in batches]
    assert len(given) == 20
    assert any(given)
    for step, expected in enumerate(given):
        assert all(rows in sets[step + 1 : step + 4] for rows in expected)


def test_lookups_without_a_step_hold_nothing(gpu: str, tiny: None):
    """FBGEMM#6120: a forward pass without a backward pass never unlocked its lines. No row is locked here."""
    plain, model = embedding(Pinned()), embedding()
    seen: list[list[Tensor]] = []
    for each in (plain, model):
        optimizer = train(each, walk(10))
        with torch.no_grad():
            turns = speedswap.lookahead(walk(15, seed=4), {each: lambda batch: batch}, depth=3)
            seen.append([each(ids) for ids in turns])
        for ids in walk(5, seed=5):
            each(ids)  # without a step
        steps(each, optimizer, walk(20, seed=6))
    torch.cuda.synchronize()
    assert all(torch.equal(ours, expected) for ours, expected in zip(*seen, strict=True))
    require_same(model.table, plain.table)
    assert counts_of(model).evicted > 20


def test_empty_batches(gpu: str, tiny: None):
    """dynamicemb#292: no keys were an invalid launch."""
    plain, model = embedding(Pinned()), embedding()
    batches = walk(12)
    for place in (0, 5, 6, 11):
        batches[place] = batches[place][:0]
    for each, depth in ((plain, 0), (model, 2)):
        train(each, batches, depth=depth)
    require_same(model.table, plain.table)
    assert model.table.gather(torch.empty(0, dtype=torch.int64, device=gpu)).weight.shape == (0, DIM)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_waits_and_allocates_no_more(gpu: str, depth: int, monkeypatch: pytest.MonkeyPatch):
    """FBGEMM#2566: temporaries of six to nine times the ids. Here no step allocates for the cache, or waits for it."""
    if not simulated_gpu.is_on():
        pytest.skip("counted on the simulated GPU")
    monkeypatch.setattr(hot, "EVERY_AT_FIRST", 1)
    monkeypatch.setattr(sizes, "BATCHES", 0)
    batches = walk(24)

    def costs(place: Any) -> tuple[int, int]:
        model = embedding(place)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
        turns = iter(speedswap.lookahead(batches, {model: lambda batch: batch}, depth=depth))
        for _ in range(8):
            steps(model, optimizer, [next(turns)])
        kernels.finish_transfers()
        gc.collect()
        with simulated_gpu.counted() as counts, without_collections():
            for _ in range(8):
                steps(model, optimizer, [next(turns)])
                if place is CACHED:
                    counts_of(model)
                kernels.finish_transfers()  # what is pending costs the next prefetch, however long a thread takes
        turns.close()
        return len(counts.round_trips), counts.allocations

    with simulated_gpu.policy("eager"):  # so that as many writes are pending
        assert costs(CACHED) == costs(Pinned())


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- what is refused


def test_another_gpu_is_refused(gpu: str, tiny: None):
    model = embedding()
    train(model, walk(3))
    cache = model.table.store.notes.hot

    class Elsewhere:
        device = torch.device("cuda", 1)

    message = "hot_bytes was given for a table whose hot rows are on cuda:0, but rows move to or from cuda:1; train"
    with pytest.raises(ValueError, match=message), cache.turn(Elsewhere(), writes=True, ahead=False):
        raise AssertionError


def test_a_gpu_without_room_for_it_is_no_reason_to_stop(gpu: str):
    plain, model = embedding(Pinned()), embedding(Pinned(hot_bytes=0.9))
    if not simulated_gpu.is_on():
        pytest.skip("would fill the GPU's memory")
    train(plain, walk(5))
    real = torch.zeros

    def full(*size: Any, **more: Any) -> Tensor:
        if more.get("dtype") is torch.int32 and size == (ROWS,):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it")
        return real(*size, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.warns(
            SpeedswapWarning, match=r"SW404: hot_bytes=0\.9 of table 'table' is more than the GPU has left"
        ):
            train(model, walk(5))
    require_same(model.table, plain.table)


@pytest.mark.parametrize(
    ("hot_bytes", "slots"), [("auto", ROWS), (ROWS * 48, ROWS), (10**9, ROWS), (0.5, ROWS // 2), (8 * 48 - 1, 7)]
)
def test_sizes(gpu: str, hot_bytes: Any, slots: int):
    """In bytes they are those of records, of weight and state: 48 bytes here."""
    model = embedding(Pinned(hot_bytes=hot_bytes))
    train(model, [torch.arange(3, device=gpu)] * 6)
    assert counts_of(model).slots == slots


# ---- interrupts


@pytest.mark.sweep(8)
@pytest.mark.parametrize("way", ["zero_copy", "split out"])
@pytest.mark.parametrize("folder", ["kernels/cuda", "tables"])
@pytest.mark.parametrize("line", [*range(1, 120, 4), 160, 200, 240])
def test_a_ctrl_c_leaves_whole_rows(gpu: str, tiny: None, folder: str, line: int, way: str, interrupted_at: Any):
    """Each row is as before a scatter or as after it, wherever it was, and the next scatter writes them all."""
    model, rows = embedding(BY_WAY[way]), torch.arange(7, device=gpu)
    train(model, walk(6))
    for value in (3.0, 4.0):
        before = model.table.read()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(line, folder):
            model.table.scatter(rows, torch.full((7, DIM), value, device=gpu))
        after = model.table.read()
        written = (after == value).all(1)
        assert torch.equal(after[~written], before[~written])
        assert not written[7:].any()
    model.table.scatter(rows, torch.full((7, DIM), 5.0, device=gpu))
    before[:7] = 5.0
    assert torch.equal(model.table.read(), before)
