"""``hvdkit.arrays.average`` in chains of optax on real ranks: inside and outside of ``jax.jit`` as in one process."""

import numpy as np
import pytest
from pages import blocks, run
from ranks import jax, needs, on_ranks

pytestmark = needs("jax", "optax")
ROWS, STEPS = 24, 6


def parameters():
    rng = np.random.default_rng(3)
    return {
        "deep": [jax().numpy.asarray(rng.normal(size=(5, 4))), None],
        "wide": jax().numpy.asarray(rng.normal(size=4)),
    }


def gradients_of(weights, batch):
    x, y = batch

    def loss(weights):
        return ((jax().numpy.tanh(x @ weights["deep"][0] + weights["wide"]) - y) ** 2).mean()

    return jax().grad(loss)(weights)


def batches(world, steps=STEPS):
    """This rank's rows of each global batch."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        x, y = rng.normal(size=(ROWS, 5)), rng.normal(size=(ROWS, 4))
        share = ROWS // world.size
        mine = slice(world.rank * share, (world.rank + 1) * share)
        yield x[mine], y[mine]


def clipped(optax, hk, world):
    return optax.chain(hk.average(world), optax.clip_by_global_norm(0.05), optax.adam(1e-2))


def in_multi_steps(optax, hk, world):
    return optax.MultiSteps(
        optax.chain(hk.average(world), optax.sgd(0.1, momentum=0.9)), every_k_schedule=2, accumulator_dtype=np.float64
    )


def beside_multi_steps(optax, hk, world):
    return optax.chain(
        hk.average(world),
        optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3, accumulator_dtype=np.float64).gradient_transformation(),
    )


def injected(optax, hk, world):
    rate = optax.linear_schedule(0.2, 0.0, STEPS)
    return optax.inject_hyperparams(lambda learning_rate: optax.chain(hk.average(world), optax.sgd(learning_rate)))(
        rate
    )


def injected_behind(optax, hk, world):
    return optax.chain(hk.average(world), optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, weight_decay=0.1))


MAKERS = {one.__name__: one for one in (clipped, in_multi_steps, beside_multi_steps, injected, injected_behind)}


def train(hk, world, maker, compiled):
    import optax

    jax()  # for its types
    optimizer = MAKERS[maker](optax, hk, world)
    weights = parameters()
    slots = optimizer.init(weights)

    def step(weights, slots, batch):
        updates, slots = optimizer.update(gradients_of(weights, batch), slots, weights)
        return optax.apply_updates(weights, updates), slots

    step = jax().jit(step) if compiled else step
    for batch in batches(world):
        weights, slots = step(weights, slots, batch)
    hk.check_agreement({"weights": weights}, world)
    return np.concatenate([np.ravel(leaf) for leaf in jax().tree.leaves(weights)])


@pytest.mark.parametrize(("maker", "compiled"), [*((maker, True) for maker in MAKERS), ("in_multi_steps", False)])
@on_ranks("arrays", n=2, mpi=True)
def test_a_chain_trains_as_one_process_on_all_samples(hk, world, everyone, alone, maker, compiled):
    found = everyone(train(hk, world, maker, compiled))
    assert all(np.array_equal(one, found[0]) for one in found)
    np.testing.assert_allclose(found[0], alone(train, maker=maker, compiled=compiled), rtol=1e-12, atol=1e-14)
    begun = np.concatenate([np.ravel(leaf) for leaf in jax().tree.leaves(parameters())])
    assert np.abs(found[0] - begun).max() > 1e-2


@on_ranks("arrays", n=2, mpi=True)
def test_it_changes_nothing_of_the_callers_and_keeps_types_and_frameworks(hk, world):
    numpy = jax().numpy
    transformation = hk.average(world)
    given = {
        "half": numpy.full(3, 1.0 + world.rank, numpy.bfloat16),
        "numpy": np.full((2, 2), 10.0 * world.rank),
        "none": None,
        "wide": [numpy.arange(4, dtype=numpy.float32) * world.rank],
    }
    before = jax().tree.map(np.array, given)
    state = transformation.init(given)
    first, second = (transformation.update(given, state)[0] for _ in range(2))
    assert jax().tree.all(jax().tree.map(np.array_equal, given, before))
    for means in (first, second):
        assert means["half"].dtype == numpy.bfloat16 and (means["half"] == 1.5).all()
        assert type(means["numpy"]) is np.ndarray and (means["numpy"] == 5).all() and means["none"] is None
        assert isinstance(means["wide"][0], jax().Array) and np.array_equal(means["wide"][0], np.arange(4) / 2)
    assert not np.shares_memory(first["numpy"], second["numpy"])
    assert transformation.update({}, state) == ({}, state)


@on_ranks("arrays", n=2, mpi=True)
def test_steps_in_a_scan_and_several_optimizers_find_their_own(hk, world):
    """Two optimizers of the same shapes in one compiled step, and steps in a loop of JAX's."""
    import optax

    both = [optax.chain(hk.average(world), optax.sgd(rate)) for rate in (1.0, 0.5)]
    weights = [jax().numpy.zeros(3), jax().numpy.zeros(3)]
    slots = [optimizer.init(one) for optimizer, one in zip(both, weights, strict=True)]

    def turn(carried, number):
        weights, slots = carried
        for place, optimizer in enumerate(both):
            gradient = jax().numpy.full(3, (number + world.rank) * 10.0**place)
            updates, slots[place] = optimizer.update(gradient, slots[place])
            weights[place] = optax.apply_updates(weights[place], updates)
        return (weights, slots), None

    (weights, _), _ = jax().jit(lambda carried: jax().lax.scan(turn, carried, jax().numpy.arange(5.0)))(
        (weights, slots)
    )
    total = sum(number + 0.5 for number in range(5))
    np.testing.assert_allclose(weights[0], -total)
    np.testing.assert_allclose(weights[1], -5 * total)


