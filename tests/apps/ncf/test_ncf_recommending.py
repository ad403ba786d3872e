"""Recommendations of a saved model: the highest scores of all items, in the user's own ids."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedswap.apps.errors import CheckpointError, SettingsError, UnknownUserError
from speedswap.apps.ncf import NCF, NcfSettings, load, train
from speedswap.apps.ncf import model as module
from speedswap.apps.ncf.interactions import Interactions, NcfSplit, OwnIds


def some_split(num_users=30, num_items=50, share=0.3, seed=0, *, ids=True):
    """Make users own1, own10, …, in the order of the text; items are numbered by hundreds."""
    rng = np.random.default_rng(seed)
    taken = rng.random((num_users, num_items)) < share
    taken[:, 0] = True
    tested = np.array([rng.choice(np.flatnonzero(row)) for row in taken])
    taken[np.arange(num_users), tested] = False
    users = OwnIds(sorted(f"own{number}" for number in range(num_users))) if ids else None
    items = OwnIds(np.arange(num_items) * 100) if ids else None
    some = np.flatnonzero(np.arange(num_users) % 3)  # a third of the users are not tested
    return NcfSplit(Interactions(np.flatnonzero(taken), num_users, num_items), some, tested[some], users, items)


def some_model(split, device="cpu", **more):
    sizes = (split.train.num_users, split.train.num_items)
    model = NCF(*sizes, NcfSettings(**{"factors": 4, "layers": [8, 6, 3]} | more)).to(device)
    with torch.no_grad():
        for parameter in model.dense().values():
            parameter.normal_()
    for side, rows in zip((model.user, model.item), sizes, strict=True):
        side.table.write(0, torch.randn(rows, side.embedding_dim))
    model.split = split
    return model


@pytest.mark.parametrize("kind", ["gmf", "mlp", "neumf"])
@pytest.mark.parametrize("storage", ["pageable", "disk", "device"])
@pytest.mark.parametrize("exclude_seen", [True, False])
def test_the_highest_scores_of_all_items_are_recommended(kind, storage, exclude_seen, device, tmp_path, monkeypatch):
    """Sorted in NumPy, over chunks of users and items; what was taken is left out, the one to test with too."""
    monkeypatch.setattr(module, "CHUNK_USERS", 4)
    monkeypatch.setattr(module, "CHUNK_SCORES", 30)
    torch.manual_seed(1)
    split = some_split()
    model = some_model(split, device, model=kind, storage=storage, scratch=tmp_path)
    rows = [7, 0, 29, 7, 3, 16]
    with torch.no_grad():
        scores = model(torch.arange(30, device=device), torch.arange(50, device=device).expand(30, -1)).cpu().numpy()
    users, items = split.train.pairs(np.arange(len(split.train)))
    if exclude_seen:
        scores[users, items] = -np.inf
        scores[split.test_users, split.test_items] = -np.inf
    found = model.recommend([split.user_ids[row] for row in rows], k=6, exclude_seen=exclude_seen)
    best = np.argsort(-scores[rows], axis=1, kind="stable")[:, :6]
    assert found.items == (best * 100).tolist()
    assert np.allclose(found.scores, np.take_along_axis(scores[rows], best, axis=1), rtol=1e-4, atol=1e-5)
    model.close()


def test_of_equal_scores_the_first_items_are_recommended(monkeypatch):
    """In chunks of any size: a ReLU that is off gives many items the same score."""
    model = some_model(some_split())
    with torch.no_grad():
        for parameter in model.dense().values():
            parameter.zero_()
    for chunk in (7, 1000):
        monkeypatch.setattr(module, "CHUNK_SCORES", chunk)
        items = model.recommend(["own3", "own1"], k=4, exclude_seen=False).items
        assert items == [[0, 100, 200, 300]] * 2


def test_a_user_with_few_items_left_gets_fewer_than_asked_for():
    """User 0 took all of five items but 1 and 3, user 1 nothing at all but 4."""
    split = NcfSplit(Interactions(np.array([0, 2, 5 + 4]), 2, 5), np.array([0]), np.array([4]))
    model = some_model(split)
    found = model.recommend([0, 1], k=10)
    assert [sorted(items) for items in found.items] == [[1, 3], [0, 1, 2, 3]]
    assert [len(scores) for scores in found.scores] == [2, 4]
    assert all(scores == sorted(scores, reverse=True) for scores in found.scores)
    assert [len(items) for items in model.recommend([0, 1], k=3, exclude_seen=False).items] == [3, 3]
    assert model.recommend([]) == ([], [])


def test_a_user_who_is_not_known_is_named():
    split = some_split()
    model = some_model(split)
    message = "user_ids has 'eve', not trained on: users are 30, such as 'own0', 'own1', 'own10'"
    with pytest.raises(UnknownUserError, match=message):
        model.recommend(["own3", "eve"])
    model = some_model(some_split(ids=False))
    expected = model.recommend([29, 3])
    for same in (["29", "3"], np.array([29, 3]), np.array(["29", "3"]), torch.tensor([29, 3])):
        assert model.recommend(same) == expected
    for user in (30, -1, "own3", 1.5, None):
        with pytest.raises(UnknownUserError, match="users are 30, such as 0, 1, 2"):
            model.recommend([user])


@pytest.mark.parametrize("user_ids", ["own3", b"own3", 3])
def test_users_are_a_list(user_ids):
    with pytest.raises(SettingsError, match=r"user_ids is .*: give a list of ids"):
        some_model(some_split()).recommend(user_ids)


def test_scores_that_are_no_numbers_are_not_recommended():
    model = some_model(some_split())
    model.item.table.write(7, torch.full((1, 8), torch.nan))
    with pytest.raises(CheckpointError, match="scores are not numbers"):
        model.recommend(["own3"])


def test_what_was_not_saved_cannot_be_left_out():
    model = NCF(3, 4, NcfSettings())
    with pytest.raises(CheckpointError, match=r"what users have seen was not saved .* give exclude_seen=False"):
        model.recommend([0])
    assert sorted(model.recommend([0], exclude_seen=False).items[0]) == [0, 1, 2, 3]


# ---------------------------------------------------------------------- saved


def contents_of(split):
    return [split.train.keys(), split.test_users, split.test_items]


@pytest.mark.parametrize("ids", [True, False])
def test_a_split_comes_back_from_its_arrays(ids):
    split = some_split(ids=ids)
    arrays = split.arrays()
    assert {array.dtype.kind for array in arrays.values()} <= {"i", "u"}
    assert arrays["train_items"].dtype == np.int32
    again = NcfSplit.from_arrays(arrays)
    assert all(map(np.array_equal, contents_of(again), contents_of(split)))
    assert (again.train.num_users, again.train.num_items) == (30, 50)
    if ids:
        assert again.user_ids.tolist() == split.user_ids.tolist()
        assert again.item_ids.tolist() == split.item_ids.tolist()
    else:
        assert again.user_ids is again.item_ids is None


@given(st.sets(st.text(max_size=5)), st.text(max_size=5))
def test_text_is_found_by_its_row_and_back(texts, other):
    ids = OwnIds(sorted(texts))
    for row, text in enumerate(ids.tolist()):
        assert ids.row(text) == row
    assert set(ids.tolist()) == texts
    assert (ids.row(other) is None) == (other not in texts)
    assert OwnIds.from_array(ids.array()).tolist() == ids.tolist()


@given(st.sets(st.integers(-(2**63), 2**63 - 1)), st.integers(-(2**65), 2**65))
def test_numbers_are_found_by_their_row_as_numbers_and_as_text(numbers, other):
    ids = OwnIds(np.array(sorted(numbers), np.int64))
    for row, number in enumerate(sorted(numbers)):
        assert ids.row(number) == ids.row(str(number)) == ids.row(np.int64(number)) == row == ids.tolist().index(number)
    assert (ids.row(other) is None) == (other not in numbers)
    assert ids.row("x") is ids.row("01") is ids.row(None) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two epochs, the output directory and the result."""
    folder = tmp_path_factory.mktemp("run")
    lines = [f"user {number % 13},i{number * number % 163 % 160}\n" for number in range(600)]
    (folder / "ratings.csv").write_text("user,item\n" + "".join(lines))
    settings = NcfSettings(
        ratings=folder / "ratings.csv",
        factors=4,
        layers=(8, 4),
        epochs=2,
        test_negatives=9,
        optimizer="adagrad",
        device="cpu",
    )
    return folder / "out", train(settings, output=folder / "out", progress=False)


