"""Checks of the splitter under DistributedDataParallel, run by every rank of a real job."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ranks_common import (
    CUDA_TEXT,
    Breaks,
    assert_same,
    counted,
    data,
    raised,
    sizes,
    small_model,
    whole_gradients,
)
from splitting import OutOfMemoryBeyond
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import speedswap
from speedswap import errors
from speedswap.batching import Padded


def ce(model, inputs, targets, **options):
    return cross_entropy(model(inputs), targets, **options)


def split(model, **options):
    ddp = DistributedDataParallel(model)
    return ddp, speedswap.BatchSplitter(ddp, **options)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def check_p01_p15_one_process_with_all_samples(rank, world_size):
    """Check ranks with 5, 8, 11 samples in micro-batches of 2: loss and gradients are those of all samples at once."""
    inputs, targets = data(sizes(world_size))
    model = small_model()
    expected, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    for options in ({"micro_batch_size": 2}, {"micro_batch_size": "auto"}, {"micro_batch_size": rank + 1}):
        ddp, splitter = split(model, **options)
        loss = splitter.backward(lambda x, y, ddp=ddp: ce(ddp, x, y), inputs[rank], targets[rank])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_same(gradients(model), wanted)
        model.zero_grad()


def check_p15_one_all_reduce_for_each_bucket(rank, world_size):
    model = nn.Sequential(*[nn.Linear(1100, 1100, bias=False).double() for _ in range(6)])  # 9.2 MiB each: 3 per bucket
    ddp, splitter = split(model, micro_batch_size=1)
    batch = torch.randn(3 + rank, 1100, dtype=torch.float64)
    with counted("all_reduce") as calls:
        splitter.backward(lambda x: ddp(x).square().mean(), batch)
    # One more, of one number, for the loss; the splitter communicates in a separate group.
    assert sum(group is ddp.process_group for group in calls) == 2 + 1


def check_p15_gradients_are_added_to_earlier_ones(rank, world_size):
    inputs, targets = data(sizes(world_size))
    model = small_model()
    _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    ddp, splitter = split(model, micro_batch_size=3)
    for _ in range(2):
        splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
        before = gradients(model)
    assert_same(gradients(model), [2 * grad for grad in wanted])
    assert all(grad is other for grad, other in zip(gradients(model), before, strict=True))


def check_p15_with_gradients_as_views_of_buckets(rank, world_size):
    inputs, targets = data(sizes(world_size))
    model = small_model()
    _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    splitter = speedswap.BatchSplitter(ddp, micro_batch_size=3)
    for times in (1, 2):
        splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
        assert_same(gradients(model), [times * grad for grad in wanted])


def check_p02_padding_counts_on_all_ranks_and_one_has_nothing_else(rank, world_size):
    inputs, targets = data(sizes(world_size))
    targets = [target.clone() for target in targets]
    targets[0][::2] = -100
    targets[-1][:] = -100
    model = small_model()
    expected, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    ddp, splitter = split(model, micro_batch_size=1, normalizer=lambda x, y: (y != -100).sum())
    loss = splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-7, atol=1e-7)
    assert_same(gradients(model), wanted)


def check_coupled_loss_is_found_on_every_rank_that_splits(rank, world_size):
    """Check that the first rank, whose batch is whole, hears of the others' errors, and no rank waits."""
    inputs, _ = data(sizes(world_size))
    model = small_model()
    ddp, splitter = split(model, micro_batch_size=100 if rank == 0 else 2)
    error = raised(lambda: splitter.backward(lambda x: torch.pdist(ddp(x)).mean(), inputs[rank]))
    assert isinstance(error, errors.PeerError if rank == 0 else errors.CoupledLossError), error
    assert gradients(model) == [None] * 4
    splitter.backward(lambda x: ddp(x).square().mean(), inputs[rank])


