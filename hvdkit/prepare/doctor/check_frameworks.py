"""Checks of Python, the frameworks and Keras."""

from __future__ import annotations

import re

from hvdkit.prepare.doctor.facts import FRAMEWORKS, PACKAGES, DoctorFacts, Failure, Package
from hvdkit.prepare.doctor.finding import Finding

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
_TRUE = ("1", "true", "True")  # the values that TensorFlow takes for yes


def python_version(facts: DoctorFacts) -> Finding | None:
    """A Python that hvdkit is not tested on."""
    major, minor = (int(number) for number in facts.python.split(".")[:2])
    if _OLDEST_PYTHON <= (major, minor) <= _NEWEST_PYTHON:
        return None
    return Finding(
        "warning",
        f"Python {facts.python} is outside 3.11 to 3.13.",
        "Horovod 0.28.1 and hvdkit's changes to it are made for these versions; others may not build or run.",
        "Make an environment with Python 3.11, 3.12 or 3.13 and install the framework and hvdkit there.",
    )


def no_framework(facts: DoctorFacts) -> Finding | None:
    """Neither PyTorch nor TensorFlow: nothing to train with."""
    if any(facts.packages[name].present for name in FRAMEWORKS):
        return None
    return Finding(
        "error",
        f"Neither PyTorch nor TensorFlow is installed in {facts.prefix}.",
        "Horovod distributes the training of one of them and is built against it.",
        "Install one, then build Horovod: 'pip install torch' or 'pip install tensorflow', then 'hvdkit install'.",
    )


def import_fails(facts: DoctorFacts, name: str) -> Finding | None:
    """A package that is installed and cannot be imported."""
    package = facts.packages[name]
    if package.failure is None or (name == "keras" and _backend_is_missing(facts)):
        return None
    where = f"It was found at {package.location}. "
    return Finding(
        "error" if name in FRAMEWORKS or name == "keras" else "warning",
        f"{PACKAGES[name]} is installed and its import fails: {package.failure.message}.",
        where + f"A script that imports {name} stops the same way.",
        import_fix(facts, package),
    )


def import_fix(facts: DoctorFacts, package: Package) -> str:
    """What to do about a package that cannot be imported, from what its import said."""
    failure = package.failure
    if failure and failure.how == "timeout":
        longer = f"hvdkit doctor --timeout {5 * facts.seconds_allowed:g}"
        return f"Try 'python -c \"import {package.name}\"'; if it is only slow: '{longer}'."
    missing = missing_module(failure) if failure else None
    if missing and missing != package.name:
        return f"Install what it needs: 'pip install {missing}'."
    version = (package.distribution_version or "").partition("+")[0]
    wanted = f"{package.distribution or package.name}=={version}" if version else package.name
    reinstall = f"Reinstall it: 'pip install --force-reinstall {wanted}'"
    if package.location and not package.location.startswith(facts.prefix):
        return f"If {package.location} is not meant to be used, take it out of PYTHONPATH; else: {reinstall}."
    return reinstall + "."


def missing_module(failure: Failure) -> str | None:
    """The package whose absence made an import fail, None for another reason."""
    found = re.search(r"No module named '([\w-]+)", failure.message + failure.detail)
    return found.group(1) if found else None


def two_versions(facts: DoctorFacts, name: str) -> Finding | None:
    """A package whose modules and metadata disagree: replaced by half, or shadowed."""
    package = facts.packages[name]
    if package.version is None or package.distribution_version is None:
        return None
    if public(package.version) == public(package.distribution_version):
        return None
    display = PACKAGES[name]
    return Finding(
        "warning",
        f"{display} says it is {package.version}, its package metadata says {package.distribution_version}.",
        f"It is imported from {package.location}; files of two versions are mixed, or PYTHONPATH hides one of them.",
        import_fix(facts, package),
    )


def public(version: str) -> str:
    """A version without its local part, the same for TensorFlow's "2.21.0-rc1" and pip's "2.21.0rc1"."""
    return version.partition("+")[0].replace("-", "")


def keras_backend_missing(facts: DoctorFacts) -> Finding | None:
    """Keras without the framework that it computes with."""
    keras = facts.packages["keras"]
    if keras.failure is None or not _backend_is_missing(facts):
        return None
    backend = missing_module(keras.failure)
    return Finding(
        "warning",
        f"Keras is installed and its backend {backend} is not.",
        "Keras computes with TensorFlow unless KERAS_BACKEND or ~/.keras/keras.json names another framework.",
        "Set KERAS_BACKEND to a framework that is here (torch, jax, tensorflow), or 'pip install tensorflow'.",
    )


def _backend_is_missing(facts: DoctorFacts) -> bool:
    failure = facts.packages["keras"].failure
    missing = missing_module(failure) if failure else None
    return missing in ("tensorflow", "torch", "jax") and not facts.packages[missing].present


def legacy_keras(facts: DoctorFacts) -> Finding | None:
    """TF_USE_LEGACY_KERAS asks for tf_keras, and it cannot be loaded."""
    asked = facts.environ.get("TF_USE_LEGACY_KERAS") in _TRUE
    if not asked or facts.tensorflow_keras_failure is None:
        return None
    return Finding(
        "error",
        f"TF_USE_LEGACY_KERAS is set and tf.keras cannot be loaded: {facts.tensorflow_keras_failure.message}.",
        "With this variable TensorFlow takes Keras 2 from the package tf_keras; every use of tf.keras stops, and "
        "'import horovod.tensorflow' with it.",
        "'pip install tf_keras' in TensorFlow's own version, or unset TF_USE_LEGACY_KERAS.",
    )


def horovod_on_keras3(facts: DoctorFacts) -> Finding | None:
    """Horovod's own Keras API averages nothing on Keras 3."""
    extension = facts.extensions.get("tensorflow")
    if extension is None or not extension.loaded or not (facts.tensorflow_keras or "").startswith("3."):
        return None
    return Finding(
        "info",
        f"Horovod's own Keras API (horovod.keras, horovod.tensorflow.keras) does not work on Keras "
        f"{facts.tensorflow_keras}.",
        "Its DistributedOptimizer raises no error and averages no gradients: every process trains a model of its own.",
        "Use hvdkit.keras in its place; or Keras 2: 'pip install tf_keras' and TF_USE_LEGACY_KERAS=1.",
    )
