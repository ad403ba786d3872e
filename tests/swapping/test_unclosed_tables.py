"""Unclosed tables in files keep the optimizer's step count with its moments."""

from __future__ import annotations

import copy
import gc
import logging
import textwrap
from pathlib import Path

import pytest
import torch
from small_training import DIM, ROWS, embedding, over, run_training, train, uninterrupted_rows
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import speedswap

BEGUN = """
import atexit, weakref
# The last thing that a process does at its end, after tables are flushed: tearing torch down takes a second.
atexit.unregister(weakref.finalize._exitfunc)
atexit.register(os._exit, 0)
atexit.register(weakref.finalize._exitfunc)

def begun(path, steps):
    items = embedding(path=path)
    return items, train(items, torch.optim.Adam(items.parameters(), lr=0.1), steps)
"""

WITHOUT_FILES = """
import shutil
kept = begun(path, range(2))
shutil.rmtree(path)
"""

ENDINGS = {
    "at its last line": "items, optimizer = begun(path, range(4))",
    "after a function that returned": "begun(path, range(4))",
    "with the table alone alive": "table = begun(path, range(4))[0].table",
    "in sys.exit": "kept = begun(path, range(4)); sys.exit(0)",
    "in an uncaught error": "kept = begun(path, range(4)); raise KeyboardInterrupt",
    "after lookahead": """
        items = embedding(path=path)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
        for ids in speedswap.lookahead(map(ids_of, range(4)), {items: lambda ids: ids}):
            items(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "in a step that failed": """
        items, optimizer = begun(path, range(4))
        class Fails(torch.Tensor): pass
        items(torch.arange(8)).square().sum().backward()
        plain = type(optimizer).step
        def fails(self, closure=None):
            plain.__wrapped__(self, closure)
            raise RuntimeError("in the middle of the step")
        type(optimizer).step = torch.optim.Optimizer.profile_hook_step(fails)
        optimizer.step()
    """,
    "in a child, too": """
        items, optimizer = begun(path, range(4))
        child = os.fork()
        if child == 0:
            optimizer.state[items.weight]["step"].fill_(77)
            sys.exit(0)
        os.waitpid(child, 0)
        heads = open(os.path.join(path, "HEAD"), "rb").read()
        assert b"77" not in heads, heads
    """,
}


def adam(items: speedswap.Embedding) -> torch.optim.Optimizer:
    return torch.optim.Adam(items.parameters(), lr=0.1)


def continued(path: Path, steps: range) -> Tensor:
    """Return the weights after more steps over a table's files."""
    with speedswap.Table.open(path) as table:
        items = over(table)
        train(items, adam(items), steps)
        return table.read()


@pytest.fixture(scope="module")
def uninterrupted() -> Tensor:
    return uninterrupted_rows(torch.optim.Adam)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables, and the error output, of processes that ended each in its own way."""
    folder = tmp_path_factory.mktemp("ended")
    for name, ending in [*ENDINGS.items(), ("without files", WITHOUT_FILES)]:
        errors = run_training(BEGUN + textwrap.dedent(ending), folder / name).stderr
        (folder / f"{name}.err").write_text(errors)
    return folder


@pytest.mark.parametrize("how", ENDINGS)
def test_process_that_ends_by_itself_leaves_the_whole_state(how: str, ended: Path, uninterrupted: Tensor) -> None:
    """Without close and flush, the next run continues as if there had been only one run."""
    errors = (ended / f"{how}.err").read_text()
    assert ("Error" in errors or "KeyboardInterrupt" in errors) == ("error" in how or "failed" in how), errors
    assert torch.equal(continued(ended / how, range(4, 6)), uninterrupted)


def test_table_that_is_freed_without_being_closed_is_flushed(tmp_path: Path, uninterrupted: Tensor) -> None:
    """A function that returned took table, module and optimizer with it."""

    def training(items: speedswap.Embedding) -> None:
        train(items, adam(items), range(4))

    training(embedding(path=tmp_path / "items"))
    gc.collect()
    assert torch.equal(continued(tmp_path / "items", range(4, 6)), uninterrupted)


def test_flush_does_not_leave_an_old_step_count_beside_new_moments(tmp_path: Path, uninterrupted: Tensor) -> None:
    """Flushed at step 2, trained on, and closed when the optimizer was gone."""

    def training(items: speedswap.Embedding) -> None:
        optimizer = train(items, adam(items), range(2))
        items.table.flush()
        for step in range(2, 4):
            train(items, optimizer, [step])

    items = embedding(path=tmp_path / "items")
    training(items)
    gc.collect()
    items.table.close()
    assert torch.equal(continued(tmp_path / "items", range(4, 6)), uninterrupted)


def test_state_goes_on_over_one_table_from_module_to_module(uninterrupted: Tensor) -> None:
    """A second module and optimizer continue over an open table as over a reopened one."""
    table = speedswap.Table.create(ROWS, DIM, seed=3, dtype=torch.float64, init=speedswap.init.normal())
    for steps in (range(2), range(2, 4), range(4, 6)):
        items = over(table)
        train(items, adam(items), steps)
        gc.collect()
    assert torch.equal(table.read(), uninterrupted)


def test_step_count_of_a_loaded_state_dict_is_kept_without_a_step(tmp_path: Path, uninterrupted: Tensor) -> None:
    """Loaded into the table, which is closed when the optimizer is gone; the checkpoint's own tensors have changed."""
    source = embedding()
    trained = train(source, adam(source), range(4))

    def restore(items: speedswap.Embedding) -> None:
        optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
        speedswap.attach(optimizer, items)
        items.load_state_dict(source.state_dict())
        optimizer.load_state_dict(trained.state_dict())

    items = speedswap.Embedding(ROWS, DIM, path=tmp_path / "items", seed=0, dtype=torch.float64)
    restore(items)
    train(source, trained, [4])  # its step count is a tensor that changes in place
    items.table.close()
    assert torch.equal(continued(tmp_path / "items", range(4, 6)), uninterrupted)


@pytest.mark.parametrize("with_helpers", [False, True], ids=["by hand", "with torch's helpers"])
def test_restored_state_is_not_said_to_start_over(
    with_helpers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files have no step count, but the loaded state_dict has all of the state: that is what is used."""
    source = embedding()
    trained = train(source, adam(source), range(4))
    with speedswap.Embedding(ROWS, DIM, path=tmp_path / "items", dtype=torch.float64).table as table:
        items = over(table)
        train(items, adam(items), range(2))
        table.live_attributes.clear()
        table.attributes.clear()
    with speedswap.Table.open(tmp_path / "items") as table:
        assert not table.attributes
        items = over(table)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
        if with_helpers:
            model_state, optimizer_state = copy.deepcopy(get_state_dict(source, trained))
            set_state_dict(items, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        else:
            items.load_state_dict(source.state_dict())
            optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        with caplog.at_level(logging.INFO, "speedswap"):
            for step in (4, 5):
                train(source, trained, [step])
                train(items, optimizer, [step])
        assert "starts over" not in caplog.text
        assert torch.equal(table.read(), source.table.read())


def test_state_without_its_step_count_is_named_with_the_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another optimizer's state is of no use; the message names that optimizer."""
    with speedswap.Embedding(ROWS, DIM, path=tmp_path / "items").table as table:
        items = over(table)
        train(items, adam(items), range(2))
    with speedswap.Table.open(tmp_path / "items") as table:
        items = over(table)
        train(items, torch.optim.AdamW(items.parameters(), weight_decay=0), [2])
        assert "no matching step count of this optimizer, AdamW: the state starts over" in caplog.text


def test_state_that_was_not_lost_is_not_said_to_start_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There was none before the first step, or a checkpoint replaces it before the next."""
    with speedswap.Embedding(ROWS, DIM, path=tmp_path / "attached").table as table:
        items = over(table)
        speedswap.attach(adam(items), items)
    with speedswap.Embedding(ROWS, DIM, path=tmp_path / "trained").table as table:
        items = over(table)
        optimizer = train(items, adam(items), range(2))
        speedswap.save_checkpoint(tmp_path / "saved", items, optimizer, tables="copy")
        train(items, torch.optim.AdamW(items.parameters(), weight_decay=0), [2])
    for name in ("attached", "trained"):
        with speedswap.Table.open(tmp_path / name) as table:
            items = over(table)
            optimizer = adam(items)
            if name == "trained":
                speedswap.load_checkpoint(tmp_path / "saved", items, optimizer)
            train(items, optimizer, [2])
    assert "starts over" not in caplog.text


def test_attaching_costs_no_step_count_when_the_next_optimizer_never_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its fresh state and step count must not be taken for the former one's."""
    with speedswap.Embedding(ROWS, DIM, path=tmp_path / "items").table as table:
        items = over(table)
        train(items, adam(items), range(5))
        speedswap.attach(torch.optim.Adam(items.parameters()), items)
    with speedswap.Table.open(tmp_path / "items") as table:
        items = over(table)
        optimizer = train(items, adam(items), range(1))
        (state,) = optimizer.state.values()
        assert state["step"] == 1


def test_process_whose_files_were_removed_ends_quietly(ended: Path) -> None:
    """A directory that was removed before the end causes no error, and does not come back."""
    assert (ended / "without files.err").read_text() == ""
    assert not (ended / "without files").exists()
