"""hvdkit.arrays on real ranks, in NumPy, JAX and MLX."""

import functools
import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from programs_checks import message, signs
from ranks import jax as in_float64
from ranks import needs, on_ranks

SAMPLES, SIDE, CLASSES, GLOBAL_BATCH, EPOCHS = 53, 6, 3, 12, 2  # 53 samples: the last step has 5, split 3 and 2


def batches(hk, world):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(SAMPLES, SIDE, SIDE, 1)).astype(np.float32)
    y = (x.sum(axis=(1, 2, 3)) > 0).astype(np.int64) + (x[:, 0, 0, 0] > 1)
    loader = hk.shard((x, y), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    return (batch for _ in range(EPOCHS) for batch in loader)


# Frameworks that know nothing of hvdkit: the weights after a training, by how the samples are weighed -----------------


def train_numpy(hk, world, by, **options):
    """Softmax regression with momentum in float64; every rank begins with other weights."""
    rng = np.random.default_rng(world.rank)
    state = {"w": rng.normal(size=(SIDE * SIDE, CLASSES)), "m": np.zeros((SIDE * SIDE, CLASSES))}
    state = hk.broadcast_state(state)
    reduce = hk.distribute(state["w"], **options)
    for x, y, w in batches(hk, world):
        flat = x.reshape(len(x), -1).astype(np.float64)
        raised = np.exp(flat @ state["w"])
        gradient = raised / raised.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]
        if by == "samples":
            mean = reduce(flat.T @ gradient / len(y), weight=int((w > 0).sum()))
        else:
            reduce.buffers[...] = flat.T @ (gradient * w[:, None]) / len(y)
            mean = reduce.start(reduce.buffers).wait()
        state["m"][...] = 0.9 * state["m"] + mean
        state["w"] -= 0.1 * state["m"]
    hk.check_agreement(state, world)
    return state["w"].ravel()


@functools.cache
def jax_functions():
    """The optimizer, whose warmup is that of 4 ranks whatever the number here, and what is compiled, once."""
    import jax
    import optax

    import hvdkit
    import hvdkit.arrays as hk

    four = hvdkit.Topology(0, 4, 0, 4, 0, 1, "none")
    optimizer = optax.adam(hk.warmup(0.04, four, 5, epochs=1))

    def losses(parameters, x, y):
        weight, bias = parameters["conv"]
        x = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + bias).reshape(len(x), -1)
        logits = x @ parameters["dense"]["w"] + parameters["dense"]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    gradients_of = jax.jit(jax.grad(lambda parameters, x, y, w: (losses(parameters, x, y) * w).mean()))

    @jax.jit
    def step(state, gradients):
        updates, slots = optimizer.update(gradients, state["slots"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "slots": slots}

    return optimizer, gradients_of, step


def train_jax(hk, world, by):
    """A CNN by optax's Adam with a warmup that runs inside jit."""
    jax = in_float64()
    numpy = jax.numpy
    first, second = jax.random.split(jax.random.key(world.rank))
    parameters = {
        "conv": [jax.random.normal(first, (3, 3, 1, 4)) / 3, numpy.zeros(4)],
        "dense": {"w": jax.random.normal(second, (SIDE * SIDE * 4, CLASSES)) / 12, "b": numpy.zeros(CLASSES)},
    }
    optimizer, gradients_of, step = jax_functions()
    state = hk.broadcast_state({"parameters": parameters, "slots": optimizer.init(parameters)})
    assert isinstance(state["parameters"]["dense"]["w"], jax.Array)
    reduce = hk.distribute(parameters)
    for x, y, w in batches(hk, world):
        x = x.astype(np.float64)
        if by == "samples":
            pending = reduce.start(gradients_of(state["parameters"], x, y, np.ones(len(y))), weight=(w > 0).sum())
        else:
            pending = reduce.start(gradients_of(state["parameters"], x, y, w))
        state = step(state, pending.wait())
    hk.check_agreement(state, world)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state["parameters"])])


