"""What the Python blocks of docs/*.md begin with and what is true after them; contracts/test_pages.py reads this, too.

The blocks of schedules.md and migrate.md have tests of their own, ``test_schedules.py`` and ``test_migrate.py``.
"""

import functools
import itertools
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SAMPLES, FEATURES, CLASSES, BATCH, TOKENS = 8, 4, 3, 2, 5
OF_THEIR_OWN = ("libraries.md", "schedules.md", "migrate.md", "ray_spark.md")


class Place(NamedTuple):
    """A block: the page, the heading that it stands under, and its number there."""

    page: str
    heading: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.page} {self.heading} {self.number}"


class Block(NamedTuple):
    """``names``: what the page has made before, ``name`` or ``name=what``, of ``Shelf``; ``after``: true at the end."""

    names: str
    after: str


GRADIENTS = "all(one.grad is not None for one in model.parameters())"
TORCH = {
    Place("agreement.md", "Weighted loss"): Block("hk world nn model train_set", GRADIENTS),
    Place("agreement.md", "Tokens, pixels, class weights (PyTorch)"): Block(
        "hk world nn model=tagger texts=tagged", GRADIENTS
    ),
    Place("agreement.md", "Tokens, pixels, class weights (PyTorch)", 1): Block(
        "hk world model=speaker batch", GRADIENTS
    ),
    Place("agreement.md", "Evaluation"): Block(
        "hk world everyone model test_set=train_set",
        "len(set(everyone(accuracy))) == 1 and sum(everyone(samples)) == len(test_set)",
    ),
    Place("agreement.md", "check_agreement"): Block(
        "hk world model optimizer", "[check.step() for _ in range(99)] == [None] * 99"
    ),
    Place("bench.md", "Recording the steps"): Block("hk loader", "x.shape == (2, 4)"),
    Place("checkpoints.md", "Checkpoints, and going on where a training stopped"): Block(
        "hk model optimizer loader=one_batch schedule epochs step accuracy",
        "saved is None and checkpoints.restore(model, optimizer, loader=loader, schedule=schedule).step == step",
    ),
    Place("checkpoints.md", "What else belongs to a training (PyTorch)"): Block(
        "ema scaler schedule checkpoints model optimizer step loader",
        "saved.step == step and sorted(saved.extra) == ['ema', 'scaler', 'schedule']",
    ),
    Place("datasets.md", "HDF5"): Block("hk world train_h5", "[x.shape for x, y in loader] == [(32, 4)]"),
    Place("edge_cases.md", "PyTorch: data in a program of several ranks"): Block(
        "torch itertools hk world everyone all_lines",
        "sorted(sum(everyone(torch.cat(list(hk.shard(Lines(), world, 2))).tolist()), [])) == list(range(8))",
    ),
    Place("one_process.md", "PyTorch: contrastive losses"): Block(
        "hk torch F=functional world loader=views model optimizer", GRADIENTS
    ),
    Place("shard_state.md", "The optimizer's state, divided"): Block(
        "torch hk world everyone model",
        "everyone(len(optimizer.state)) == [0, 0] and hasattr(optimizer, '_hvdkit_sharded')",
    ),
    Place("shard_state.md", "Checkpoints"): Block(
        "hk world everyone model optimizer=divided",
        "everyone(0) and {'optimizer.safetensors', 'model.safetensors'} <= {one.name for one in Path().iterdir()}",
    ),
    Place("elastic.md", "Elastic trainings"): Block("hk epochs make", "state.step == len(loader) == 2"),
    Place("emulate.md", "The tutorial's network"): Block(
        "torch", "Classifier()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)"
    ),
    Place("failures.md", "The same inside a script"): Block(
        "world loader train=train_batch", "not Path('stacks').exists()"
    ),
    Place("monitor.md", "Seeing a run while it trains"): Block(
        "hk world epochs loader optimizer loss accuracy", "Path('runs/digits/metrics.jsonl').stat().st_size > 0"
    ),
    Place("quickstart.md", "PyTorch"): Block(
        "Net SummaryWriter train_set=images valid_set=images epochs",
        "loader.epoch == 1 and checkpoints.best().score == means['accuracy'] and (writer is None) != world.is_root",
    ),
    Place("profile.md", "Profiles"): Block("hk loader=many", "len(list(Path('profile').glob('trace-*-of-2*'))) == 2"),
    Place("slow_networks.md", "every: weights instead of gradients"): Block(
        "hk torch world model", "hk.check_agreement(model, None, world) is None and optimizer.state == {}"
    ),
}
"""On two ranks of PyTorch."""

