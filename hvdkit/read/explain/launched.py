"""How ``hvdkit launch --explain-job`` started a job, for who explains it."""

from __future__ import annotations

from hvdkit.common.json_files import Document, Positive

NAME = "launch.json"
"""The file in the directory of a job."""


class JobLaunch(Document, frozen=True):
    """How a job was started.

    Attributes:
        ranks: how many processes.
        launcher: such as "mpirun".
        cores: usable ones of the machine on which it was started.
        ranks_on_a_host: the most that share one; None where only the launcher knows.
        threads: OMP_NUM_THREADS of each rank; None where it is not set to a number.
        settings: the variables of Horovod (HOROVOD_*) that are set.
    """

    kind = "job-launch"
    written_by = "hvdkit launch --explain-job"

    ranks: Positive
    launcher: str
    cores: Positive
    ranks_on_a_host: Positive | None
    threads: Positive | None
    settings: dict[str, str]