def train_mlx(hk, world, by):
    """An MLP by MLX's SGD with momentum, in float32."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten

    mx.set_default_device(mx.cpu)
    mx.random.seed(world.rank)
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    optimizer = optim.SGD(0.1, momentum=0.9)
    optimizer.init(model.trainable_parameters())
    state = hk.broadcast_state({"parameters": model.parameters(), "slots": optimizer.state})
    assert isinstance(tree_flatten(state["parameters"])[0][1], mx.array)
    model.update(state["parameters"])
    optimizer.state = state["slots"]
    reduce = hk.distribute(model.trainable_parameters())

    def loss(model, x, y, w):
        return (nn.losses.cross_entropy(model(x), y) * w).mean()

    for x, y, w in batches(hk, world):
        weights = np.ones(len(y)) if by == "samples" else w
        arrays = (mx.array(one) for one in (x.reshape(len(x), -1), y, weights.astype(np.float32)))
        _, gradients = nn.value_and_grad(model, loss)(model, *arrays)
        optimizer.update(model, reduce(gradients, weight=int((w > 0).sum()) if by == "samples" else None))
    hk.check_agreement({"parameters": model.parameters(), "slots": optimizer.state}, world)
    return np.concatenate([np.asarray(leaf).ravel() for _, leaf in tree_flatten(model.parameters())])


def trained(hk, world, framework, by, **options):
    return globals()[f"train_{framework}"](hk, world, by, **options)


@pytest.mark.parametrize("by", ["weights", "samples"])
@pytest.mark.parametrize("framework", ["numpy", pytest.param("mlx", marks=needs("mlx"))])
@on_ranks("arrays", n=3, mpi=True)
def test_n_ranks_end_with_the_weights_of_one_process(hk, world, everyone, alone, framework, by):
    """53 samples in global batches of 12: the last step has 5, split 3 and 2, or 2, 2 and 1."""
    found = everyone(trained(hk, world, framework, by))
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if framework == "mlx" else {"rtol": 1e-10, "atol": 1e-12}
    np.testing.assert_allclose(found[0], alone(trained, framework=framework, by=by), **tolerance)
    assert all(np.array_equal(one, found[0]) for one in found)


@needs("jax", "optax")
@pytest.mark.parametrize("by", ["weights", "samples"])
@on_ranks("arrays", mpi=True)  # jax takes seconds to start
def test_two_ranks_in_jax_end_with_the_weights_of_one_process(hk, world, everyone, alone, by):
    found = everyone(trained(hk, world, "jax", by))
    np.testing.assert_allclose(found[0], alone(trained, framework="jax", by=by), rtol=1e-10, atol=1e-12)
    assert np.array_equal(found[0], found[1])


@on_ranks("arrays", n=3, mpi=True)
def test_fp16_gradients_stay_within_their_rounding(hk, world, alone):
    exact = alone(trained, framework="numpy", by="samples")
    begin = np.random.default_rng(0).normal(size=exact.shape)
    found = train_numpy(hk, world, "samples", compression="fp16")
    assert 1e-7 < np.linalg.norm(found - exact) / np.linalg.norm(exact - begin) < 2 * 2**-11


# Who this process is ------------------------------------------------------------------------------------------------


@on_ranks("arrays", mpi=True)
def test_topology(world, everyone):
    assert everyone(world.rank) == everyone(world.local_rank) == [0, 1]
    assert (world.size, world.local_size, world.cross_rank, world.cross_size) == (2, 2, 0, 1)
    assert world.launcher == "Open MPI"


@on_ranks("arrays", n=1)
def test_without_a_launcher_it_is_one_process(world):
    assert (world.rank, world.size, world.launcher) == (0, 1, "none")


@on_ranks("arrays", n=1)
def test_a_launcher_that_mpi_does_not_see_is_refused(hk):
    os.environ.update(SLURM_PROCID="2", SLURM_NTASKS="4", SLURM_STEP_ID="0")
    refused = message(hk.init)
    assert refused.startswith("TopologyMismatchError: srun started rank 2 of 4")
    assert all(part in refused for part in ("rank 0 of 1", "Open MPI", "hvdkit launch", "mpi4py"))


# Exchanges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [100, 300_000])
@on_ranks("arrays", mpi=True)
def test_a_started_exchange_goes_on_while_the_caller_does_not_wait(hk, world, values):
    """In one message and in shared memory.

    Rank 1 gives its gradients only when rank 0, which has given its own, says so: one that waited would hang.
    """
    from mpi4py import MPI

    reduce = hk.distribute(np.zeros(values, np.float32))
    if world.rank == 0:
        pending = reduce.start(np.ones(values))
        assert not pending.done()
        MPI.COMM_WORLD.send("go", 1)
        end = time.monotonic() + 60
        while not pending.done() and time.monotonic() < end:  # with a thread, no call into MPI
            time.sleep(0.001)
        assert pending.done()
    else:
        MPI.COMM_WORLD.recv(source=0)
        pending = reduce.start(np.full(values, 3.0))
    assert (pending.wait() == 2).all()


@pytest.mark.parametrize("values", [1, 4000, 5000, 70_000])
@on_ranks("arrays", n=3, mpi=True)
def test_each_of_many_steps_gives_its_own_sum_at_every_length(hk, world, values):
    """Lengths for one message and for shared memory; the ranks pause by chance."""
    rng = np.random.default_rng(world.rank)
    reduce = hk.distribute(np.zeros(values, np.float32), op="sum")
    for step in range(300):
        reduce.buffers[...] = step + 1 + world.rank
        found = reduce(reduce.buffers)
        if rng.random() < 0.1:
            time.sleep(1e-4)
        assert (found == 3 * (step + 1) + 3).all(), step


@on_ranks("arrays", n=3, mpi=True)
def test_a_communicator_averages_among_its_ranks(hk, world, everyone):
    from mpi4py import MPI

    pair = MPI.COMM_WORLD.Split(world.rank // 2, world.rank)
    (mean,) = hk.distribute(np.zeros(1), comm=pair)(np.array([2.0 + 2 * world.rank]))
    assert everyone(float(mean)) == [3.0, 3.0, 6.0]


# Mistakes on one rank: every rank must come out of every call -------------------------------------------------------

ALL_RANKS = {
    "a model's shapes": (
        lambda hk, odd: hk.distribute({"a": np.zeros(3 + odd)}),
        "AgreementError: the ranks hold different models: rank",
    ),
    "a model's names": (
        lambda hk, odd: hk.distribute([np.zeros(3)] * (1 + odd)),
        "AgreementError: the ranks hold different models: rank",
    ),
    "options": (
        lambda hk, odd: hk.distribute(np.zeros(3), op="sum" if odd else "average"),
        "AgreementError: the ranks hold different models: rank",
    ),
    "broadcast": (
        lambda hk, odd: hk.broadcast_state({"a": np.zeros(2 + odd)}),
        "AgreementError: the ranks hold different models: rank",
    ),
    "metrics": (lambda hk, odd: hk.average_metrics({f"loss{odd}": 1.0}, hk.init()), "different metrics"),
    "agreement": (
        lambda hk, odd: hk.check_agreement({"a": np.arange(3.0) + 0.5 * odd}, hk.init()),
        "a differs between ranks 0, 2 and rank 1, by at most 0.5",
    ),
    "not finite": (
        lambda hk, odd: hk.check_agreement({"a": np.array([np.inf, np.nan if odd else 1.0])}, hk.init()),
        "a differs between ranks 0, 2 and rank 1, by at most nan",
    ),
    "same path": (
        lambda hk, odd: hk.check_agreement({"a.b": np.zeros(1) + odd, "a": {"b": np.zeros(1)}}, hk.init()),
        "a.b (1) differs",
    ),
    "large": (lambda hk, odd: hk.check_agreement({"a": 2**60 + odd}, hk.init()), "by at most 1;"),
    "signs of float64": (lambda hk, odd: hk.check_agreement(signs(odd)["float64"], hk.init()), "by at most 2;"),
    "signs of float32": (lambda hk, odd: hk.check_agreement(signs(odd)["float32"], hk.init()), "by at most 2;"),
    "no communicator": (
        lambda hk, odd: hk.distribute(np.zeros(3), comm=3),
        "InvalidArgumentError: comm must be an mpi4py communicator",
    ),
    "root": (
        lambda hk, odd: hk.broadcast_state(np.zeros(1), root=9),
        "InvalidArgumentError: root must be a rank in 0 .. 2, got 9",
    ),
}
"""What all ranks say alike, where rank 1 differs."""


@pytest.mark.parametrize("mistake", ALL_RANKS)
@on_ranks("arrays", n=3, mpi=True)
def test_ranks_that_differ_are_one_error_on_every_rank(hk, world, mistake):
    action, told = ALL_RANKS[mistake]
    assert told in message(lambda: action(hk, int(world.rank == 1)))


RIGHT = {"a": np.ones(3), "b": np.ones(30000)}
ONE_RANK = {
    "shape": (lambda hk, reduce, odd: reduce(RIGHT | {"a": np.ones(3 + odd)}), "has the shape (4,)"),
    "started": (lambda hk, reduce, odd: reduce.start({"a": np.ones(3)} if odd else RIGHT).wait(), "dict of a"),
    "no array": (lambda hk, reduce, odd: hk.broadcast_state({"a": "text" if odd else 1.0}), "a is of type str"),
    "metric": (
        lambda hk, reduce, odd: hk.average_metrics({"loss": "much" if odd else 1.0}, hk.init()),
        "must be a number",
    ),
}
"""What only rank 1 does wrong, and says of it."""


@pytest.mark.parametrize("mistake", ONE_RANK)
@on_ranks("arrays", n=3, mpi=True)
def test_a_mistake_on_one_rank_is_an_error_on_every_rank(hk, world, mistake):
    action, told = ONE_RANK[mistake]
    reduce = hk.distribute({"a": np.zeros(3, np.float32), "b": np.zeros(30000)})
    said = message(lambda: action(hk, reduce, int(world.rank == 1)))
    assert told in said
    assert said.startswith("InvalidArgumentError: " if world.rank == 1 else "AgreementError: rank 1 failed")
    assert reduce(RIGHT)["b"].sum() == 30000


@on_ranks("arrays", n=3, mpi=True)
def test_a_weight_that_only_one_rank_gives_is_refused(hk, world):
    reduce = hk.distribute(np.zeros(3))
    said = message(lambda: reduce(np.ones(3), weight=2 if world.rank == 1 else None))
    assert said.startswith("AgreementError: 1 of 3 ranks gave a weight")
    assert reduce(np.ones(3)).sum() == 3


@on_ranks("arrays", n=3, mpi=True)
def test_a_model_that_differs_is_told_beside_the_one_it_differs_from(hk, world, everyone):
    _, ill, other = everyone(message(lambda: hk.distribute({"a": np.zeros(3 + (world.rank == 1))})))
    assert "a float64 (4,)" in ill and "a float64 (3,)" in other


@on_ranks("arrays", n=3, mpi=True)
def test_a_sum_that_overflows_does_so_on_every_rank_whatever_numpy_raises_there(hk, world):
    with np.errstate(all="raise" if world.rank == 1 else "warn"):
        total = hk.distribute(np.zeros(30000, np.float32), op="sum")(np.full(30000, 3e38))
    assert np.isposinf(total).all()


# State, metrics, checkpoints ----------------------------------------------------------------------------------------


@on_ranks("arrays", n=3, mpi=True)
def test_a_state_is_broadcast_bit_for_bit(hk, world):
    kept, frozen = np.arange(3.0) * (world.rank + 1), np.ones(2) * world.rank
    frozen.flags.writeable = False
    state = {
        "kept": kept,
        "frozen": frozen,
        "nested": [(world.rank, 0.5 + world.rank), {"none": None, "empty": np.zeros((0, 3))}],
        "turned": (np.arange(6.0).reshape(2, 3) * (world.rank + 1)).T,
        "flag": np.array([world.rank == 0]),
        "nan": np.array([np.nan, -0.0]) if world.is_root else np.zeros(2),
    }
    after = hk.broadcast_state(state)
    assert after["kept"] is kept and kept.tolist() == [0, 1, 2]
    assert after["frozen"].tolist() == [0, 0]
    assert after["nested"][0] == (0, 0.5) and after["nested"][1]["empty"].shape == (0, 3)
    assert after["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert after["flag"].tolist() == [True]
    assert np.isnan(after["nan"][0]) and np.signbit(after["nan"][1])


@on_ranks("arrays", n=3, mpi=True)
def test_metrics_are_means_over_unequal_counts(hk, world):
    means = hk.average_metrics({"loss": world.rank, "accuracy": (world.rank * 10, 10 + 10 * world.rank)}, world)
    assert means == pytest.approx({"loss": 1.0, "accuracy": 30 / 60})


@on_ranks("arrays", n=3, mpi=True)
def test_agreement_is_checked_every_other_step(hk, world):
    check = hk.CheckAgreement(world, every=2)
    check.step({"a": world.rank})
    said = message(lambda: check.step({"a": world.rank}))
    assert said.startswith("AgreementError: after step 2, the ranks disagree: a differs between")


def parts():
    import ml_dtypes

    return {
        "w": np.zeros(2),
        "half": np.zeros(3, ml_dtypes.bfloat16),
        "turned": np.zeros((3, 2)).T,
        "step": 0,
        "none": None,
    }


def saved(hk, world, directory):
    """Save in the middle of an epoch; the next number at random."""
    hk.seed_everything(7, world)
    loader = hk.shard(np.arange(24), world, 4 // world.size, seed=1)
    store = hk.Checkpoints(directory, keep=2)
    state, nothing = store.restore(parts(), loader=loader)
    for number, (_,) in zip(range(2), loader, strict=False):
        state["step"] = number + 1
    state["w"] += 1.5
    state["turned"][...] = np.arange(6).reshape(2, 3)
    state["half"][...] = 0.25
    done = store.save(state, step=2, loader=loader, accuracy=0.5)
    assert nothing is None
    assert {file.name for file in done.path.iterdir()} == {"manifest.json", "random.npy", "state.json", "state.npz"}
    return np.random.random()


def restored(hk, world, directory):
    """Go on in the middle of the epoch: the samples of the rest, and the next number at random."""
    hk.seed_everything(7, world)
    loader = hk.shard(np.arange(24), world, 4 // world.size, seed=1)
    store = hk.Checkpoints(directory, keep=2)
    state = parts()
    w = state["w"]
    state, found = store.restore(state, loader=loader)
    assert state["w"] is w and w.tolist() == [1.5, 1.5]
    assert str(state["half"].dtype) == "bfloat16" and state["half"].astype(float).tolist() == [0.25] * 3
    assert state["turned"].tolist() == [[0, 1, 2], [3, 4, 5]] and state["step"] == 2
    told = {name: found.metadata[name] for name in ("accuracy", "size", "framework", "seed")}
    assert told == {"accuracy": 0.5, "size": 2, "framework": "arrays", "seed": 7}
    rest, after = [int(one) for (batch,) in loader for one in batch], np.random.random()
    other = message(lambda: store.restore({**state, "w": np.zeros(3)}))
    assert "it holds w float64 (2,), the state has w float64 (3,)" in other
    no_loader = message(lambda: store.save(state, step=3, loader=[1] if world.rank == 0 else loader))
    if world.is_root:
        assert "loader must be what shard returned" in no_loader
    return rest, after


@pytest.mark.parallel
@pytest.mark.parametrize("n", [1, 2])
def test_checkpoints_go_on_on_another_number_of_ranks(run_job, n, tmp_path):
    before = run_job("arrays", saved, 2, mpi=True, directory=tmp_path / "run")
    rest, after = zip(*run_job("arrays", restored, n, mpi=True, directory=tmp_path / "run"), strict=True)
    order = np.random.default_rng(np.random.SeedSequence([1, 0])).permutation(24)
    assert sorted(itertools.chain(*rest)) == sorted(order[8:].tolist())
    assert (list(after) == before) == (n == 2)
    assert len(set(after)) == n


@on_ranks("arrays", mpi=True)
def test_a_pass_without_a_step_is_no_epoch(hk, world):
    loader, reduce = hk.shard(np.arange(24), world, 4, seed=1), hk.distribute(np.zeros(2))
    order = loader.share.order(0)
    for epoch in range(2):
        assert [len(list(loader)), len(next(iter(loader)))] == [3, 1]
        assert loader.epoch == epoch
        for step, (batch,) in enumerate(loader):
            assert epoch or set(batch) <= set(order[step * 8 : step * 8 + 8])
            reduce(np.ones(2))
            list(loader)
            assert loader.state()["samples"] == epoch * 24 + (step + 1) * 8
    loader.load_state({**loader.state(), "position": 8})
    assert (len(loader), len(list(loader))) == (3, 2)


@on_ranks("arrays", mpi=True)
def test_a_checkpoint_that_cannot_be_written_fails_on_every_rank(hk, world, tmp_path):
    Path(tmp_path, "file").write_text("not a directory")
    said = message(lambda: hk.Checkpoints(tmp_path / "file" / "run").save({"w": np.zeros(1)}, step=1))
    assert said.startswith("CheckpointError: could not write the checkpoint of step 1")


# fit ----------------------------------------------------------------------------------------------------------------


def fit(hk, world, epochs, directory=None, exact=False):
    """Least squares: the weights, and each epoch's loss."""

    def gradients_of(state, x, y, w=None):
        off = x @ state["w"] - y
        weighed = off if w is None else off * w
        return float((weighed * off).mean()), {"w": 2 * x.T @ weighed / len(y)}

    def update(state, gradients, lr):
        return {"w": state["w"] - lr * gradients["w"]}

    x = np.random.default_rng(2).normal(size=(22, 3))
    state, history = hk.fit(
        {"w": np.full(3, float(world.rank))}, gradients_of, update, (x, x @ [1.0, 2.0, 3.0]), epochs=epochs,
        batch_size=8 // world.size, base_lr=0.1 / world.size, warmup_epochs=0 if exact else 1,
        checkpoint_dir=directory, remainder="exact" if exact else "drop",
    )  # fmt: skip
    return state["w"].tolist(), [epoch["loss"] for epoch in history]


