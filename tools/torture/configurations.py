"""Random models, optimizers and loops, against the same training of plain tensors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import OptimizerError
from torture.attack import Attack, Broken
from torture.lookups import Config, MicroBatch, ask, random_config, random_lookup, reference
from torture.reference import Choice, RowsAlone, random_optimizer, step_rows

__all__ = ["ATTACK"]


class Game:
    """One model, its optimizer and the rows that both must have."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.generation = 0
        self.ways: list[str] = []
        rng = self.rng
        self.choice: Choice = random_optimizer(rng)
        self.dtype = rng.choice([torch.float32, torch.float64])
        self.configs = [random_config(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
        self.lookups = rng.choice([1, 1, 1, 2])
        self.accumulation = rng.choice([1, 1, 2, 3])
        self.zero = rng.choice(["none", "none", "none", "zeros", "zeros", "after", "never"])
        self.by_closure = self.zero in ("none", "zeros") and rng.random() < 0.2
        self.clip = rng.random() < 0.3
        self.scaler = rng.random() < 0.2
        self.group_factors = [rng.choice([1.0, 0.5]) for _ in self.configs]
        self.scheduled = rng.random() < 0.3
        alone = self.lookups == 1 or (self.accumulation == 1 and self.zero in ("none", "after"))
        # Sums of more than two gradients are added in another order than torch's; bags are pooled otherwise.
        self.exact = alone and all(config.bag is None for config in self.configs)
        if not self.exact:  # float64 leaves room between rounding and mistakes; signs of sums near 0 do not
            self.dtype = torch.float64
            while self.choice.name == "Rprop":
                self.choice = random_optimizer(rng)
        for config in self.configs:
            config.dtype = self.dtype
            if self.dtype != torch.float32:
                config.stored = config.state = config.rounding = None
        self.stochastic = any(config.stochastic for config in self.configs)
        self.modules = [self._module(config) for config in self.configs]
        self.dense = [_dense(self.configs[0].dim, self.dtype) for _ in range(2)] if rng.random() < 0.4 else None
        self.optimizer = self.choice.make(self._groups([m.weight for m in self.modules], 0))
        self.tables = [
            RowsAlone(module.table.read(), self.choice.initial, config.stored, config.state)
            for module, config in zip(self.modules, self.configs, strict=True)
        ]
        self.twin = self.choice.make(self._groups([table.placeholder for table in self.tables], 1))
        self.schedulers = [self._scheduler(o) for o in (self.optimizer, self.twin)] if self.scheduled else []
        if rng.random() < 0.5:
            speedswap.attach(self.optimizer, nn.ModuleList(self.modules))

    # ------------------------------------------------------------------ what is made

    def _module(self, config: Config, table: speedswap.Table | None = None) -> Any:
        self.generation += 1
        on_disk = config.storage == "disk"
        cls: Any = speedswap.Embedding if config.bag is None else speedswap.EmbeddingBag
        inits = [None, speedswap.init.zeros(), speedswap.init.uniform(-1, 1), torch.nn.init.xavier_uniform_]
        settings: dict[str, Any] = {"mode": config.bag} if config.bag else {}
        return cls(
            config.rows,
            config.dim,
            padding_idx=config.padding_idx,
            **({"storage": config.storage} if table is None and not on_disk else {}),
            **({"path": self.folder / f"table-{self.generation}"} if table is None and on_disk else {}),
            dtype=config.dtype,
            **({"stored_dtype": config.stored} if table is None else {}),
            state_dtype=config.state,
            rounding=config.rounding,
            init=self.rng.choice(inits),
            seed=config.seed,
            table=table,
            **settings,
        )

    def _groups(self, weights: list[nn.Parameter], side: int) -> list[dict[str, Any]]:
        lr = self.choice.settings["lr"]
        groups = [{"params": [w], "lr": lr * f} for w, f in zip(weights, self.group_factors, strict=True)]
        if self.choice.name == "Rprop":
            groups = [{"params": weights}]
        if self.dense:
            groups.append({"params": list(self.dense[side].parameters())})
        return groups

    @staticmethod
    def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)

    def micro_batch(self, generator: torch.Generator) -> MicroBatch:
        return [[random_lookup(config, self.rng, generator) for _ in range(self.lookups)] for config in self.configs]

    # ------------------------------------------------------------------ one loop, twice

    def play(self, steps: int) -> None:
        """Take some steps, with and without lookahead."""
        rng = self.rng
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        batches = [self.micro_batch(generator) for _ in range(steps * self.accumulation)]
        depth = rng.choice([0, 0, 1, 1, 2, 4])
        self.depth = depth
        loop: Iterable[MicroBatch] = batches
        if depth:
            ids = {module: _ids_of(place) for place, module in enumerate(self.modules)}
            loop = speedswap.lookahead(batches, ids, depth=depth)
        for place, window in enumerate(_windows(loop, self.accumulation, self._between(batches))):
            self._step(place, window)
        if self.zero == "never":
            self._zero_both(True)

    def _between(self, batches: list[MicroBatch]) -> Any:
        """Use the rows without training before a batch is trained on."""
        looks_aside = self.rng.random() < 0.5
        writes_aside = self.rng.random() < 0.15

        def between(place: int) -> None:
            if looks_aside and self.rng.random() < 0.6:
                other = self.rng.choice(
                    [place, place, min(place + 1, len(batches) - 1), self.rng.randrange(len(batches))]
                )
                with self.rng.choice([torch.no_grad, torch.inference_mode])():
                    self._compare_lookups(batches[other])
            if writes_aside and self.rng.random() < 0.3 and place % self.accumulation == 0:
                self._write_aside()

        return between

    def _write_aside(self) -> None:
        """Change rows of a table without training."""
        which = self.rng.randrange(len(self.modules))
        module, table, config = self.modules[which], self.tables[which], self.configs[which]
        rows = torch.tensor(sorted(self.rng.sample(range(config.rows), min(3, config.rows))))
        values = torch.full((len(rows), config.dim), float(self.rng.choice([-1, 0, 2])), dtype=config.dtype)
        module.table.scatter(rows, values)
        table.weight[rows] = values

    def _step(self, place: int, window: list[MicroBatch]) -> None:
        set_to_none = self.zero != "zeros"
        if self.zero in ("none", "zeros") and not self.by_closure:
            self._zero_both(set_to_none)
        losses: list[float] = []

        def ours() -> Tensor:
            if self.by_closure:
                self.optimizer.zero_grad(set_to_none=set_to_none)
            total = torch.zeros(())
            for micro in window:
                loss = self._loss(self._outs(micro), micro, 0)
                torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward()
                losses.append(loss.item())
                total = total + loss.detach()
            return total

        if self.by_closure:
            self.optimizer.step(ours)
            self.twin.zero_grad(set_to_none=set_to_none)
            for table in self.tables:
                table.zero_grad()
        else:
            ours()
        for micro, loss in zip(window, losses, strict=True):
            self._same("loss", torch.tensor(loss), torch.tensor(self._collect(micro)), place)
        parameters = [parameter for table in self.tables for parameter in table.prepare()]
        if not self.by_closure:
            if self.clip:
                both = [self._all(self.modules, 0), parameters + self._dense_parameters(1)]
                norms = [nn.utils.clip_grad_norm_(each, 0.1) for each in both]
                self._same("norm of the gradients", norms[0], norms[1], place)
            if self.scaler:
                torch.amp.GradScaler("cpu", enabled=False).step(self.optimizer)
            else:
                self.optimizer.step()
        step_rows(self.twin, self.tables)
        for scheduler in self.schedulers:
            scheduler.step()
        if self.zero == "after":
            self._zero_both(True)
        if self.stochastic or self.rng.random() < 0.2:
            self.compare(place)

    def _all(self, modules: list[Any], side: int) -> list[nn.Parameter]:
        return [module.weight for module in modules] + self._dense_parameters(side)

    def _dense_parameters(self, side: int) -> list[nn.Parameter]:
        return list(self.dense[side].parameters()) if self.dense else []

    def _zero_both(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.twin.zero_grad(set_to_none=set_to_none)
        for table in self.tables:
            table.zero_grad()

    def _outs(self, micro: MicroBatch) -> list[list[Tensor]]:
        return [[ask(module, each) for each in asked] for module, asked in zip(self.modules, micro, strict=True)]

    def _loss(self, outs: list[list[Tensor]], micro: MicroBatch, side: int) -> Tensor:
        pairs = zip(outs, micro, strict=True)
        loss = sum(((out - e.target) ** 2).mean() for many, asked in pairs for out, e in zip(many, asked, strict=True))
        assert isinstance(loss, Tensor)
        if self.dense:
            loss = loss + self.dense[side](outs[0][0]).square().mean()
        return loss / self.accumulation

    def _collect(self, micro: MicroBatch) -> float:
        """Add one micro-batch's gradients to those of the plain rows; return its loss."""
        outs, leaves = [], []
        for table, config, asked in zip(self.tables, self.configs, micro, strict=True):
            rows, leaf, local = table.look_up(torch.cat([each.ids.long() for each in asked]))
            leaves.append((table, rows, leaf))
            parts = local.split([len(each.ids) for each in asked])
            padding = None if config.padding_idx is None else config.padding_idx % config.rows
            place = None if padding is None else next(iter((rows == padding).nonzero().flatten().tolist()), None)
            outs.append([reference(leaf, p, each, config.bag, place) for p, each in zip(parts, asked, strict=True)])
        loss = self._loss(outs, micro, 1)
        loss.backward()
        for table, rows, leaf in leaves:
            table.collect(rows, leaf.grad)
        return loss.item()

    # ------------------------------------------------------------------ what must be equal

    def _compare_lookups(self, micro: MicroBatch) -> None:
        for module, table, config, asked in zip(self.modules, self.tables, self.configs, micro, strict=True):
            for each in asked:
                if config.bag is None:
                    found, expected = module(each.ids), table.weight[each.ids.long()]
                    self._same(f"evaluation of {each.ids.tolist()}", found, expected, -3, config)
                else:
                    module(each.ids, each.offsets, each.weights)

    def compare(self, place: int) -> None:
        """Raise Broken unless every row's weight and state are what plain tensors have."""
        for module, table, config in zip(self.modules, self.tables, self.configs, strict=True):
            self._same("weight", module.table.read(), table.weight, place, config)
            if table.state and set(module.table.columns) != {"weight", *table.state}:
                raise Broken(f"columns are {sorted(module.table.columns)}, not weight and {sorted(table.state)}")
            for name, values in table.state.items():
                self._same(name, module.table.read(column=name), values, place, config)
            if config.stochastic:  # what has been drawn is not foretold; the next step begins with it
                table.weight = module.table.read()
                table.state = {name: module.table.read(column=name) for name in table.state}
        for ours, theirs in zip(self._dense_parameters(0), self._dense_parameters(1), strict=True):
            self._same("a dense layer's parameter", ours.detach(), theirs.detach(), place)

    def _same(self, what: str, found: Tensor, expected: Tensor, place: int, config: Config | None = None) -> None:
        if found.shape != expected.shape:
            raise Broken(f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}, after step {place}")
        if config is not None and config.stochastic:
            good = torch.allclose(found, expected, rtol=2**-6, atol=1e-6, equal_nan=True)
        elif self.exact and not self.stochastic:
            good = torch.equal(found.nan_to_num(7e7), expected.nan_to_num(7e7))
        else:
            tolerance = 1e-2 if self.stochastic else 1e-8
            good = torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not good:
            gap = float((found - expected).abs().max())
            rows = (found != expected).reshape(len(found), -1).any(1).nonzero().flatten() if found.dim() else ""
            raise Broken(
                f"{what} differs by {gap:.3g} in rows {rows if isinstance(rows, str) else rows.tolist()[:8]} "
                f"after step {place}: {self}"
            )

    def __str__(self) -> str:
        return (
            f"{self.choice.name} {self.choice.settings}, {self.configs}, lookups {self.lookups}, accumulation "
            f"{self.accumulation}, zero_grad {self.zero}, closure {self.by_closure}, clip {self.clip}, dense "
            f"{bool(self.dense)}, depth {getattr(self, 'depth', None)}, exact {self.exact}, "
            f"scheduled {self.scheduled}, ways {self.ways}"
        )

    # ------------------------------------------------------------------ what comes between loops

    def pass_on(self) -> None:
        """Continue with other objects: a state_dict's, a reopened table's, a loaded copy's; or with frozen rows."""
        ways = ["nothing", "state_dict", "save", "frozen"]
        if all(module.table.path is not None for module in self.modules):
            ways += ["reopen", "reopen"]
        way = self.rng.choice(ways)
        if way == "state_dict":
            states = [module.state_dict() for module in self.modules], self.optimizer.state_dict()
            self._renew([self._module(config) for config in self.configs], states[1])
            for module, state in zip(self.modules, states[0], strict=True):
                module.load_state_dict(state)
            for table in self.tables:
                table.scalars = {key: _as_loaded(key, value, self.dtype) for key, value in table.scalars.items()}
            for parameter in self._dense_parameters(1):
                held = self.twin.state[parameter]
                held.update({key: _as_loaded(key, value, self.dtype) for key, value in held.items()})
        elif way in ("save", "reopen"):
            self._reopen(way)
        elif way == "frozen":
            self._evaluate_frozen()
        self.ways.append(way)
        self.compare(-1)

    def _reopen(self, way: str) -> None:
        others = self.optimizer.state_dict()["state"] if self.dense else {}
        places = []
        for module in self.modules:
            place = module.table.path if way == "reopen" else self.folder / f"saved-{self.generation}"
            self.generation += 1
            if way == "save":
                module.table.save(place)
            places.append(place)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        old, self.modules = self.modules, []
        if self.rng.random() < 0.5:
            self.optimizer = None  # as a function that returns leaves it, before the table is closed
        for module in old:
            module.table.close()
        configs = zip(self.configs, places, strict=True)
        modules = [
            self._module(config, speedswap.Table.open(place) if way == "reopen" else speedswap.Table.load(place))
            for config, place in configs
        ]
        self._renew(modules, None)
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)
        for place, parameter in enumerate(self._dense_parameters(0), start=len(modules)):
            if place in others:
                self.optimizer.state[parameter].update(others[place])

    def _renew(self, modules: list[Any], state: dict[str, Any] | None) -> None:
        self.modules = modules
        self._zero_both_of_twin()
        self.optimizer = self.choice.make(self._groups([module.weight for module in modules], 0))
        for parameter in self._dense_parameters(0):
            parameter.grad = None
        # Loaded state goes to the table of an attached optimizer.
        if state is not None or self.rng.random() < 0.5:
            speedswap.attach(self.optimizer, nn.ModuleList(modules))
        if state is not None:
            self.optimizer.load_state_dict(state)
        if self.scheduled:
            past = self.schedulers[0].state_dict()
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.schedulers[0] = self._scheduler(self.optimizer)
            self.schedulers[0].load_state_dict(past)
            for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = lr

    def _zero_both_of_twin(self) -> None:
        self.twin.zero_grad()
        for table in self.tables:
            table.zero_grad()

    def _evaluate_frozen(self) -> None:
        """Look up temporarily frozen rows; nothing is trained."""
        self._zero_both(True)
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        for module in self.modules:
            module.weight.requires_grad_(False)
        batches = [self.micro_batch(generator) for _ in range(3)]
        ids = {module: _ids_of(place) for place, module in enumerate(self.modules)}
        for micro in speedswap.lookahead(batches, ids, depth=1):
            self._compare_lookups(micro)
            if any(out.requires_grad for many in self._outs(micro) for out in many):
                raise Broken(f"rows that are frozen want a gradient: {self}")
        self.optimizer.step()
        for module in self.modules:
            module.weight.requires_grad_(True)


def _dense(dim: int, dtype: torch.dtype) -> nn.Module:
    layer = nn.Linear(dim, 2, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel(), dtype=dtype).view_as(parameter))
    return layer


