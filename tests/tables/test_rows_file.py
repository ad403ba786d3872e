"""Files of changed rows: only these are in them, and they make another table over the same initial values equal."""

from __future__ import annotations

import json
import os
import re
import signal
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import exit_status, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import speedswap
from speedswap import Disk, IdMap, Table, init
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables import rows_file
from speedswap.tables.rows_file import RowsFile, load_rows, save_rows

ROWS, DIM = 600, 80
Make = Callable[..., Table]


@pytest.fixture(params=["pageable", "disk", "groups", "scratch"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return a maker of tables of one seed, whose rows are in memory, or on disk, alone or in groups."""
    made: list[Table] = []

    def create(dim: int = 4 if request.param == "groups" else DIM, **options: Any) -> Table:
        disk = Disk(tmp_path / f"t{len(made)}", cache_bytes=1 << 16, scratch=request.param == "scratch")
        given = {"init": init.normal(), "seed": 7, "name": "items", **options}
        storage = "pageable" if request.param == "pageable" else disk
        made.append(Table.create(ROWS, dim, storage=storage, **given))
        return made[-1]

    return create


def ones_in(table: Table, rows: list[int], value: float = 1.0) -> None:
    table.scatter(
        torch.tensor(rows, dtype=torch.int64), torch.full((len(rows), table.embedding_dim), value, dtype=table.dtype)
    )


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file)


def test_a_file_has_the_changed_rows_and_no_others(make: Make, tmp_path: Path) -> None:
    trained, fresh = make(), make()
    ones_in(trained, [599, 5, 17])
    trained.save_rows(tmp_path / "rows")
    found = tensors_of(tmp_path / "rows")
    assert found.keys() == {"items.ids", "items.rows"}
    assert found["items.ids"].dtype == torch.int64
    assert found["items.ids"].tolist() == [5, 17, 599]
    assert torch.equal(found["items.rows"], torch.ones(3, trained.embedding_dim))
    fresh.load_rows(tmp_path / "rows")
    assert torch.equal(fresh.read(), trained.read())


def test_a_file_without_rows_changes_nothing(make: Make, tmp_path: Path) -> None:
    table = make()
    before = table.read()
    table.save_rows(tmp_path / "rows")
    assert tensors_of(tmp_path / "rows")["items.rows"].shape == (0, table.embedding_dim)
    table.load_rows(tmp_path / "rows")
    assert torch.equal(table.read(), before)


@pytest.mark.parametrize(
    ("stored", "in_file"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.int8, torch.float32)],
)
def test_rows_are_written_in_the_dtype_that_stores_them(
    stored: torch.dtype, in_file: torch.dtype, make: Make, tmp_path: Path
) -> None:
    trained, fresh = make(stored_dtype=stored), make(stored_dtype=stored)
    rows = torch.arange(0, ROWS, 3)
    trained.scatter(rows, torch.randn(len(rows), trained.embedding_dim))
    trained.save_rows(tmp_path / "rows")
    found = tensors_of(tmp_path / "rows")["items.rows"]
    assert found.dtype == in_file
    assert torch.equal(found.float(), trained.gather(rows).weight)
    fresh.load_rows(tmp_path / "rows")
    if stored == torch.int8:  # its scales are rounded again
        torch.testing.assert_close(fresh.read(), trained.read(), rtol=1e-6, atol=0)
    else:
        assert torch.equal(fresh.read(), trained.read())


def test_a_table_of_bfloat16_rows_loads_into_a_wider_one_and_not_the_other_way(make: Make, tmp_path: Path) -> None:
    narrow, wide = (make(dtype=dtype, init=init.zeros()) for dtype in (torch.bfloat16, torch.float32))
    ones_in(narrow, [3], 0.1)
    narrow.save_rows(tmp_path / "narrow")
    wide.load_rows(tmp_path / "narrow")
    assert torch.equal(wide.read(), narrow.read().float())
    wide.save_rows(tmp_path / "wide")
    with pytest.raises(
        TypeError, match=r"'weight' is torch.float32 in .*, which table 'items' would round to torch.bf"
    ):
        narrow.load_rows(tmp_path / "wide")


def trained_embedding(table: Table, steps: int = 2) -> speedswap.Embedding:
    items = speedswap.Embedding(table.num_embeddings, table.embedding_dim, table=table)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    for step in range(steps):
        items(torch.tensor([4, 9, 30 + step])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return items


def test_state_goes_along_or_starts_from_its_initial_values(make: Make, tmp_path: Path) -> None:
    trained, other = make(), make()
    trained_embedding(trained)
    trained_embedding(other, 1)
    trained.save_rows(tmp_path / "with", state=True)
    trained.save_rows(tmp_path / "without")
    names = {"items.ids", "items.rows", "items.state.exp_avg", "items.state.exp_avg_sq"}
    assert names <= tensors_of(tmp_path / "with").keys()
    other.load_rows(tmp_path / "with")
    for column in trained.columns:
        assert torch.equal(other.read(column=column), trained.read(column=column))
    other.load_rows(tmp_path / "with", state=False)
    assert torch.equal(other.read(), trained.read())
    assert not other.read(column="exp_avg").any()
    trained_embedding(other, 1)
    other.load_rows(tmp_path / "without")
    assert not other.gather(torch.tensor([4, 9, 30, 31]))["exp_avg_sq"].any()
    with pytest.raises(ValueError, match=r"the state exp_avg, exp_avg_sq.* lacks; attach the optimizer first, or give"):
        make().load_rows(tmp_path / "with")


def test_training_goes_on_to_the_same_bits_with_stochastic_rounding(make: Make, tmp_path: Path) -> None:
    """Its random bits are a function of the number of the write, which goes along with the state."""
    trained, other = (make(dtype=torch.float32, stored_dtype=torch.bfloat16, rounding="stochastic") for _ in range(2))
    trained_embedding(trained, 3)
    trained_embedding(other, 1)
    trained.save_rows(tmp_path / "rows", state=True)
    other.load_rows(tmp_path / "rows")
    assert other.writes == trained.writes
    for table in (trained, other):
        table.scatter(torch.tensor([9]), torch.full((1, table.embedding_dim), 1 + 2**-9))
    assert torch.equal(other.read(), trained.read())
    other.load_rows(tmp_path / "rows", state=False)
    assert other.writes > trained.writes


def test_rows_whose_initial_values_are_unknown_are_all_saved(make: Make, tmp_path: Path) -> None:
    given, other = make(init=torch.nn.init.xavier_uniform_), make(seed=8)
    ones_in(given, [1])
    given.save_rows(tmp_path / "rows")
    assert tensors_of(tmp_path / "rows")["items.ids"].tolist() == [*range(ROWS)]
    other.load_rows(tmp_path / "rows")
    assert torch.equal(other.read(), given.read())


def test_idle_steps_count_as_changes(make: Make, tmp_path: Path) -> None:
    """Rows that only decay are changed rows, although nothing has written them."""
    trained, fresh = make(), make()
    items = speedswap.Embedding(ROWS, trained.embedding_dim, table=trained)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1, weight_decay=0.1)
    speedswap.attach(optimizer, items, idle_rows="dense")
    items(torch.tensor([4, 9])).sum().backward()
    optimizer.step()
    trained.save_rows(tmp_path / "rows")
    fresh.load_rows(tmp_path / "rows")
    assert torch.equal(fresh.read(), trained.read())


def test_several_tables_share_a_file(make: Make, tmp_path: Path) -> None:
    tables, others = ([make(), make(seed=8)] for _ in range(2))
    for number, table in enumerate(tables):
        ones_in(table, [number, 100])
    save_rows({"a.b": tables[0].store, "a": tables[1].store}, tmp_path / "rows")
    load_rows({"a": others[1].store, "a.b": others[0].store}, tmp_path / "rows")
    for table, other in zip(tables, others, strict=True):
        assert torch.equal(other.read(), table.read())
    assert RowsFile(tmp_path / "rows").count("a") == 2


def test_parts_of_a_store_have_their_own_rows(tmp_path: Path) -> None:
    config = [
        speedswap.EmbeddingConfig(name=name, num_embeddings=500, embedding_dim=DIM, feature_names=[name])
        for name in ("users", "items")
    ]
    pair = []
    for name in ("one", "other"):
        torch.manual_seed(0)  # from which the collection takes its seeds
        pair.append(speedswap.EmbeddingCollection(config, storage=Disk(tmp_path / name)))
    collection, other = pair
    ones_in(collection.tables["items"], [3, 499])
    collection.tables["items"].save_rows(tmp_path / "rows")
    assert tensors_of(tmp_path / "rows")["items.ids"].tolist() == [3, 499]
    other.tables["items"].load_rows(tmp_path / "rows")
    for name in ("users", "items"):
        assert torch.equal(other.tables[name].read(), collection.tables[name].read())


# ---- refused


def test_rows_of_another_table_are_refused(make: Make, tmp_path: Path) -> None:
    trained = make()
    ones_in(trained, [3])
    file = tmp_path / "rows"
    trained.save_rows(file)
    for other, message in [
        (
            make(seed=8),
            r'differ from .*"seed": 7.*those of .*"seed": 8.*make the table over the same checkpoint, or with',
        ),
        (make(init=init.zeros()), '"normal".*"constant"'),
        (make(zero_row=3), '"zero_row": null.*"zero_row": 3'),
        (make(dim=3), r"rows of a table of \[600, \d+\], but table 'items' has \[600, 3\]"),
        (make(name="users"), r"name is 'users', but .* has rows of 'items'; give one of these"),
        (make(init=torch.nn.init.ones_), "those of values that cannot be computed again"),
    ]:
        before = other.read()
        with pytest.raises(ValueError, match=message):
            other.load_rows(file)
        assert torch.equal(other.read(), before)
    make(name="users").load_rows(file, name="items")


def test_a_table_with_an_id_map_is_refused(make: Make, tmp_path: Path) -> None:
    table = make()
    table.set_id_map(IdMap(ROWS - 1))
    with pytest.raises(TypeError, match="has an id map, which gives rows their numbers"):
        table.save_rows(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_existing_files_and_places_within_tables_are_refused(make: Make, tmp_path: Path) -> None:
    table = make()
    (tmp_path / "rows").write_text("mine")
    with pytest.raises(FileExistsError, match="give overwrite=True"):
        table.save_rows(tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == "mine"
    table.save_rows(tmp_path / "rows", overwrite=True)
    with pytest.raises(FileNotFoundError, match="this folder does not exist"):
        table.save_rows(tmp_path / "none" / "rows")
    if table.path is not None:
        with pytest.raises(FileExistsError, match="inside the table"):
            table.save_rows(table.path / "rows")


def test_damage_is_found_before_a_row_is_written(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any flipped byte of a tensor, any cut, and a header that does not fit."""
    monkeypatch.setattr(rows_file, "rows_in_piece", lambda forms: 8)
    trained, other = make(), make()
    ones_in(trained, [3, 8, 9, 400, 401])
    file = tmp_path / "rows"
    trained.save_rows(file, state=True)
    whole, before = file.read_bytes(), other.read()
    first = 8 + int.from_bytes(whole[:8], "little")
    wrong = [whole[:cut] for cut in (0, 7, 8, 100, first, len(whole) - 1)]
    wrong += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(first, len(whole), 61)]
    wrong += [whole.replace(*change) for change in ((b"items.ids", b"items.idz"), (b"600", b"500"), (b"rows", b"rowz"))]
    for data in wrong:
        assert data != whole
        file.write_bytes(data)
        with pytest.raises(TableFormatError, match=re.escape(str(file))):
            other.load_rows(file)
        assert torch.equal(other.read(), before)


def test_ids_that_are_not_ascending_rows_are_refused(make: Make, tmp_path: Path) -> None:
    """Although the checksums are right."""
    table = make()
    ones_in(table, [3, 8])
    table.save_rows(tmp_path / "rows")
    with safe_open(tmp_path / "rows", "pt") as file:
        metadata = file.metadata()
    for ids in ([8, 3], [3, 3], [3, ROWS], [-1, 3]):
        tensors = {"items.ids": torch.tensor(ids), "items.rows": torch.ones(2, table.embedding_dim)}
        crcs = {name: f"{zlib.crc32(each.numpy().tobytes()):08x}" for name, each in tensors.items()}
        crcs["__metadata__"] = json.loads(metadata["crc32"])["__metadata__"]
        save_file(tensors, tmp_path / "wrong", metadata | {"crc32": json.dumps(crcs)})
        with pytest.raises(TableFormatError, match="the ids of 'items' are not ascending rows"):
            table.load_rows(tmp_path / "wrong")


def test_another_safetensors_file_is_refused(make: Make, tmp_path: Path) -> None:
    save_file({"items.ids": torch.arange(3)}, tmp_path / "other")
    with pytest.raises(
        TableFormatError, match=r"is not a file of rows of version 1; give one that Table.save_rows wrote"
    ):
        make().load_rows(tmp_path / "other")


# ---- since a commit


@pytest.fixture(params=[DIM, 4], ids=["rows", "groups"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    place = Disk(tmp_path / "table", cache_bytes=1, commit_seconds=None)
    return Table.create(ROWS, request.param, init=init.normal(), seed=7, name="items", storage=place)


def test_rows_changed_since_a_commit(table: Table, make: Make, tmp_path: Path) -> None:
    """Exactly these, in the process that wrote them, and once the table is opened again."""
    ones_in(table, [1, 2, 3])
    commit = table.hold()
    assert table.changed_since(commit).tolist() == []
    ones_in(table, [2, 40, 599], 5.0)
    assert table.changed_since(commit).tolist() == [2, 40, 599]
    table.save_rows(tmp_path / "since", since=commit)
    assert tensors_of(tmp_path / "since")["items.ids"].tolist() == [2, 40, 599]
    table.close()
    with Table.open(tmp_path / "table") as again:
        assert again.changed_since(commit).tolist() == [2, 40, 599]
        with Table.open(tmp_path / "table", "r") as reader:
            assert reader.changed_since(commit).tolist() == [2, 40, 599]
        again.commits.let_go(commit)
        with pytest.raises(ValueError, match=rf"since is {commit}, which is not a held commit of table 'items': \[\]"):
            again.changed_since(commit)


def test_a_number_of_a_commit_is_a_whole_number(tmp_path: Path) -> None:
    with Table.create(50, 4, path=tmp_path / "table") as table:
        held, commits = table.hold(), table.commits
        assert commits is not None
        for wrong in (1.0, "1", -1, True, 2**70):
            for name, call in {
                "since": table.changed_since,
                "commit": commits.let_go,
                "commit ": commits.return_to,
                "commit  ": lambda commit: Table.open(tmp_path / "table", "r", commit=commit),
            }.items():
                with pytest.raises(ValueError, match=re.escape(f"{name.strip()} is {wrong!r}; give ")):
                    call(wrong)
        assert commits.held == [held]


@pytest.mark.parametrize("dim", [2048, 4], ids=["rows", "groups"])
def test_rows_that_the_cleaner_has_moved_did_not_change(dim: int, tmp_path: Path) -> None:
    """Also once the table is opened again: its log says which records were moved."""
    place, count = Disk(tmp_path / "t", cache_bytes=1, commit_seconds=None), 3000
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(count, generator=generator)
    with Table.create(count, dim, storage=place) as table:
        table.write(0, torch.ones(count, dim))
        commit, written = table.hold(), torch.zeros(count, dtype=torch.bool)
        for value in range(40):
            some = order[:1500][torch.rand(1500, generator=generator) < 0.3]
            table.scatter(some, torch.full((len(some), dim), value + 2.0))
            written[some] = True
            table.flush()
            table.store.log.wait_for_cleaner()
        assert table.store.log.stats()["groups_moved"] > 0
        found = table.changed_since(commit)
        assert torch.equal(found, written.nonzero().squeeze(1))
    with Table.open(place) as again:
        assert torch.equal(again.changed_since(commit), found)


def test_columns_added_since_a_commit_do_not_change_rows(table: Table) -> None:
    ones_in(table, [1, 2])
    commit = table.hold()
    trained_embedding(table, 1)
    assert table.changed_since(commit).tolist() == [4, 9, 30]


def test_columns_reset_since_a_commit_are_changes(table: Table) -> None:
    """Of written rows, if untouched ones begin alike; a row that has its initial values did not change."""
    ones_in(table, [1, 2])
    table.reset_rows(torch.tensor([2]))
    trained_embedding(table, 1)
    commit = table.hold()
    before = {name: table.read(column=name) for name in table.columns}
    for columns in ([each for each in table.columns.values() if each.name != "weight"], [*table.columns.values()]):
        table.reset_columns(columns)
        now = {name: table.read(column=name) for name in table.columns}
        differ = torch.stack([(before[name] != each).flatten(1).any(1) for name, each in now.items()]).any(0)
        assert table.changed_since(commit).tolist() == differ.nonzero().squeeze(1).tolist()
    assert table.changed_since(commit).tolist() == [1, 4, 9, 30]
    table.reset_columns([replace(table.columns["weight"], init=init.constant(0.5))])
    assert table.changed_since(commit).tolist() == [*range(ROWS)]


def test_idle_steps_since_a_commit_are_changes(table: Table) -> None:
    """Every row decays in the step after the commit; until then none has changed."""
    items = speedswap.Embedding(ROWS, table.embedding_dim, table=table)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1, weight_decay=0.1)
    speedswap.attach(optimizer, items, idle_rows="dense")
    items(torch.tensor([4, 9])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    commit = table.hold()
    assert table.changed_since(commit).tolist() == []
    items(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert table.changed_since(commit).tolist() == [*range(ROWS)]


def test_places_without_commits_say_so(make: Make, tmp_path: Path) -> None:
    with make() as table:
        if table.commits is None:
            message = (
                r"table 'items' keeps no commits to compare with .*; put it on disk with storage=speedswap.Disk\(path\)"
            )
            for call in (table.hold, lambda: table.changed_since(1), lambda: table.save_rows(tmp_path / "f", since=1)):
                with pytest.raises(TypeError, match=message):
                    call()
    with pytest.raises(TableClosedError):
        table.save_rows(tmp_path / "rows")


# ---- killed


def test_a_killed_save_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    tables = [Table.create(ROWS, DIM, storage="pageable", init=init.zeros(), name="items") for _ in range(2)]
    file, step, seen = tmp_path / "rows", 0, set()

    def save(value: float) -> None:
        tables[int(value) - 1].save_rows(file, overwrite=True)

    for number, table in enumerate(tables):
        ones_in(table, [3], number + 1.0)
    torch.set_num_threads(1)
    save(1.0)
    while killed_at(step, lambda: save(2.0)):
        seen.add(tensors_of(file)["items.rows"][0, 0].item())
        RowsFile(file).verify()
        save(1.0)
        assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]
        step += 1
    assert step > 4
    assert seen == {1.0, 2.0}


@pytest.mark.parametrize("pieces", [0, 1, 5, None])
def test_a_killed_load_leaves_the_table_before_or_after_it(
    pieces: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are one commit, although the cache holds few of them."""
    place = Disk(tmp_path / "t", cache_bytes=1, commit_seconds=0.001)
    with Table.create(ROWS, DIM, storage="pageable", init=init.normal(), name="t") as trained:
        trained.scatter(torch.arange(0, ROWS, 2), torch.ones(ROWS // 2, DIM))
        trained.save_rows(tmp_path / "rows")
        after = trained.read()
    with Table.create(ROWS, DIM, storage=place, init=init.normal()) as table:
        before = table.read()
    monkeypatch.setattr(rows_file, "rows_in_piece", lambda forms: 80)
    every = RowsFile.pieces

    def work() -> None:
        with Table.open(place) as table:

            def killing(file: RowsFile, *given: Any) -> Any:
                for number, piece in enumerate(every(file, *given)):
                    if number == pieces and verified:
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield piece
                verified.append(True)

            verified: list[bool] = []
            RowsFile.pieces = killing  # type: ignore[method-assign]
            table.load_rows(tmp_path / "rows")
            table.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    assert exit_status(work) == -signal.SIGKILL
    with Table.open(place) as table:
        assert torch.equal(table.read(), after if pieces is None else before)


def test_changed_rows_are_those_of_the_last_commit_after_a_kill(tmp_path: Path) -> None:
    with Table.create(ROWS, DIM, path=tmp_path / "t") as table:
        ones_in(table, [1])
        commit = table.hold()

    def work() -> None:
        table = Table.open(Disk(tmp_path / "t", commit_seconds=None))
        ones_in(table, [2, 3], 2.0)
        table.flush()
        ones_in(table, [4], 3.0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_status(work) == -signal.SIGKILL
    with Table.open(tmp_path / "t") as table:
        assert table.changed_since(commit).tolist() == [2, 3]


# ---- any sequence of calls


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["write", "save", "hold", "since", "reopen"]), st.integers(0, 2**32 - 1))))
def test_any_sequence_of_calls_against_a_dictionary(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> None:
    folder = tmp_path_factory.mktemp("walk")
    place = Disk(folder / "t", cache_bytes=1)
    table = Table.create(200, 3, init=init.uniform(), storage=place, name="items")
    initial, rows = table.read(), dict[int, float]()
    then: dict[int, float] | None = None
    commit = 0
    for number, (call, seed) in enumerate(calls):
        generator = torch.Generator().manual_seed(seed)
        file = folder / str(number)
        if call == "write":
            some = torch.randperm(200, generator=generator)[: seed % 20].tolist()
            ones_in(table, some, number + 2.0)
            rows |= dict.fromkeys(some, number + 2.0)
        elif call == "save":
            table.save_rows(file)
            found = tensors_of(file)
            assert dict(zip(found["items.ids"].tolist(), found["items.rows"][:, 0].tolist(), strict=True)) == rows
            with Table.create(200, 3, init=init.uniform(), storage="pageable", name="items") as other:
                other.load_rows(file)
                expected = initial.clone()
                for row, value in rows.items():
                    expected[row] = value
                assert torch.equal(other.read(), expected)
        elif call == "hold":
            for held in table.commits.held:
                table.commits.let_go(held)
            commit, then = table.hold(), dict(rows)
        elif call == "since" and then is not None:
            expected = {row: value for row, value in rows.items() if then.get(row) != value}
            assert table.changed_since(commit).tolist() == sorted(expected)
            table.save_rows(file, since=commit)
            assert tensors_of(file)["items.rows"][:, 0].tolist() == [expected[row] for row in sorted(expected)]
        elif call == "reopen":
            table.close()
            table = Table.open(place)
    table.close()
