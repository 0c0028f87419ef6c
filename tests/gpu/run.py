"""Runs every NCCL operation of Horovod on a machine without a card, on 2 to 4 ranks, and says how many were wrong.

``python tests/gpu/run.py`` runs all jobs, ``--faults`` those that must find each fault put in on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import build
from faults import FAULTS

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
TIMELINE = (
    *("INIT_NCCL", "NCCL_ALLREDUCE", "NCCL_ALLGATHER", "NCCL_BCAST", "NCCL_ALLTOALL", "NCCL_REDUCESCATTER"),
    *("NCCL_REDUCE", "INIT_FUSION_BUFFER", "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"),
)
"""What the timeline of ``everything`` must name."""


@dataclass(frozen=True)
class Job:
    """Ranks that run one suite of the harness.

    Attributes:
        name: what the lines printed begin with.
        hosts: the ranks of each pretended host.
        suite: arguments of the harness.
        environ: variables of all ranks.
        of_rank: variables of one rank, beside.
        mpi: MPI is the controller; otherwise Gloo is.
        fails: a case whose operation must fail on every rank that lives.
        dies: the rank that is killed on the way, None when none is.
        timeline: a timeline is written, and must name every operation.
    """

    name: str
    hosts: tuple[int, ...]
    suite: tuple[str, ...] = ("everything",)
    environ: Mapping[str, str] = field(default_factory=dict)
    of_rank: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    mpi: bool = False
    fails: bool = False
    dies: int | None = None
    timeline: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.hosts)


def _jobs() -> Iterator[Job]:
    for size in (2, 3, 4):
        yield Job(f"{size} ranks", (size,))
    yield Job("copies one by one", (3,), environ={"HOROVOD_BATCH_D2D_MEMCOPIES": "0"})
    yield Job("two streams", (2,), environ={"HOROVOD_NUM_NCCL_STREAMS": "2"})
    yield Job("async completion", (2,), environ={"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"})
    yield Job("elastic", (2,), environ={"HOROVOD_ELASTIC": "1"})
    yield Job("timeline", (3,), timeline=True)
    yield Job("over MPI", (3,), mpi=True)
    for hosts in ((2, 2), (2, 1)):
        shape = "+".join(map(str, hosts))
        environ = {"HOROVOD_TORUS_ALLREDUCE": "1"}
        yield Job(f"torus allreduce {shape}", hosts, ("reductions",), environ)
        environ = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}
        yield Job(f"hierarchical allreduce {shape}", hosts, ("reductions",), environ, mpi=True)
        environ = {"HOROVOD_HIERARCHICAL_ALLGATHER": "1"}
        yield Job(f"hierarchical allgather {shape}", hosts, ("allgather",), environ, mpi=True)
    yield Job("adasum 2+2", (2, 2), ("adasum",), mpi=True)
    elastic = {"HOROVOD_ELASTIC": "1"}
    for operation in OPERATIONS:
        environ = elastic | {"STANDIN_REMOTE_ERROR_AT": "1"}
        yield Job(f"ncclRemoteError in {operation}", (3,), ("again", operation), environ, fails=True)
        killed = {1: {"STANDIN_DIE_AT": "1"}}
        yield Job(f"rank 1 dies in {operation}", (3,), ("lost", operation), elastic, killed, fails=True, dies=1)
        # As between GPUs of one host, where NCCL notices nothing: Gloo does, and Horovod aborts the communicators.
        environ = elastic | {"STANDIN_NO_REMOTE_ERROR": "1"}
        name = f"rank 1 dies unnoticed in {operation}"
        yield Job(name, (3,), ("lost", operation), environ, killed, fails=True, dies=1)
    environ = elastic | {"HOROVOD_TORUS_ALLREDUCE": "1", "STANDIN_REMOTE_ERROR_AT": "2"}
    yield Job("ncclRemoteError between hosts in torus", (2, 2), ("lost", "allreduce"), environ, fails=True)


JOBS = {job.name: job for job in _jobs()}


@dataclass
class Outcome:
    """What a job's ranks said: cases that were right, what was wrong, and elements compared."""

    right: int = 0
    elements: int = 0
    wrong: list[str] = field(default_factory=list)