def check_ignored_targets_of_one_rank_alone(rank, world_size):
    inputs, targets = data([8] * world_size)
    targets = [target.clone() for target in targets]
    targets[-1][::2] = -100
    model = small_model()
    ddp, splitter = split(model, micro_batch_size=4)
    error = raised(lambda: splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank]))
    assert isinstance(error, errors.BatchError if rank == world_size - 1 else errors.PeerError), error
    assert gradients(model) == [None] * 4


def check_loss_that_communicates_is_not_checked(rank, world_size):
    """Check that no rank calls such a function more often than another."""
    inputs, targets = data([8] * world_size)
    model = small_model()
    for micro_batch_size in (2, 4, 8):
        ddp, splitter = split(model, micro_batch_size=micro_batch_size)
        total = torch.zeros(())

        def loss_fn(x, y, ddp=ddp, total=total):
            one = torch.ones(())
            dist.all_reduce(one)
            total.add_(one)
            return ce(ddp, x, y)

        splitter.backward(loss_fn, inputs[rank], targets[rank])
        assert total == world_size * 8 // micro_batch_size


def check_aux_is_each_ranks_own(rank, world_size):
    """Check that even a rank without samples learns of the aux from the others."""
    for counts in (sizes(world_size), [0, *sizes(world_size - 1)]):
        inputs, _ = data(counts)
        ddp, splitter = split(small_model(), micro_batch_size=2)
        for _ in range(2):
            _, aux = splitter.backward(lambda x, ddp=ddp: (ddp(x).square().mean(), {"x": x}), inputs[rank])
            if counts[rank]:
                assert torch.equal(aux["x"], inputs[rank])
            else:
                assert aux is None
        loss = splitter.backward(lambda x, ddp=ddp: ddp(x).square().mean(), inputs[rank])
        assert loss.dim() == 0


def check_p02_no_target_on_any_rank(rank, world_size):
    model = small_model()
    ddp, splitter = split(model, normalizer=lambda x, y: (y != -100).sum())
    loss = splitter.backward(lambda x, y: ce(ddp, x, y), torch.randn(2, 6).double(), torch.full((2,), -100))
    assert loss == 0
    assert gradients(model) == [None] * 4


def check_p03_class_weights_count_on_all_ranks(rank, world_size):
    inputs, targets = data(sizes(world_size))
    weight = torch.tensor([0.1, 1.0, 3.0, 7.0], dtype=torch.float64)
    model = small_model()
    expected, wanted = whole_gradients(
        model, lambda m, x, y: ce(m, x, y, weight=weight), torch.cat(inputs), torch.cat(targets)
    )
    ddp, splitter = split(model, micro_batch_size=2, normalizer=lambda x, y: weight[y].sum())
    loss = splitter.backward(lambda x, y: ce(ddp, x, y, weight=weight), inputs[rank], targets[rank])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(model), wanted)


def check_p04_sum_and_none_are_not_rescaled(rank, world_size):
    inputs, targets = data(sizes(world_size))
    model = small_model()
    expected, wanted = whole_gradients(
        model, lambda m, x, y: ce(m, x, y, reduction="sum"), torch.cat(inputs), torch.cat(targets)
    )
    for reduction in ("sum", "none"):
        ddp, splitter = split(model, micro_batch_size=2, reduction=reduction)
        loss = splitter.backward(
            lambda x, y, ddp=ddp, reduction=reduction: ce(ddp, x, y, reduction=reduction), inputs[rank], targets[rank]
        )
        if reduction == "sum":
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        else:
            assert loss.shape == (len(inputs[rank]),)
        assert_same(gradients(model), wanted)
        model.zero_grad()


def out_of_memory_on(rank, culprit, limit, ddp, backward):
    """Return a loss function that fits ``limit`` samples on one rank, and any number on the others."""

    def loss_fn(x, y):
        if rank == culprit and backward:
            return ce(ddp, Breaks.apply(x.requires_grad_(), limit), y)
        if rank == culprit and len(x) > limit:
            ddp(x[:1])
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return ce(ddp, x, y)

    return loss_fn


