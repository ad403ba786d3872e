"""State of modules over tables and of their optimizers, saved and loaded as torch saves and loads its own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap

ROWS, DIM = 6, 2

# ---------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.25),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


def make_embedding() -> nn.Module:
    return speedswap.Embedding(ROWS, DIM, dtype=torch.float64)


def make_collection() -> nn.Module:
    config = speedswap.EmbeddingConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, dtype=torch.float64)
    return speedswap.EmbeddingCollection([config])


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Take steps with every row in each, so that torch moves no others."""
    for step in steps:
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        out = model({"a": ids.unsqueeze(1)})["a"].values() if "Collection" in type(model).__name__ else model(ids)
        (out.sin() * torch.arange(1, ROWS + 1).unsqueeze(1)).sum().backward()
        optimizer.step()


def assert_equal_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, state in found["state"].items():
        torch.testing.assert_close(dict(sorted(state.items())), dict(sorted(expected["state"][key].items())))


@pytest.mark.parametrize("make_model", [make_embedding, make_collection])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizers_state_dict_is_a_snapshot_in_both_directions(
    make: Callable[[Any], Optimizer], steps: int, make_model: Callable[[], nn.Module]
) -> None:
    """Rows, columns and step counts are of one moment; training goes on without them, and after they are loaded."""
    model, twin = make_model(), nn.Embedding(ROWS, DIM, dtype=torch.float64)
    rows = next(iter(model.state_dict().values()))
    twin.load_state_dict({"weight": rows.clone()})
    optimizer, twins = make(model.parameters()), make(twin.parameters())
    for each, its in ((model, optimizer), (twin, twins)):
        train(each, its, range(steps))
    saved = model.state_dict(), optimizer.state_dict()
    expected = copy.deepcopy((twin.state_dict(), twins.state_dict()))
    for start in (2, 4):  # the second time as it was loaded
        train(model, optimizer, range(start, start + 2))
        assert_equal_states(saved[1], expected[1])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    with speedswap.swapping.rows_apart():
        apart = optimizer.state_dict()
        count = copy.deepcopy(apart["state"])
        if count:
            optimizer.load_state_dict(apart)
    twin.load_state_dict(copy.deepcopy(expected[0]))
    twins.load_state_dict(copy.deepcopy(expected[1]))
    for each, its in ((model, optimizer), (twin, twins)):
        train(each, its, range(4, 7))
    torch.testing.assert_close(next(iter(model.state_dict().values())), twin.weight.detach())
    assert_equal_states(saved[1], expected[1])
    assert apart["state"] == count


def test_state_made_with_an_optimizer_can_be_written_to_in_place() -> None:
    """Loaded into, as torch.distributed.checkpoint loads; one value takes memory for every row only then."""
    model, twin = make_embedding(), nn.Embedding(ROWS, DIM, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())
    optimizer, twins = OPTIMIZERS["adagrad"](model.parameters()), OPTIMIZERS["adagrad"](twin.parameters())
    wanted = torch.rand(ROWS, DIM, dtype=torch.float64)
    for its in (optimizer, twins):
        state = its.state_dict()["state"][0]
        assert torch.equal(state["sum"], torch.full((ROWS, DIM), 0.25, dtype=torch.float64))
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True)["sum"], state["sum"])
        assert torch.equal(copy.deepcopy(state)["sum"] + 1, state["sum"] + 1)
        state["sum"].copy_(wanted)
        state["sum"][2] = 3.0
        state["sum"].mul_(2)
    for each, its in ((model, optimizer), (twin, twins)):
        train(each, its, range(3))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    torch.testing.assert_close(optimizer.state_dict()["state"], twins.state_dict()["state"])


# ---------------------------------------------------------------------------- modules