def run_job(program: Path, tools: build.Toolchain, job: Job, environ: Mapping[str, str], patience: int) -> Outcome:
    """Start the ranks of a job and judge what they print.

    Args:
        program: the harness.
        tools: for mpirun.
        job: what is run.
        environ: variables of all ranks, stronger than the job's.
        patience: seconds after which an operation counts as hung, and twice as many until the job does.
    """
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="gpu-standin-") as name, _rendezvous(job) as port:
        timeline = Path(name) / "timeline.json"
        common = _clean(os.environ) | {
            "HARNESS_SIZE": str(job.size),
            "HARNESS_HOSTS": ",".join(map(str, job.hosts)),
            "HARNESS_PATIENCE": str(patience),
            "HOROVOD_CYCLE_TIME": "1",
            "HOROVOD_FUSION_THRESHOLD": str(256 << 10),
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_LOG_LEVEL": "fatal",
            **({"HOROVOD_TIMELINE": str(timeline)} if job.timeline else {}),
            **job.environ,
            **environ,
        }
        said = _over_mpi(program, tools, job, common, patience) if job.mpi else _over_gloo(program, job, common, port)
        ended = _wait(said, 2 * patience)
        for rank, (code, text) in enumerate(ended):
            _judge(job, rank, code, text, outcome)
        if job.timeline:
            written = timeline.read_text(encoding="utf-8") if timeline.exists() else ""
            outcome.wrong += [f"the timeline does not name {name}" for name in TIMELINE if f'"{name}"' not in written]
    return outcome


def _judge(job: Job, rank: int, code: int, text: str, outcome: Outcome) -> None:
    """Add the lines of one process; over MPI it speaks for all ranks."""
    if rank == job.dies:
        return
    who = "" if job.mpi else f"rank {rank}: "
    ends = 0
    for line in text.splitlines():
        case, _, rest = line.partition("\t")
        if not rest:
            continue
        wrong, elements, what = rest.split("\t")
        ends += case == "end"
        must_fail = case == "fails" or "refused: " in case
        outcome.elements += int(elements)
        if (int(wrong) == -1 and not what.startswith("hung")) if must_fail else int(wrong) == 0:
            outcome.right += 1
        else:
            outcome.wrong.append(f"{who}{case}: {what or f'{wrong} elements are wrong'}")
    if ends != (job.size if job.mpi else 1) or code != 0:
        last = next((line for line in reversed(text.splitlines()) if line.startswith("stand-in: ")), "")
        outcome.wrong.append(f"{who}ended with {_code(code)} {last}".rstrip())


def _code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _over_gloo(program: Path, job: Job, common: Mapping[str, str], port: int) -> list[subprocess.Popen[str]]:
    """One process a rank, with what a launcher would tell it."""
    started = []
    for rank in range(job.size):
        host = next(number for number in range(len(job.hosts)) if rank < sum(job.hosts[: number + 1]))
        local = rank - sum(job.hosts[:host])
        place = {"RANK": rank, "SIZE": job.size, "LOCAL_RANK": local, "LOCAL_SIZE": job.hosts[host], "CROSS_RANK": host}
        place["CROSS_SIZE"] = sum(local < count for count in job.hosts)
        environ = {
            **common,
            **{f"HOROVOD_{name}": str(value) for name, value in place.items()},
            "HOROVOD_HOSTNAME": f"host{host}",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            **job.of_rank.get(rank, {}),
        }
        started.append(_start([str(program), *job.suite], environ))
    return started


def _over_mpi(
    program: Path, tools: build.Toolchain, job: Job, common: Mapping[str, str], patience: int
) -> list[subprocess.Popen[str]]:
    """mpirun, which speaks for all ranks."""
    environ = {
        **common,
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    options += ["--timeout", str(2 * patience)]
    return [_start([str(tools.mpirun), "-n", str(job.size), *options, str(program), *job.suite], environ)]


def _start(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(started: Sequence[subprocess.Popen[str]], patience: int) -> list[tuple[int, str]]:
    """Exit code and output of each process; those that do not end are killed."""
    texts = [""] * len(started)

    def read(number: int) -> None:
        stdout = started[number].stdout
        assert stdout is not None
        texts[number] = stdout.read()

    readers = [threading.Thread(target=read, args=[number]) for number in range(len(started))]
    for reader in readers:
        reader.start()
    late = time.monotonic() + patience
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, late - time.monotonic()))
    for process in started:
        process.kill()
    for reader in readers:
        reader.join()
    return [(process.wait(), text) for process, text in zip(started, texts, strict=True)]


