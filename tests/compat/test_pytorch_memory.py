"""The README of pytorch-memory as written, and its defects, which do not come back."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from typing import get_args, get_origin

import numpy as np
import pytest
import torch
from children import run_script
from torch import nn

from speedswap.compat import pytorch_memory
from speedswap.compat.pytorch_memory import (
    Config,
    Feeder,
    GiB,
    InspectNetwork,
    KiB,
    MiB,
    NotEnoughGPURam,
    generate_epoch,
    get_parameter_count,
    get_variable_count,
    i_arr_mul,
    multiply_epochs,
    round_to,
    summary_of_network,
)
from speedswap.errors import BatchError, MemoryBudgetError


def linear():
    return nn.Linear(4, 2)


def config_for(count, *, batch=2, memory=4, reads=1, model=linear, **changes):
    """Make a configuration whose host memory holds ``memory`` identities of 4 floats and 2 targets."""
    arguments = {
        "cpu_memory_limit": memory * reads * 24,
        "gpu_memory_limit": MiB(1),
        "input_shape": (4,),
        "output_shape": (2,),
        "model_class": model,
        "total_sample_count": count,
        "input_dtype": np.float32,
        "output_dtype": np.float32,
        "one_read_count": reads,
        "preferred_batch_size": batch,
    }
    return Config(**arguments | changes)


def read_input(identity):
    yield np.full(4, identity, np.float32)


def get_output(identity):
    yield np.full(2, -identity, np.float32)


def feeder_for(count, **options):
    return Feeder(config_for(count, **options), range(count), range(count), read_input, get_output)


def epoch_for(count, **options):
    return generate_epoch(config_for(count, **options), range(count), range(count), read_input, get_output)


# ---------------------------------------------------------------------- the README


class Big(nn.Module):
    """A model for the README's inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 32, stride=32), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 256))

    def forward(self, images):
        return self.layers(images)


def test_readme_config():
    model_class = Big
    config = Config(
        cpu_memory_limit=GiB(2),
        gpu_memory_limit=GiB(1.5),
        total_sample_count=2048,
        input_shape=(3, 1024, 1024),
        output_shape=(256,),
        model_class=model_class,
        input_dtype=np.float32,
        output_dtype=np.float32,
        one_read_count=2,
        preferred_batch_size=16,
    )
    assert config.batch_size == 16
    assert config.sample_size == 3 * 1024 * 1024 * 4 + 256 * 4
    assert config.allowed_sample_count == 80  # of 85 that fit, in batches of 8
    assert config.total_read_count == 26
    assert config.batch_count == 256
    assert config.batch_count_in_memory == 10
    assert config.sample_count_in_single_batch == 8
    assert config.sample_batch_memory_footprint == 16 * config.sample_size


def test_readme_config_needs_little_memory_to_be_made():
    """Samples of 12 MiB count among what a trial may take: 128 of them took 2.7 GB, and importing the compiler more."""
    code = """
import resource, sys
import numpy as np, torch
from torch import nn
from speedswap.compat.pytorch_memory import Config, GiB

sizes = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(64), nn.Flatten(), nn.Linear(768, 256))

    def forward(self, images):
        sizes.append(len(images))
        return self.layers(images)

def most_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = most_mib()
config = Config(GiB(2), GiB(1.5), (3, 1024, 1024), (256,), Model, 2048, np.float32, np.float32, 2, 16)
assert config.batch_size == 16, config.batch_size
assert max(sizes) <= 5, sizes
assert most_mib() - before < 200, most_mib() - before
assert "torch._inductor" not in sys.modules
assert "scipy" not in sys.modules  # defect 9: it is not needed
"""
    done = run_script(code, imported=("torch",))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def readme(monkeypatch):
    """The names that the README's second and third example use without defining."""
    model = nn.Linear(4, 2)
    losses = []

    def calculate_loss(y_batch, y_pred):
        losses.append(nn.functional.mse_loss(y_pred, y_batch).item())

    return {
        "config": config_for(10, batch=4, reads=2),
        "input_list": [f"{index}.wav" for index in range(10)],
        "output_list": [f"{index}.label" for index in range(10)],
        "read_input": lambda name: (np.full(4, int(name.split(".")[0]) + noise, np.float32) for noise in (0.0, 0.1)),
        "get_output": lambda name: [np.full(2, int(name.split(".")[0]), np.float32)] * 2,
        "apply_on_input_batch": lambda samples: torch.tensor(np.array(list(samples)), dtype=torch.float32),
        "apply_on_output_batch": lambda samples: torch.tensor(np.array(list(samples)), dtype=torch.float32),
        "model": model,
        "calculate_loss": calculate_loss,
        "losses": losses,
        "Feeder": Feeder,
        "generate_epoch": generate_epoch,
        "multiply_epochs": multiply_epochs,
    }