def check_p16_one_rank_out_of_memory_in_forward_or_backward(rank, world_size):
    inputs, targets = data(sizes(world_size, first=8))
    for backward in (False, True):
        for culprit in range(world_size):
            model = small_model()
            _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
            ddp, splitter = split(model)
            loss_fn = out_of_memory_on(rank, culprit, 2, ddp, backward)
            for times in (1, 2):  # the second batch begins with the size that all have agreed on
                with counted("all_reduce") as calls:
                    splitter.backward(loss_fn, inputs[rank].clone(), targets[rank])
                assert sum(group is ddp.process_group for group in calls) == 2
                agreed = [None] * world_size
                dist.all_gather_object(agreed, splitter.micro_batch_size)
                assert agreed == [agreed[0]] * world_size
                assert agreed[0] in (1, 2)
                assert_same(gradients(model), [times * grad for grad in wanted])


def check_p16_sizes_grow_again_together(rank, world_size):
    inputs, targets = data([8] * world_size)
    model = small_model()
    ddp, splitter = split(model, grow_after=2)
    limit = [2]

    def loss_fn(x, y):
        if rank == 0 and len(x) > limit[0]:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return ce(ddp, x, y)

    seen = []
    for batch in range(24):
        if batch == 1:
            limit[0] = 8
        splitter.backward(loss_fn, inputs[rank], targets[rank])
        seen.append(splitter.micro_batch_size)
    assert seen[0] == 2
    assert seen[-1] == 8
    assert seen == sorted(seen)


def check_p16_a_single_sample_does_not_fit_on_one_rank(rank, world_size):
    inputs, targets = data(sizes(world_size))
    model = small_model()
    _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    ddp, splitter = split(model)
    splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
    error = raised(lambda: splitter.backward(out_of_memory_on(rank, 1, 0, ddp, False), inputs[rank], targets[rank]))
    assert type(error) is (torch.OutOfMemoryError if rank == 1 else errors.PeerError), error
    if rank != 1:
        assert "rank 1 failed" in str(error)
    assert_same(gradients(model), wanted)  # as before the batch
    model.zero_grad()
    splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
    assert_same(gradients(model), wanted)


def check_an_error_on_one_rank_reaches_all(rank, world_size):
    inputs, targets = data(sizes(world_size))
    ddp, splitter = split(small_model(), micro_batch_size=2)

    def loss_fn(x, y):
        if rank == 1:
            raise ValueError("a bad sample")
        return ce(ddp, x, y)

    error = raised(lambda: splitter.backward(loss_fn, inputs[rank], targets[rank]))
    assert type(error) is (ValueError if rank == 1 else errors.PeerError), error
    unequal = targets[rank][1:] if rank == 0 else targets[rank]
    error = raised(lambda: splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], unequal))
    assert type(error) is (errors.BatchError if rank == 0 else errors.PeerError), error


def check_ranks_that_do_different_things_are_told(rank, world_size):
    inputs, targets = data(sizes(world_size))
    ddp, splitter = split(small_model())
    if rank == 0:
        error = raised(lambda: splitter.backward_coupled(ddp, lambda z: z.square().mean(), inputs[rank]))
    else:
        error = raised(lambda: splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank]))
    assert type(error) is errors.PeerError
    assert "in the same order" in str(error)


def check_parameters_that_some_ranks_or_none_use(rank, world_size):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = (nn.Linear(6, 4).double() for _ in range(3))

        def forward(self, x, second):
            return self.second(x) if second else self.first(x)

    torch.manual_seed(4)
    model = Branches()
    inputs, targets = data(sizes(world_size))

    def on_all(m, *parts):
        losses = [ce(lambda x, i=i: m(x, i == 1), x, y, reduction="sum") for i, (x, y) in enumerate(parts)]
        return sum(losses) / sum(len(x) for x, _ in parts)

    _, wanted = whole_gradients(model, on_all, *zip(inputs, targets, strict=True))
    ddp, splitter = split(model, micro_batch_size=2)
    splitter.backward(lambda x, y: ce(lambda z: ddp(z, rank == 1), x, y), inputs[rank], targets[rank])
    assert_same(gradients(model), wanted)
    assert model.unused.weight.grad is None