QUICKSTART = {name: Place("quickstart.md", name) for name in ("TensorFlow", "Keras")}
KERAS = {
    Place("bench.md", "Recording the steps", 1): Block("hk model data epochs", "model.optimizer.iterations == 2"),
    Place("elastic.md", "Elastic trainings", 1): Block(
        "hk model optimizer data epochs", "state.world.size == 2 and optimizer.iterations == 2"
    ),
    QUICKSTART["Keras"]: Block(
        "make_model x_train y_train x_valid=x_train y_valid=y_train epochs",
        "len(history.history['val_accuracy']) == 1 and optimizer.iterations == 2",
    ),
}
"""On two ranks of Keras."""

ARRAYS = Place("arrays.md", "Any framework of arrays: hvdkit.arrays")
OPTAX = Place("arrays.md", "In a chain of optax")
"""Run by test_arrays_average.py."""
SHARDED = [Place("arrays.md", "An optimizer's state on all ranks together", number) for number in range(2)]
"""Run by test_arrays_shard_state.py."""
RECORDED = [
    Place("timeline.md", "Record some steps"),
    Place("timeline.md", "Merge"),
    Place("timeline.md", "Merge", 1),
]
"""One after the other: each reads what those before have recorded."""

READ = {
    Place("timeline.md", "In Python"): "summary.steps.duration.p50 > 0 and Path('report.html').stat().st_size > 10_000",
}
"""Without ranks, of a public timeline."""

TARGETS = Place("agreement.md", "Tokens, pixels (TensorFlow)")
"""On ranks of TensorFlow, by ``test_tensorflow_optimizers.py``."""

LOOP = {
    QUICKSTART["TensorFlow"]: Block(
        "make_model x_train y_train x_valid=x_train y_valid=y_train epochs",
        "optimizer.iterations == steps == 2 and samples == 64 and checkpoints.best().score == means['accuracy']",
    ),
}
"""On two ranks of TensorFlow."""

TRAINED = Place("use_model.md", "Using the trained model")
"""On one rank of PyTorch."""

PROGRAM = Place("launch.md", "From Python")
"""A whole program."""
RUN = [*TORCH, *KERAS, ARRAYS, OPTAX, *SHARDED, *RECORDED, *READ, TARGETS, *LOOP, TRAINED, PROGRAM]


def names_of(block: Block, shelf: Any) -> dict[str, Any]:
    """What the block begins with, made when it is named."""
    pairs = [word.partition("=") for word in block.names.split()]
    return {name: getattr(shelf, what or name) for name, _, what in pairs}