def test_readme_feeder(readme):
    exec(
        """
feeder = Feeder(
    config,
    input_list,
    output_list,
    read_input,
    get_output,
    apply_on_input_batch,
    apply_on_output_batch,
    )


epochs = feeder.generate_epochs(epoch_count=100)
for epoch in epochs:
    for x_batch, y_batch in epoch:
        y_pred = model.forward(x_batch)
        calculate_loss(y_batch, y_pred)
""",
        readme,
    )
    assert len(readme["losses"]) == 100 * 5


def test_readme_generate_epoch(readme):
    exec(
        """
epoch_generator = generate_epoch(
        config,
        input_list,
        output_list,
        read_input,
        get_output,
        apply_on_input_batch,
        apply_on_output_batch,
        )
epochs = multiply_epochs(epoch_generator=epoch_generator, epoch_count=100)
for epoch in epochs:
    for x_batch, y_batch in epoch:
        y_pred = model.forward(x_batch)
        calculate_loss(y_batch, y_pred)
""",
        readme,
    )
    assert len(readme["losses"]) == 100 * 5


def test_readme_arguments_by_name(readme):
    """As the README writes ``configs=config``, with the names that it leaves out."""
    names = "input_list output_list read_input get_output apply_on_input_batch apply_on_output_batch".split()
    feeder = Feeder(configs=readme["config"], **{name: readme[name] for name in names})
    x_batch, y_batch = next(next(feeder.generate_epochs()))
    assert x_batch.shape == (4, 4)
    assert y_batch.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


# ---------------------------------------------------------------------- its numbers


def test_units_and_rounding():
    assert [KiB(), MiB(), GiB(), GiB(1.5), KiB(0.3)] == [1024, 1024**2, 1024**3, 3 * 512 * 1024**2, 307]
    assert [round_to(17, 5), round_to(20, 5), round_to(3, 5)] == [15, 20, 0]
    assert [i_arr_mul([2, 3, 4]), i_arr_mul(())] == [24, 1]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_counts_and_summary():
    assert get_parameter_count(Classifier) == 4 * 8 + 8 + 8 * 2 + 2
    assert get_variable_count(Classifier, (4,)) == 2 * (8 + 2)  # two layers, with gradients
    older = InspectNetwork(Classifier, (4,))
    assert older.get_parameter_count() == get_parameter_count(Classifier)
    assert older.get_intermediate_variable_count() == 20
    assert summary_of_network(Classifier, (4,)) == [
        {"input_shape": (4,), "output_shape": (8,), "parameter_count": 40, "layer_type_name": "Linear"},
        {"input_shape": (8,), "output_shape": (2,), "parameter_count": 18, "layer_type_name": "Linear"},
    ]


def test_the_whole_networks_output_is_that_of_its_last_module():
    """Figures of pytorch-memory for the same network: outputs of 64, 64 and 4, with gradients, for 8 and 60 numbers."""

    def network():
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))

    assert get_variable_count(network, (8,)) == 264
    config = config_for(10, memory=100, input_shape=(8,), output_shape=(60,), model=network)
    assert config.single_sample_memory_usage == (8 + 60 + 264) * 4 == 1328
    assert [layer["layer_type_name"] for layer in summary_of_network(network, (8,))] == ["Linear", "ReLU", "Linear"]
    assert get_variable_count(lambda: nn.Linear(8, 4), (8,)) == 8  # which is the whole network


