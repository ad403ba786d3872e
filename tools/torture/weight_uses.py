"""Uses of a weight and its gradient, one function per use, with torch's embedding or speedswap's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["DIM", "ROWS", "USES", "Net", "Player"]

ROWS, DIM = 20, 3


class Net(nn.Module):
    """Rows and a layer after them."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items
        self.layer = nn.Linear(DIM, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.items(ids))
        return out


class Player:
    """A net with its optimizer, and what a use of it gave besides trained rows."""

    def __init__(self, net: Net, make: Callable[[Any], torch.optim.Optimizer], ids: list[Tensor], frozen: bool) -> None:
        self.net = net
        self.weight: Any = net.items.weight
        self.weight.requires_grad_(not frozen)
        self.optimizer = make([p for p in net.parameters() if p.requires_grad])
        self.ids = ids
        self.frozen = frozen
        self.values: list[Tensor] = []

    def loss(self, place: int = 0) -> Tensor:
        return self.net(self.ids[place]).square().sum()

    def note(self, *values: Any) -> None:
        """Keep what torch gave, to be compared."""
        self.values += [v.detach().clone() if isinstance(v, Tensor) else torch.tensor(float(v)) for v in values]

    def train(self) -> None:
        """Take an ordinary step."""
        self.optimizer.zero_grad()
        self.loss(1).backward()
        self.optimizer.step()


def _in_backward(p: Player) -> None:
    """Step the optimizer as soon as a parameter has its gradient, as memory-saving loops do."""

    def step(parameter: Tensor) -> None:
        own.step()
        own.zero_grad()

    own = type(p.optimizer)([p.weight], lr=0.1)
    handle = p.weight.register_post_accumulate_grad_hook(step)
    p.loss().backward()
    handle.remove()
    p.weight.grad = None


def _doubled(p: Player) -> None:
    p.weight.register_hook(lambda grad: grad * 2)
    p.loss().backward()
    p.optimizer.step()


def _prehook_sees(p: Player) -> None:
    seen: list[float] = []
    p.weight.register_hook(lambda grad: seen.append(float(grad.abs().sum())))
    p.loss().backward()
    p.note(*seen)
    p.note(len(seen))


def _multi_grad(p: Player) -> None:
    seen: list[int] = []
    torch.autograd.graph.register_multi_grad_hook([p.weight], lambda grads: seen.append(1))
    p.loss().backward()
    p.note(len(seen))


def _gradient_edge(p: Player) -> None:
    loss = p.loss()
    edge = torch.autograd.graph.get_gradient_edge(p.weight)
    p.note(torch.autograd.grad(loss, edge)[0])


def _accumulate_node(p: Player) -> None:
    """Register a hook on the node that accumulates, as distributed wrappers do."""
    seen: list[int] = []
    node = p.weight.expand_as(p.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *unused: seen.append(1))
    p.loss().backward()
    p.note(len(seen))


def _inputs_weight(p: Player) -> None:
    p.loss().backward(inputs=[p.weight])
    p.optimizer.step()


def _inputs_all(p: Player) -> None:
    p.loss().backward(inputs=list(p.net.parameters()))
    p.optimizer.step()


def _inputs_other(p: Player) -> None:
    p.loss().backward(inputs=list(p.net.layer.parameters()))
    p.optimizer.step()


def _inputs_later(p: Player) -> None:
    """Compute ordinary gradients first, then those of the layer alone."""
    p.loss().backward()
    p.loss(1).backward(inputs=list(p.net.layer.parameters()))
    p.optimizer.step()


def _inputs_of_values(p: Player) -> None:
    rows = p.net.items(p.ids[0])
    rows.retain_grad()
    loss = p.net.layer(rows).square().sum()
    if rows.requires_grad:
        loss.backward(inputs=[rows])
        p.note(rows.grad)
        p.optimizer.step()


def _grad_weight(p: Player) -> None:
    p.note(torch.autograd.grad(p.loss(), p.weight)[0])


def _grad_allow_unused(p: Player) -> None:
    found = torch.autograd.grad(p.loss(), [p.weight], allow_unused=True)[0]
    p.note(0.0 if found is None else found.abs().sum())


def _grad_other(p: Player) -> None:
    p.note(*torch.autograd.grad(p.loss(), list(p.net.layer.parameters())))
    p.optimizer.step()


