"""Checks of the splitter under fully_shard, run by every rank of a real job."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ranks_common import CUDA_TEXT, Breaks, assert_same, counted, data, raised, sizes, whole_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import speedswap
from speedswap import errors
from speedswap.batching import Padded

REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def ce(model, inputs, targets, **options):
    return cross_entropy(model(inputs), targets, **options)


class Block(nn.Module):
    """A layer that runs out of memory, if it is told to, in the middle of its forward or backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7).double(), nn.Linear(7, 6).double()
        self.forward_limit = self.backward_limit = 1000

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if len(x) > self.forward_limit:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        if self.backward_limit < 1000:
            hidden = Breaks.apply(hidden, self.backward_limit)
        return x + self.second(hidden)


def blocks(count=3):
    torch.manual_seed(3)
    return nn.Sequential(*[Block() for _ in range(count)], nn.Linear(6, 4).double())


def sharded(world_size, model=None, **options):
    """Return a plain model, one that is sharded block by block, and a splitter for it."""
    plain = blocks() if model is None else model
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (world_size,))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain, model, speedswap.BatchSplitter(model, **options)


def gradients(model):
    return [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


class Attempts(speedswap.batching.Callback):
    """Keeps the sizes of the micro-batches of each attempt."""

    def __init__(self, seen):
        self.seen = seen

    def before_batch(self, event):
        self.seen.append(event.micro_batch_sizes)


def check_p15_one_process_with_all_samples(rank, world_size):
    """Check 5, 8, 11 samples in micro-batches of 2; one reduce-scatter per block."""
    inputs, targets = data(sizes(world_size))
    for options in ({"micro_batch_size": 2}, {"micro_batch_size": "auto"}, {"micro_batch_size": rank + 1}):
        plain, model, splitter = sharded(world_size, **options)
        expected, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
        for times in (1, 2):  # the second batch's are added
            with counted(REDUCE_SCATTER) as calls:
                loss = splitter.backward(lambda x, y, model=model: ce(model, x, y), inputs[rank], targets[rank])
            assert len(calls) == 4, len(calls)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
            assert_same(gradients(model), [times * grad for grad in wanted])


def check_p15_fewer_samples_than_micro_batches(rank, world_size):
    """Check that a rank with one sample runs as many passes as one with nine."""
    inputs, targets = data([1, 9, 2][:world_size])
    plain, model, splitter = sharded(world_size, micro_batch_size=2)
    expected, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
    loss = splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(model), wanted)