def test_numbers_of_the_configuration_follow_its_formula():
    config = config_for(100, batch=7, memory=13, reads=3, model=Classifier)
    assert config.input_size == 16
    assert config.output_size == 8
    assert config.sample_size == 24
    assert config.single_sample_memory_usage == 24 + 20 * 4
    assert config.model_memory_usage == 58 * 4
    assert config.batch_size == 6  # 7 rounded down to a multiple of 3
    assert config.sample_count_in_single_batch == 2
    assert config.allowed_sample_count == 12
    assert config.total_read_count == 9
    assert config.batch_count == 50
    assert config.batch_count_in_memory == 6


def test_batch_is_what_fits_where_none_is_preferred():
    smaller = config_for(10**6, batch=None, memory=10**6, gpu_memory_limit=KiB(64))
    larger = config_for(10**6, batch=None, memory=10**6, gpu_memory_limit=KiB(128))
    assert 1 < smaller.batch_size < larger.batch_size
    assert config_for(100, batch=None, memory=5).batch_size == 5


def test_optimizer_takes_its_part():
    limits = {"batch": None, "memory": 10**6, "gpu_memory_limit": KiB(256)}
    without = config_for(10**6, **limits, model=lambda: nn.Linear(4, 500))
    with_adam = config_for(10**6, **limits, model=lambda: nn.Linear(4, 500), optimizer=torch.optim.Adam)
    assert 1 < with_adam.batch_size < without.batch_size


# ---------------------------------------------------------------------- its defects


