"""The examples of examples/pytorch, run in a rank as a user would."""

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"


def example(script: str, flags: list[str]) -> dict[str, Any]:
    """An example of the repository, run as a user would: its exit status and what it printed."""
    path = EXAMPLES / script
    printed, said = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "argv", [str(path), *flags]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
            status: Any = None
        except SystemExit as end:
            status = end.code
    return {"status": status, "lines": printed.getvalue().splitlines(), "said": said.getvalue()}


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """Several examples in one process: the process group of the first one serves all, to the end."""
    import torch.distributed as dist

    import hvdkit.torch as hk

    start, started = hk.init_process_group, []

    def once(*backend: str) -> Any:
        if not started:
            started.append(start(*backend))
        return started[0]

    with mock.patch.object(hk, "init_process_group", once), mock.patch.object(dist, "destroy_process_group"):
        yield
