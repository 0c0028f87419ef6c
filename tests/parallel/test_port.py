"""Ported programs train: on two ranks they end with the weights of one process on the global batch."""

import ast
import contextlib
import dataclasses
import os
import runpy
import sys
from concurrent import futures
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import on_ranks

from hvdkit.observe import trial as trials
from hvdkit.observe import trial_marks
from hvdkit.observe.startup import sitecustomize
from hvdkit.prepare.port import edits, trial
from hvdkit.prepare.port.cli import port_script

DATA = Path(__file__).parents[1] / "data" / "port" / "before"


def program(name: str) -> Path:
    """The ported program, in the directory of the test."""
    found = port_script(edits.read(str(DATA / name)))
    assert found.left == ()
    path = Path.cwd() / f"ported_{os.getpid()}_{name}"
    path.write_bytes(found.after)
    return path


def trained(path: Path, **settings: str) -> list[float]:
    """The weights that a program ends with."""
    os.environ.update(settings)
    try:
        model = runpy.run_path(str(path), run_name="__main__")["model"]
    finally:
        for one in settings:
            del os.environ[one]
    weights = (
        model.get_weights() if hasattr(model, "get_weights") else [one.detach().numpy() for one in model.parameters()]
    )
    return [float(number) for one in weights for number in one.reshape(-1)]


def one_process(path: Path, size: int, batch: int, lr: float) -> list[float]:
    return trained(path, BATCH=str(size * batch), LR=str(size * lr))


def compare(everyone: Any, ours: list[float], theirs: list[float]) -> None:
    assert everyone(ours) == [ours] * 2
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@on_ranks("torch", n=2)
def test_a_pytorch_loop(world, everyone):
    ours = trained(program("single_torch.py"), BATCH="16", LR="0.05")
    compare(everyone, ours, one_process(DATA / "single_torch.py", world.size, 16, 0.05))
    assert [path.name for path in Path.cwd().glob("*.pt")] == ["net.pt"]


@on_ranks("torch", n=2)
def test_a_horovod_program_for_pytorch(hk, world, everyone):
    before = trained(DATA / "horovod_torch.py")
    compare(everyone, trained(program("horovod_torch.py")), before)


@on_ranks("torch", n=2, fresh=True)
def test_a_ddp_program(world, everyone):
    import torch

    # A store that is there already, as torchrun's: a free port may be another job's by the time that rank 0 takes it.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = everyone(store.port)[0]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    where.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    rank = {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank)}
    # Where the group ends while a thread of Gloo's drops its last tensor, each waits for the other, for ever.
    with mock.patch.object(torch.distributed, "destroy_process_group"):
        before = trained(DATA / "ddp.py", **where, **rank)
    compare(everyone, trained(program("ddp.py")), before)


@on_ranks("keras", n=2)
def test_keras_fit(world, everyone):
    # 81 samples train, and 80 of them fill the steps of 2 ranks
    plain = (
        (DATA / "single_keras.py")
        .read_text()
        .replace("model.fit(x_train, y_train", "model.fit(x_train[:80], y_train[:80]")
    )
    path = Path.cwd() / f"plain_{os.getpid()}.py"
    path.write_text(plain.replace("validation_split=0.1, ", "").replace("model.save", "# model.save"))
    ours = trained(program("single_keras.py"), BATCH="8", LR="0.05")
    compare(everyone, ours, one_process(alone(path), world.size, 8, 0.05))


def alone(path: Path) -> Path:
    """A program whose optimizer averages nothing, which hvdkit's fit would refuse on several ranks."""
    content = path.read_text().replace("model.fit(", "keras.Model.fit.__wrapped__(model, ")
    path.write_text(content)
    return path


@on_ranks("keras", n=2)
def test_a_horovod_program_for_keras_2(world, everyone):
    ours = trained(program("horovod_keras.py"))
    assert everyone(ours) == [ours] * 2
    everyone(None)
    assert sorted(path.name for path in Path.cwd().glob("check*")) == ["checkpoint-1.keras", "checkpoint-2.keras"]


OWN_STEP = """\
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
x = np.random.RandomState(0).rand(33, 4).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(x)
dataset = dataset.shuffle(64).batch(8)


class Own(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def compile(self, d_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.inner(data) ** 2)
        grads = tape.gradient(loss, self.inner.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.inner.trainable_weights))
        return {"d_loss": loss}


model = Own(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
model.compile(d_optimizer=keras.optimizers.Adam(learning_rate=0.01))
history = model.fit(dataset, epochs=2, verbose=0)
losses = history.history["d_loss"]
"""


@on_ranks("keras", n=2)
def test_a_train_step_that_counts_no_samples(everyone):
    found = port_script(edits.ScriptText("own.py", OWN_STEP.encode(), ast.parse(OWN_STEP)))
    assert found.left == ()
    path = Path.cwd() / f"own_{os.getpid()}.py"
    path.write_bytes(found.after)
    losses = everyone(runpy.run_path(str(path), run_name="__main__")["losses"])
    assert losses[0] == losses[1] and len(losses[0]) == 2