@pytest.mark.parametrize("storage", ["auto", "disk"])
def test_a_saved_model_knows_the_ids_and_what_was_taken(trained, storage, tmp_path):
    folder, result = trained
    assert result.best.number == 2, "the last epoch is not the best: choose other settings"
    model = load(folder, storage=storage, scratch=tmp_path)
    users = [f"user {number}" for number in (12, 3)]
    found, expected = model.recommend(users, k=7), result.model.recommend(users, k=7)
    assert found.items == expected.items
    assert found.scores == expected.scores
    for user, items in zip(users, found.items, strict=True):
        number = int(user.split()[1])
        taken = {f"i{line * line % 163 % 160}" for line in range(600) if line % 13 == number}
        assert len(set(items)) == 7
        assert not taken & set(items)
    model.close()
    assert list(tmp_path.iterdir()) == []


def test_damaged_interactions_are_an_error(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "out")
    for path in tmp_path.glob("out/checkpoints/*/tensors-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with pytest.raises(CheckpointError, match="differ from those written"):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: arrays.pop("train_ends"),
        lambda arrays: arrays.update(train_items=arrays["train_items"][::-1]),
        lambda arrays: arrays.update(test_items=arrays["test_items"] + 10**6),
        lambda arrays: arrays.update(user_ids=arrays["user_ids"][1:]),
    ],
)
def test_interactions_that_do_not_fit_together_are_an_error(damage, trained):
    arrays = trained[1].split.arrays()
    assert len(NcfSplit.from_arrays(arrays).train) == len(trained[1].split.train)
    damage(arrays)
    with pytest.raises((KeyError, ValueError)):
        NcfSplit.from_arrays(arrays)