class Shelf:
    """The smallest of each kind, for PyTorch."""

    itertools = itertools
    epochs, step, accuracy, loss = 1, 1, 0.5, 1.0

    def __init__(self, hk: Any, world: Any, everyone: Any) -> None:
        import torch

        torch.manual_seed(0)
        self.torch, self.nn, self.functional = torch, torch.nn, torch.nn.functional
        self.hk, self.world, self.everyone = hk, world, everyone

    def pairs(self, number: int) -> Any:
        x, y = self.torch.randn(number, FEATURES), self.torch.randint(CLASSES, (number,))
        return self.torch.utils.data.TensorDataset(x, y)

    def shard(self, number: int) -> Any:
        return self.hk.shard(self.pairs(number), self.world, BATCH)

    @functools.cached_property
    def train_set(self) -> Any:
        return self.pairs(SAMPLES)

    @functools.cached_property
    def images(self) -> Any:
        return self.pairs(128)

    def Net(self) -> Any:  # noqa: N802  # the page's name of a class
        layers = self.nn.Linear(FEATURES, 8), self.nn.BatchNorm1d(8), self.nn.Dropout(0.1), self.nn.Linear(8, CLASSES)
        return self.nn.Sequential(*layers)

    class SummaryWriter:
        """In place of TensorBoard's, which imports TensorFlow."""

        def __init__(self, directory: str) -> None:
            self.directory = directory

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert step == 0 and value >= 0 and name in ("accuracy", "loss")

    @functools.cached_property
    def model(self) -> Any:
        return self.nn.Linear(FEATURES, CLASSES)

    @functools.cached_property
    def optimizer(self) -> Any:
        optimizer = self.torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.hk.distribute(optimizer, self.model)
        self.hk.broadcast_state(self.model, optimizer)
        return optimizer

    @functools.cached_property
    def divided(self) -> Any:
        optimizer = self.torch.optim.AdamW(self.model.parameters())
        self.hk.distribute(optimizer, self.model, shard_state=True)
        self.hk.broadcast_state(self.model, optimizer)
        self.model(self.torch.ones(1, FEATURES)).sum().backward()
        optimizer.step()
        return optimizer

    @functools.cached_property
    def loader(self) -> Any:
        return self.shard(SAMPLES)

    @functools.cached_property
    def views(self) -> Any:
        first = self.torch.randn(SAMPLES, FEATURES)
        return self.hk.shard(self.torch.utils.data.TensorDataset(first, -first), self.world, BATCH)

    @functools.cached_property
    def one_batch(self) -> Any:
        return self.shard(BATCH * self.world.size)

    @functools.cached_property
    def many(self) -> Any:
        """As many as ``hk.profile`` of the page waits for and records, and some more."""
        return self.shard(20 * BATCH * self.world.size)

    @functools.cached_property
    def schedule(self) -> Any:
        return self.hk.warmup(self.optimizer, self.world, len(self.loader), epochs=1)

    @functools.cached_property
    def checkpoints(self) -> Any:
        return self.hk.Checkpoints("runs")

    @functools.cached_property
    def ema(self) -> Any:
        return self.torch.optim.swa_utils.AveragedModel(self.model)

    @functools.cached_property
    def scaler(self) -> Any:
        return self.torch.amp.GradScaler("cpu")

    @functools.cached_property
    def tagger(self) -> Any:
        return self.nn.Sequential(self.nn.Embedding(10, FEATURES), self.nn.Linear(FEATURES, CLASSES))

    @functools.cached_property
    def tagged(self) -> list[dict[str, Any]]:
        labels = self.torch.tensor([[0, 1, 2, -100, -100]])
        return [{"ids": self.torch.arange(TOKENS), "labels": label} for label in labels.repeat(SAMPLES, 1)]

    @functools.cached_property
    def speaker(self) -> Any:
        """A model that returns its own loss, as those of the transformers library do."""

        class Speaker(self.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self, tagger: Any, loss_of: Any) -> None:
                super().__init__()
                self.tagger, self.loss_of = tagger, loss_of

            def forward(self, ids: Any, labels: Any) -> Any:
                scores = self.tagger(ids)[:, :-1].transpose(1, 2)
                return types.SimpleNamespace(loss=self.loss_of(scores, labels[:, 1:]))

        return Speaker(self.tagger, self.nn.CrossEntropyLoss())

    @functools.cached_property
    def batch(self) -> dict[str, Any]:
        return self.torch.utils.data.default_collate(self.tagged[: 1 + self.world.rank])

    @functools.cached_property
    def train_h5(self) -> str:
        from hvdkit.datasets import write_hdf5

        if self.world.is_root:
            x, y = self.torch.randn(64, FEATURES), self.torch.randint(CLASSES, (64,))
            write_hdf5("train.h5", {"x": x.numpy(), "y": y.numpy()})
        self.everyone(None)
        return "train.h5"

    def all_lines(self) -> Iterator[int]:
        return iter(range(SAMPLES))

    def make(self, world: Any) -> Any:
        assert world.size == self.world.size
        return self.model, self.optimizer, self.loader, self.schedule

    def train(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        self.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def train_batch(self, batch: Any) -> None:
        self.train(*batch)


class QuickShelf:
    """Data and a model, for Keras and TensorFlow."""

    epochs = 1

    def __init__(self) -> None:
        import numpy as np

        self.x_train = np.random.default_rng(0).normal(size=(128, FEATURES)).astype("float32")
        self.y_train = np.arange(128) % CLASSES

    def make_model(self) -> Any:
        import keras

        return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])


class KerasShelf(QuickShelf):
    """The smallest of each kind, for Keras."""

    def __init__(self, hk: Any, world: Any) -> None:
        import keras
        import numpy as np

        super().__init__()
        x = np.ones((SAMPLES, FEATURES), "float32")
        self.hk, self.model = hk, keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        self.optimizer = hk.distribute(keras.optimizers.SGD(0.1))
        self.model.compile(self.optimizer, "mse")
        hk.broadcast_state(self.model, self.optimizer)
        self.data = hk.shard((x, x[:, :1]), world, BATCH)


def arrays_begin() -> dict[str, Any]:
    """For hvdkit.arrays: a linear regression in NumPy."""
    import numpy as np

    generator = np.random.default_rng(int(os.environ["OMPI_COMM_WORLD_RANK"]))  # broadcast_state makes them the root's
    x = np.ones((256, FEATURES), "float32")

    def gradients_of(parameters: Any, x: Any, y: Any) -> Any:
        return {"w": 2 * x.T @ (x @ parameters["w"] - y) / len(x)}

    parameters = {"w": generator.normal(size=(FEATURES, 1)).astype("float32")}
    slots = {"w": np.zeros((FEATURES, 1), "float32")}
    return {"parameters": parameters, "slots": slots, "x": x, "y": x[:, :1], "gradients_of": gradients_of}


def true_after(after: str, names: dict[str, Any]) -> bool:
    return bool(eval(after, {**names, "Path": Path}))  # noqa: S307  # the table above