@pytest.mark.parametrize("make", [feeder_for, epoch_for], ids=["Feeder", "generate_epoch"])
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_p22_defect_1_memory_stays_within_the_limit_over_epochs(make, epochs):
    """40 MB in samples of 0.1 MB, with room for four of them."""
    sample_bytes, count = 100_000, 400
    config = Config(
        cpu_memory_limit=4 * sample_bytes + 8 * 4,
        gpu_memory_limit=GiB(1),
        input_shape=(sample_bytes // 4,),
        output_shape=(2,),
        model_class=lambda: nn.Linear(sample_bytes // 4, 2),
        total_sample_count=count,
        input_dtype=np.float32,
        output_dtype=np.float32,
        preferred_batch_size=2,
    )
    assert (config.batch_size, config.allowed_sample_count) == (2, 4)

    def read(identity):
        yield np.full(sample_bytes // 4, identity, np.float32)

    lists = (config, range(count), range(count), read, get_output)
    tracemalloc.start()
    try:
        if make is feeder_for:
            several = Feeder(*lists).generate_epochs(epochs)
        else:
            several = multiply_epochs(generate_epoch(*lists), epochs)
        batches = sum(1 for epoch in several for _ in epoch)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batches == epochs * count // 2
    assert most <= config.cpu_memory_limit + config.sample_batch_memory_footprint + 50_000


@pytest.mark.parametrize("make", ["Feeder", "generate_epoch"])
def test_p22_defect_1_each_epoch_is_read_again(make):
    read = Counter()
    random = np.random.default_rng(0)

    def read_noisy(identity):
        read[identity] += 1
        yield np.full(4, identity) + random.normal(size=4)

    lists = (config_for(6), range(6), range(6), read_noisy, get_output)
    epochs = Feeder(*lists).generate_epochs(3) if make == "Feeder" else multiply_epochs(generate_epoch(*lists), 3)
    inputs = [np.concatenate([x for x, _ in epoch]) for epoch in epochs]
    assert set(read.values()) == {3}
    assert not np.array_equal(inputs[0], inputs[1])


def test_defect_1_epochs_can_have_orders_of_their_own():
    feeder = Feeder(config_for(20), range(20), range(20), read_input, get_output, shuffle=True)
    orders = [[int(x) for batch, _ in epoch for x in batch[:, 0]] for epoch in feeder.generate_epochs(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))


def test_defect_1_what_cannot_be_read_again_is_not_kept_instead():
    with pytest.raises(BatchError, match="yields its batches once"):
        next(multiply_epochs(iter([1, 2]), 2))
    assert [list(epoch) for epoch in multiply_epochs([1, 2])] == [[1, 2], [1, 2]]


def test_defect_2_too_little_gpu_memory_for_one_read_is_an_error():
    model_bytes = 4 * (4 * 2 + 2)
    with pytest.raises(NotEnoughGPURam, match="gpu_memory_limit is 40, but the model's parameters alone take 40"):
        config_for(10, gpu_memory_limit=model_bytes)
    with pytest.raises(NotEnoughGPURam, match="with the 1 samples of one read takes"):
        config_for(10, gpu_memory_limit=model_bytes + 1)
    with pytest.raises(NotEnoughGPURam, match="with the 64000 samples of one read takes"):
        config_for(10, reads=64_000)


def test_defect_3_too_little_host_memory_for_one_sample_is_an_error():
    with pytest.raises(MemoryBudgetError, match="cpu_memory_limit is 23, but the samples of one read take 24"):
        config_for(10, cpu_memory_limit=23)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(10, 10)))
        self.root = nn.Parameter(torch.zeros(1000))

    def forward(self, x):
        return self.inner(x) + self.root.sum()


def test_p23_defect_4_parameters_count_once_wherever_they_are():
    assert get_parameter_count(Nested().inner) == 110
    assert get_parameter_count(Nested) == 1110
    assert config_for(10, input_shape=(10,), memory=100, model=Nested).model_memory_usage == 4440


@pytest.mark.parametrize(
    "dtype, size",
    [(torch.float16, 2), (torch.float64, 8), (np.dtype("int16"), 2), (np.float64, 8), ("float16", 2), ("bfloat16", 2)],
)
def test_defect_5_dtypes_in_any_spelling(dtype, size, capsys):
    config = config_for(10, memory=100, input_dtype=dtype, output_dtype=dtype)
    assert (config.input_item_size, config.output_item_size) == (size, size)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("dtype", [np.int16, torch.int16], ids=str)
def test_defect_5_batches_have_the_dtype(dtype):
    config = config_for(4, memory=100, input_dtype=dtype, output_dtype=dtype)
    x, y = next(Feeder(config, range(4), range(4), read_input, get_output).generate_epochs().__next__())
    assert x.dtype == y.dtype == dtype


class Several(nn.Module):
    """Tuples as outputs, BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()

    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return self.drop(self.norm(hidden[0])), hidden


def test_defect_6_tuples_batch_norm_and_random_numbers():
    before = torch.get_rng_state()
    config = config_for(10, input_shape=(5, 4), memory=100, model=Several)
    assert torch.equal(torch.get_rng_state(), before)
    # lstm: 5 × 8 outputs and two states of 8; norm 8, drop 8; all of them with gradients
    assert config.total_intermediate_variable_count == 2 * (40 + 16 + 8 + 8)
    assert summary_of_network(Several, (5, 4))[0]["output_shape"] == (5, 8)


@pytest.mark.parametrize("count, sizes", [(10, [2] * 5), (9, [2] * 4), (2, [2]), (4, [2, 2])])
def test_p22_defect_7_feeder_drops_what_does_not_fill_a_batch_and_nothing_is_empty(count, sizes):
    assert [len(x) for epoch in feeder_for(count).generate_epochs() for x, _ in epoch] == sizes


def test_p22_defect_7_generate_epoch_keeps_the_tail():
    epoch = epoch_for(9)
    assert [len(x) for x, _ in epoch] == [2, 2, 2, 2, 1]
    assert [x[0, 0] for x, _ in epoch] == [0, 2, 4, 6, 8]


def test_defect_8_any_number_of_batches():
    assert sum(1 for _ in epoch_for(5000, batch=1)) == 5000


class Functional(nn.Module):
    """Most of what it keeps is made by functions, not by modules."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 256)

    def forward(self, x):
        x = self.layer(x)
        for _ in range(20):
            x = torch.sin(x) * torch.cos(x)
        return x


def test_p23_defect_9_functions_between_layers_count():
    config = config_for(10**4, batch=None, memory=10**4, model=Functional)
    kept = 20 * 4 * 256 * 4  # sin and cos keep their input, the product both factors
    assert config.batch_size <= MiB(1) // (kept // 2)


def test_defect_9_gradients_and_optimizer_state_count():
    """A model of 40 KB and gradients as large do not fit in 60 KB."""
    with pytest.raises(NotEnoughGPURam, match="gpu_memory_limit"):
        config_for(10, gpu_memory_limit=60_000, model=lambda: nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 1)))


