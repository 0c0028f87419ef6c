"""What makes Horovod fast beside binding and threads: its own settings, from the user, a tuned file, or as they are."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.run.launch.model import Request, Setting

_AS_THEY_ARE = {
    "HOROVOD_CYCLE_TIME": "1 ms: every cycle Horovod negotiates what is ready; shorter helps models of a few "
    "milliseconds per step, longer fuses more and leaves the cores alone",
    "HOROVOD_FUSION_THRESHOLD": "134217728 bytes (128 MiB): what is ready in one cycle is one allreduce up to here; "
    "hvdkit.torch sets 4194304, so that its buckets are not copied together",
    "HOROVOD_CACHE_CAPACITY": "1024 tensors: known ones are negotiated by a bit each; 0 makes each step as slow as the "
    "first, and the timeline say which rank was late",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "off: it pays with NCCL over several hosts of several GPUs each",
}
"""Horovod 0.28.1's defaults (``horovod/common/operations.cc``), and what each is for."""
_BYTES_OF_A_MISTAKE = 64 * 1024
"""A fusion buffer below this holds not even one small layer: most likely a number of MiB."""


def settings(request: Request, name: str, environ: Mapping[str, str]) -> list[Setting]:
    """Every setting with its reason; a variable that the user has set stays, a tuned file or an option wins over it."""
    chosen = [_controller(name)]
    variables = request.tuned.variables()
    for variable, value in variables.items():
        chosen.append(Setting(_source(request, variable), variables={variable: value}))
    for variable, what in _AS_THEY_ARE.items():
        if variable in variables or variable in request.variables:
            continue
        if environ.get(variable):
            chosen.append(Setting(f"{variable}={environ[variable]} stays as you set it"))
        else:
            chosen.append(Setting(f"{variable} stays unset, {what}"))
    return chosen


def _source(request: Request, variable: str) -> str:
    given = request.options.get(variable)
    return given if given is not None else f"--tuned: {request.tuned_source}"


def _controller(name: str) -> Setting:
    if name == "mpirun":
        return Setting("ranks negotiate over MPI, which takes microseconds where Gloo takes a tenth of a millisecond")
    if name == "horovodrun":
        return Setting("ranks negotiate and allreduce over Gloo, Horovod's own transport")
    return Setting("ranks negotiate over MPI where the launcher's MPI is Horovod's, else over Gloo")


def notes(request: Request, environ: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for a fusion threshold that is most likely in the wrong unit."""
    value = {**environ, **request.tuned.variables(), **request.variables}.get("HOROVOD_FUSION_THRESHOLD", "")
    try:
        number = float(value)
    except ValueError:
        return ()
    if number == 0 or number >= _BYTES_OF_A_MISTAKE:
        return ()
    return (
        f"HOROVOD_FUSION_THRESHOLD={value} is {int(number)} bytes, so that nothing is fused; if {value} are the MiB of "
        f"an autotune log, use --fusion-threshold-mb {value}, or --tuned with the log.",
    )