def adapted(base: type[nn.Module]) -> nn.Module:
    """Return an embedding with parameters, buffers, modules and extra state of a subclass."""

    class Adapted(base):  # type: ignore[misc,valid-type]
        _version = 3

        def __init__(self) -> None:
            super().__init__(ROWS, DIM)
            self.lora = nn.Parameter(torch.zeros(2, 3))
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("scratch", torch.zeros(4), persistent=False)
            self.head = nn.Linear(2, 2, bias=False)
            nn.init.ones_(self.head.weight)
            self.tag = "x"

        def get_extra_state(self) -> str:
            return self.tag

        def set_extra_state(self, state: str) -> None:
            self.tag = state

    module = Adapted()
    with torch.no_grad():
        module.weight.data.fill_(9.0)
    return module


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def whole() -> dict[str, Any]:
    own = {"lora": numbers(2, 3), "seen": numbers(4), "head.weight": numbers(2, 2), "_extra_state": "y"}
    return {"weight": numbers(ROWS, DIM), **own}


def load(state: dict[str, Any], **settings: Any) -> Callable[[nn.Module], object]:
    return lambda module: str(module.load_state_dict(state, **settings))


def renamed(module: nn.Module) -> object:
    seen = []

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        seen.append((prefix, metadata.get("version"), tuple(module.weight.shape)))
        for name in ("weight", "lora", "head.weight"):
            state[prefix + name] = state.pop(prefix + "old." + name)

    module.register_load_state_dict_pre_hook(rename)
    old = {f"old.{key}" if key in ("weight", "lora", "head.weight") else key: value for key, value in whole().items()}
    return str(module.load_state_dict(old)), seen


def grown(module: nn.Module) -> object:
    def grow(state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = torch.cat([state[prefix + "weight"], numbers(2, DIM)])

    module._register_load_state_dict_pre_hook(grow)
    return str(module.load_state_dict({**whole(), "weight": numbers(ROWS - 2, DIM)}))


def hooked_afterwards(module: nn.Module) -> object:
    seen: list[object] = []

    def after(_: nn.Module, keys: Any) -> None:
        seen.append(str(keys))
        keys.missing_keys.clear()

    module.register_load_state_dict_post_hook(after)
    return str(module.load_state_dict({"weight": numbers(ROWS, DIM)})), seen


def saved_with_hooks(module: nn.Module) -> object:
    seen: list[object] = []
    module.register_state_dict_pre_hook(lambda _, prefix, keep: seen.append((prefix, keep)))

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "renamed"] = state.pop(prefix + "weight")

    module.register_state_dict_post_hook(rename)
    state = module.state_dict(prefix="q.")
    return list(state), state["q.renamed"].tolist(), seen


def assigned(module: nn.Module) -> object:
    state = whole()
    found = str(module.load_state_dict(state, assign=True))
    return found, module.lora.data_ptr() == state["lora"].data_ptr()


def from_parameters(module: nn.Module) -> object:
    state = {"weight": nn.Parameter(numbers(ROWS, DIM)), "lora": nn.Parameter(numbers(2, 3), requires_grad=False)}
    found = str(module.load_state_dict(state, strict=False))
    return found, [each.requires_grad for each in (*state.values(), *module.parameters())]


def raising(module: nn.Module) -> object:
    def hook(*_: Any) -> None:
        raise LookupError("no such version")

    module.register_load_state_dict_pre_hook(hook)
    return str(module.load_state_dict(whole()))


def nested(module: nn.Module) -> object:
    model = nn.ModuleDict({"a": module, "b": nn.Linear(1, 1)})
    state = {"a.weight": numbers(ROWS, DIM), "a.other": numbers(1), "a.head.other": numbers(1), "c": numbers(1)}
    return str(model.load_state_dict(state, strict=False)), list(model.state_dict()), model.state_dict()._metadata


