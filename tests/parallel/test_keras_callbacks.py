"""Callbacks of the user's in fit on several ranks: who writes, what they decide by, and who has the effect of it.

Frameworks and hvdkit are imported within, on the ranks.
"""

import csv
import types
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

FEATURES = 6
X = np.random.default_rng(5).normal(size=(48, FEATURES)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


def compiled(hk: Any, rate: float = 0.1, seed: int = 0) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hk.distribute(keras.optimizers.SGD(rate, momentum=0.9)), loss)
    return model


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


@on_ranks("keras")
def test_writers_write_on_the_root_what_all_ranks_decide(hk, world, everyone, tmp_path, monkeypatch):
    import keras

    class Noting(keras.callbacks.TensorBoard):
        """A subclass of a writer; TensorBoard itself needs a package of its own to write."""

        def set_model(self, model: Any) -> None:
            self.seen = ["set_model"]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(f"batch {batch}")

        on_train_begin = on_train_end = on_train_batch_begin = on_epoch_begin = on_epoch_end = lambda *_, **__: None

    posted = []
    requests = types.SimpleNamespace(post=lambda *_, **__: posted.append(1), exceptions=types.SimpleNamespace())
    monkeypatch.setattr("keras.src.callbacks.remote_monitor.requests", requests)
    own = tmp_path / f"rank-{world.rank}"
    best = keras.callbacks.ModelCheckpoint(own / "best" / "{epoch}-{loss:.6f}.keras", "loss", save_best_only=True)
    last = keras.callbacks.ModelCheckpoint(own / "last.weights.h5", save_weights_only=True)
    table, noting = keras.callbacks.CSVLogger(own / "log.csv"), Noting(tmp_path)
    if world.is_root:
        own.mkdir()
    model = compiled(hk)
    callbacks = [hk.BroadcastState(), [best, last, table], noting, keras.callbacks.RemoteMonitor()]
    logged = model.fit(hk.shard((X, Y), world, 4), epochs=3, verbose=0, callbacks=callbacks).history["loss"]
    assert everyone(logged) == [logged] * 2 and everyone(best.best) == [min(logged)] * 2
    assert sum(everyone(len(posted)), 0) == 3
    other = compiled(hk, seed=9)
    if not world.is_root:
        assert not own.exists() and not hasattr(noting, "seen")
        return
    assert noting.seen == ["set_model", *[f"batch {batch}" for batch in range(6)] * 3]
    improved = [epoch for epoch in range(3) if logged[epoch] == min(logged[: epoch + 1])]
    saved = [f"{epoch + 1}-{logged[epoch]:.6f}.keras" for epoch in improved]
    assert sorted(path.name for path in (own / "best").iterdir()) == saved
    assert [float(row["loss"]) for row in csv.DictReader((own / "log.csv").open())] == pytest.approx(logged)
    other.load_weights(own / "last.weights.h5")
    assert weights(other) == weights(model)


@on_ranks("keras", n=3)
@pytest.mark.parametrize("on_root_alone", [False, True])
def test_what_backup_and_restore_restores_reaches_all_ranks(hk, world, everyone, tmp_path, on_root_alone):
    """A training that ends before its third epoch goes on as if it had not, from other weights."""
    import keras

    def train(seed: int, *callbacks: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model = compiled(hk, seed=seed)
        model.layers[2].rate = 0.0
        data = hk.shard((X, Y), world, 4, seed=2)
        return model, model.fit(data, epochs=4, verbose=0, callbacks=callbacks).history

    def backup() -> list[Any]:
        made = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        return [made] if world.is_root or not on_root_alone else []

    def stop(epoch: int, _: Any = None) -> None:
        if epoch == 2:
            raise KeyError("the node is needed")

    whole, _ = train(0)
    with pytest.raises(KeyError):
        train(0, *backup(), keras.callbacks.LambdaCallback(on_epoch_begin=stop))
    everyone("stopped")
    assert (tmp_path / "backup").exists()
    resumed, history = train(7 + world.rank, *backup())
    assert len(history["loss"]) == 2 and weights(resumed) == weights(whole)
    everyone("ended")
    assert not (tmp_path / "backup").exists()


@on_ranks("keras-torch", smoke=("keras", "keras-jax"), n=3)
@pytest.mark.parametrize("averaging", ["none", "last"])
def test_decisions_follow_the_mean_over_the_ranks(hk, world, everyone, averaging):
    """Each rank alone would see another metric: labels that fit on the root, that are wrong on the others."""
    import keras

    seen: list[dict[str, float]] = []
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5)
    model = compiled(hk)
    callbacks = [
        own,
        plateau,
        stopping,
        hk.BroadcastState(),
        *([hk.AverageMetrics(world)] if averaging == "last" else []),
    ]
    labels = Y if world.is_root else 1 - Y
    data = hk.shard((X, Y), world, 4)
    logged = model.fit(data, epochs=9, verbose=0, validation_data=(X, labels), callbacks=callbacks).history
    assert len(logged["val_loss"]) == 2  # most ranks see it rise from the first epoch on
    assert stopping.best == logged["val_loss"][0] and logged["learning_rate"] == [pytest.approx(0.1)] * 2
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.05)
    keep = {name: [one[name] for one in seen] for name in ("loss", "val_loss")}
    mine = (logged, keep, weights(model))
    assert everyone(mine) == [mine] * 3
    measured = model.evaluate(X, labels, verbose=0)
    assert hk.average_metrics({"loss": measured}, world)["loss"] == pytest.approx(logged["val_loss"][0], rel=1e-5)


@on_ranks("keras-torch")
def test_a_writer_that_fails_is_an_error_on_every_rank(hk, world, tmp_path):
    import keras

    from hvdkit.errors import RootError

    nameless = keras.callbacks.ModelCheckpoint(tmp_path / "{f1}.keras")
    damaged = keras.callbacks.BackupAndRestore(tmp_path)
    if world.is_root:
        (tmp_path / "latest.weights.h5").write_bytes(b"no weights")
    for writer, error, told in ((nameless, KeyError, "Failed to format"), (damaged, OSError, "Unable to")):
        with pytest.raises(error if world.is_root else RootError, match=told) as failed:
            compiled(hk).fit(hk.shard((X, Y), world, 4), verbose=0, callbacks=[writer])
        assert world.is_root or "the root failed at what it does for every rank" in str(failed.value)


@on_ranks("keras")
def test_a_callback_list_of_keras_is_left_as_it_was(hk, world, tmp_path):
    import keras

    model = compiled(hk)
    own = tmp_path / f"rank-{world.rank}.csv"
    options = {"model": model, "epochs": 1, "steps": 6, "add_history": True}
    callbacks = keras.callbacks.CallbackList([keras.callbacks.CSVLogger(own, append=True)], **options)
    before = list(callbacks.callbacks)
    for _ in range(2):
        model.fit(hk.shard((X, Y), world, 4), verbose=0, callbacks=callbacks)
    assert callbacks.callbacks == before
    assert own.exists() == world.is_root
    assert not world.is_root or len(own.read_text().splitlines()) == 3  # a header and two epochs