def _grad_all(p: Player) -> None:
    p.note(*torch.autograd.grad(p.loss(), [q for q in p.net.parameters() if q.requires_grad]))


def _penalty(p: Player) -> None:
    """Compute a gradient of a gradient, by the rows."""
    rows = p.net.items(p.ids[0])
    if not rows.requires_grad:
        return
    (grad,) = torch.autograd.grad(p.net.layer(rows).square().sum(), rows, create_graph=True)
    (grad.square().sum() + p.net.layer(rows).sum()).backward()
    p.optimizer.step()


def _create_graph(p: Player) -> None:
    p.loss().backward(create_graph=True)
    p.optimizer.step()


def _retain_graph(p: Player) -> None:
    loss = p.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    p.optimizer.step()


def _func_grad(p: Player) -> None:
    p.note(torch.func.grad(lambda w: (p.net.items(p.ids[0]) @ w.T).square().sum())(p.net.layer.weight.detach()))


def _func_vjp(p: Player) -> None:
    out, back = torch.func.vjp(lambda w: p.net.items(p.ids[0]) @ w.T, p.net.layer.weight.detach())
    p.note(out, *back(torch.ones_like(out)))


def _func_jvp(p: Player) -> None:
    w = p.net.layer.weight.detach()
    p.note(*torch.func.jvp(lambda w: p.net.items(p.ids[0]) @ w.T, (w,), (torch.ones_like(w),)))


def _func_jacrev(p: Player) -> None:
    p.note(torch.func.jacrev(lambda w: (p.net.items(p.ids[0]) @ w.T).sum(0))(p.net.layer.weight.detach()))


def _vmap_ids(p: Player) -> None:
    p.note(torch.func.vmap(p.net.items)(torch.stack([p.ids[0][:4], p.ids[1][:4]])))


def _vmap_other(p: Player) -> None:
    scales = torch.arange(3, dtype=torch.float64)
    p.note(torch.func.vmap(lambda scale: p.net.items(p.ids[0]) * scale)(scales))


def _call_functional(p: Player) -> None:
    p.note(torch.func.functional_call(p.net, {"layer.weight": torch.ones(2, DIM, dtype=torch.float64)}, (p.ids[0],)))


def _call_with_rows(p: Player) -> None:
    rows = torch.ones(ROWS, DIM, dtype=torch.float64)
    p.note(torch.func.functional_call(p.net, {"items.weight": rows}, (p.ids[0],)))


def _call_with_all(p: Player) -> None:
    p.note(torch.func.functional_call(p.net, dict(p.net.named_parameters()), (p.ids[0],)))