LOADS: dict[str, Callable[[nn.Module], object]] = {
    "everything": load(whole()),
    "nothing": load({}),
    "nothing, leniently": load({}, strict=False),
    "the rows alone": load({"weight": numbers(ROWS, DIM)}),
    "all but the rows": load({key: value for key, value in whole().items() if key != "weight"}),
    "keys of others": load({**whole(), "lora_B": numbers(1), "head.other": numbers(1), "away.x": numbers(1)}),
    "keys of others, leniently": load({**whole(), "lora_B": numbers(1), "away.x": numbers(1)}, strict=False),
    "other shapes of its own": load({**whole(), "lora": numbers(1), "head.weight": numbers(3, 3), "more": numbers(1)}),
    "rows of another shape": load({**whole(), "weight": numbers(ROWS - 1, DIM), "more": numbers(1)}),
    "rows of another shape, leniently": load({"weight": numbers(ROWS - 1, DIM)}, strict=False),
    "flat rows": load({**whole(), "weight": numbers(ROWS * DIM)}),
    "no tensor": load({**whole(), "weight": [1.0]}),
    "an array": load({**whole(), "weight": numbers(ROWS, DIM).numpy()}),
    "another dtype": load({**whole(), "weight": numbers(ROWS, DIM).double()}),
    "renamed by a hook": renamed,
    "grown by a hook": grown,
    "hooks afterwards": hooked_afterwards,
    "saved with hooks": saved_with_hooks,
    "assigned": assigned,
    "parameters of another": from_parameters,
    "a hook that raises": raising,
    "as a part of a model": nested,
}


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("way", LOADS.values(), ids=LOADS.keys())
def test_a_module_is_saved_and_loaded_as_torchs_own(way: Callable[[nn.Module], object], kind: str) -> None:
    """Its hooks, own parameters, buffers, modules and extra state, what is missing, unexpected or does not fit."""
    outcomes: list[Any] = []
    for library in (nn, speedswap):
        module = adapted(getattr(library, kind))
        try:
            outcome = way(module)
        except (RuntimeError, LookupError) as error:
            outcome = type(error), str(error)
        state = {key: each.tolist() if isinstance(each, Tensor) else each for key, each in module.state_dict().items()}
        outcomes.append((outcome, state))
    assert outcomes[1] == outcomes[0]


def test_a_collections_tables_report_what_does_not_fit() -> None:
    """All of it at once, by the names of the state_dict; also what is below its groups."""
    configs = [speedswap.EmbeddingConfig(name=each, num_embeddings=ROWS, embedding_dim=DIM) for each in "abc"]
    model = nn.ModuleDict({"t": speedswap.EmbeddingCollection(configs)})
    before = {key: each.clone() for key, each in model.state_dict().items()}
    assert list(before) == [f"t.embeddings.{each}.weight" for each in "abc"]
    called = []
    table = model["t"].embeddings["a"]
    table.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: called.append(prefix))
    state = {**before, "t.embeddings.a.other": numbers(1), "t.groups.0.weight": numbers(3 * ROWS, DIM)}
    found = model.load_state_dict(state, strict=False)
    assert {*found.unexpected_keys} == {"t.embeddings.a.other", "t.groups.0.weight"}
    assert not found.missing_keys
    assert called == ["t.embeddings.a."]
    wrong = {"t.embeddings.a.weight": numbers(ROWS, 5), "t.embeddings.b.weight": numbers(1)}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    for name, shape in (("a", (ROWS, 5)), ("b", (1,))):
        size, own = torch.Size(shape), torch.Size((ROWS, DIM))
        part = f"{name}.weight: copying a param with shape {size} from checkpoint, the shape in current model is {own}."
        assert f"size mismatch for t.embeddings.{part}" in str(error.value)
    assert 'Missing key(s) in state_dict: "t.embeddings.c.weight"' in str(error.value)
    for key, each in model.state_dict().items():
        assert torch.equal(each, before[key])


def test_checkpoints_have_what_a_subclass_adds(tmp_path: Any) -> None:
    module = adapted(speedswap.Embedding)
    module.load_state_dict(whole())
    speedswap.save_checkpoint(tmp_path, nn.Sequential(module))
    again = adapted(speedswap.Embedding)
    speedswap.load_checkpoint(tmp_path, nn.Sequential(again))
    found, expected = again.state_dict(), module.state_dict()
    assert found.pop("_extra_state") == expected.pop("_extra_state") == "y"
    torch.testing.assert_close(found, expected)
