"""Horovod's own API in the build of hvdkit, without hvdkit: what its patches mend. Imports are within, on the ranks."""

import urllib.error
import urllib.request
import warnings
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

SAMPLES, FEATURES, BATCH = 72, 6, 4


def make_data() -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    return generator.normal(size=(SAMPLES, FEATURES)).astype("float32"), generator.normal(size=(SAMPLES, 1))


def of_rank(rank: int, size: int) -> tuple[Any, Any]:
    """The samples of a rank, such that the ranks' batches together are those of one process."""
    return tuple(
        part.reshape(-1, size, BATCH, part.shape[1])[:, rank].reshape(-1, part.shape[1]) for part in make_data()
    )


def make_model(seed: int = 0) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh"), layers.Dropout(0.0), layers.Dense(1)])


def fit(optimizer: Any, data: tuple[Any, Any], batch: int, epochs: int = 2, callbacks: Any = ()) -> tuple[Any, Any]:
    model = make_model()
    model.compile(optimizer, "mse", metrics=["mae"])
    return model, model.fit(
        *data, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    ).history


def difference(one: Any, other: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one.get_weights(), other.get_weights(), strict=True))


@on_ranks("keras", n=3, fresh=True)
def test_fit_with_horovods_optimizer_equals_one_process(everyone):
    import horovod.tensorflow.keras as hvd
    from keras import optimizers

    hvd.init()
    mine = of_rank(hvd.rank(), hvd.size())
    for make in (
        lambda: optimizers.Adam(0.01, clipnorm=0.05),
        lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 5, 0.9), momentum=0.9),
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0),
        lambda: optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    ):
        model, _ = fit(hvd.DistributedOptimizer(make()), mine, BATCH)
        alone, _ = fit(make(), make_data(), BATCH * hvd.size())
        assert difference(model, alone) < 1e-5
    twice = hvd.DistributedOptimizer(optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True)
    model, _ = fit(twice, mine, BATCH)
    alone, _ = fit(optimizers.SGD(0.1), make_data(), 2 * BATCH * hvd.size())
    assert difference(model, alone) < 1e-5


@on_ranks("keras", n=2, fresh=True)
def test_horovods_callbacks_broadcast_average_and_warm_up(everyone):
    import horovod.tensorflow.keras as hvd
    import keras

    hvd.init()
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2),
    ]
    data = of_rank(hvd.rank(), 3)  # the third part is nobody's
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = model.fit(*data, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
    assert sum("momentum_correction=False" in str(one.message) for one in said) == (hvd.rank() == 0)
    (weights, loss), (others, other_loss) = everyone(([w.tolist() for w in model.get_weights()], history["loss"]))
    assert weights == others
    assert loss == other_loss
    assert history["lr"] == pytest.approx([0.075, 0.1, 0.1])


@on_ranks("keras", n=2, fresh=True)
def test_a_model_saved_with_horovods_optimizer_goes_on_after_load_model(everyone, tmp_path):
    import horovod.keras as hvd
    import keras

    hvd.init()
    mine = of_rank(hvd.rank(), 3)
    model, _ = fit(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), mine, BATCH)
    model.save(tmp_path / f"{hvd.rank()}.keras")
    assert not hasattr(keras.models.load_model(tmp_path / f"{hvd.rank()}.keras").optimizer, "register_local_var")
    loaded = hvd.load_model(tmp_path / f"{hvd.rank()}.keras")
    for one in (model, loaded):
        one.fit(*mine, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    assert difference(model, loaded) == 0.0
    first, second = everyone([weight.tolist() for weight in loaded.get_weights()])
    assert first == second


@on_ranks("keras", n=2, fresh=True)
def test_tape_broadcast_state_and_batch_norm_take_keras_3(everyone):
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as hvd_keras
    import keras
    import tensorflow as tf

    hvd.init()
    model, optimizer = make_model(seed=hvd.rank()), keras.optimizers.SGD(0.1)
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    x, y = make_data()
    step(x[hvd.rank() :: 2], y[hvd.rank() :: 2].astype("float32"))
    alone, _ = fit(keras.optimizers.SGD(0.1), (x, y), SAMPLES, epochs=1)
    assert difference(model, alone) < 1e-6
    state = hvd_keras.elastic.KerasState(model, optimizer, batch=hvd.rank())
    state.sync()
    kept = model.get_weights()
    model.set_weights([weight + 1 for weight in kept])
    state.restore()
    assert state.batch == 0
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), kept, strict=True))
    norm = hvd.SyncBatchNormalization()
    found = norm(x[hvd.rank() :: 2], training=True)
    whole = keras.layers.BatchNormalization()
    assert np.allclose(found, whole(x, training=True)[hvd.rank() :: 2], atol=1e-4)
    assert np.allclose(norm.moving_variance, whole.moving_variance, atol=1e-5)