@on_ranks("arrays", n=2, mpi=True)
def test_a_loader_knows_its_place_from_compiled_steps(hk, world):
    import optax

    optimizer = optax.chain(hk.average(world), optax.sgd(0.1))
    weights = jax().numpy.zeros(2)
    step = jax().jit(lambda weights, x: optax.apply_updates(weights, optimizer.update(x.mean(0), optimizer.init(x))[0]))
    loader = hk.shard(np.arange(32.0).reshape(16, 2), world, 2)
    for number, (x,) in enumerate(loader):
        weights = step(weights, x)
        if number == 2:
            break
    reached = loader.position
    assert (reached.epoch, reached.samples) == (0, 12), (reached, loader.epoch)


@pytest.mark.parametrize("compiled", [True, False])
@on_ranks("arrays", n=2, mpi=True, fresh=True)
def test_other_gradients_on_another_rank_are_an_error_on_all(hk, world, compiled):
    transformation = hk.average(world)
    update = jax().jit(transformation.update) if compiled else transformation.update
    given = {"w": np.zeros(3 + world.rank)}
    kind = Exception if compiled else __import__("hvdkit").AgreementError
    with pytest.raises(kind, match=r"the ranks hold different models: .*\['w'\] float64 \([34],\)"):
        jax().block_until_ready(update(given, transformation.init(given)))


def leaves_a_step_out(compiled, ends):
    """Rank 1 leaves its third step out, and then asks all for an agreement, or comes to its end."""
    import jax

    import hvdkit.arrays as hk

    world = hk.init()
    transformation = hk.average(world)
    update = jax.jit(transformation.update) if compiled else transformation.update
    for number in range(3):
        if world.rank == 0 or number < 2:
            update({"w": np.ones(3)}, transformation.init(None))
    if not ends:
        hk.check_agreement(np.zeros(2), world)


@pytest.mark.parallel
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_rank_that_leaves_a_step_out_ends_the_job_with_one_sentence(run_ranks, compiled, ends):
    (stderr,) = run_ranks(leaves_a_step_out, 2, compiled=compiled, ends=ends, fails=True)
    said = {line for line in stderr.splitlines() if line.startswith("hvdkit: ")}
    short = "hvdkit: rank 1 made one allreduce of gradients fewer than rank 0, 2 and not 3"
    assert len(said) == 1 and said.pop().startswith("hvdkit: rank 1 ended, and rank 0 waits" if ends else short), stderr


@on_ranks("arrays", n=2, mpi=True, fresh=True)
def test_steps_in_another_order_are_an_error_on_all(hk, world):
    """Two models, both known; in a later step rank 1 begins with the one with which rank 0 ends."""
    update = hk.average(world).update
    few, many = {"w": np.ones(3)}, {"w": np.ones(100)}
    for gradients in (few, many):
        update(gradients, None)
    with pytest.raises(__import__("hvdkit").AgreementError, match="hold different models"):
        update(many if world.rank else few, None)
    assert (update(few, None)[0]["w"] == 1).all()


@on_ranks("arrays", n=1)
def test_alone_gradients_stay_as_they_are(hk, world):
    transformation = hk.average(world)
    given = {"w": jax().numpy.arange(3.0)}
    assert transformation.update(given, transformation.init(given))[0]["w"] is given["w"]


def of_the_page(hk, world):
    (program,) = blocks("arrays.md")["In a chain of optax"]
    return np.asarray(run(program, {"__name__": "__main__"})["weights"])


@on_ranks("arrays", n=2, mpi=True)
def test_the_program_of_the_page_trains_alike_on_all_ranks(hk, world, everyone):
    found = everyone(of_the_page(hk, world))
    assert np.array_equal(found[0], found[1]) and 1.5 < np.abs(found[0]).max() < 7
