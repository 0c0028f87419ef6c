"""Checks of Python, the frameworks and Keras."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdkit.prepare.doctor.facts import FRAMEWORKS, PACKAGES, DoctorFacts, Failure, Package
from hvdkit.prepare.doctor.finding import Found, error, info, warning

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
_TRUE = ("1", "true", "True")  # the values that TensorFlow takes for yes


def something_to_train_with(facts: DoctorFacts) -> Iterator[Found]:
    """A Python that hvdkit is tested on, and a framework."""
    major, minor = (int(number) for number in facts.python.split(".")[:2])
    if not _OLDEST_PYTHON <= (major, minor) <= _NEWEST_PYTHON:
        yield warning(
            "python",
            f"Python {facts.python} is outside 3.11 to 3.13.",
            "Horovod 0.28.1 and hvdkit's changes to it are made for these versions; others may not build or run.",
            "Make an environment with Python 3.11, 3.12 or 3.13 and install the framework and hvdkit there.",
        )
    if not any(facts.packages[name].present for name in FRAMEWORKS):
        yield error(
            "no-framework",
            f"Neither PyTorch nor TensorFlow is installed in {facts.prefix}.",
            "Horovod distributes the training of one of them and is built against it.",
            "Install one, then build Horovod: 'pip install torch' or 'pip install tensorflow', then 'hvdkit install'.",
        )


def import_fails(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """A package that is installed and cannot be imported."""
    package = facts.packages[name]
    if package.failure and not (name == "keras" and _backend_is_missing(facts)):
        yield Found(
            f"import-{name}",
            "error" if name in FRAMEWORKS or name == "keras" else "warning",
            f"{PACKAGES[name]} is installed and its import fails: {package.failure.message}.",
            f"It was found at {package.location}. A script that imports {name} stops the same way.",
            import_fix(facts, package),
        )


def import_fix(facts: DoctorFacts, package: Package) -> str:
    """What to do about a package that cannot be imported, from what its import said."""
    failure = package.failure
    if failure and failure.how == "timeout":
        longer = f"hvdkit doctor --timeout {5 * facts.seconds_allowed:g}"
        return f"Try 'python -c \"import {package.name}\"'; if it is only slow: '{longer}'."
    missing = missing_module(failure)
    if missing and missing != package.name:
        return f"Install what it needs: 'pip install {missing}'."
    version = (package.distribution_version or "").partition("+")[0]
    wanted = f"{package.distribution or package.name}=={version}" if version else package.name
    reinstall = f"Reinstall it: 'pip install --force-reinstall {wanted}'"
    if package.location and not package.location.startswith(facts.prefix):
        return f"If {package.location} is not meant to be used, take it out of PYTHONPATH; else: {reinstall}."
    return reinstall + "."


def missing_module(failure: Failure | None) -> str | None:
    """The package whose absence made an import fail, None for another reason."""
    found = re.search(r"No module named '([\w-]+)", failure.message + failure.detail) if failure else None
    return found.group(1) if found else None


def two_versions(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """A package whose modules and metadata disagree: replaced by half, or shadowed."""
    package = facts.packages[name]
    version, said = package.version, package.distribution_version
    if version is not None and said is not None and public(version) != public(said):
        yield warning(
            f"two-versions-{name}",
            f"{PACKAGES[name]} says it is {version}, its package metadata says {said}.",
            f"It is imported from {package.location}; files of two versions are mixed, or PYTHONPATH hides one of "
            "them.",
            import_fix(facts, package),
        )


def public(version: str) -> str:
    """A version without its local part, the same for TensorFlow's "2.21.0-rc1" and pip's "2.21.0rc1"."""
    return version.partition("+")[0].replace("-", "")


def keras(facts: DoctorFacts) -> Iterator[Found]:
    """Keras without the framework that it computes with, or another Keras asked for than there is."""
    if _backend_is_missing(facts):
        yield warning(
            "keras-backend",
            f"Keras is installed and its backend {missing_module(facts.packages['keras'].failure)} is not.",
            "Keras computes with TensorFlow unless KERAS_BACKEND or ~/.keras/keras.json names another framework.",
            "Set KERAS_BACKEND to a framework that is here (torch, jax, tensorflow), or 'pip install tensorflow'.",
        )
    if facts.tensorflow_keras_failure and lacks_legacy_keras(facts):
        yield error(
            "legacy-keras",
            f"TF_USE_LEGACY_KERAS is set and tf.keras cannot be loaded: {facts.tensorflow_keras_failure.message}.",
            "With this variable TensorFlow takes Keras 2 from the package tf_keras; every use of tf.keras stops, and "
            "'import horovod.tensorflow' with it.",
            "'pip install tf_keras' in TensorFlow's own version, or unset TF_USE_LEGACY_KERAS.",
        )


def _backend_is_missing(facts: DoctorFacts) -> bool:
    missing = missing_module(facts.packages["keras"].failure)
    return missing in ("tensorflow", "torch", "jax") and not facts.packages[missing].present


def lacks_legacy_keras(facts: DoctorFacts) -> bool:
    """Whether TF_USE_LEGACY_KERAS asks for tf_keras, and it cannot be loaded."""
    return facts.environ.get("TF_USE_LEGACY_KERAS") in _TRUE and facts.tensorflow_keras_failure is not None


def horovod_on_keras3(facts: DoctorFacts) -> Iterator[Found]:
    """Horovod's own Keras API averages nothing on Keras 3."""
    extension = facts.extensions.get("tensorflow")
    if extension and extension.loaded and (facts.tensorflow_keras or "").startswith("3."):
        yield info(
            "horovod-on-keras-3",
            f"Horovod's own Keras API (horovod.keras, horovod.tensorflow.keras) does not work on Keras "
            f"{facts.tensorflow_keras}.",
            "Its DistributedOptimizer raises no error and averages no gradients: every process trains a model of its "
            "own.",
            "Use hvdkit.keras in its place; or Keras 2: 'pip install tf_keras' and TF_USE_LEGACY_KERAS=1.",
        )