@on_ranks("arrays", mpi=True)
def test_fit_trains_all_ranks_alike_and_goes_on_where_it_stopped(hk, world, everyone, tmp_path):
    weights, losses = fit(hk, world, 3)
    assert everyone((weights, losses)) == [(weights, losses)] * 2
    assert len(losses) == 3 and losses[2] < losses[0]
    fit(hk, world, 2, tmp_path / "run")
    assert fit(hk, world, 3, tmp_path / "run") == (weights, losses[2:])


@on_ranks("arrays", mpi=True)
def test_fit_on_every_sample_is_that_of_one_process(hk, world, alone):
    weights, _ = fit(hk, world, 2, exact=True)
    assert weights == pytest.approx(alone(fit, epochs=2, exact=True)[0], rel=1e-10)


# Ranks that end -----------------------------------------------------------------------------------------------------


def leaves_early(how, values):
    """Rank 1 ends while the others wait for its gradients."""
    import hvdkit.arrays as hk

    world = hk.init()
    reduce = hk.distribute(np.zeros(values))
    reduce(np.ones(values))
    if world.rank == 1:
        if how == "raises":
            raise ValueError("rank 1 has a bad day")
        sys.exit(0 if how == "fewer steps" else 3)
    reduce(np.ones(values))


@pytest.mark.parallel
@needs("mpi4py")
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "ValueError: rank 1 has a bad day"),
        ("exits", "hvdkit: rank 1 ended, and rank"),
        ("fewer steps", "hvdkit: rank 1 ended, and rank"),
    ],
)
@pytest.mark.parametrize("values", [2, 1000])
def test_a_rank_that_ends_early_ends_the_job(run_ranks, how, told, values):
    (stderr,) = run_ranks(leaves_early, 3, how=how, values=values, fails=True)
    assert told in stderr


