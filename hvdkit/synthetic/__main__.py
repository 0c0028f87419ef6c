"""``python -m hvdkit.synthetic FRAMEWORK SETTINGS``: one rank of ``hvdkit bench synthetic``, which starts it."""

from __future__ import annotations

import importlib
import json

from hvdkit.errors import InvalidArgumentError
from hvdkit.synthetic.benchmark import BenchmarkSettings, started_by


def run(framework: str, word: str) -> None:
    """Train in a framework; ``word`` is one of ``BenchmarkSettings.word``."""
    try:
        settings = BenchmarkSettings(**json.loads(word))
    except InvalidArgumentError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"expected the settings of `hvdkit bench synthetic`, got {word!r}.") from error
    importlib.import_module(f"hvdkit.{framework}")  # says what is missing, where the framework alone would only fail
    importlib.import_module(f"hvdkit.synthetic.{framework}").run(settings)


if __name__ == "__main__":
    started_by("hvdkit bench synthetic", run, 2)
