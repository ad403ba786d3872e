"""Optimizers that leave something other than rows in their state, or in the weight."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken

__all__ = ["ATTACK"]

_State = dict[str, Any]
_Change = Callable[[torch.optim.Optimizer, nn.Parameter, _State, str], None]


def _to(make: Callable[[Tensor], Any]) -> _Change:
    """Return a change of one state tensor."""

    def change(optimizer: torch.optim.Optimizer, weight: nn.Parameter, state: _State, key: str) -> None:
        state[key] = make(state[key])

    return change


def _data(make: Callable[[Tensor], Tensor]) -> _Change:
    """Return a change of the weight's rows."""

    def change(optimizer: torch.optim.Optimizer, weight: nn.Parameter, state: _State, key: str) -> None:
        weight.data = make(weight.data)

    return change


def _drop(optimizer: torch.optim.Optimizer, weight: nn.Parameter, state: _State, key: str) -> None:
    del state[key]


def _clear(optimizer: torch.optim.Optimizer, weight: nn.Parameter, state: _State, key: str) -> None:
    optimizer.state[weight] = {}


def _share(optimizer: torch.optim.Optimizer, weight: nn.Parameter, state: _State, key: str) -> None:
    state[key] = weight.data


def _more(optimizer: torch.optim.Optimizer, weight: nn.Parameter, state: _State, key: str) -> None:
    state["surprise"] = torch.ones(len(weight.data) + 1, 2)


def _grown(values: Tensor) -> Tensor:
    return torch.cat([values, values])