@on_ranks("torch", n=3, fresh=True)
def test_unnamed_tensors_of_torch_meet_after_uneven_calls(everyone):
    """As released, the last allreduce of each half waits for ever: rank 1 has made fewer calls."""
    import horovod.torch as hvd
    import torch

    even = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[even])
    if even.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=even).item() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    if hvd.rank() != 1:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


@on_ranks("keras", n=3, fresh=True)
def test_barrier_of_tensorflow_waits_for_the_ranks_of_its_process_set(everyone):
    import time

    import horovod.keras
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras
    import tensorflow as tf

    assert hvd.barrier is horovod.keras.barrier is horovod.tensorflow.keras.barrier
    two = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[two])

    def after_the_last(late: int, barrier, ranks=(0, 1, 2)) -> bool:
        """Whether no rank left before the one that came late; all clocks are this host's."""
        if hvd.rank() not in ranks:
            return everyone(()) is not None
        if hvd.rank() == late:
            time.sleep(0.3)
        came = time.monotonic()
        assert int(barrier()) == len(ranks)
        times = [one for one in everyone((came, time.monotonic())) if one]
        return min(left for _, left in times) >= max(came for came, _ in times)

    assert after_the_last(2, hvd.barrier)
    assert after_the_last(0, tf.function(hvd.barrier))
    assert after_the_last(1, lambda: hvd.barrier(two), ranks=(0, 1))


@on_ranks("tensorflow", n=2, fresh=True)
def test_elastic_run_takes_the_errors_of_horovods_operations_and_no_others(everyone, monkeypatch):
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError
    from horovod.tensorflow import elastic

    monkeypatch.setattr(elastic, "run_fn", lambda wrapped, reset: wrapped)  # what would start anew
    lost = "{{function_node __wrapped__HorovodAllreduce_device_/job:localhost}} Horovod has been shut down."

    def raises(error):
        def train(state):
            raise error

        return lambda: elastic.run(train)(None)

    for kind in (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.InternalError):
        with pytest.raises(HorovodInternalError):
            raises(kind(None, None, lost))()
        with pytest.raises(kind, match="No space left"):
            raises(kind(None, None, "No space left on device"))()


@pytest.mark.parametrize(
    ("version", "implementation", "binding"),
    [
        ("mpirun (Open MPI) 5.0.11", "OpenMPI", ["--bind-to none", "--map-by slot"]),
        ("HYDRA build details:\n    Version: 4.2.0", "MPICH", ["-bind-to none", "-map-by slot"]),
    ],
)
def test_horovodrun_knows_open_mpi_5_and_mpich(tmp_path, version, implementation, binding):
    mpi_run = pytest.importorskip("horovod.runner.mpi_run")
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\nprintf '{version}\\n'\n")
    (tmp_path / "mpirun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    _, found, name = mpi_run._get_mpi_implementation_flags(False, environ)
    assert (name, found) == (implementation, binding)


def test_the_store_of_gloo_forgets_a_group_when_its_ranks_have_met():
    """Else a second ``init`` finds addresses of the first; the order is that of two ranks of which one is slow."""
    http_server = pytest.importorskip("horovod.runner.http.http_server")
    from horovod.runner.common.util import hosts

    server = http_server.RendezvousServer(0)
    port = server.start()
    server.init(hosts.get_host_assignments(hosts.parse_hosts("here:2"), 2))

    def send(method, key):
        body = b"address" if method == "PUT" else None
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{key}", body, method=method)).close()

    for rank in (0, 1):
        send("PUT", f"local_here/{rank}")
    for met in ("local_here/1", "cross_1/1", "local_here/0"):
        send("DELETE", met)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        send("GET", "local_here/0")
    server.stop()