def check_frozen_parameters_stay_out(rank, world_size):
    inputs, targets = data(sizes(world_size))
    model = small_model()
    ddp, splitter = split(model, micro_batch_size=2)
    splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
    model.zero_grad()
    model[0].requires_grad_(False)
    _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
    assert_same(gradients(model), wanted)


def check_sparse_gradients(rank, world_size):
    torch.manual_seed(5)
    table = nn.Embedding(10, 3, sparse=True).double()
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 10, (world_size, 6), generator=generator)
    _, wanted = whole_gradients(table, lambda m, i: m(i).square().mean(), ids.reshape(-1))
    ddp, splitter = split(table, micro_batch_size=4)
    splitter.backward(lambda i: ddp(i).square().mean(), ids[rank])
    assert table.weight.grad.is_sparse
    assert_same([table.weight.grad.to_dense()], [grad.to_dense() for grad in wanted])


def check_p10_buffers_are_rank_0s_once_a_batch(rank, world_size):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    ddp, splitter = split(model)
    model[1].running_mean.fill_(float(rank))
    inputs, targets = data([8] * world_size)
    seen = []

    def loss_fn(x, y):
        seen.append(model[1].running_mean.clone())
        if rank == 1 and len(x) > 4:
            ddp(x)
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return ce(ddp, x, y)

    with counted("broadcast") as calls:
        splitter.backward(loss_fn, inputs[rank], targets[rank])
    assert len(calls) == len(list(model.buffers()))
    assert torch.equal(seen[0], torch.zeros(5).double())
    if rank == 1:  # the second attempt starts with what rank 0 had, and counts its own passes alone
        assert torch.equal(seen[1], seen[0])
    assert model[1].num_batches_tracked == (2 if rank == 1 else 1)


def check_a_rank_without_samples(rank, world_size):
    counts = [4, 3, 0][3 - world_size :]
    inputs, targets = data(counts)
    model = small_model()
    expected, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    for reduction in ("mean", "sum", "none"):
        ddp, splitter = split(model, reduction=reduction)
        for _ in range(2):
            model.zero_grad()
            loss = splitter.backward(
                lambda x, y, ddp=ddp, reduction=reduction: ce(ddp, x, y, reduction=reduction),
                inputs[rank],
                targets[rank],
            )
        if reduction == "mean":
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
            assert_same(gradients(model), wanted)
        else:
            assert_same(gradients(model), [grad * sum(counts) for grad in wanted])


def contrastive(z):
    return cross_entropy(z @ z.T, torch.arange(len(z)))


def check_p06_coupled_losses_are_averaged_over_ranks(rank, world_size):
    """Compare samples within each rank and average the gradients, as DistributedDataParallel does."""
    inputs, _ = data(sizes(world_size))
    model = small_model()

    def on_all(m, *parts):
        return sum(contrastive(m(part)) for part in parts) / world_size

    expected, wanted = whole_gradients(model, on_all, *inputs)
    ddp, splitter = split(model, micro_batch_size=2)
    loss = splitter.backward_coupled(ddp, contrastive, inputs[rank])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(model), wanted)
    model.zero_grad()
    contrastive(splitter.forward(ddp, inputs[rank])).backward()
    assert_same(gradients(model), wanted)


