"""A training that was interrupted, also in mid-epoch, goes on, on as many ranks as before or on others."""

import copy
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import on_ranks

from hvdkit import Topology, datasets
from hvdkit.steps.shards import Shard

SAMPLES, BATCH, EVERY = 1437, 24, 3
STEPS = -(-SAMPLES // (2 * BATCH))
EPOCHS = {"torch": 8, "tensorflow": 5, "keras": 4, "keras-torch": 3, "keras-jax": 3}  # two of warmup
LAST_KILL = {"torch": 5, "tensorflow": 3, "keras": 3, "keras-torch": 2, "keras-jax": 2}


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    found = datasets.load("digits")
    return (found.x_train.reshape(-1, 64), found.y_train), (found.x_test.reshape(-1, 64), found.y_test)


def train(hk: Any, on: Any, directory: Path, epochs: int, killed_at: int = 0, **checkpointing: Any) -> dict[str, Any]:
    """Train to the end, saving every third step; with ``killed_at`` the root kills itself after that step."""
    data, held = digits()
    run = on.Resumable(data, BATCH, directory, **checkpointing)
    facts = by_fit(run, epochs, killed_at) if hasattr(run, "fit") else by_steps(run, epochs, killed_at)
    hk.check_agreement(run.model, run.optimizer, run.world, loader=run.loader)
    drawn = [random.gauss(0, 1), float(np.random.random())]
    state = run.loader.state()
    here = {"weights": run.weights(), "last rate": run.rate(), "drawn": drawn, "data": state}
    return {**facts, **here, "accuracy": run.accuracy(*held)}


def by_fit(run: Any, epochs: int, killed_at: int) -> dict[str, Any]:
    record = run.fit(epochs, killed_at, EVERY)
    epoch, batch = record.began
    steps = -(-SAMPLES // (run.world.size * BATCH))
    assert record.batches == [*range(batch, steps), *list(range(steps)) * (epochs - epoch - 1)]
    return {"epoch": epoch, "first epoch": record.seen, "first rate": record.rate}


def by_steps(run: Any, epochs: int, killed_at: int) -> dict[str, Any]:
    began, first_rate, first_epoch = run.loader.epoch, run.rate(), []
    for epoch in range(run.loader.epoch, epochs):
        for batch in run.loader:
            seen = run.train_step(*batch)
            first_epoch += seen if epoch == began else []
            if run.step % EVERY == 0:
                run.checkpoints.save(run.model, run.optimizer, step=run.step, loader=run.loader)
            if run.step == killed_at and run.world.is_root:
                os.kill(os.getpid(), signal.SIGKILL)
    if hasattr(run.checkpoints, "wait"):
        run.checkpoints.wait()
    if run.saved is not None:
        assert (run.saved.metadata["size"], run.saved.metadata["seed"]) == (2, 1)
    elif run.world.size == 2:
        assert run.step == epochs * STEPS
    return {"epoch": began, "first epoch": first_epoch, "first rate": first_rate}


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("framework", "sizes", "checkpointing"),
    [
        ("torch", (1, 2, 3), {}),
        ("torch", (2,), {"asynchronous": True, "compression": "int8"}),
        ("torch", (1, 2, 3), {"asynchronous": True, "shard_state": True}),
        ("tensorflow", (2, 3), {"compression": "int8"}),
        ("keras", (2, 3), {}),
        ("keras-torch", (1, 2), {}),
        ("keras-jax", (2,), {"compression": "int8"}),
    ],
)
def test_killed_at_a_random_step_and_resumed(run_job, tmp_path, framework, sizes, checkpointing):
    """Two ranks over MPI are killed; those that go on, and those that nothing interrupts, are over Gloo.

    In 8 bits, too: what was rounded away is in the checkpoints.
    """
    epochs, base = EPOCHS[framework], 0.01 if framework.startswith("keras") else 0.02
    draw = random.Random(None if "HVDKIT_FUZZ" in os.environ else framework)  # noqa: S311
    step = draw.randrange(STEPS + 2, LAST_KILL[framework] * STEPS)
    print(f"killed after step {step}")
    killed, settings = tmp_path / "killed", {"epochs": epochs, **checkpointing}
    told = run_job(framework, train, mpi=True, fails=True, directory=killed, killed_at=step, **settings)
    assert f"rank 0 of {framework}-2-mpi: the process ended" in told
    whole = run_job(framework, train, directory=tmp_path / "whole", **settings)
    for n in sizes:
        directory = shutil.copytree(killed, tmp_path / f"on-{n}")
        ranks = run_job(framework, train, n, directory=directory, **settings)
        epoch, seen = ranks[0]["epoch"], sorted(index for rank in ranks for index in rank["first epoch"])
        taken = SAMPLES - len(seen)
        done = epoch * STEPS + taken / (2 * BATCH)
        # Saved every third step, and perhaps not yet when it was killed: by fit the end of an epoch, by a thread any.
        assert step - 2 * EVERY <= done <= step + 1
        before = Shard(SAMPLES, Topology(0, 1), BATCH, "exact", seed=2).order(epoch)[:taken]
        assert sorted([*seen, *before.tolist()]) == list(range(SAMPLES))
        assert taken % (2 * BATCH) == 0
        full = base * n**0.5
        progress = min(1.0, (epoch + taken / SAMPLES) / 2)
        assert ranks[0]["first rate"] == pytest.approx(base + (full - base) * progress, rel=0.02)
        assert ranks[0]["last rate"] == pytest.approx(full)
        for rank, uninterrupted in zip(ranks, [*whole, whole[0]][:n], strict=True):
            assert rank["accuracy"] > whole[0]["accuracy"] - 0.04
            assert rank["weights"] == ranks[0]["weights"]
            assert (rank["weights"] == uninterrupted["weights"]) == (n == 2)
            assert (rank["drawn"] == uninterrupted["drawn"]) == (n == 2)
            assert (rank["data"]["epoch"], rank["data"]["position"]) == (epochs, 0)
    assert whole[0]["accuracy"] > (0.9 if framework.startswith("keras") else 0.93)


@on_ranks("torch", "tensorflow", "keras")
def test_best_and_newest_and_what_does_not_fit(hk, on, world, everyone, tmp_path):
    data, _ = digits()
    run = on.Resumable(data, BATCH, tmp_path / "run", keep_best=1)
    if hasattr(run, "begin_loop"):
        run.begin_loop()
    kept = []
    for score, batch in zip((0.2, 0.9, 0.3, 0.4), run.loader, strict=False):
        run.train_step(*batch)
        kept.append(run.weights())
        at = {"step": run.step, "loader": run.loader, "score": score}
        run.checkpoints.save(run.model, run.optimizer, **at, note="x")
    best = run.checkpoints.restore(run.model, which="best")
    assert (best.step, best.score) == (2, 0.9) and run.weights() == kept[1]
    newest = run.checkpoints.restore(run.model, run.optimizer, loader=run.loader, schedule=run.schedule)
    assert newest.step == 4 and run.weights() == kept[3]
    expected = {"epoch": 0, "position": 192, "samples": 192, "n_samples": SAMPLES, "seed": 2}
    expected |= {"sampler": None, "shuffle": True}
    facts = {"framework": hk.__name__.rpartition(".")[2], "size": 2, "seed": 1, "note": "x", "data": expected}
    assert facts.items() <= newest.metadata.items()
    hk.check_agreement(run.model, run.optimizer, world, loader=run.loader)
    everyone("restored")
    names = sorted(path.name for path in (tmp_path / "run").glob("*-*"))
    assert names == ["step-0000000002", "step-0000000003", "step-0000000004"]
    if hk.__name__ != "hvdkit.keras":
        assert np.load(tmp_path / "run" / names[0] / "random.npy").shape[0] == 2

    other = hk.shard(on.numbered(*data), world, BATCH, seed=3)
    if world.is_root:  # what a version wrote that let metadata replace the position
        manifest = shutil.copytree(tmp_path / "run" / names[0], tmp_path / "older" / names[0]) / "manifest.json"
        written = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**written, "metadata": {**written["metadata"], "data": "digits"}}))
    older = hk.Checkpoints(tmp_path / "older")
    restore, save, model = run.checkpoints.restore, run.checkpoints.save, run.model
    for attempt, told in (
        (lambda: hk.Checkpoints(f"{__file__}/run").save(model, step=1), "could not write the checkpoint of step 1"),
        (lambda: restore(model, which="oldest"), "which must be latest or best, got 'oldest'"),
        (lambda: restore(model, run.optimizer, loader=other), "the checkpoint's data had seed=2, this loader has 3"),
        (lambda: restore(model, run.optimizer, loader=[1]), "got list"),
        (lambda: restore(model, run.optimizer, schedule=run.schedule), "must be from warmup, and needs the loader"),
        (lambda: save(model, step=9, score=float("nan")), "score must be a finite number, got nan"),
        (
            lambda: save(model, step=9, size="big", data="digits"),
            "metadata named data and size would replace",
        ),
        (lambda: older.restore(model, loader=run.loader), "holds no position in the data"),
    ):
        assert told in message(attempt)
    assert len(list(run.loader)) == STEPS - 4


