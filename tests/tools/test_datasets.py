"""`hvdkit.datasets.load` and its command line: names, numbers, the data sets that need no files."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdkit
from hvdkit.datasets import NAMES, Dataset, load
from hvdkit.datasets.__main__ import datasets, main
from hvdkit.errors import InvalidArgumentError, MissingFrameworkError

REPOSITORY = str(Path(hvdkit.__file__).parents[1])


def assert_contract(data: Dataset) -> None:
    for images, labels in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert images.dtype == np.float32
        assert images.ndim == 4
        assert images.flags.c_contiguous
        assert 0.0 <= images.min() <= images.max() <= 1.0
        assert labels.dtype == np.int64
        assert labels.shape == (len(images),)
        assert set(labels.tolist()) <= set(range(data.classes))


def test_digits_are_the_default_and_split_in_proportion_without_loss() -> None:
    from sklearn.datasets import load_digits

    data, bundled = load(), load_digits()
    assert_contract(data)
    assert (data.name, data.classes, data.x_train.max()) == ("digits", 10, 1.0)
    assert (data.x_train.shape, data.x_test.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    images = np.concatenate([data.x_train, data.x_test]).reshape(1797, 64) * 16
    labels = np.concatenate([data.y_train, data.y_test])
    rows = sorted(map(tuple, np.column_stack([images, labels]).tolist()))
    assert rows == sorted(map(tuple, np.column_stack([bundled.data, bundled.target]).tolist()))
    assert np.all(np.abs(np.bincount(data.y_test) - np.bincount(labels) * 0.2) <= 1)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_data_set_depends_on_the_seed_alone(name: str) -> None:
    first, again, other = (load(name, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.x_train, again.x_train)
    assert np.array_equal(first.y_test, again.y_test)
    assert not np.array_equal(first.x_train, other.x_train)


def test_digits_without_scikit_learn_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install 'hvdkit\[examples\]'"):
        load("digits")


@given(
    n=st.integers(1, 60),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    classes=st.integers(2, 12),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=50)
def test_synthetic_has_the_asked_shape(n: int, shape: tuple[int, int, int], classes: int, seed: int) -> None:
    data = load("synthetic", n=n, shape=shape, classes=classes, seed=seed)
    assert_contract(data)
    assert data.classes == classes
    assert data.x_train.shape == (n, *shape)
    assert len(data.x_test) == int(np.ceil(n / 4))
    counts = np.bincount(data.y_train, minlength=classes)
    assert counts.max() - counts.min() <= 1


def test_synthetic_can_be_learned() -> None:
    data = load("synthetic")
    assert data.x_train.shape == (1000, 8, 8, 1)
    centres = np.stack([data.x_train[data.y_train == label].mean(axis=0) for label in range(data.classes)])
    distances = ((data.x_test[:, None] - centres[None]) ** 2).sum(axis=(2, 3, 4))
    assert np.mean(distances.argmin(axis=1) == data.y_test) > 0.95


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"n": -1}, "n must be an integer >= 1, got -1"),
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"n": 2.5}, "n must be an integer >= 1, got 2.5"),
        ({"n": True}, "n must be an integer >= 1, got True"),
        ({"classes": 1}, "classes must be an integer >= 2, got 1"),
        ({"shape": (8, 8)}, r"shape is \(8, 8\), expected height, width and channels"),
        ({"shape": 8}, "shape is 8, expected height, width and channels"),
        ({"shape": (8, 0, 1)}, "shape must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"seed": 2**32}, "seed must be at most 4294967295, got 4294967296"),
        ({"seed": "a"}, "seed must be an integer >= 0, got 'a'"),
    ],
)
def test_wrong_numbers_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        load("synthetic", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"n": 10}, {"shape": (8, 8, 1)}, {"classes": 3}])
@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_options_of_synthetic_are_not_silently_ignored(name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="is for the data set synthetic"):
        load(name, **arguments)  # type: ignore[arg-type]


def test_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load("fashion-mnist")
    assert all(name in str(caught.value) for name in NAMES)
    assert str(caught.value).endswith("did you mean fashion_mnist?")
    with pytest.raises(InvalidArgumentError) as caught:
        load("imagenet21k")
    assert "did you mean" not in str(caught.value)


def test_command_describes_a_data_set() -> None:
    done = CliRunner().invoke(datasets, ["digits"])
    assert done.exit_code == 0, done.output
    assert "10 classes, images 8 x 8 x 1" in done.output
    assert "1437 samples" in done.output
    assert "360 samples" in done.output


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["mnsit"], 2, "did you mean mnist?"),
        ([], 2, "Missing argument 'NAME'"),
        (["digits", "--nope"], 2, "No such option"),
        (["mnist"], 2, "train-images-idx3-ubyte"),
    ],
)
def test_command_says_a_mistake_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    sentence: str,
) -> None:
    monkeypatch.setenv("HVDKIT_DATA", str(tmp_path))
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hvdkit: ")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_import_loads_no_framework() -> None:
    code = (
        "import sys, hvdkit.datasets; "
        "print([m for m in ('torch', 'tensorflow', 'keras', 'sklearn', 'horovod') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": REPOSITORY},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