@on_ranks("tensorflow", n=2)
def test_a_tape(world, everyone):
    ours = trained(program("single_tape.py"), BATCH="8", LR="0.05")
    plain = Path.cwd() / f"plain_{os.getpid()}.py"
    # of 97 samples 96 go to two ranks, each its own half of every 16
    plain.write_text(
        (DATA / "single_tape.py").read_text().replace("(x, y))\n", "(x[:96], y[:96]))\n", 1).replace("model.save", "# ")
    )
    compare(everyone, ours, one_process(plain, world.size, 8, 0.05))


@on_ranks("tensorflow", n=2)
def test_a_horovod_program_with_a_tape(world, everyone):
    ours = trained(program("horovod_tape.py"))
    assert everyone(ours) == [ours] * 2


# --try ----------------------------------------------------------------------------------------------------------------


def recorded(directory: Path, source: str, *, batches: Path | str = "", steps: int = 4) -> None:
    """What a run of --try does in the process of a rank, whose framework is imported already."""
    os.environ[trials.VARIABLE] = trials.WantedTrial(str(directory), steps, str(batches), dropout=False).variable()
    for variable, _, function, module in sitecustomize._ASKED:
        if variable == trials.VARIABLE and module in sys.modules:
            getattr(trial_marks, function)(sys.modules[module])
    sys.argv[1:] = []
    with contextlib.suppress(SystemExit):
        trials.run_script(source, source)


@on_ranks("torch", "keras", "tensorflow", n=2, fresh=True)
def test_two_ranks_take_the_steps_that_the_script_takes_on_the_batches_of_both(hk, alone, everyone):
    name = {"torch": "single_torch.py", "keras": "single_keras.py", "tensorflow": "single_tape.py"}
    before = DATA / name[hk.__name__.rpartition(".")[2]]
    here = Path(everyone(str(Path.cwd()))[0])
    recorded(here / "ours", str(program(before.name)))
    everyone(None)
    ranks = [trials.read(here / "ours", rank) for rank in (0, 1)]
    assert [one["digest"] for one in ranks[0].steps] == [one["digest"] for one in ranks[1].steps]
    assert len(ranks[0].steps) == 4 and not trials.on_same_batches(ranks)
    if trials.current()._rank == 0:
        given, why = trials.union(ranks)
        assert why == ""
        given.write(here / "union", 0)
    everyone(None)
    alone(recorded, directory=here / "theirs", source=str(before), batches=here / "union")
    theirs = trials.read(here / "theirs", 0)
    _, equal = trial._compare(ranks[0], theirs)
    assert equal and ranks[0].steps[0]["rate"] == pytest.approx(2 * 0.05 if "keras" not in before.name else 0.02)
    wrong = dataclasses.replace(theirs, steps=theirs.steps[:1])
    assert trial._distance(ranks[1], wrong, 0) < 1e-4 and theirs.same is False
    assert theirs.steps[-1]["own rate"] == pytest.approx(theirs.steps[-1]["rate"] / 2)


@on_ranks("tensorflow", n=2)
def test_words_of_a_second_thread_meet_none_of_the_first_where_functions_run_eagerly(world):
    """As --try has them run: there an operation has the name of another that was called before."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvdkit.tensorflow.state import RANKS

    gather = RANKS.background("allgather", "second")
    words = tf.constant([world.rank], tf.int64)
    tf.config.run_functions_eagerly(True)
    try:
        hvd.allgather(words, name="first")
        with futures.ThreadPoolExecutor() as second:
            told = [second.submit(gather, words.numpy()[None])] if world.is_root else []
            gathered = hvd.allgather(words, name="first").numpy().tolist()
            told = told or [second.submit(gather, words.numpy()[None])]
            assert (gathered, told[0].result().tolist()) == ([0, 1], [[0], [1]])
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parallel
def test_a_script_is_looked_into_as_it_is(tmp_path):
    content = DATA / "single_torch.py"
    scripts = trial.Scripts(str(content), content.read_bytes(), b"")
    (seen,) = trial._Runs(scripts, [], 3, 300.0, tmp_path).run("the script itself", "it", 0)
    assert [step["rate"] for step in seen.steps] == [0.05] * 3 and seen.notes == ["BatchNorm"]
    assert [list(event) for event in seen.events] == [["batch"]] * 3
    assert seen.arrays["b0"].shape == (16, 8) and not any(step["drew"] for step in seen.steps)


@pytest.mark.parallel
def test_a_learning_rate_on_one_rank_that_is_not_the_scripts_differs(tmp_path):
    script = edits.read(str(DATA / "single_torch.py"))
    once, twice = b"hk.scale_lr(args.lr, world)", b"hk.scale_lr(2 * args.lr, world)"
    after = port_script(script).after
    assert once in after
    found = trial.attempt(trial.Scripts(script.path, script.content, after.replace(once, twice)), [], 3, 300.0)
    assert found.verdict == "Differs: on 1 rank the learning rate is not the script's own." and not found.ok
