"""``hvdkit.arrays``'s ``shard_state`` and ``ShardedState`` on real ranks: as without, with 1 / n of the state."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from pages import blocks, run
from programs_checks import message
from ranks import jax, needs, on_ranks

from hvdkit import AgreementError

ROWS, STEPS = 24, 6
optax_too = needs("jax", "optax")


def parameters():
    """77 numbers of several shapes: 39 and 38, or 26, 26 and 25 on each rank."""
    rng = np.random.default_rng(3)
    deep, last = (jax().numpy.asarray(rng.normal(size=shape)) for shape in ((7, 6), (6, 4)))
    return {"deep": [deep, None], "wide": jax().numpy.full(6, 0.1), "last": last, "bias": {"10": np.zeros(4), "2": 0.5}}


def loss(weights, batch):
    x, y = batch
    hidden = jax().numpy.tanh(x @ weights["deep"][0] + weights["wide"])
    return ((hidden @ weights["last"] * weights["bias"]["2"] + weights["bias"]["10"] - y) ** 2).mean()


def batches(world, steps=STEPS):
    """This rank's rows of each global batch."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        x, y = rng.normal(size=(ROWS, 7)), rng.normal(size=(ROWS, 4))
        share = ROWS // world.size
        mine = slice(world.rank * share, (world.rank + 1) * share)
        yield x[mine], y[mine]


def params_ema(optax):
    """The mean of the parameters over the steps, beside the updates."""

    def update(updates, state, parameters):
        return updates, jax().tree.map(lambda mean, one: 0.9 * mean + 0.1 * one, state, parameters)

    return optax.GradientTransformation(lambda parameters: jax().tree.map(jax().numpy.asarray, parameters), update)


def two_rates(optax):
    groups = {"deep": ["slow", None], "wide": "slow", "last": "fast", "bias": {"10": "fast", "2": "slow"}}
    return optax.multi_transform({"slow": optax.adam(1e-3), "fast": optax.sgd(0.1, momentum=0.9)}, groups)


CUT = {
    "momentum": lambda optax: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda optax: optax.adam(optax.linear_schedule(0.0, 0.02, 2)),
    "adamw": lambda optax: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, weight_decay=0.1),
    "rmsprop": lambda optax: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "adagrad": lambda optax: optax.adagrad(0.1),
    "lion": lambda optax: optax.lion(1e-2),
    "nadam": lambda optax: optax.nadam(1e-2),
    "ema": lambda optax: optax.chain(optax.adam(1e-2), optax.ema(0.9), params_ema(optax)),
    "two_rates": two_rates,
    "multi_steps": lambda optax: optax.MultiSteps(optax.adam(1e-2), 2, accumulator_dtype=np.float64),
}
WHOLE = {
    "lamb": lambda optax: optax.lamb(1e-2),
    "lars": lambda optax: optax.lars(0.1),
    "adafactor": lambda optax: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda optax: optax.contrib.muon(1e-2),
    "decay_of_matrices": lambda optax: optax.adamw(
        1e-2, weight_decay=0.1, mask=lambda weights: jax().tree.map(lambda one: np.ndim(one) > 1, weights)
    ),
}


def chain(optax, hk, world, maker):
    inner = {**CUT, **WHOLE}[maker](optax)
    return optax.chain(hk.average(world), optax.clip_by_global_norm(0.5), hk.shard_state(inner, world))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax().tree.leaves(tree)])


def train(hk, world, maker, way):
    """The weights after some steps of a chain: "jit", "scan", "eager" or within "MultiSteps"."""
    import optax

    jax()  # for its types
    optimizer = chain(optax, hk, world, maker)
    if way == "MultiSteps":
        optimizer = optax.MultiSteps(optimizer, 2, accumulator_dtype=np.float64)
    weights = parameters()
    slots = optimizer.init(weights) if way != "jit" else jax().jit(optimizer.init)(weights)

    gradients_of = jax().jit(jax().grad(loss))

    def step(carried, batch):
        weights, slots = carried
        updates, slots = optimizer.update(gradients_of(weights, batch), slots, weights)
        return (optax.apply_updates(weights, updates), slots), None

    carried = jax().tree.map(jax().numpy.asarray, (weights, slots))
    if way == "scan":
        all_of_them = [np.stack(column) for column in zip(*batches(world), strict=True)]
        carried, _ = jax().jit(lambda *given: jax().lax.scan(step, *given))(carried, tuple(all_of_them))
    else:
        step = step if way == "eager" else jax().jit(step)
        for batch in batches(world):
            carried, _ = step(carried, batch)
    weights, slots = carried
    sums_apart = way == "MultiSteps"  # of each rank's gradients, of which 0 or -0 is left
    hk.check_agreement({"weights": weights, "slots": None if sums_apart else slots}, world)
    return flat(weights)