def check_one_rank_may_evaluate_alone(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    ddp, splitter = split(model, micro_batch_size=2)
    searching = speedswap.BatchSplitter(ddp)
    if rank == 0:
        ddp.eval()
        outputs = splitter.map(ddp, torch.ones(5, 6).double())
        assert torch.equal(outputs, model(torch.ones(5, 6).double()))
        failing = OutOfMemoryBeyond(ddp, 2)
        assert torch.equal(searching.map(failing, torch.ones(5, 6).double()), outputs)


def check_micro_batches_packed_by_tokens(rank, world_size):
    """Check that each rank packs its own samples, finds a size in tokens, and weighs by the tokens of all ranks."""
    lengths = [[3, 9], [1, 2, 7, 7, 4, 1], [5]][:world_size]
    torch.manual_seed(2)
    rows = [torch.randn(len(each), max(each), 6, dtype=torch.float64) for each in lengths]
    there = [(torch.arange(max(each)) < torch.tensor(each)[:, None]).double() for each in lengths]

    def token_mean(model, x, there):
        return (model(x.flatten(0, 1)).square().sum(1) * there.flatten()).sum() / there.sum()

    model = small_model()
    flat = torch.cat([x.flatten(0, 1) for x in rows])[None], torch.cat([one.flatten() for one in there])[None]
    expected, wanted = whole_gradients(model, token_mean, *flat)
    ddp = DistributedDataParallel(model)
    splitter = speedswap.BatchSplitter(
        ddp, micro_batch_tokens="auto", normalizer=lambda x, there: there.sum(), check=False
    )

    def loss_fn(x, there):
        if x.shape[0] * x.shape[1] > 20:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return token_mean(ddp, x, there)

    for _ in range(2):
        model.zero_grad()
        loss = splitter.backward(loss_fn, *[Padded(given[rank], lengths[rank]) for given in (rows, there)])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_same([parameter.grad for parameter in model.parameters()], wanted)


def check_plain_steps_reduce_as_before(rank, world_size):
    """Check that DistributedDataParallel behaves as before without the splitter."""
    inputs, targets = data([4] * world_size)
    model = small_model()
    _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    ddp, splitter = split(model, micro_batch_size=2)
    for _ in range(2):
        splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
        model.zero_grad()
        ce(ddp, inputs[rank], targets[rank]).backward()
        assert_same(gradients(model), wanted)
        model.zero_grad()


def check_half_precision(rank, world_size):
    torch.manual_seed(3)
    model = nn.Linear(6, 4).bfloat16()
    inputs, _ = data(sizes(world_size))
    exact = nn.Linear(6, 4).double()
    exact.load_state_dict(model.state_dict())
    wanted = whole_gradients(exact, lambda m, x: mse_loss(m(x), x[:, :4]), torch.cat(inputs).bfloat16().double())[1]
    ddp, splitter = split(model, micro_batch_size=2)
    splitter.backward(lambda x: mse_loss(ddp(x), x[:, :4]), inputs[rank].bfloat16())
    for grad, other in zip(gradients(model), wanted, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), other, rtol=0.05, atol=0.02)


def check_p12_an_infinite_gradient_on_one_rank_skips_the_step_on_all(rank, world_size):
    inputs, targets = data(sizes(world_size))
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, splitter = split(model, micro_batch_size=2, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets))
    for infinite in (False, True):
        before = copy.deepcopy(list(model.parameters()))
        batch = inputs[rank].clone()
        if infinite and rank == 1:
            batch[0, 0] = torch.inf
        splitter.backward(lambda x, y: ce(ddp, x, y), batch, targets[rank])
        scaler.step(optimizer)
        scaler.update()
        if infinite:
            assert scaler.get_scale() == 512
            assert all(map(torch.equal, model.parameters(), before))
        else:
            moved = [(old - new) / 0.1 for old, new in zip(before, model.parameters(), strict=True)]
            assert_same(moved, wanted, tolerance=1e-10)
        optimizer.zero_grad()