def _grad_by_rows(p: Player) -> None:
    """Compute a gradient by the embedding's own weight, as torch.func takes it."""

    def loss(values: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(p.net, values, (p.ids[0],)).square().sum()
        return out

    found = torch.func.grad(loss)({name: q.detach() for name, q in p.net.named_parameters()})
    p.note(*found.values())


def _stacked(p: Player) -> None:
    values, _ = torch.func.stack_module_state([p.net, copy.deepcopy(p.net)])
    p.note(*values.values())


def _jacobian(p: Player) -> None:
    w = p.net.layer.weight.detach()
    p.note(torch.autograd.functional.jacobian(lambda w: (p.net.items(p.ids[0]) @ w.T).sum(0), w))


def _forward_mode(p: Player) -> None:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        w = forward.make_dual(p.net.layer.weight.detach(), torch.ones(2, DIM, dtype=torch.float64))
        p.note(forward.unpack_dual(p.net.items(p.ids[0]) @ w.T).tangent)


def _checkpointed(p: Player, reentrant: bool = False) -> None:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = checkpoint(lambda ids, s: p.net(ids) * s, p.ids[0], scale, use_reentrant=reentrant)
    out.square().sum().backward()
    p.optimizer.step()


def _checkpointed_reentrant(p: Player) -> None:
    _checkpointed(p, True)


def _saved_tensors(p: Player) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = p.loss()
    loss.backward()
    p.optimizer.step()


def _module_hooks(p: Player) -> None:
    p.net.items.register_full_backward_hook(lambda module, grads, outs: None)
    p.net.items.register_forward_hook(lambda module, args, out: out * 2)
    p.loss().backward()
    p.optimizer.step()


def _grad_scaled_in_place(p: Player) -> None:
    p.loss().backward()
    if p.weight.grad is not None:
        p.weight.grad *= 3
    p.optimizer.step()


def _grad_replaced(p: Player) -> None:
    p.loss().backward()
    if p.weight.grad is not None:
        p.weight.grad = p.weight.grad * 3
    p.optimizer.step()


def _grad_data(p: Player) -> None:
    p.loss().backward()
    if p.weight.grad is not None:
        p.weight.grad.data = p.weight.grad.data * 3
    p.optimizer.step()


def _grad_dropped(p: Player) -> None:
    p.loss().backward()
    p.weight.grad = None
    p.optimizer.step()


def _detached(p: Player) -> None:
    p.net.layer(p.net.items(p.ids[0]).detach()).square().sum().backward()
    p.optimizer.step()


def _in_place_output(p: Player) -> None:
    out = p.net.items(p.ids[0])
    out *= 2
    p.net.layer(out).square().sum().backward()
    p.optimizer.step()


def _weight_in_loss(p: Player) -> None:
    (p.loss() + p.weight.square().sum()).backward()
    p.optimizer.step()


def _weight_changed(p: Player) -> None:
    with torch.no_grad():
        p.weight.mul_(0.5)
        p.weight.data[3] = 7.0
    p.train()


def _weight_replaced(p: Player) -> None:
    p.net.items.weight = nn.Parameter(torch.ones(ROWS, DIM, dtype=torch.float64))
    p.note(p.net.items(p.ids[0]))


def _weight_data_replaced(p: Player) -> None:
    p.weight.data = torch.ones(ROWS, DIM, dtype=torch.float64)
    p.note(p.net.items(p.ids[0]))


def _parametrized(p: Player) -> None:
    class Twice(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows * 2

    nn.utils.parametrize.register_parametrization(p.net.items, "weight", Twice())
    p.note(p.net.items(p.ids[0]))


def _weight_norm(p: Player) -> None:
    nn.utils.parametrizations.weight_norm(p.net.items)
    p.note(p.net.items(p.ids[0]))


def _pruned(p: Player) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(p.net.items, "weight", 0.5)
    p.note(p.net.items(p.ids[0]))


def _tied(p: Player) -> None:
    """Use the rows as the layer that scores all of them."""
    logits = p.net.items(p.ids[0]) @ p.weight.T
    logits.square().mean().backward()
    p.optimizer.step()


def _tied_module(p: Player) -> None:
    head = nn.Linear(DIM, ROWS, bias=False, dtype=torch.float64)
    head.weight = p.weight
    head(p.net.items(p.ids[0])).square().mean().backward()
    p.optimizer.step()


def _flattened(p: Player) -> None:
    p.note(nn.utils.parameters_to_vector(p.net.parameters()))


def _clipped(p: Player) -> None:
    p.loss().backward()
    nn.utils.clip_grad_value_(p.net.parameters(), 0.01)
    p.optimizer.step()


def _averaged(p: Player) -> None:
    mean = torch.optim.swa_utils.AveragedModel(p.net)
    p.train()
    mean.update_parameters(p.net)
    mean.update_parameters(p.net)
    p.note(mean(p.ids[0]))


def _half(p: Player) -> None:
    p.net.float()
    p.note(p.net(p.ids[0]))


USES: list[Callable[[Player], None]] = [
    _in_backward, _doubled, _prehook_sees, _multi_grad, _gradient_edge, _accumulate_node, _inputs_weight, _inputs_all,
    _inputs_other, _inputs_later, _inputs_of_values, _grad_weight, _grad_allow_unused, _grad_other, _grad_all, _penalty,
    _create_graph, _retain_graph, _func_grad, _func_vjp, _func_jvp, _func_jacrev, _vmap_ids, _vmap_other,
    _call_functional, _call_with_rows, _call_with_all, _grad_by_rows, _stacked, _jacobian, _forward_mode, _checkpointed,
    _checkpointed_reentrant, _saved_tensors, _module_hooks, _grad_scaled_in_place, _grad_replaced, _grad_data,
    _grad_dropped, _detached, _in_place_output, _weight_in_loss, _weight_changed, _weight_replaced,
    _weight_data_replaced, _parametrized, _weight_norm, _pruned, _tied, _tied_module, _flattened, _clipped, _averaged,
    _half,
]  # fmt: skip
