"""What the ranks of test_arrays.py do; each function returns JSON values."""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from programs_checks import signs

import hvdkit
import hvdkit.arrays as hk

SAMPLES, SIDE, CLASSES, GLOBAL_BATCH, EPOCHS = 53, 6, 3, 12, 2  # 53 samples: the last step has 5


def make_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(SAMPLES, SIDE, SIDE, 1)).astype(np.float32)
    return x, (x.sum(axis=(1, 2, 3)) > 0).astype(np.int64) + (x[:, 0, 0, 0] > 1)


def batches(world: hvdkit.Topology):
    loader = hk.shard(make_data(), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    return (batch for _ in range(EPOCHS) for batch in loader)


def _error(action) -> str:
    try:
        action()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def topology() -> dict[str, Any]:
    world = hk.init()
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "launcher")
    return {name: getattr(world, name) for name in names}


def mismatched(variables: dict[str, str]) -> str:
    os.environ.update(variables)
    return _error(hk.init)


# Frameworks that know nothing of hvdkit: the weights after a training, by how the samples were weighed ----------------


def train_numpy(world: hvdkit.Topology, by: str, **options: Any) -> list[float]:
    """Softmax regression with momentum in float64; every rank begins with other weights."""
    rng = np.random.default_rng(world.rank)
    state = {"w": rng.normal(size=(SIDE * SIDE, CLASSES)), "m": np.zeros((SIDE * SIDE, CLASSES))}
    state = hk.broadcast_state(state)
    reduce = hk.distribute(state["w"], **options)
    for x, y, w in batches(world):
        flat = x.reshape(len(x), -1).astype(np.float64)
        raised = np.exp(flat @ state["w"])
        gradient = raised / raised.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]
        if by == "samples":
            counted = int((w > 0).sum())
            mean = reduce(flat.T @ gradient / len(y), weight=counted)
        else:
            reduce.buffers[...] = flat.T @ (gradient * w[:, None]) / len(y)
            mean = reduce.start(reduce.buffers).wait()
        state["m"][...] = 0.9 * state["m"] + mean
        state["w"] -= 0.1 * state["m"]
    hk.check_agreement(state, world)
    return state["w"].reshape(-1).tolist()


@functools.cache
def jax_functions():
    """The optimizer, whose warmup is that of 4 ranks whatever the number here, and what is compiled, once."""
    import jax
    import optax

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


def train_jax(world: hvdkit.Topology, by: str, **options: Any) -> list[float]:
    """A CNN by optax's Adam with a warmup that runs inside jit."""
    from ranks import COMPILE_FAST

    os.environ["XLA_FLAGS"] = COMPILE_FAST
    import jax

    jax.config.update("jax_enable_x64", True)
    numpy = jax.numpy
    first, second = jax.random.split(jax.random.key(world.rank))
    parameters = {
        "conv": [jax.random.normal(first, (3, 3, 1, 4)) / 3, numpy.zeros(4)],
        "dense": {"w": jax.random.normal(second, (SIDE * SIDE * 4, CLASSES)) / 12, "b": numpy.zeros(CLASSES)},
    }
    optimizer, gradients_of, step = jax_functions()
    state = hk.broadcast_state({"parameters": parameters, "slots": optimizer.init(parameters)})
    assert isinstance(state["parameters"]["dense"]["w"], jax.Array)
    reduce = hk.distribute(parameters, **options)

    for x, y, w in batches(world):
        x = x.astype(np.float64)
        if by == "samples":
            pending = reduce.start(gradients_of(state["parameters"], x, y, np.ones(len(y))), weight=(w > 0).sum())
        else:
            pending = reduce.start(gradients_of(state["parameters"], x, y, w))
        state = step(state, pending.wait())
    hk.check_agreement(state, world)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state["parameters"])]).tolist()


def train_mlx(world: hvdkit.Topology, by: str, **options: Any) -> list[float]:
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
    reduce = hk.distribute(model.trainable_parameters(), **options)

    def loss(model, x, y, w):
        return (nn.losses.cross_entropy(model(x), y) * w).mean()

    for x, y, w in batches(world):
        weights = np.ones(len(y)) if by == "samples" else w
        arrays = (mx.array(one) for one in (x.reshape(len(x), -1), y, weights.astype(np.float32)))
        _, gradients = nn.value_and_grad(model, loss)(model, *arrays)
        optimizer.update(model, reduce(gradients, weight=int((w > 0).sum()) if by == "samples" else None))
    hk.check_agreement({"parameters": model.parameters(), "slots": optimizer.state}, world)
    return np.concatenate([np.asarray(leaf).ravel() for _, leaf in tree_flatten(model.parameters())]).tolist()


TRAININGS = {"numpy": train_numpy, "jax": train_jax, "mlx": train_mlx}


def everything(frameworks: list[str]) -> dict[str, Any]:
    """Each framework's weights after a training, by the loader's weights and by the numbers of samples."""
    world = hk.init()
    trained = {}
    for name in frameworks:
        trained[name] = {by: TRAININGS[name](world, by) for by in ("weights", "samples")}
    trained["numpy"]["fp16"] = train_numpy(world, "samples", compression="fp16")
    trained["numpy"]["calls"] = train_numpy(world, "weights", progress="calls")
    return trained


