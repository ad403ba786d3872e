"""AIkit's TensorFlow half over Keras 3, on the torch backend, against Keras's own training with the whole batch."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

from speedswap.compat import aikit, runai  # noqa: E402
from speedswap.compat.aikit.ga.TF import hooks, optimizers  # noqa: E402
from speedswap.errors import BatchError, OptimizerError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, about NumPy 2


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def network():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def samples(count):
    features = np.random.default_rng(0).normal(size=(count, 5)).astype("float32")
    return features, np.tanh(features.sum(1, keepdims=True))


def fit(model, optimizer, batch_size, count=64, epochs=2, **kwargs):
    model.compile(optimizer, "mse")
    features, targets = samples(count)
    model.fit(features, targets, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **kwargs)
    return model


def assert_same_weights(ours, theirs):
    start = network()
    for a, b, before in zip(ours.weights, theirs.weights, start.weights, strict=True):
        a, b, before = (keras.ops.convert_to_numpy(value) for value in (a, b, before))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        assert abs(b - before).max() > 1e-3


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"])
def test_fit_with_accumulation_equals_fit_with_the_whole_batch(name):
    rate = {"learning_rate": 0.5 if name == "Adadelta" else 0.02}
    ours = fit(network(), getattr(optimizers, name)(4, **rate), 8)
    theirs = fit(network(), getattr(keras.optimizers, name)(**rate), 32)
    assert_same_weights(ours, theirs)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 4


def test_a_single_step_is_the_plain_optimizer():
    """Keras itself refuses gradient_accumulation_steps below 2."""
    optimizer = optimizers.Adam(1, learning_rate=0.02)
    assert optimizer.gradient_accumulation_steps is None
    assert_same_weights(fit(network(), optimizer, 32), fit(network(), keras.optimizers.Adam(0.02), 32))


def test_any_optimizer_or_its_name_can_be_wrapped():
    plain = keras.optimizers.SGD(0.02, momentum=0.9)
    assert optimizers.Optimizer(plain, 4) is plain
    assert_same_weights(fit(network(), plain, 8), fit(network(), keras.optimizers.SGD(0.02, momentum=0.9), 32))
    assert optimizers.Optimizer("adam", 3).gradient_accumulation_steps == 3
    assert optimizers.Optimizer(plain, 4).gradient_accumulation_steps == 4
    with pytest.raises(OptimizerError, match="accumulates 4 steps already, not 2"):
        optimizers.Optimizer(plain, 2)


def test_wrapping_keeps_the_state_of_an_optimizer_that_has_trained():
    ours = fit(network(), keras.optimizers.Adam(0.02), 32)
    optimizers.Optimizer(ours.optimizer, 4)
    features, targets = samples(64)
    ours.train_function = None
    ours.fit(features, targets, batch_size=8, epochs=2, shuffle=False, verbose=0)
    theirs = fit(network(), keras.optimizers.Adam(0.02), 32, epochs=4)
    assert_same_weights(ours, theirs)
    assert int(ours.optimizer.iterations) == 8


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_unfit_steps_are_refused(steps):
    with pytest.raises(BatchError, match=r"steps is .* must be an integer of at least 1"):
        optimizers.SGD(steps)


def test_trailing_window_is_applied_at_the_end_of_each_epoch():
    ours = fit(network(), optimizers.SGD(4, 0.05, momentum=0.9), 8, count=48, callbacks=[hooks.Flush()])
    theirs = fit(network(), keras.optimizers.SGD(0.05, momentum=0.9), 32, count=48)  # 32, then 16
    assert_same_weights(ours, theirs)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 4
    assert not hooks.flush(ours.optimizer)


def test_module_imports_as_the_readme_writes_it():
    names: dict[str, object] = {}
    exec("import speedswap.compat.aikit.elastic.TF\nspeedswap.compat.aikit.elastic.TF.init(256, 64)", names)
    assert aikit.elastic.steps == 4


@pytest.mark.parametrize("gpus, steps", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("wrapper", ["elastic.models", "elastic.TF.model", "elastic.TF.models", "runai"])
def test_readme_model_example(gpus, steps, wrapper):
    aikit.elastic.TF.init(256, 64, gpus)
    assert (aikit.elastic.steps, aikit.elastic.batch_size) == (steps, 64)
    module = {
        "elastic.models": aikit.elastic.models,
        "elastic.TF.model": aikit.elastic.TF.model,
        "elastic.TF.models": aikit.elastic.TF.models,
        "runai": runai.elastic.keras.models,
    }[wrapper]
    model = module.Model(network())
    model.compile(keras.optimizers.SGD(0.05), loss="mse")
    assert (model.optimizer.gradient_accumulation_steps or 1) == steps


def test_elastic_model_trains_with_the_global_batch():
    aikit.elastic.TF.init(32, 8)
    assert (aikit.elastic.gpus, aikit.elastic.steps) == (1, 4)
    ours = aikit.elastic.models.Model(network())
    ours.compile(keras.optimizers.Adam(0.02), loss="mse")
    seen = []

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    features, targets = samples(48)
    history = ours.fit(features, targets, epochs=2, shuffle=False, verbose=0, callbacks=Sizes())
    theirs = fit(network(), keras.optimizers.Adam(0.02), 32, count=48)
    assert_same_weights(ours.model, theirs)
    assert len(seen) == 2 * 6  # batches of 8
    assert len(history.history["loss"]) == 2
    assert ours.predict(features, verbose=0).shape == (48, 1)
    assert tuple(ours(features).shape) == (48, 1)


def test_model_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"model is a list; give a keras\.Model"):
        aikit.elastic.models.Model([])


def test_runai_names_are_the_same_things():
    runai.elastic.keras.init(256, 64)
    assert runai.elastic.steps == 4
    assert runai.ga.keras.optimizers.Optimizer is optimizers.Optimizer
    assert runai.ga.keras.hooks is hooks