_CHANGES: dict[str, _Change] = {
    "half of the rows": _to(lambda v: v[: len(v) // 2].clone()),
    "twice the rows": _to(_grown),
    "no rows": _to(lambda v: v[:0]),
    "one row": _to(lambda v: v[:1].clone()),
    "one row, expanded": _to(lambda v: v[:1].expand_as(v)),
    "one value, expanded": _to(lambda v: v.new_full((1, 1), 3.0).expand_as(v)),
    "flat": _to(lambda v: v.flatten()),
    "one dimension more": _to(lambda v: v.unsqueeze(0)),
    "transposed shape": _to(lambda v: v.t().contiguous()),
    "transposed memory": _to(lambda v: v.t().contiguous().t()),
    "every second row": _to(lambda v: _grown(v)[::2]),
    "a window of a larger tensor": _to(lambda v: nn.functional.pad(v, (1, 2, 3, 1), value=9.0)[3:-1, 1:-2]),
    "not a number": _to(lambda v: v * float("nan")),
    "infinite": _to(lambda v: v + float("inf")),
    "wider floats": _to(lambda v: v.to(torch.float64 if v.dtype == torch.float32 else torch.float32)),
    "integers": _to(lambda v: v.to(torch.int32)),
    "complex": _to(lambda v: v.to(torch.complex64)),
    "a conjugated view": _to(lambda v: v.to(torch.complex64).conj()),
    "a negated view": _to(lambda v: torch.complex(v, v).conj().imag),
    "bytes": _to(lambda v: v.view(torch.uint8)),
    "requires grad": _to(lambda v: v.clone().requires_grad_()),
    "in a graph": _to(lambda v: v.clone().requires_grad_() * 2),
    "an inference tensor": _to(lambda v: _inference(v)),
    "sparse": _to(lambda v: v.to_sparse()),
    "on the meta device": _to(lambda v: v.to("meta")),
    "without memory": _to(lambda v: _resized(v)),
    "a number": _to(lambda v: 1.5),
    "a 0-d tensor": _to(lambda v: v.sum()),
    "None": _to(lambda v: None),
    "a list": _to(lambda v: v.tolist()),
    "an array": _to(lambda v: v.numpy()),
    "missing": _drop,
    "an empty dictionary": _clear,
    "the weight itself": _share,
    "one entry more": _more,
    "rows: half": _data(lambda v: v[: len(v) // 2].clone()),
    "rows: twice": _data(_grown),
    "rows: none": _data(lambda v: v[:0]),
    "rows: expanded": _data(lambda v: v[:1].expand_as(v)),
    "rows: transposed": _data(lambda v: v.t().contiguous().t()),
    "rows: flat": _data(lambda v: v.flatten()),
    "rows: not a number": _data(lambda v: v * float("nan")),
    "rows: wider": _data(lambda v: v.to(torch.float64 if v.dtype == torch.float32 else torch.float32)),
    "rows: narrower": _data(lambda v: v.to(torch.float16)),
    "rows: every second": _data(lambda v: _grown(v)[::2]),
    "rows: wrong width": _data(lambda v: v[:, :1].clone()),
    "rows: without memory": _data(lambda v: _resized(v)),
}


def _inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


def _resized(values: Tensor) -> Tensor:
    gone = values.clone()
    gone.untyped_storage().resize_(0)
    return gone


class Hostile(torch.optim.Adam):
    """Adam, whose step ends with a change of its state once it is told to."""

    change: Callable[[torch.optim.Optimizer], None] | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        change, self.change = self.change, None
        if change is not None:
            change(self)
        return loss


def _columns(items: Any) -> dict[str, Tensor]:
    return {name: items.table.read(column=name) for name in items.table.columns}


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    rows, dim = rng.choice([(20, 3), (50, 8), (9, 1), (300, 64)])
    dtype = rng.choice([torch.float32, torch.float64])
    settings: dict[str, Any] = {"path": folder / "table"} if rng.random() < 0.3 else {}
    if dtype == torch.float32 and rng.random() < 0.3:
        settings |= {"state_dtype": torch.bfloat16, "rounding": "nearest"}
    items = speedswap.Embedding(rows, dim, seed=seed, dtype=dtype, **settings)
    optimizer: Any = Hostile(items.parameters(), lr=0.1)
    if rng.random() < 0.5:
        speedswap.attach(optimizer, items)
    name = rng.choice(list(_CHANGES))
    # Torch's own step reads memory that is gone, too.
    seam = rng.choice(["step", "post hook", *([] if "without memory" in name else ["pre hook"])])
    ahead = rng.random() < 0.3
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(rows, (12,), generator=generator) for _ in range(5)]
    when = rng.choice([1, 2, 3])
    text = f"{name!r} at a step's {seam}, {rows} × {dim} {dtype} {settings}, lookahead {ahead}, at step {when}"
    loop: Any = speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches
    for place, ids in enumerate(loop):
        optimizer.zero_grad()
        items(ids).square().sum().backward()
        if place == when:
            return f"{name}: {_change_and_check(items, optimizer, ids, name, seam, rng, text)}"
        optimizer.step()
    raise AssertionError("no step was changed")


def _change_and_check(
    items: Any, optimizer: Any, ids: Tensor, name: str, seam: str, rng: random.Random, text: str
) -> str:
    """Take a step with a change; either it raises and the table is unchanged, or the change is there."""
    before = _columns(items)
    left: dict[str, Any] = {}
    key = rng.choice(["exp_avg", "exp_avg_sq"])

    def change(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        _CHANGES[name](optimizer, weight, optimizer.state[weight], key)
        left["weight"] = _kept(weight.data)
        for column in ("exp_avg", "exp_avg_sq"):
            left[column] = _kept(optimizer.state[weight].get(column))

    refusals: list[type[Exception]] = [SpeedswapError, TypeError, ValueError]
    hook = None
    if seam == "step":
        optimizer.change = change
    elif seam == "post hook":
        hook = optimizer.register_step_post_hook(change)
    else:
        hook = optimizer.register_step_pre_hook(change)
        refusals = [Exception]  # torch has stepped on it
    try:
        optimizer.step()
        outcome = "taken"
    except tuple(refusals):
        outcome = "refused"
    finally:
        optimizer.change = None
        if hook is not None:
            hook.remove()
    after = _columns(items)
    touched = torch.unique(ids)
    for column, values in before.items():
        expected = values.clone()
        if outcome == "taken" and seam != "pre hook":
            found = left[column]
            if found is not None and found.shape == expected[touched].shape:
                found = found.to(values.dtype)
                if items.table.columns[column].compact:
                    found = found.to(items.table.columns[column].stored_dtype).to(values.dtype)
                expected[touched] = found
            elif found is not None or not torch.equal(after[column], expected):
                raise Broken(f"column {column!r}, left as {_words(found)}, was taken without an error: {text}")
        elif outcome == "taken":  # torch has stepped on it: its result, in the batch's rows alone
            expected[touched] = after[column][touched]
        if not torch.equal(after[column].nan_to_num(7e7), expected.nan_to_num(7e7)):
            rows = (after[column] != expected).any(1).nonzero().flatten().tolist()
            raise Broken(f"column {column!r} has values of nobody's in rows {rows[:8]}, {outcome}: {text}")
    if set(after) - set(before):
        raise Broken(f"columns {sorted(set(after) - set(before))} came of it: {text}")
    _go_on(items, optimizer, after, text)
    return outcome


def _kept(value: Any) -> Tensor | None:
    """Copy the values that were left for a column, where it has its own; return None if none can be read."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return None
    if value.numel() and not value.untyped_storage().nbytes():
        return None
    return value.detach().clone()


def _words(value: Tensor | None) -> str:
    return "nothing to be read" if value is None else f"{tuple(value.shape)} of {value.dtype}"


def _go_on(items: Any, optimizer: Any, before: dict[str, Tensor], text: str) -> None:
    """Train on afterwards; rows outside the batch stay unchanged."""
    ids = torch.tensor([1, 2, 2])
    try:
        optimizer.zero_grad()
        items(ids).square().sum().backward()
        optimizer.step()
    except (SpeedswapError, TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        pass  # Adam cannot continue with state that is not its own
    others = torch.ones(len(before["weight"]), dtype=torch.bool)
    others[ids] = False
    for column, values in before.items():
        if not torch.equal(items.table.read(column=column)[others].nan_to_num(7e7), values[others].nan_to_num(7e7)):
            raise Broken(f"the step after it changed {column!r} of rows outside its batch: {text}")


ATTACK = Attack(
    name="states",
    promise="what an optimizer leaves that is not the batch's rows is refused before anything is written",
    round=_round,
    quick=20,
)
