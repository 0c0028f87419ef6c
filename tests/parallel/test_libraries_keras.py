"""KerasTuner and keras-hub: n ranks train as one process on the global batch; docs/libraries.md's programs."""

from typing import Any

import pytest
from pages import blocks, run
from ranks import needs, on_ranks

GLOBAL_BATCH, SAMPLES, TOKENS, LENGTH = 12, 36, 40, 8


def regression(samples: int) -> Any:
    import numpy as np

    x = np.random.default_rng(samples).normal(size=(samples, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def search(kind: str, hk: Any = None, world: Any = None) -> dict[str, Any]:
    """Hyperparameters and score of each trial, and the best model's weights."""
    import keras
    import keras_tuner

    hk = hk or __import__("hvdkit.keras").keras
    world = world or hk.init()

    def build(hp: Any) -> Any:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(hp.Int("units", 2, 8), activation="tanh")
        model = keras.Sequential([keras.layers.Input((4,)), hidden, keras.layers.Dense(1)])
        rate = hp.Float("rate", 0.01, 0.3, sampling="log")
        model.compile(hk.distribute(keras.optimizers.SGD(rate)), "mse")
        return model

    sizes = {"max_epochs": 3} if kind == "Hyperband" else {"max_trials": 3}
    directory = f"{kind}/{world.rank}-of-{world.size}"
    tuner = getattr(keras_tuner, kind)(build, "val_loss", seed=1, directory=directory, overwrite=True, **sizes)
    train, test = (hk.shard(regression(n), world, GLOBAL_BATCH // world.size) for n in (SAMPLES, GLOBAL_BATCH))
    tuner.search(train, validation_data=test, epochs=2, callbacks=[hk.BroadcastState()], verbose=0)
    trials = {name: (one.hyperparameters.values, one.score) for name, one in tuner.oracle.trials.items()}
    return {"trials": trials, "best": [weight.tolist() for weight in tuner.get_best_models()[0].get_weights()]}


@needs("keras_tuner")
@pytest.mark.parametrize("kind", ["RandomSearch", "BayesianOptimization", "Hyperband"])
@on_ranks("keras", n=3, smoke=("keras-torch",))
def test_all_ranks_search_as_one_process(hk, world, everyone, alone, tmp_path, kind):
    import numpy as np

    found, expected = search(kind, hk, world), alone(search, kind=kind)
    assert everyone(found) == [found] * world.size
    assert len(found["trials"]) >= 3 and found["trials"].keys() == expected["trials"].keys()
    for name, (values, score) in expected["trials"].items():
        assert found["trials"][name] == (values, pytest.approx(score, rel=1e-5))
    for mine, whole in zip(found["best"], expected["best"], strict=True):
        np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-6)


def text_model(kind: str) -> Any:
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "dropout": 0.0}
    sizes |= {"vocabulary_size": TOKENS, "max_sequence_length": LENGTH}
    if kind == "classifier":
        backbone = keras_hub.models.BertBackbone(**sizes)
        return keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0)
    return keras_hub.models.GPT2CausalLM(keras_hub.models.GPT2Backbone(**sizes))


def trained(kind: str, hk: Any = None, world: Any = None) -> list[Any]:
    """Weights after two epochs, and what ``evaluate`` says."""
    import keras
    import numpy as np

    hk = hk or __import__("hvdkit.keras").keras
    world = world or hk.init()
    ids = np.random.default_rng(0).integers(1, TOKENS, (SAMPLES, LENGTH))
    x = {"token_ids": ids, "padding_mask": np.arange(LENGTH) < 4 + np.arange(SAMPLES)[:, None] % 5}
    if kind == "classifier":
        x["segment_ids"] = np.zeros_like(ids)
    y = ids[:, 0] % 3 if kind == "classifier" else np.roll(ids, -1, axis=1)
    model = text_model(kind)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hk.distribute(keras.optimizers.SGD(0.5)), loss, weighted_metrics=["accuracy"])
    data = hk.shard((x, y), world, GLOBAL_BATCH // world.size)
    keras.Model.fit(model, data, epochs=2, callbacks=[hk.BroadcastState()], verbose=0)
    results = keras.Model.evaluate(model, data, verbose=0, return_dict=True)
    return [*model.get_weights(), *(results[name] for name in sorted(results))]


@needs("keras_hub")
@pytest.mark.parametrize("kind", ["classifier", "language"])
@on_ranks("keras", n=2, smoke=("keras-torch",))
def test_a_model_of_keras_hub_trains_as_in_one_process(hk, world, alone, kind):
    import numpy as np

    found, expected = trained(kind, hk, world), alone(trained, kind=kind)
    initial = text_model(kind).get_weights()
    assert max(np.abs(after - before).max() for after, before in zip(found, initial, strict=False)) > 0.01
    for mine, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, whole, rtol=0, atol=2e-6)


@needs("keras_tuner", "keras_hub")
@on_ranks("keras", n=2)
def test_the_programs_of_the_page_run(everyone, tmp_path):
    import numpy as np

    (code,) = blocks("libraries.md")["KerasTuner"]
    names = run(code, {"train_set": regression(24), "test_set": regression(12)})
    weights = [weight.tolist() for weight in names["model"].get_weights()]
    assert everyone(weights) == [weights] * 2 and len(names["tuner"].oracle.trials) == 2

    (code,) = blocks("libraries.md")["keras-hub"]
    names = run(code, {"texts": ["a good film", "a bad film"] * 4, "labels": np.array([1, 0] * 4)})
    weights = [weight.tolist() for weight in names["model"].get_weights()]
    assert everyone(weights) == [weights] * 2 and names["model"].optimizer.iterations == 4