@contextlib.contextmanager
def _rendezvous(job: Job) -> Iterator[int]:
    """The server at which Horovod's ranks find one another over Gloo; yields its port."""
    kept: dict[str, dict[str, bytes]] = {}
    finished: dict[str, set[str]] = {}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bytes | None = b"") -> None:
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def do_GET(self) -> None:
            _, scope, key = self.path.split("/", 2)
            if scope == "rank_and_size":  # asked when Horovod starts anew: every rank keeps its place
                host, _, local = key.partition(":")
                at = int(host.removeprefix("host"))
                places = [sum(job.hosts[:at]) + int(local), job.size, int(local), job.hosts[at], at, len(job.hosts)]
                return self.answer(",".join(map(str, places)).encode())
            with lock:
                return self.answer(kept.get(scope, {}).get(key))

        def do_PUT(self) -> None:
            _, scope, key = self.path.split("/", 2)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                kept.setdefault(scope, {})[key] = body
            self.answer()

        def do_DELETE(self) -> None:
            # When all ranks of a scope have met, it is cleared for the next time.
            _, scope, key = self.path.split("/", 2)
            with lock:
                finished.setdefault(scope, set()).add(key)
                if len(finished[scope]) == _members(scope, job):
                    kept.pop(scope, None)
                    finished.pop(scope)
            self.answer()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _members(scope: str, job: Job) -> int:
    """How many ranks meet under a name of Horovod's. A job that starts anew has no process set but the whole."""
    scope = scope.partition("_process_set_")[0]
    if found := re.fullmatch(r"local_host(\d+)", scope):
        return job.hosts[int(found[1])]
    if found := re.fullmatch(r"cross_(\d+)", scope):
        return sum(int(found[1]) < count for count in job.hosts)
    return job.size


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what another launcher or a user told Horovod."""
    return {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMIX_"))}


# The command ----------------------------------------------------------------------------------------------------------


def run_jobs(program: Path, tools: build.Toolchain, jobs: Sequence[Job], arguments: argparse.Namespace) -> int:
    """Run jobs and print a line each; the number of jobs with something wrong."""
    bad = 0
    for job in jobs:
        outcome = run_job(program, tools, job, {"STANDIN_SEED": str(arguments.seed)}, arguments.patience)
        bad += bool(outcome.wrong)
        verdict = f"WRONG ({len(outcome.wrong)})" if outcome.wrong else "right"
        print(f"{verdict:<12} {job.name}: {outcome.right} cases, {outcome.elements} elements", flush=True)
        for line in outcome.wrong[: None if arguments.verbose else 5]:
            print(f"    {line}", flush=True)
    return bad


def run_faults(tools: build.Toolchain, tree: Path, arguments: argparse.Namespace) -> int:
    """Put faults in and run the jobs that must find them; the number of faults that were not found."""
    faults = [fault for fault in FAULTS if arguments.only in fault.name or arguments.only in fault.job]
    missed = 0
    for fault in faults:
        program = build.compile_all(tools, tree, fault.edits, say=lambda _: None)
        environ = {"STANDIN_SEED": str(arguments.seed), **fault.environ}
        outcome = run_job(program, tools, JOBS[fault.job], environ, min(arguments.patience, 10))
        missed += not outcome.wrong
        verdict = "found" if outcome.wrong else "NOT FOUND"
        said = f": {outcome.wrong[0]}" if outcome.wrong else ""
        print(f"{verdict:<10} {fault.name} ({fault.job}){said}"[:160], flush=True)
        if fault.edits:
            program.unlink()
    print(f"{len(faults) - missed} of {len(faults)} faults were found")
    return missed


def main() -> int:
    """Build, run, and say how many were wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", action="store_true", help="put faults into Horovod; each must be found")
    parser.add_argument("--only", metavar="WORDS", default="", help="jobs, or faults, whose name has these words")
    parser.add_argument("--seed", type=int, default=1, help="of the streams' delays")
    parser.add_argument("--patience", type=int, default=60, help="seconds after which an operation counts as hung")
    parser.add_argument("--verbose", action="store_true", help="all that was wrong, not the first five of a job")
    arguments = parser.parse_args()
    tools = build.find()
    if isinstance(tools, str):
        print(f"Skipped: {tools}")
        return 0
    tree = build.source()
    program = build.compile_all(tools, tree)
    if arguments.faults:
        return min(run_faults(tools, tree, arguments), 1)
    jobs = [job for job in JOBS.values() if arguments.only in job.name]
    bad = run_jobs(program, tools, jobs, arguments)
    print(f"{len(jobs) - bad} of {len(jobs)} jobs were right")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