def skips_a_step():
    """Rank 1 leaves one reduction out; then each rank waits in a call that the other has not made."""
    import hvdkit.arrays as hk

    world = hk.init()
    reduce = hk.distribute(np.zeros(2))
    for step in range(3):
        if world.rank != 1 or step != 1:
            reduce(np.ones(2))
    hk.average_metrics({"loss": 1.0}, world)


@pytest.mark.parallel
@needs("mpi4py")
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_is_one_step_short_ends_the_job(run_ranks, n):
    (stderr,) = run_ranks(skips_a_step, n, fails=True)
    others = "rank 0" if n == 2 else "ranks 0, 2"
    assert f"hvdkit: rank 1 made one allreduce of gradients fewer than {others}, 2 and not 3" in stderr


def ends_later(file):
    """Rank 0 does something alone for longer than the ranks' ends may lie apart, in no call of hvdkit: no error."""
    import hvdkit.arrays as hk

    world = hk.init()
    hk.distribute(np.zeros(2))(np.ones(2))
    if world.rank == 0:
        time.sleep(2.5)
        Path(file).write_text("done")


@pytest.mark.parallel
@needs("mpi4py")
def test_a_rank_may_end_later_than_the_others(run_ranks, tmp_path):
    run_ranks(ends_later, 2, file=str(tmp_path / "alone"))
    assert (tmp_path / "alone").read_text() == "done"
