"""Asking a process that makes a model; no framework is loaded here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvdkit.errors import DataError, InvalidArgumentError


def ask(process: str, model: str, **more: Any) -> dict[str, Any]:
    """What a module answers that is run as ``python -m PROCESS QUESTION REPLY``; its prints are kept off ours.

    Args:
        process: name of the module; it writes JSON to the file REPLY.
        model: ``MODULE:FACTORY`` or ``FILE.py:FACTORY``; told apart it is part of QUESTION.
        more: the rest of QUESTION, which is JSON.
    Raises:
        InvalidArgumentError: ``model`` is something else, or what the module found wrong with it.
        DataError: it ended without an answer.
    """
    module, colon, name = model.rpartition(":")
    if not (colon and module and name):
        raise InvalidArgumentError(
            f"--model is {model!r}; expected MODULE:FACTORY or FILE.py:FACTORY, such as nets:Classifier."
        )
    question = {"module": module, "factory": name, **more}
    with tempfile.TemporaryDirectory() as folder:
        reply = Path(folder) / "reply.json"
        done = subprocess.run(
            [sys.executable, "-m", process, json.dumps(question), str(reply)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
        )
        try:
            answer: dict[str, Any] = json.loads(reply.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise DataError(
                f"The process that makes the model ended with status {done.returncode} and no answer: {last[:300]}"
            ) from error
    if "error" in answer:
        raise InvalidArgumentError(f"--model {model}: {answer['error']}")
    return answer