# The rest on real ranks --------------------------------------------------------------------------------------------


def several(calls: dict[str, tuple[str, dict[str, Any]]], directory: str) -> dict[str, Any]:
    """What functions of this file return, one after the other in one job: starting ranks takes longest."""
    os.chdir(directory)
    return {name: globals()[function](**arguments) for name, (function, arguments) in calls.items()}


def overlaps(sizes: list[int]) -> dict[str, Any]:
    """What ``overlap`` finds, by how gradients move on and how many there are."""
    world = hk.init()
    return {
        f"{progress} {values}": overlap(world, progress, values) for progress in ("thread", "calls") for values in sizes
    }


def overlap(world: hvdkit.Topology, progress: str, values: int) -> dict[str, Any]:
    """Rank 1 gives its gradients only when rank 0, which has given its own, says so: one that waited would hang."""
    from mpi4py import MPI

    reduce = hk.distribute(np.zeros(values, np.float32), progress=progress)
    if world.rank == 0:
        pending = reduce.start(np.ones(values))
        early = pending.done()
        MPI.COMM_WORLD.send("go", 1)
        end = time.monotonic() + 60
        while not pending.done() and time.monotonic() < end:  # with a thread, no call into MPI
            time.sleep(0.001)
        done, found = pending.done(), pending.wait()
        return {"early": early, "done": done, "mean": [float(found.min()), float(found.max())]}
    MPI.COMM_WORLD.recv(source=0)
    found = reduce.start(np.full(values, 3.0)).wait()
    return {"mean": [float(found.min()), float(found.max())]}


def many_steps(sizes: list[int], steps: int) -> list[str]:
    """Where a sum is not that of its own step; the ranks pause by chance, before a call and after it."""
    world = hk.init()
    rng, wrong = np.random.default_rng(world.rank), []
    for values in sizes:
        reduce = hk.distribute(np.zeros(values, np.float32), op="sum")
        for step in range(steps):
            reduce.buffers[...] = step + 1 + world.rank
            found = reduce(reduce.buffers)
            if rng.random() < 0.1:
                time.sleep(1e-4)
            expected = world.size * (step + 1) + sum(range(world.size))
            if (found.min(), found.max()) != (expected, expected):
                wrong.append(f"{values} values, step {step}: {found.min()} to {found.max()}, not {expected}")
    return wrong


def errors() -> dict[str, str]:
    """Mistakes on one rank: every rank must come out of every call, and the last call must still work."""
    world = hk.init()
    odd = world.rank == 1
    reduce = hk.distribute({"a": np.zeros(3, np.float32), "b": np.zeros(30000)})
    right = {"a": np.ones(3), "b": np.ones(30000)}
    found = {
        "model": _error(lambda: hk.distribute({"a": np.zeros(3 + odd)})),
        "names": _error(lambda: hk.distribute([np.zeros(3)] * (1 + odd))),
        "options": _error(lambda: hk.distribute(np.zeros(3), op="sum" if odd else "average")),
        "shape": _error(lambda: reduce({"a": np.ones(4)[: 3 + odd], "b": np.ones(30000)})),
        "started": _error(lambda: reduce.start({"a": np.ones(3)} if odd else right).wait()),
        "weight": _error(lambda: reduce(right, weight=2 if odd else None)),
        "broadcast": _error(lambda: hk.broadcast_state({"a": np.zeros(2 + odd)})),
        "no array": _error(lambda: hk.broadcast_state({"a": "text" if odd else 1.0})),
        "metrics": _error(lambda: hk.average_metrics({f"loss{odd}": 1.0}, world)),
        "metric": _error(lambda: hk.average_metrics({"loss": "much" if odd else 1.0}, world)),
        "agreement": _error(lambda: hk.check_agreement({"a": np.arange(3.0) + 0.5 * odd}, world)),
        "signs": [_error(lambda one=one: hk.check_agreement(one, world)) for one in signs(odd).values()],
        "same path": _error(lambda: hk.check_agreement({"a.b": np.zeros(1) + odd, "a": {"b": np.zeros(1)}}, world)),
        "large": _error(lambda: hk.check_agreement({"a": 2**60 + odd}, world)),
        "no communicator": _error(lambda: hk.distribute(np.zeros(3), comm=3)),
        "root": _error(lambda: hk.broadcast_state(np.zeros(1), root=9)),
    }
    with np.errstate(all="raise" if odd else "warn"):
        total = hk.distribute(np.zeros(30000, np.float32), op="sum")(np.full(30000, 3e38))
        found["overflow"] = str([float(total.min()), float(total.max())])
        found["infinite"] = _error(lambda: hk.check_agreement({"a": np.array([np.inf, np.nan if odd else 1.0])}, world))
    found["after"] = str(reduce(right)["b"].sum())
    return found