class Tally(nn.Module):
    """A layer that counts its passes in a buffer of a part that never runs itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.counts = nn.Linear(6, 6).double(), nn.Module()
        self.counts.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.counts.passes += 1
        return self.layer(x)


def check_passes_without_effect_leave_all_buffers(rank, world_size):
    """Check that a pass that only the other ranks need changes no buffer, whichever module writes it."""
    inputs, targets = data([1, 9, 2][:world_size])
    _, model, splitter = sharded(world_size, nn.Sequential(Tally(), nn.Linear(6, 4).double()), micro_batch_size=2)
    splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    assert model[0].counts.passes == [1, 5, 2][rank]


def check_aux_is_each_ranks_own(rank, world_size):
    """Check that a rank with extra passes, or with padding for targets, returns each of its samples once."""
    inputs, targets = data([1, 9, 2][:world_size])
    targets = [target.clone() for target in targets]
    targets[-1][:2] = -100
    options = {"micro_batch_size": 2, "normalizer": lambda x, y: (y != -100).sum()}
    plain, model, splitter = sharded(world_size, **options)

    def loss_fn(x, y):
        outputs = model(x)
        return cross_entropy(outputs, y), outputs

    for _ in range(2):
        _, outputs = splitter.backward(loss_fn, inputs[rank], targets[rank])
        torch.testing.assert_close(outputs, plain(inputs[rank]).detach(), rtol=1e-12, atol=1e-12)


def check_evaluation_runs_side_by_side(rank, world_size):
    """Check results, sizes and gradients where ranks have 1, 9 and 2 samples, and one runs out of memory."""
    inputs, targets = data([1, 9, 2][:world_size])
    plain, model, splitter = sharded(world_size)
    splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    before, size = gradients(model), splitter.micro_batch_size
    model.eval()
    if rank == 1:
        model[1].forward_limit = 4
    seen = []
    splitter.callbacks.append(Sizes(seen))
    for _ in range(2):
        found = splitter.map(lambda x: {"out": model(x)}, inputs[rank])["out"]
        torch.testing.assert_close(found, plain(inputs[rank]).detach(), rtol=1e-12, atol=1e-12)
    assert_same(gradients(model), before)
    assert splitter.micro_batch_size == size
    if rank == 1:
        assert seen == [9, 3, 3, 3, 3, 3, 3], seen
    model[1].forward_limit = 1000
    model.train()
    splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    assert_same(gradients(model), [2 * grad for grad in before])


def check_micro_batches_packed_by_tokens(rank, world_size):
    """Check ranks whose samples have different lengths: equally many passes, and gradients of all samples together."""
    lengths = [[3, 9], [1, 2, 7, 7, 4, 1], [5]][:world_size]
    torch.manual_seed(2)
    rows = [torch.randn(len(each), max(each), 6, dtype=torch.float64) for each in lengths]

    def token_mean(model, x, there):
        return (model(x.flatten(0, 1)).square().sum(1) * there.flatten()).sum() / there.sum()

    there = [(torch.arange(max(each)) < torch.tensor(each)[:, None]).double() for each in lengths]
    options = {"micro_batch_tokens": 12, "normalizer": lambda x, there: there.sum()}
    plain, model, splitter = sharded(world_size, **options)
    flat = torch.cat([x.flatten(0, 1) for x in rows])[None], torch.cat([one.flatten() for one in there])[None]
    expected, wanted = whole_gradients(plain, token_mean, *flat)
    seen = []
    splitter.callbacks.append(Attempts(seen))
    batch = [Padded(given[rank], lengths[rank]) for given in (rows, there)]
    loss = splitter.backward(lambda x, there: token_mean(model, x, there), *batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(model), wanted)
    assert seen == [[(1, 1, 0, 0), (1, 1, 1, 3), (1, 0, 0, 0)][rank]], seen
    found = splitter.map(lambda x, there: model(x).sum(-1).sum(1, keepdim=True), *batch)
    assert found.shape == (len(lengths[rank]), 1)


class Sizes(speedswap.batching.Callback):
    """Keeps the size of each micro-batch."""

    def __init__(self, seen):
        self.seen = seen

    def before_micro_batch(self, event):
        self.seen.append(event.micro_batch_sizes[event.index])


def check_coupled_loss_is_not_looked_for(rank, world_size):
    """Check that no rank gathers parameters that the others do not."""
    inputs, _ = data([1, 9, 2][:world_size])
    _, model, splitter = sharded(world_size, micro_batch_size=2)
    calls = []

    def loss_fn(x):
        calls.append(len(x))
        return model(x).std()

    splitter.backward(loss_fn, inputs[rank].expand(-1, 6))
    assert len(calls) == 5


def check_p02_padding_counts_on_all_ranks_and_one_has_nothing_else(rank, world_size):
    inputs, targets = data(sizes(world_size))
    targets = [target.clone() for target in targets]
    targets[0][::2] = -100
    targets[-1][:] = -100
    plain, model, splitter = sharded(world_size, micro_batch_size=1, normalizer=lambda x, y: (y != -100).sum())
    expected, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
    loss = splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-7, atol=1e-7)
    assert_same(gradients(model), wanted)


def check_p04_sum_is_not_rescaled(rank, world_size):
    inputs, targets = data(sizes(world_size))
    plain, model, splitter = sharded(world_size, micro_batch_size=2, reduction="sum")
    expected, wanted = whole_gradients(
        plain, lambda m, x, y: ce(m, x, y, reduction="sum"), torch.cat(inputs), torch.cat(targets)
    )
    loss = splitter.backward(lambda x, y: ce(model, x, y, reduction="sum"), inputs[rank], targets[rank])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(model), wanted)


def check_p16_one_rank_out_of_memory_in_forward_or_backward(rank, world_size):
    """Fail in every block, on one rank or another: all leave, agree, and get the gradients of one process."""
    inputs, targets = data(sizes(world_size, first=4, step=1))
    for where in ("forward_limit", "backward_limit"):
        for block in range(3):
            culprit = block % world_size
            plain, model, splitter = sharded(world_size)
            _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
            seen = []
            splitter.callbacks.append(Attempts(seen))
            if rank == culprit:
                setattr(model[block], where, 2)
            for times in (1, 2):
                seen.clear()
                with counted(REDUCE_SCATTER) as calls:
                    splitter.backward(lambda x, y, model=model: ce(model, x, y), inputs[rank], targets[rank])
                assert len(calls) == 4, len(calls)
                assert_same(gradients(model), [times * grad for grad in wanted])
                everyones = [None] * world_size
                dist.all_gather_object(everyones, seen[-1])
                assert len({len(parts) for parts in everyones}) == 1, everyones
                assert max(everyones[culprit]) <= 2
                assert len(seen) <= (3 if times == 1 else 1)  # the second batch begins with what fits


def check_p16_out_of_memory_outside_of_the_model(rank, world_size):
    """Fail in the loss itself, and after the last micro-batch, when the others are past their last vote."""
    inputs, targets = data(sizes(world_size, first=6, step=1))
    plain, model, splitter = sharded(world_size)
    _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))

    def in_the_loss(x, y):
        loss = ce(model, x, y)
        if rank == 0 and len(x) > 3:
            raise MemoryError
        return loss

    def in_the_last_backward(x, y):
        return ce(model, Breaks.apply(x.requires_grad_(), 3 if rank == 1 else 1000), y)

    for loss_fn in (in_the_loss, in_the_last_backward):
        model.zero_grad()
        splitter.backward(loss_fn, inputs[rank].clone(), targets[rank])
        assert_same(gradients(model), wanted)


def check_p16_a_single_sample_does_not_fit_on_one_rank(rank, world_size):
    inputs, targets = data(sizes(world_size))
    for options in ({}, {"micro_batch_size": 2}):
        plain, model, splitter = sharded(world_size, **options)
        _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
        splitter.backward(lambda x, y, model=model: ce(model, x, y), inputs[rank], targets[rank])
        for where in ("forward_limit", "backward_limit"):
            if rank == 1:
                setattr(model[1], where, 0)
            error = raised(lambda: splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank]))  # noqa: B023
            assert type(error) is (torch.OutOfMemoryError if rank == 1 else errors.PeerError), repr(error)
            setattr(model[1], where, 1000)
            assert_same(gradients(model), wanted)  # as before the batch
        model.zero_grad()
        splitter.backward(lambda x, y, model=model: ce(model, x, y), inputs[rank], targets[rank])
        assert_same(gradients(model), wanted)


def check_named_modules_are_checkpointed_on_all_ranks(rank, world_size):
    """Fail with one sample on one rank; modules run again that are sharded, contain such, or are inside of one."""
    inputs, targets = data(sizes(world_size, first=2, step=1))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Sequential(Block(), nn.Sequential(Block())), Block(), nn.Linear(6, 4).double())
    expected, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
    for named in ("0", "0.0", "0.1", "1", "1.first"):
        model = copy.deepcopy(plain)
        for name in ("0.0", "0", "1", "2", ""):
            fully_shard(model.get_submodule(name), mesh=init_device_mesh("cpu", (world_size,)))
        module = model.get_submodule(named)
        splitter = speedswap.BatchSplitter(model, escalate=[module])
        runs = []
        module.register_forward_hook(lambda module, *_, runs=runs: runs.append("forward" in vars(module)))

        def loss_fn(x, y, model=model, runs=runs):
            loss = ce(model, x, y)
            if rank == world_size - 1 and not runs[-1]:
                raise torch.OutOfMemoryError(CUDA_TEXT)
            return loss

        for times in (1, 2):
            runs.clear()
            loss = splitter.backward(loss_fn, inputs[rank], targets[rank])
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
            assert_same(gradients(model), [times * grad for grad in wanted])
            assert splitter.rung == 1
        assert runs == [True] * (1 + world_size), runs  # as many passes as the rank with most samples


def check_long_samples_escalate_with_all_others(rank, world_size):
    """Check samples packed by their lengths, the longest of which does not fit on one rank: all run the same passes."""
    lengths = [[3, 2], [1, 2, 7, 3], [5]][:world_size]
    torch.manual_seed(2)
    rows = [[torch.randn(length, 6, dtype=torch.float64) for length in each] for each in lengths]
    plain, model, _ = sharded(world_size)
    tokens = torch.cat([row for each in rows for row in each])
    expected, wanted = whole_gradients(plain, lambda model, x: model(x).square().sum(), tokens)
    splitter = speedswap.BatchSplitter(model, micro_batch_tokens="auto", reduction="sum", escalate=[model[0]])
    seen = []

    def loss_fn(x):
        losses = model(x.flatten(0, 1)).square().sum(1) * (x != 0).any(2).flatten()
        seen.append((*x.shape[:2], "forward" in vars(model[0])))
        if x.shape[1] > 6 and not seen[-1][2]:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return losses.sum()

    batch = Padded(nn.utils.rnn.pad_sequence(rows[rank], batch_first=True), lengths[rank])
    for times in (1, 2):
        seen.clear()
        loss = splitter.backward(loss_fn, batch)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_same(gradients(model), [times * grad for grad in wanted])
        assert splitter.rung == 1
    own = sorted(lengths[rank], reverse=True)
    own += own[-1:] * (max(map(len, lengths)) - len(own))  # passes that the other ranks need
    assert [one for one in seen if one[2]] == [(1, length, True) for length in own], seen


def check_an_error_on_one_rank_reaches_all(rank, world_size):
    inputs, targets = data(sizes(world_size))
    plain, model, splitter = sharded(world_size, micro_batch_size=2)
    _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))

    def loss_fn(x, y):
        if rank == 1:
            raise ValueError("a bad sample")
        return ce(model, x, y)

    error = raised(lambda: splitter.backward(loss_fn, inputs[rank], targets[rank]))
    assert type(error) is (ValueError if rank == 1 else errors.PeerError), repr(error)
    splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    assert_same(gradients(model), wanted)


def check_a_parameter_that_one_rank_uses(rank, world_size):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = (nn.Linear(6, 4).double() for _ in range(3))

        def forward(self, x, second=None):
            second = rank == 1 if second is None else second
            return self.second(x) if second else self.first(x)

    def on_all(m, *parts):
        losses = [cross_entropy(m[0](x, i == 1), y, reduction="sum") for i, (x, y) in enumerate(parts)]
        return sum(losses) / sum(len(x) for x, _ in parts)

    torch.manual_seed(4)
    inputs, targets = data(sizes(world_size))
    plain, model, splitter = sharded(world_size, nn.Sequential(Branches()), micro_batch_size=2)
    _, wanted = whole_gradients(plain, on_all, *zip(inputs, targets, strict=True))
    splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
    assert_same(gradients(model), wanted)


def check_plain_steps_and_evaluation_in_between(rank, world_size):
    """Check that fully_shard behaves as before without the splitter; an evaluation leaves its root gathered."""
    inputs, targets = data([4] * world_size)
    plain, model, splitter = sharded(world_size)
    _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
    for limit in (1000, 2):
        if rank == 0:
            model[0].forward_limit = limit
        splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
        assert_same(gradients(model), wanted)
        model.zero_grad()
        model[0].forward_limit = 1000
        with torch.no_grad():
            model(inputs[rank])
        ce(model, inputs[rank], targets[rank]).backward()
        assert_same(gradients(model), wanted)
        model.zero_grad()
        with torch.no_grad():
            model(inputs[rank])


def check_training_is_that_of_one_process(rank, world_size):
    """Adam over several batches, one of which runs out of memory."""
    inputs, targets = data(sizes(world_size))
    plain, model, splitter = sharded(world_size)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, model)]
    for batch in range(4):
        model[1].forward_limit = 2 if rank == 0 and batch == 1 else 1000
        splitter.backward(lambda x, y: ce(model, x, y), inputs[rank], targets[rank])
        ce(plain, torch.cat(inputs), torch.cat(targets)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-9, atol=1e-9)


class Checkpointed(nn.Sequential):
    """Runs the forward passes of its parts again in the backward pass."""

    def forward(self, x):
        for part in self:
            x = checkpoint(part, x, use_reentrant=False)
        return x


def check_p16_with_activation_checkpointing(rank, world_size):
    inputs, targets = data(sizes(world_size))
    for where in ("forward_limit", "backward_limit"):
        plain, model, splitter = sharded(world_size, Checkpointed(*blocks()))
        _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
        if rank == 1:
            setattr(model[1], where, 3)
        splitter.backward(lambda x, y, model=model: ce(model, x, y), inputs[rank], targets[rank])
        assert_same(gradients(model), wanted)


def check_p11_p16_gradients_summed_in_another_precision(rank, world_size):
    """Check bfloat16 passes with float32 sums: those of a failed attempt are dropped."""
    inputs, targets = data(sizes(world_size, step=0))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = []
    for fails in (False, True):
        model = blocks().float()
        for part in model:
            fully_shard(part, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
        splitter = speedswap.BatchSplitter(model, micro_batch_size="auto" if fails else 2)
        if fails and rank == 0:
            model[0].backward_limit = 3
        loss = splitter.backward(lambda x, y, m=model: ce(m, x, y), inputs[rank].float(), targets[rank])
        given.append([loss, *gradients(model)])
    assert_same(*given, tolerance=0)


def check_p15_sharded_and_replicated_at_once(rank, world_size):
    inputs, targets = data(sizes(world_size))
    plain = blocks()
    for shape in ((world_size, 1), (1, world_size)):
        model = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in [*model, model]:
            fully_shard(part, mesh=mesh)
        splitter = speedswap.BatchSplitter(model, micro_batch_size=2)
        _, wanted = whole_gradients(plain, ce, torch.cat(inputs), torch.cat(targets))
        splitter.backward(lambda x, y, model=model: ce(model, x, y), inputs[rank], targets[rank])
        assert_same(gradients(model), wanted)


def check_a_torch_that_cannot_reset_is_refused(rank, world_size):
    _, model, _ = sharded(world_size)
    reset = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        error = raised(lambda: speedswap.BatchSplitter(model))
    finally:
        FSDPModule.reset_iter_state = reset
    assert type(error) is errors.BatchError, repr(error)
    assert "needs torch 2.12" in str(error)


def check_what_cannot_be_split_is_refused(rank, world_size):
    _, model, splitter = sharded(world_size)
    error = raised(lambda: splitter.backward_coupled(model, lambda z: z.mean(), torch.zeros(4, 6).double()))
    assert type(error) is errors.BatchError
    assert "fully_shard" in str(error)
    error = raised(lambda: speedswap.BatchSplitter(model, offload_activations=True))
    assert "offload_activations" in str(error)
    model.set_requires_gradient_sync(False)
    ce(model, torch.zeros(4, 6).double(), torch.zeros(4, dtype=torch.long)).backward()
    error = raised(lambda: splitter.backward(lambda x: model(x).mean(), torch.zeros(4, 6).double()))
    assert isinstance(error, errors.SpeedswapError)
    assert "unreduced" in str(error) or type(error) is errors.PeerError