def require_as_alone(everyone, alone, found, **given):
    found = everyone(found)
    assert all(np.array_equal(one, found[0]) for one in found)
    np.testing.assert_allclose(found[0], alone(train, **given), rtol=1e-10, atol=1e-12)
    assert np.abs(found[0] - flat(parameters())).max() > 1e-3


@optax_too
@pytest.mark.parametrize("maker", [*CUT, *WHOLE])
@on_ranks("arrays", n=2, mpi=True)
def test_weights_are_those_of_one_process(hk, world, everyone, alone, maker):
    require_as_alone(everyone, alone, train(hk, world, maker, "jit"), maker=maker, way="jit")


@optax_too
@pytest.mark.parametrize("way", ["eager", "scan", "MultiSteps"])
@on_ranks("arrays", n=2, mpi=True)
def test_it_trains_in_loops_and_outside_of_them(hk, world, everyone, alone, way):
    require_as_alone(everyone, alone, train(hk, world, "adam", way), maker="adam", way=way)


@optax_too
@on_ranks("arrays", n=(2, 3), mpi=True)
def test_the_state_takes_a_part_of_the_memory(hk, world, everyone):
    import optax

    numpy = jax().numpy
    weights = {"a": numpy.ones((30, 40)), "b": numpy.ones(7), "c": numpy.ones((90, 11)), "d": numpy.ones((3, 5, 8))}
    alone = sum(leaf.nbytes for leaf in jax().tree.leaves(optax.adam(1.0).init(weights)))
    own = sum(leaf.nbytes for leaf in jax().tree.leaves(hk.shard_state(optax.adam(1.0), world).init(weights)))
    counted = everyone(own)
    assert all(abs(one * world.size / alone - 1) < 0.05 for one in counted), (counted, alone)
    whole = hk.shard_state(WHOLE["decay_of_matrices"](optax), world).init(weights)
    assert any(leaf.shape == (30, 40) for leaf in jax().tree.leaves(whole)) == (world.rank == 0)


@optax_too
@on_ranks("arrays", n=2, mpi=True)
def test_what_looks_at_several_parameters_is_refused_by_name(hk, world):
    import optax

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    group = {"deep": ["a", None], "wide": "a", "last": "b", "bias": {"10": "b", "2": "a"}}
    for inner, words in {
        clipped: "state of clip_by_global_norm, scale_by_adam, scale: it looks at several",
        optax.multi_transform({"a": clipped, "b": optax.sgd(0.1)}, group): "partition.*it looks at several parameters",
        optax.apply_if_finite(optax.sgd(0.1), 3): "apply_if_finite.*it looks at several parameters",
        optax.contrib.dadapt_adamw(): "dadapt_adamw: it looks at several parameters",
        optax.contrib.prodigy(): "prodigy: it looks at several parameters",
        optax.novograd(1e-2): "scale_by_novograd, .* or keeps one number of each",
        optax.flatten(optax.adam(1e-2)): "flatten, .*belongs to several parameters",
        optax.contrib.momo(): r"momo: it cannot be tried out \(.*'value'",
        optax.MultiSteps(optax.adam(1e-2), 9).gradient_transformation(): "first 4 updates are 0",
    }.items():
        with pytest.raises(__import__("hvdkit").InvalidArgumentError, match=words):
            hk.shard_state(inner, world).init(parameters())
    with pytest.raises(__import__("hvdkit").InvalidArgumentError, match="got float; give optax"):
        hk.shard_state(1e-3, world)


@optax_too
@on_ranks("arrays", n=2, mpi=True)
def test_trying_draws_nothing_and_counts_no_step(hk, world):
    import optax

    from hvdkit.steps import passes

    before, steps = (np.random.get_state()[1].tolist(), np.random.get_state()[2]), passes.told()
    hk.shard_state(optax.adam(1e-2), world).init(parameters())
    assert ((np.random.get_state()[1].tolist(), np.random.get_state()[2]), passes.told()) == (before, steps)


# Any arrays ---------------------------------------------------------------------------------------------------------