@on_ranks("torch")
@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_a_scheduler_goes_on_at_its_part_of_the_rate_on_another_number_of_ranks(hk, world, everyone, tmp_path, rate):
    import torch

    def built(rate):
        model = torch.nn.Linear(2, 1)
        optimizer = hk.distribute(torch.optim.SGD(model.parameters(), rate), model)
        hk.broadcast_state(model, optimizer)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    model, optimizer, schedule = built(0.2)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    saved = hk.Checkpoints(tmp_path / "run").save(model, optimizer, step=4)
    everyone("saved")
    if world.is_root:
        manifest = saved.path / "manifest.json"
        written = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**written, "metadata": {**written["metadata"], "size": 3}}))
    everyone("of three ranks")
    model, again, _ = built(rate)
    hk.Checkpoints(tmp_path / "run").restore(model, again)
    (group,) = again.param_groups
    assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] * rate / 0.2, rel=1e-12)
    assert group["initial_lr"] == rate


@on_ranks("torch", "tensorflow", "keras")
def test_a_pass_without_a_step_is_no_epoch(hk, on, world, tmp_path):
    """Looks, train accuracy and a search for a learning rate, also where the training goes on in mid-epoch."""
    data, _ = digits()
    run, again = on.Resumable(data, BATCH, tmp_path / "run"), on.Resumable(data, BATCH, tmp_path / "run")
    if hasattr(run, "begin_loop"):
        run.begin_loop()
        again.begin_loop()
    plan = [batch.indices.tolist() for batch in run.loader.share.batches(0)]

    def indices(batch: Any) -> list[int]:
        numbers = batch[1][:, 1] if "keras" in hk.__name__ else batch[2]
        return np.asarray(numbers).tolist()

    def look(loader: Any) -> list[int]:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        list(loader)
        kept = iter(loader)
        return indices(next(kept))

    assert look(run.loader) == look(run.loader) == plan[0] and run.loader.epoch == 0
    if "keras" not in hk.__name__:
        before = run.model.get_weights() if hasattr(run.model, "get_weights") else copy.deepcopy(run.model.state_dict())
        for _, batch in zip(range(STEPS + 5), itertools.chain(run.loader, run.loader), strict=False):
            run.train_step(*batch)
        assert run.loader.epoch == 2
        put_back = run.model.set_weights if hasattr(run.model, "set_weights") else run.model.load_state_dict
        put_back(before)
        assert run.loader.epoch == 0
    for step, batch in enumerate(run.loader):
        assert indices(batch) == plan[step] and run.loader.epoch == (step > 0)
        if step == 3:  # before this batch is trained on
            run.checkpoints.save(run.model, run.optimizer, step=step, loader=run.loader)
            break
        run.train_step(*batch)
        look(run.loader)

    again.checkpoints.restore(again.model, again.optimizer, loader=again.loader)
    assert look(again.loader) == plan[3]
    again.loader.set_epoch(0)  # as programs for DDP do in each epoch
    assert len(again.loader) == STEPS
    rest = []
    for batch in again.loader:
        rest.append(indices(batch))
        again.train_step(*batch)
    look(again.loader)
    again.checkpoints.save(again.model, again.optimizer, step=STEPS, loader=again.loader)
    expected = plan[3:-1]
    assert rest[:-1] == expected and again.loader.epoch == 1
    assert again.loader.state()["samples"] == SAMPLES
    if "keras" in hk.__name__:
        import keras

        class Looks(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                look(again.loader) if batch == 4 else next(iter(again.loader))

            on_epoch_end = on_train_batch_end

        again.model.evaluate(again.loader, verbose=0)
        again.model.fit(again.loader, initial_epoch=1, epochs=3, verbose=0, callbacks=[Looks()])
        assert again.loader.state()["samples"] == 3 * SAMPLES


HOLDER = """
import sys
from hvdkit.steps.checkpoint import CheckpointDirectory
held = CheckpointDirectory(sys.argv[1])
held.claim()
print("held", flush=True)
sys.stdin.read()
"""


@on_ranks("torch", "tensorflow", "keras")
def test_beside_another_job_a_training_stops_alike_on_every_rank(hk, on, world, everyone, tmp_path):
    data, _ = digits()
    run = on.Resumable(data, BATCH, tmp_path / "run")
    if hasattr(run, "begin_loop"):
        run.begin_loop()
    run.train_step(*next(iter(run.loader)))
    run.checkpoints.save(run.model, run.optimizer, step=1, loader=run.loader)
    holder = None
    if world.is_root:
        shutil.copytree(tmp_path / "run", tmp_path / "other")
        command = [sys.executable, "-c", HOLDER, tmp_path / "other"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == "held\n"
    process = everyone(holder and holder.pid)[0]
    try:
        others = hk.Checkpoints(tmp_path / "other", wait=0)
        model, optimizer, loader = run.model, run.optimizer, run.loader
        for attempt in (
            lambda: others.restore(model, optimizer),
            lambda: others.restore(model, loader=loader),
            lambda: others.save(model, step=2),
        ):
            told = message(attempt)
            assert f"{tmp_path / 'other'}: process {process} on " in told
            assert everyone(told) == [told] * world.size
        if hk.__name__ == "hvdkit.torch":  # said at once, not when the thread has written
            behind = hk.Checkpoints(tmp_path / "other", wait=0, asynchronous=True)
            assert "another job writes checkpoints" in message(lambda: behind.save(model, step=2))
        assert others.restore(model).step == 1, "to evaluate"
    finally:
        if holder is not None:
            holder.communicate("")
    everyone("ended")
    assert others.restore(model, optimizer).step == 1
    everyone("restored")
    assert sorted(path.name for path in (tmp_path / "other").glob("*-*")) == ["step-0000000001"]


@on_ranks("torch")
def test_checkpoints_can_be_written_while_the_training_goes_on(hk, on, world, everyone, tmp_path):
    run = on.Resumable(digits()[0], BATCH, tmp_path / "run", keep_best=1, asynchronous=True)
    for score, batch in zip((0.2, 0.9, 0.3, 0.4), run.loader, strict=False):
        run.train_step(*batch)
        at = {"step": run.step, "loader": run.loader, "score": score}
        run.checkpoints.save(run.model, run.optimizer, **at)
    assert run.checkpoints.wait().step == 4 and run.checkpoints.wait() is None
    assert run.checkpoints.restore(run.model, which="best").step == 2
    blocked = hk.Checkpoints(f"{__file__}/run", asynchronous=True)
    blocked.save(run.model, step=1)
    assert "CheckpointError: could not write the checkpoint of step 1" in message(blocked.wait)


@on_ranks("tensorflow")
def test_a_position_that_nobody_can_know_is_no_checkpoint(hk, on, world, tmp_path):
    import tensorflow as tf

    data = on.numbered(*digits()[0])
    run = on.Resumable(digits()[0], BATCH, tmp_path / "run")
    mapped = hk.shard(data, world, BATCH)
    weights = tf.ones(BATCH)
    run.train_step(*next(iter(mapped.map(lambda *parts: parts))), weights)
    error = message(lambda: run.checkpoints.save(run.model, step=9, loader=mapped))
    assert "the position in this data set is unknown" in error
    other = hk.shard(data, world, BATCH, seed=3)
    handed = iter(other)
    run.train_step(*next(handed), weights)
    assert other.position.samples == 2 * BATCH
    tf.function(lambda batches: next(batches), autograph=False)(handed)
    assert "the position in this data set is unknown" in message(other.state)


@on_ranks("tensorflow", "keras")
def test_fit_in_one_call_goes_on(hk, on, world, everyone, tmp_path):
    import keras

    x, y = digits()[0]

    def fit(epochs: int) -> tuple[int, list[float]]:
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        options = {"batch_size": 64, "base_lr": 0.1, "warmup_epochs": 1, "epochs": epochs}
        history = hk.fit(model, keras.optimizers.SGD, loss, (x, y), checkpoint_dir=tmp_path / "fit", **options)
        return len(history), np.concatenate([np.ravel(one) for one in model.get_weights()]).tolist()

    (two, _), (next_two, after), (none, same) = fit(2), fit(4), fit(4)
    assert [two, next_two, none] == [2, 2, 0]
    assert everyone(after) == everyone(same) == [after] * 2


@on_ranks("keras")
def test_a_monitor_keeps_the_best_and_an_elastic_fit_needs_no_launch(hk, on, world, tmp_path):
    run = on.Resumable(digits()[0], BATCH, tmp_path / "run")
    run.begin_loop()
    model, data = run.model, run.loader
    monitoring = hk.Checkpoint(tmp_path / "fit", keep=1, keep_best=1, monitor="loss", mode="min")
    losses = model.fit(data, epochs=3, verbose=0, callbacks=[hk.AverageMetrics(world), monitoring]).history["loss"]
    assert hk.Checkpoints(tmp_path / "fit").restore(model, which="best").score == pytest.approx(-min(losses))
    state = hk.ElasticState(model, run.optimizer, loader=data, schedule=run.schedule, step=0)
    commit = hk.ElasticCommit(state, every=7)
    again = {"initial_epoch": data.epoch, "epochs": data.epoch + 1, "verbose": 0}
    once = hk.run_elastic(lambda state: model.fit(state.loader, **again, callbacks=[run.schedule, commit]).epoch, state)
    assert [once, state.loader.state()["epoch"], state._commits] == [[3], 4, 1 + STEPS // 7 + 1]

    x, y = on.numbered(*digits()[0])
    other = hk.shard((x, y), world, BATCH, seed=3)
    short = {"epochs": 9, "verbose": 0}
    directory = str(tmp_path)
    for attempt, told in (
        (lambda: hk.Checkpoint(directory, every=0), "every must be None or an integer >= 1, got 0"),
        (lambda: hk.Checkpoint(directory, keep_best=1), "keep_best=1 needs monitor"),
        (lambda: hk.Checkpoint(directory, monitor="loss", mode="up"), "mode must be max or min, got 'up'"),
        (
            lambda: model.fit(x[:48], y[:48], **short, callbacks=[hk.Checkpoint(f"{directory}/x", every=2)]),
            "Checkpoint(every=) needs data that can go on in mid-epoch",
        ),
        (
            lambda: model.fit(data, **short, callbacks=[hk.Checkpoint(f"{directory}/y", monitor="f1")]),
            "monitor must be one of the logs loss, ",
        ),
        (lambda: hk.ElasticState(model, run.optimizer, loader=[1]), "loader must be what shard returned, got list"),
        (
            lambda: hk.ElasticState(model, run.optimizer, loader=data, schedule=3),
            "schedule must be from warmup, got int",
        ),
        (
            lambda: hk.ElasticState(model, run.optimizer, loader=data, rule="cubic"),
            "rule must be one of linear, sqrt, none",
        ),
        (lambda: hk.ElasticCommit(data), "state must be an ElasticState, got ShardedData"),
        (lambda: hk.ElasticCommit(state, every=0), "every must be an integer >= 1, got 0"),
        (
            lambda: model.fit(other, **short, callbacks=[commit]),
            "ElasticCommit needs fit to train on the state's loader",
        ),
    ):
        assert told in message(attempt)