def check_p08_a_retried_batch_is_a_clean_one_on_every_rank(rank, world_size):
    """Dropout, running statistics and random numbers, bit for bit, where another rank's batch fits at once."""
    inputs, targets = data([8] * world_size)
    given = []
    for fails in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4)).double()
        size = "auto" if fails else 2 if rank == 1 else 8
        ddp, splitter = split(model, micro_batch_size=size)
        torch.manual_seed(rank)

        def loss_fn(x, y, ddp=ddp, fails=fails):
            loss = ce(ddp, x, y)
            if fails and rank == 1 and len(x) > 2:
                raise torch.OutOfMemoryError(CUDA_TEXT)
            return loss

        splitter.backward(loss_fn, inputs[rank], targets[rank])
        given.append([*gradients(model), *model.buffers(), torch.rand(3)])
    assert_same(*given, tolerance=0)


def check_what_cannot_be_split_is_refused(rank, world_size):
    ddp = DistributedDataParallel(small_model())
    splitter = speedswap.BatchSplitter(ddp)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    error = raised(lambda: splitter.backward(lambda x: ddp(x).mean(), torch.zeros(2, 6).double()))
    assert type(error) is errors.BatchError
    assert "a communication hook" in str(error)
    still = DistributedDataParallel(small_model(), static_graph=True)
    assert "static_graph" in str(raised(lambda: speedswap.BatchSplitter(still)))


def check_two_towers(rank, world_size):
    towers = [DistributedDataParallel(small_model(classes=3)) for _ in range(2)]
    inputs, _ = data(sizes(world_size))
    models = nn.ModuleList(tower.module for tower in towers)

    def on_all(m, *parts):
        return sum(contrastive_pair(m[0](part), m[1](part.flip(1))) for part in parts) / world_size

    def contrastive_pair(a, b):
        return cross_entropy(a @ b.T, torch.arange(len(a)))

    _, wanted = whole_gradients(models, on_all, *inputs)
    splitter = speedswap.BatchSplitter(towers, micro_batch_size=3)
    splitter.backward_coupled(towers, contrastive_pair, inputs[rank], inputs[rank].flip(1))
    assert_same(gradients(models), wanted)


def check_the_groups_all_reduces_are_left_alone(rank, world_size):
    """Check that a user's own collectives between batches pair correctly."""
    inputs, targets = data(sizes(world_size))
    ddp, splitter = split(small_model(), micro_batch_size=2)
    for _ in range(3):
        splitter.backward(lambda x, y: ce(ddp, x, y), inputs[rank], targets[rank])
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        assert total == sum(range(world_size))


def check_buffers_of_the_first_rank_are_there_again_in_a_second_attempt(rank, world_size):
    """Fail once on the last rank, after DistributedDataParallel's buffers have come from the first one."""
    inputs, targets = data([4] * world_size)
    ddp, splitter = split(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double().eval(), check=False)
    ddp.module[0].running_mean.fill_(float(rank))
    seen = []

    def loss_fn(x, y):
        seen.append(float(ddp.module[0].running_mean[0]))
        if rank == world_size - 1 and len(x) > 2:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return ce(ddp, x, y)

    splitter.backward(loss_fn, inputs[rank], targets[rank])
    assert seen == [0.0] * (3 if rank == world_size - 1 else 1), seen


def check_ranks_agree_on_the_rung(rank, world_size):
    """Check that one rank whose sample does not fit escalates alone, and that all begin the next batch on its rung."""
    inputs, targets = data([3] * world_size)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6)) for _ in range(4)]).double()
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected, wanted = whole_gradients(model, ce, torch.cat(inputs), torch.cat(targets) % 4)
    ddp, splitter = split(model, check=False)
    checkpointed = []

    def loss_fn(x, y):
        loss = ce(ddp, x, y)
        checkpointed.append(any("forward" in vars(block) for block in model))
        if rank == world_size - 1 and not checkpointed[-1] and len(checkpointed) <= 2:
            raise torch.OutOfMemoryError(CUDA_TEXT)
        return loss

    for _ in range(2):
        first = len(checkpointed)
        loss = splitter.backward(loss_fn, inputs[rank], targets[rank] % 4)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_same(gradients(model), wanted)
        model.zero_grad()
    assert splitter.rung == 1
    assert checkpointed[first:][-3:] == [True] * 3