def numpy_parameters():
    rng = np.random.default_rng(4)
    return {"w": rng.normal(size=(5, 7)), "b": np.zeros(3), "nothing": None, "c": [rng.normal(size=2), np.zeros(0)]}


def adam_step(weights, gradients, m, v, t, lr=0.1):
    """Adam in place, on lists of arrays."""
    for weight, gradient, first, second in zip(weights, gradients, m, v, strict=True):
        first += 0.1 * (gradient - first)
        second += 0.001 * (gradient**2 - second)
        weight -= lr * first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)


def leaves(tree):
    return [tree["b"], *tree["c"], tree["w"]]


def toy_gradients(weights, world, t):
    """Of each rank another one; the mean over 1, 2 or 3 ranks is the same."""
    shift = 1.0 * world.rank - (world.size - 1) / 2
    b, c, d, w = (np.sin(one + t) + shift for one in leaves(weights))
    return {"w": w, "b": b, "nothing": None, "c": [c, d]}


def train_numpy(hk, world):
    weights = numpy_parameters()
    reduce, shards = hk.distribute(weights), hk.ShardedState(weights, world=world)
    own = shards.own(weights)
    m, v = ([np.zeros_like(one) for one in leaves(own)] for _ in range(2))
    for t in range(1, 5):
        adam_step(leaves(own), leaves(shards.own(reduce(toy_gradients(weights, world, t)))), m, v, t)
        assert shards.gather(own, out=weights) is weights
    assert 0 < sum(one.size for one in m) <= -(-40 // world.size)
    return np.concatenate([one.ravel() for one in leaves(weights)])


@pytest.mark.parametrize("most", [4 * 2**20, 64, 1])
@on_ranks("arrays", n=(2, 3), mpi=True)
def test_a_loop_in_numpy_updates_its_own_numbers_in_place(hk, world, everyone, alone, most, monkeypatch):
    """Pieces that travel together, some alone, and each alone."""
    monkeypatch.setattr("hvdkit.arrays.sharded.MESSAGE_BYTES", most)
    found = everyone(train_numpy(hk, world))
    assert all(np.array_equal(one, found[0]) for one in found)
    np.testing.assert_allclose(found[0], alone(train_numpy), rtol=1e-10)


@on_ranks("arrays", n=3, mpi=True)
def test_gathered_arrays_are_new_and_of_the_framework_and_type(hk, world):
    import ml_dtypes

    given = {
        "half": np.arange(7).astype(ml_dtypes.bfloat16),
        "n": np.arange(5),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }
    for whole in (False, True):
        shards = hk.ShardedState(given, world=world, whole=whole)
        own = shards.own(given)
        assert {one.ndim for one in own.values()} == ({1, 2} if whole else {1})
        made = shards.gather(own)
        for name, one in made.items():
            assert one.dtype == given[name].dtype and np.array_equal(one, given[name])
            assert not np.shares_memory(one, given[name])


@on_ranks("arrays", n=2, mpi=True)
def test_a_mistake_on_one_rank_is_an_error_on_all(hk, world):
    weights = {"w": np.zeros(4), "b": np.zeros(2)}
    shards = hk.ShardedState(weights, world=world)
    own = shards.own(weights)
    for wrong, words in (
        ({**own, "w": np.zeros(9)}, "w has 9 numbers, but"),
        ({"w": own["w"]}, "expected a container of b, w"),
    ):
        said = message(lambda wrong=wrong: shards.gather(wrong if world.rank else own))
        assert words in said and said.startswith("InvalidArgumentError" if world.rank else "AgreementError: rank 1")
    said = message(lambda: shards.gather(own, out={"w": np.zeros(4, np.float32), "b": np.zeros(2)}))
    assert "out has no NumPy array of shape (4,) and type float64" in said
    assert "w has the shape (5,), the parameter (4,)" in message(lambda: shards.own({**weights, "w": np.zeros(5)}))
    said = message(lambda: shards.state(m=weights))
    assert said.startswith("InvalidArgumentError: m.") and "numbers are this rank's" in said
    with pytest.raises(AgreementError, match="hold different models"):
        hk.ShardedState({"w": np.zeros(4 + world.rank)}, world=world)
    with pytest.raises(AgreementError, match="hold different models"):
        hk.ShardedState(weights, world=world, whole=bool(world.rank))


# State, checkpoints -------------------------------------------------------------------------------------------------


@on_ranks("arrays", n=2, mpi=True)
def test_state_of_its_own_is_neither_compared_nor_overwritten_and_the_rest_is(hk, world):
    weights = {"w": np.zeros(5)}
    shards = hk.ShardedState(weights, world=world)
    m = {"w": np.full_like(shards.own(weights)["w"], world.rank)}
    state = {"slots": shards.state(m=m, t=7), "weights": weights}
    hk.check_agreement(state, world)
    state = hk.broadcast_state(state)
    assert state["slots"].inner["m"]["w"] is m["w"] and (m["w"] == world.rank).all() and m["w"].size == 3 - world.rank
    with pytest.raises(AgreementError, match=r"slots\.t"):
        hk.check_agreement({"slots": shards.state(m=m, t=world.rank)}, world)
    assert hk.broadcast_state({"slots": shards.state(m=m, t=world.rank)})["slots"].inner["t"] == 0


def half(hk, world, directory, maker, sharded, first):
    """Half of a training: from its begin, or from what the first half has saved; its weights."""
    import optax

    jax()
    optimizer = chain(optax, hk, world, maker)
    if not sharded:
        inner = {**CUT, **WHOLE}[maker](optax)
        optimizer = optax.chain(hk.average(world), optax.clip_by_global_norm(0.5), inner)
    weights = jax().tree.map(jax().numpy.asarray, parameters())
    state = hk.broadcast_state({"weights": weights, "slots": optimizer.init(weights)})
    store = hk.Checkpoints(directory)
    state, found = store.restore(state)
    assert (0 if found is None else found.step) == first

    @jax().jit
    def step(state, batch):
        gradients = jax().grad(loss)(state["weights"], batch)
        updates, slots = optimizer.update(gradients, state["slots"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "slots": slots}

    for batch in list(batches(world, 3 * STEPS // 2))[first : first + STEPS // 2]:
        state = step(state, batch)
    done = store.save(state, step=first + STEPS // 2)
    hk.check_agreement(state, world)
    files = sum(file.name.startswith("state-") for file in done.path.iterdir())
    assert files == (world.size if sharded and world.size > 1 else 0)
    return flat(state["weights"])


@optax_too
@pytest.mark.parallel
@pytest.mark.parametrize(("maker", "steps"), [("adamw", "2 3 2-"), ("adafactor", "3 2- 2"), ("adamw", "2- 2 1")])
def test_a_training_goes_on_on_other_numbers_of_ranks_and_without(run_job, maker, steps, tmp_path):
    """In three jobs; "2-" is one without shard_state on 2 ranks."""
    for number, job in enumerate(steps.split()):
        given = {"maker": maker, "sharded": not job.endswith("-"), "first": number * STEPS // 2}
        n = int(job[0])
        found = run_job("arrays", half, n, mpi=n > 1, directory=tmp_path / "run", **given)
    once = run_job("arrays", at_once, 1, maker=maker)
    for one in found:
        np.testing.assert_allclose(one, once[0], rtol=1e-10, atol=1e-12)


def at_once(hk, world, maker):
    """The whole training, in one process."""
    import optax

    jax()
    optimizer = chain(optax, hk, world, maker)
    weights = jax().tree.map(jax().numpy.asarray, parameters())
    slots = optimizer.init(weights)
    for batch in batches(world, 3 * STEPS // 2):
        updates, slots = optimizer.update(jax().grad(loss)(weights, batch), slots, weights)
        weights = optax.apply_updates(weights, updates)
    return flat(weights)


def numpy_slots(world, hk, fill):
    """Weights and slots of two types; ``fill`` numbers them from 0 on."""
    import ml_dtypes

    weights = {"w": np.zeros((5, 3)), "b": np.zeros(4)}
    shards = hk.ShardedState(weights, world=world)
    numbered = {"w": np.arange(15.0).reshape(5, 3), "b": np.arange(4.0)}
    m = {name: one * fill for name, one in shards.own(numbered).items()}
    v = {name: (one * fill).astype(ml_dtypes.bfloat16) for name, one in shards.own(numbered).items()}
    return {"weights": weights, "slots": shards.state(m=m, v=v, t=int(fill))}


def saves_numpy(hk, world, directory):
    hk.Checkpoints(directory).save(numpy_slots(world, hk, 1.0), step=1)


def restores_numpy(hk, world, directory, saved_by):
    wanted, state = numpy_slots(world, hk, 1.0), numpy_slots(world, hk, 0.0)
    store = hk.Checkpoints(directory)
    restored, _ = store.restore(state)
    assert restored["slots"].inner["t"] == 1
    for name in ("m", "v"):
        for key, one in restored["slots"].inner[name].items():
            assert one is state["slots"].inner[name][key]
            assert np.array_equal(one, wanted["slots"].inner[name][key]), (name, key)
    other = hk.ShardedState({"w": np.zeros((5, 4)), "b": np.zeros(4)}, world=world)
    m = other.own({"w": np.zeros((5, 4)), "b": np.zeros(4)})
    said = message(lambda: store.restore({**state, "slots": other.state(m=m, v=m, t=0)}))
    assert "it holds slots.m.w float64 (5, 3), the state has slots.m.w float64 (5, 4)" in said
    path = Path(directory) / "step-0000000001"
    if world.is_root:
        (path / f"state-0-of-{saved_by}.npz").unlink()
    assert "CheckpointError" in message(lambda: store.restore(numpy_slots(world, hk, 0.0)))


@pytest.mark.parallel
@pytest.mark.parametrize(("n", "then"), [(2, 3), (3, 2), (2, 1)])
def test_slots_of_a_loop_are_restored_on_other_numbers_of_ranks(run_job, n, then, tmp_path):
    run_job("arrays", saves_numpy, n, mpi=True, directory=tmp_path / "run")
    run_job("arrays", restores_numpy, then, mpi=then > 1, directory=tmp_path / "run", saved_by=n)


# Ends ---------------------------------------------------------------------------------------------------------------


def ends_before_gathering(how, compiled):
    """Rank 1 ends when it has the gradients."""
    import numpy as np

    import hvdkit.arrays as hk

    world = hk.init()
    weights = {"w": np.zeros(5)}
    reduce, shards = hk.distribute(weights), hk.ShardedState(weights, world=world)
    exchange = shards.exchange

    def ending(*given):
        if world.rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "error":
                raise ZeroDivisionError("of rank 1")
            raise SystemExit(0)
        return exchange(*given)

    hk.ShardedState.exchange = lambda self, *given: ending(*given)
    if compiled:
        import jax
        import optax

        optimizer = hk.shard_state(optax.sgd(0.1), world)
        slots = optimizer.init(weights)
        step = jax.jit(lambda g, slots: optimizer.update(hk.average(world).update(g, None)[0], slots))
        jax.block_until_ready(step(weights, slots))
    else:
        shards.gather(shards.own(reduce(weights)))
    print("went on")


@pytest.mark.parallel
@pytest.mark.parametrize(("how", "compiled"), [("kill", False), ("error", False), ("exit", False), ("kill", True)])
def test_a_rank_that_ends_between_gradients_and_gathering_ends_the_job(run_ranks, how, compiled):
    if compiled:
        pytest.importorskip("optax")
    (stderr,) = run_ranks(ends_before_gathering, 2, how=how, compiled=compiled, fails=True)
    words = {"kill": "signal 9", "error": "ZeroDivisionError: of rank 1", "exit": "rank 1 ended, and rank 0 waits"}
    assert words[how] in stderr and "went on" not in stderr, stderr


def killed_while_saving(directory, rank):
    """Saves twice; in the second time a rank is killed when it has written half of its file."""
    import numpy as np

    import hvdkit.arrays as hk

    world = hk.init()
    store = hk.Checkpoints(directory)
    saves_numpy(hk, world, directory)
    save, written = np.savez, []

    def savez(file, *given, **named):
        save(file, *given, **named)
        written.append(file)
        if world.rank == rank:
            os.truncate(file, 100)
            os.kill(os.getpid(), signal.SIGKILL)

    np.savez = savez
    store.save(numpy_slots(world, hk, 0.0), step=2)


@pytest.mark.parallel
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_saves_loses_nothing(run_ranks, run_job, rank, tmp_path):
    run_ranks(killed_while_saving, 2, directory=str(tmp_path / "run"), rank=rank, fails=True)
    run_job("arrays", restores_numpy, 2, mpi=True, directory=tmp_path / "run", saved_by=2)


@optax_too
@on_ranks("arrays", n=2, mpi=True)
def test_the_programs_of_the_page_train_alike_on_all_ranks(hk, world, everyone):
    for program in blocks("arrays.md")["An optimizer's state on all ranks together"]:
        jax()
        found = everyone(np.asarray(run(program, {"__name__": "__main__"})["weights"]))
        assert np.array_equal(found[0], found[1]) and np.abs(found[0] - np.arange(8.0)).max() < 3.5