def _as_loaded(key: str, value: Any, dtype: torch.dtype) -> Any:
    """Convert a scalar as torch's load_state_dict does: to the parameter's dtype, unless it is the step."""
    return value.to(dtype) if key != "step" and isinstance(value, Tensor) else value


def _ids_of(place: int) -> Any:
    return lambda micro: [each.ids for each in micro[place]]


def _windows(loop: Iterable[MicroBatch], size: int, between: Any) -> Iterator[list[MicroBatch]]:
    """Yield windows of batches; a lookahead yields one only when the previous one has been looked up."""
    window = []
    for place, micro in enumerate(loop):
        between(place)
        window.append(micro)
        if len(window) == size:
            yield window
            window = []


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore", speedswap.errors.SpeedswapWarning)
    if seed % 40 == 39:
        return _refused(seed)
    game = Game(seed, folder)
    for part in range(game.rng.choice([1, 2, 3])):
        if part:
            game.pass_on()
        game.play(game.rng.choice([1, 3, 6]))
        game.compare(-2)
    for module in game.modules:
        module.table.close()
    exactly = "to the bit" if game.exact and not game.stochastic else "closely"
    return f"{game.choice.name}, {exactly}"


def _refused(seed: int) -> str:
    """Check that an optimizer that mixes rows is refused at its first step, before anything has changed."""
    items = speedswap.Embedding(20, 4, seed=seed)
    before = items.table.read()
    names = [name for name in ("Adafactor", "LBFGS", "SparseAdam", "Muon") if hasattr(torch.optim, name)]
    name = names[seed // 40 % len(names)]
    optimizer = getattr(torch.optim, name)(items.parameters() if name != "SparseAdam" else [items.weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = items(torch.tensor([1, 2, 2])).square().sum()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except OptimizerError:
        if not torch.equal(items.table.read(), before):
            raise Broken(f"{name} was refused, but rows have changed") from None
        return "refused optimizer"
    raise Broken(f"{name}, which mixes rows, was not refused")


ATTACK = Attack(
    name="configurations",
    promise="training through tables gives what torch gives on the rows alone, in any loop, across saving and loading",
    round=_round,
    quick=15,
)