def test_defect_9_parameters_count_in_their_own_precision():
    config = config_for(10, memory=100, input_dtype=np.float64, model=linear)
    assert config.model_memory_usage == 40


def test_defect_9_model_may_be_an_object_and_shapes_may_have_a_batch_dimension():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    modes = [module.training for module in model.modules()]
    with_batch = get_variable_count(model, (1, 3, 8, 8))
    assert with_batch == get_variable_count(model, (3, 8, 8)) == 2 * 2 * 2 * 36
    assert [module.training for module in model.modules()] == modes
    assert model[1].num_batches_tracked == 0
    assert config_for(10, input_shape=(1, 3, 8, 8), memory=100, model=model).batch_size == 2


@pytest.mark.parametrize("value", [-1, 0, 1.5])
@pytest.mark.parametrize("name", ["total_sample_count", "one_read_count", "preferred_batch_size"])
def test_a_count_is_an_integer_of_at_least_1(name, value):
    numbers = {"total_sample_count": 4, "one_read_count": 1, "preferred_batch_size": 1} | {name: value}
    with pytest.raises(BatchError, match=f"{name} is {value}; it must be an integer of at least 1"):
        Config(GiB(1), GiB(1), (3,), (1,), lambda: nn.Linear(3, 1), **numbers)


@pytest.mark.parametrize("make", [Feeder, generate_epoch])
def test_defect_9_lists_of_different_lengths_are_refused(make):
    with pytest.raises(BatchError, match="output_list has 4 items, but input_list has 200"):
        make(config_for(200), range(200), range(4), read_input, get_output)


@pytest.mark.parametrize("make", [Feeder, generate_epoch])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("reader", ["read_input", "get_output"])
def test_wrong_number_of_samples_is_said_in_terms_of_one_read_count(reader, count, make):
    """Arguments that only this library has, such as variants, mean nothing to the predecessor's users."""
    readers = {"read_input": read_input, "get_output": get_output}
    readers = {name: lambda identity, read=read: list(read(identity)) * 2 for name, read in readers.items()}
    readers[reader] = lambda identity: [np.zeros(4, np.float32)] * count
    epoch = make(config_for(4, reads=2), range(4), range(4), **readers)
    with pytest.raises(BatchError) as raised:
        next(iter(next(epoch.generate_epochs()) if make is Feeder else epoch))
    gave = "more than 2" if count > 2 else str(count)
    assert f"{reader}(0) gave {gave} samples, but one_read_count is 2" in str(raised.value)
    assert "variants" not in str(raised.value)


def test_epoch_is_an_iterator_too():
    epoch = epoch_for(4)
    assert len(list(itertools.islice(iter(epoch.__next__, None), 2))) == 2
    with pytest.raises(StopIteration):
        next(epoch)


def test_names_of_types_are_there():
    assert isinstance(np.zeros(1), pytorch_memory.Sample)
    assert isinstance(torch.zeros(1), pytorch_memory.Sample)
    for alias in (pytorch_memory.MemorySamples, pytorch_memory.Batch, pytorch_memory.Epoch):
        assert get_origin(alias) is Iterable
    assert get_args(pytorch_memory.Epoch) == (tuple[pytorch_memory.Batch, pytorch_memory.Batch],)


def test_generator_with_stop_iteration_takes_the_first_item_at_once():
    taken = []

    def numbers():
        for number in range(3):
            taken.append(number)
            yield number

    items = pytorch_memory.generator_with_stop_iteration(numbers())
    assert taken == [0]
    assert list(items) == [0, 1, 2]
    with pytest.raises(StopIteration):
        pytorch_memory.generator_with_stop_iteration(iter(()))