def state_and_metrics() -> dict[str, Any]:
    """Broadcast of everything a state may hold, metrics over unequal counts, a check every other step."""
    world = hk.init()
    kept = np.arange(3.0) * (world.rank + 1)
    frozen = np.ones(2) * world.rank
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
    check = hk.CheckAgreement(world, every=2)
    check.step({"a": world.rank})  # not yet
    means = hk.average_metrics({"loss": world.rank, "accuracy": (world.rank * 10, 10 + 10 * world.rank)}, world)
    return {
        "same object": after["kept"] is kept,
        "kept": kept.tolist(),
        "frozen": after["frozen"].tolist(),
        "nested": after["nested"][0],
        "empty": list(after["nested"][1]["empty"].shape),
        "turned": after["turned"].tolist(),
        "flag": after["flag"].tolist(),
        "negative zero": bool(np.isnan(after["nan"][0]) and np.signbit(after["nan"][1])),
        "means": means,
        "second": _error(lambda: check.step({"a": world.rank})),
    }


def checkpoints(directory: str, go_on: bool) -> dict[str, Any]:
    """Save in the middle of an epoch; go on from there, perhaps on another number of ranks."""
    import ml_dtypes

    world = hk.init()
    hk.seed_everything(7, world)
    loader = hk.shard(np.arange(24), world, 4 // world.size, seed=1)
    store = hk.Checkpoints(directory, keep=2)
    state = {
        "w": np.zeros(2),
        "half": np.zeros(3, ml_dtypes.bfloat16),
        "turned": np.zeros((3, 2)).T,
        "step": 0,
        "none": None,
    }
    if not go_on:
        state, nothing = store.restore(state, loader=loader)
        for number, (_,) in zip(range(2), loader, strict=False):
            state["step"] = number + 1
        state["w"] += 1.5
        state["turned"][...] = np.arange(6).reshape(2, 3)
        state["half"][...] = 0.25
        saved = store.save(state, step=2, loader=loader, accuracy=0.5)
        after = np.random.random()
        return {"nothing": nothing is None, "files": sorted(file.name for file in saved.path.iterdir()), "next": after}
    w = state["w"]
    state, saved = store.restore(state, loader=loader)
    return {
        "same object": state["w"] is w,
        "w": w.tolist(),
        "half": [str(state["half"].dtype), *state["half"].astype(float).tolist()],
        "turned": state["turned"].tolist(),
        "step": state["step"],
        "metadata": {name: saved.metadata[name] for name in ("accuracy", "size", "framework", "seed")},
        "rest": [int(one) for (batch,) in loader for one in batch],
        "next": np.random.random(),
        "other": _error(lambda: store.restore({**state, "w": np.zeros(3)})),
        "no loader": _error(lambda: store.save(state, step=3, loader=[1] if world.rank == 0 else loader)),
    }


def unwritable(directory: str) -> str:
    hk.init()
    return _error(lambda: hk.Checkpoints(directory).save({"w": np.zeros(1)}, step=1))


def subset() -> list[float]:
    """Ranks 0 and 1 average among themselves."""
    from mpi4py import MPI

    world = hk.init()
    pair = MPI.COMM_WORLD.Split(world.rank // 2, world.rank)
    return hk.distribute(np.zeros(1), comm=pair)(np.array([2.0 + 2 * world.rank])).tolist()


def fit(directory: str, epochs: int, exact: bool = False) -> dict[str, Any]:
    """Least squares by fit."""

    def gradients_of(state, x, y, w=None):
        off = x @ state["w"] - y
        weighed = off if w is None else off * w
        return float((weighed * off).mean()), {"w": 2 * x.T @ weighed / len(y)}

    def update(state, gradients, lr):
        return {"w": state["w"] - lr * gradients["w"]}

    rng = np.random.default_rng(2)
    x = rng.normal(size=(22, 3))
    world = hk.init()
    state, history = hk.fit(
        {"w": np.full(3, float(world.rank))}, gradients_of, update, (x, x @ [1.0, 2.0, 3.0]), epochs=epochs,
        batch_size=8 // world.size, base_lr=0.1 / world.size, warmup_epochs=0 if exact else 1,
        checkpoint_dir=directory or None, remainder="exact" if exact else "drop",
    )  # fmt: skip
    return {"w": state["w"].tolist(), "losses": [epoch["loss"] for epoch in history]}


def leaves_early(how: str, values: int) -> str:
    """Rank 1 ends while the others wait for its gradients."""
    world = hk.init()
    reduce = hk.distribute(np.zeros(values))
    reduce(np.ones(values))
    if world.rank == 1:
        if how == "raises":
            raise ValueError("rank 1 has a bad day")
        sys.exit(0 if how == "fewer steps" else 3)
    reduce(np.ones(values))
    return "came out"


def ends_later(directory: str) -> str:
    """Rank 0 does something alone for longer than the ranks' ends may lie apart, in no call of hvdkit: no error."""
    world = hk.init()
    hk.distribute(np.zeros(2))(np.ones(2))
    if world.rank == 0:
        time.sleep(2.5)
        Path(directory, "alone").write_text("done")
    return "ended"
