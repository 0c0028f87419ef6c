"""Random faults in small trainings that save often and resume: what is lost, left running or misnamed?

    python benchmarks/faults.py --faults 30
    python benchmarks/faults.py --minutes 60 --out faults.jsonl
    python benchmarks/faults.py --seed 3 --only 17                    (one fault again)
    python benchmarks/faults.py --each                                (every kind once)

Each fault hits two ranks of a training at a moment drawn by chance: while they start, between saves or in one. Then
- every checkpoint that a save reported done, and that keep=2 keeps, is valid and holds the weights it was saved with;
- no process of the job lives 10 s after its launcher (processes are known by a variable in their environment);
- the last line of `hvdkit launch` names the cause, and a job that a fault need not end comes to its right end;
- the job started again goes on behind the last save, to the weights of a training that nothing disturbed, bit for bit.

Seconds are from the failure until no process of the job lives. They depend on the load and are told, not judged. Of a
host that is cut off they include the limits that the launchers are given here, 5 s and 4 s, to take it for lost; of a
rank that is stopped under torchrun the 5 s after which it is killed.
Slow disks and wrong clocks need a C compiler, full disks and cut links root; without, these faults are left out.
Ends with status 1 when something did not hold; what that job wrote is then kept.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "parallel")]

FRAMEWORKS = ("torch", "torch-asynchronous", "tensorflow", "keras")
SAMPLES, BATCH, EPOCHS, EVERY, KEEP = 480, 8, 3, 2, 2
SAVES = SAMPLES // (2 * BATCH) * EPOCHS // EVERY
HANG_S, LINGER_S = 300, 10
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long off[2];
static volatile long *dials = off;  /* seconds that clocks are wrong by, microseconds that each flush takes longer */
__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("FAULTS_DIALS"), O_RDONLY);
  void *found = mmap(0, sizeof off, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) dials = found;
  close(file);
}
#define REAL(name, ...) static int (*real)(__VA_ARGS__); if (!real) real = (int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
int clock_gettime(clockid_t clock, struct timespec *at) {
  REAL("clock_gettime", clockid_t, struct timespec *);
  int failed = real(clock, at);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += dials[0];
  return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
  REAL("gettimeofday", struct timeval *, void *);
  int failed = real(at, zone);
  at->tv_sec += dials[0];
  return failed;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return at ? *at = now.tv_sec : now.tv_sec;
}
int fsync(int file) { REAL("fsync", int); usleep(dials[1]); return real(file); }
int fdatasync(int file) { REAL("fdatasync", int); usleep(dials[1]); return real(file); }
"""


# In a rank


def say(*words):
    """Tell the campaign: whole, and at once, so that it holds if this process is killed now."""
    with open(os.environ["FAULTS_EVENTS"], "ab", buffering=0) as events:  # noqa: PTH123
        events.write(f"{' '.join(map(str, (time.monotonic(), *words)))}\n".encode())


def obey(rank):
    """Do what the campaign has ordered this rank to do; whether to skip a step."""
    order = Path(f"{os.environ['FAULTS_EVENTS']}.{rank}")
    if not order.exists():
        return False
    what, _, number = order.read_text().partition(" ")
    order.unlink()
    if what == "handle":
        signal.signal(int(number), lambda *_: None)
    say("failed")
    if what == "exit":
        sys.exit(int(number))
    if what == "_exit":
        os._exit(int(number))
    if what == "sleep":
        time.sleep(int(number))
    if what == "raise":
        raise RuntimeError(
            "an older job said: Horovod has been shut down. This was caused by an exception on one of the ranks"
        )
    if what == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        sys.exit(3)
    if what == "child":
        child = multiprocessing.get_context("fork").Process(target=hold, args=(int(number),))
        child.start()
        child.join()
        raise RuntimeError("a worker exited unexpectedly")
    if what == "hold":
        hold(int(number))
    return what == "skip"


def hold(megabytes):
    """Use so much memory, where the cgroup may not have it; else be killed."""
    held = bytearray(megabytes << 20)
    time.sleep(600 if held else 0)
    os.kill(os.getpid(), signal.SIGKILL)


def train(framework, directory, audited):
    """Train to the end, saving often; then say what each checkpoint in ``audited`` restores."""
    from hvdkit.steps import launchers

    rank = launchers.detect(os.environ).rank
    say("rank", rank, os.getpid())
    obey(rank)
    from lean_imports import lean_imports

    name, _, asynchronous = framework.partition("-")
    with lean_imports():
        on = importlib.import_module(f"training_{name}")
    images = np.random.default_rng(0).normal(size=(SAMPLES, 64)).astype(np.float32)
    run = on.Resumable(
        (images, np.arange(SAMPLES) % 10), BATCH, directory, **({"asynchronous": True} if asynchronous else {})
    )
    digests = []

    def digest():
        return hashlib.sha256(np.array(run.weights()).tobytes()).hexdigest()

    def report(saved):
        if saved is not None and run.world.is_root:
            say("saved", saved.path.name, digests[-1])

    def save(self, *state, **given):
        if asynchronous:
            report(self.wait())
        if self is run.checkpoints:
            obey(rank)
        digests.append(digest())
        report(plain_save(self, *state, **given))

    plain_save, on.hk.Checkpoints.save = on.hk.Checkpoints.save, save
    if hasattr(run, "fit"):
        if (run.checkpoints.restore(run.model) or run).step < SAVES * EVERY:
            run.fit(EPOCHS, 0, EVERY)
    else:
        for _ in range(run.loader.epoch, EPOCHS):
            for batch in run.loader:
                if obey(rank):
                    continue
                run.train_step(*batch)
                if run.step % EVERY == 0:
                    run.checkpoints.save(run.model, run.optimizer, step=run.step, loader=run.loader)
    if asynchronous:
        report(run.checkpoints.wait())
    say("ended", digest())
    for path in sorted(Path(audited).glob("*")):
        on.hk.Checkpoints(path).restore(run.model)
        say("holds", path.name, digest())


# A job


class Job:
    """A training that ``words`` start in ``place``; what it wrote and said is kept there under ``label``."""

    def __init__(self, place, label, words, framework, environment):
        self.directory, self._events, self._log = place / "run", place / f"{label}.events", place / f"{label}.log"
        self._events.touch()
        self._mark = str(uuid.uuid4())
        with self._log.open("wb") as log:
            self.launcher = subprocess.Popen(
                [*words, __file__, "train", framework, str(self.directory), str(place / "audited")],
                env={**environment, "FAULTS_EVENTS": str(self._events), "FAULTS_MARK": self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self, what):
        """The time and words of each line of that kind."""
        lines = [line.split() for line in self._events.read_text().splitlines()]
        return [(float(at), *words) for at, kind, *words in lines if kind == what]

    def order(self, rank, words):
        """Have a rank obey these words, which it finds whole."""
        whole = self._events.with_name(f"{self._events.name}.words")
        whole.write_text(words)
        whole.rename(f"{self._events}.{rank}")

    def digests(self, what):
        return {name: digest for _, name, digest in self.said(what)}

    def ends(self):
        return [digest for _, digest in self.said("ended")]

    def log(self):
        return self._log.read_text(errors="replace")

    def cause(self):
        return (["", *re.findall("^(?:hvdkit launch|hvdkit|Error): (.*)", self.log(), re.MULTILINE)])[-1]

    def wait(self, condition=lambda: False, seconds=HANG_S):
        """Whether it comes true while the job runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def pid(self, rank):
        def known():
            return [int(pid) for _, number, pid in self.said("rank") if int(number) == rank]

        if not self.wait(known):
            raise ProcessLookupError
        return known()[0]

    def alive(self):
        """What lives of it: process ids and commands."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes():
                    found[int(path.parent.name)] = (path.parent / "cmdline").read_text().replace("\0", " ")[-200:]
        return found

    def end(self):
        """Wait for its end: the status, None where it hung; when nothing of it lived any more; what outlived it."""
        self.wait()
        status, deadline = self.launcher.poll(), time.monotonic() + LINGER_S
        while status is not None and self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        gone, left = time.monotonic(), self.alive()
        self.kill()
        return status, gone, [] if status is None else list(left.values())

    def kill(self):
        while self.alive():
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.launcher.wait()


# Faults


@dataclass(frozen=True)
class Fault:
    """What is drawn or chosen: ``moment`` says where in the training, ``fraction`` when there, or for how long."""

    number: int
    kind: str
    framework: str
    launcher: str
    moment: str
    rank: int
    after_saves: int
    fraction: float


OURS, SAVING = ("mpirun", "horovodrun"), ("step", "save", "slow save")


@dataclass(frozen=True)
class Kind:
    """``strike(campaign, fault, job)`` causes it, and returns when the failure was where that is not at once.

    ``cause`` is what `hvdkit launch` says at the end; None: the job goes on. ``options`` and ``variables`` are those of
    the launch, ``before`` what a rank is ordered to do before ``init``.
    """

    strike: Callable
    cause: str | None
    launchers: tuple = (*OURS, "torchrun")
    moments: tuple = ("start", *SAVING)
    needs: str = ""
    frameworks: tuple = FRAMEWORKS
    options: tuple = ()
    variables: dict = field(default_factory=dict)
    before: str = ""


def freeze(_, fault, job):
    os.kill(job.pid(fault.rank), signal.SIGSTOP)
    job.wait(seconds=3 * fault.fraction)
    failed = time.monotonic()
    job.launcher.terminate()
    return failed


def pause(fault, pid):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5 + 3 * fault.fraction)
    os.kill(pid, signal.SIGCONT)


def cut(campaign, _, __):
    campaign.hosts.cut(1)


def fill(_, __, job):
    with (job.directory / "filler").open("wb", buffering=0) as filler:

        def failed():
            with contextlib.suppress(OSError):
                while True:  # also what is freed meanwhile
                    filler.write(bytes(4096))
            return job.said("failed")

        return job.said("failed")[0][0] if job.wait(failed) else None


def slow_down(campaign, fault, job):
    campaign.turn(flush_s=0.05 + 0.2 * fault.fraction)
    job.wait(seconds=4)


def jump(campaign, fault, job):  # noqa: ARG001
    campaign.turn(clock_s=(-86400, -3600, -2, 2, 3600, 86400)[int(6 * fault.fraction)])


def order(words):
    """Have the rank obey in its next step or save; when it did."""

    def strike(_, fault, job):
        job.order(fault.rank, words)
        return job.said("failed")[0][0] if job.wait(lambda: job.said("failed")) else None

    return strike


def starve(words):
    """Have the rank obey where its cgroup has no more than 64 MB left."""

    def strike(campaign, fault, job):
        used = int((campaign.memory / "memory.usage_in_bytes").read_text())
        (campaign.memory / "memory.limit_in_bytes").write_text(str(used + (64 << 20)))
        return order(words)(campaign, fault, job)

    return strike


def nothing(_, __, job):
    """What was wrong from the start has its consequences."""
    begun = time.monotonic()
    job.wait()
    return (job.said("failed") or [(begun,)])[0][0]


def kill_above(levels):
    """Kill what is so many processes above a rank's command: 1, the process beside it; 2, its launcher."""

    def strike(_, fault, job):
        pid = job.pid(fault.rank)
        for _ in range(levels):
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)

    return strike


def to_rank(number):
    return lambda _, fault, job: os.kill(job.pid(fault.rank), number)


def to_launcher(number):
    return lambda _, __, job: job.launcher.send_signal(number)


EXITED = r"rank {rank} \(pid {pid}\) exited with status \d"
LOOPS = ("torch", "torch-asynchronous", "tensorflow")
STALE = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "9",
    "RANK": "7",
}
DISCOVERY = {
    "hosts": "echo localhost:1; echo 127.0.0.1:1",
    "hangs": "sleep 600",
    "floods": "exec yes localhost:1",
}
KILLED, TOLD = r"rank {rank} \(pid {pid}\) was killed by %s; the job was ended\.", "interrupted by SIGTERM; .*"
KINDS = {
    "SIGKILL of a rank": Kind(to_rank(signal.SIGKILL), KILLED % "SIGKILL"),
    "SIGSEGV of a rank": Kind(to_rank(signal.SIGSEGV), KILLED % "SIGSEGV"),
    "SIGSTOP of a rank, SIGTERM of the launcher": Kind(freeze, TOLD),
    "SIGSTOP of a rank for seconds": Kind(lambda _, fault, job: pause(fault, job.pid(fault.rank)), None),
    "SIGSTOP of the launcher for seconds": Kind(lambda _, fault, job: pause(fault, job.launcher.pid), None),
    "SIGTERM of the launcher": Kind(to_launcher(signal.SIGTERM), TOLD),
    "SIGKILL of the launcher": Kind(to_launcher(signal.SIGKILL), "", OURS),
    "link between two hosts cut": Kind(
        cut, "host {host} answered when the job began and no longer does: .*", OURS, SAVING, "root"
    ),
    "disk full": Kind(fill, r"rank \d \(pid \d+\) exited with status 1; .*", moments=SAVING, needs="root"),
    "disk slow": Kind(slow_down, None, moments=SAVING, needs="cc"),
    "clock jumps": Kind(jump, None, needs="cc"),
    "SIGTERM of a rank": Kind(to_rank(signal.SIGTERM), KILLED % "SIGTERM", OURS),
    "SIGABRT of a rank": Kind(to_rank(signal.SIGABRT), KILLED % "SIGABRT", OURS),
    "SIGBUS of a rank": Kind(to_rank(signal.SIGBUS), KILLED % "SIGBUS", OURS),
    "SIGUSR1 of the launcher": Kind(to_launcher(signal.SIGUSR1), None, OURS, SAVING),
    "SIGUSR2 of the launcher": Kind(to_launcher(signal.SIGUSR2), None, OURS, SAVING),
    "SIGINT of the launcher": Kind(to_launcher(signal.SIGINT), "interrupted by SIGINT; .*", OURS),
    "SIGHUP of the launcher": Kind(to_launcher(signal.SIGHUP), "interrupted by SIGHUP; .*", OURS),
    "SIGKILL of the process beside a rank": Kind(kill_above(1), "mpirun exited with status 137; .*", ("mpirun",)),
    "SIGKILL of mpirun": Kind(kill_above(2), "mpirun was killed by SIGKILL; .*", ("mpirun",), SAVING),
    "worker of a rank killed": Kind(order("child 0"), f"{EXITED} after its worker .* by SIGKILL; .*", OURS, SAVING),
    "worker of a rank out of memory": Kind(
        starve("child 300"), r"rank \d .* because memory ran out .*", OURS, SAVING, "cgroup"
    ),
    "rank out of memory": Kind(starve("hold 300"), r"rank {rank} .* SIGKILL because memory .*", OURS, SAVING, "cgroup"),
    "rank exits 0 before init": Kind(
        nothing, r"rank {rank} .* before it called init.*", OURS, ("start",), before="exit 0"
    ),
    "rank exits 3 before init": Kind(nothing, f"{EXITED}; .*", OURS, ("start",), before="exit 3"),
    "rank slow before init": Kind(nothing, None, OURS, ("start",), before="sleep 12"),
    "rank exits 0": Kind(order("exit 0"), r"rank {rank} .* status 0 before the others were done; .*", OURS, SAVING),
    "rank exits 3": Kind(order("exit 3"), f"{EXITED}; .*", OURS, SAVING),
    "rank exits 4 without clean-up": Kind(order("_exit 4"), f"{EXITED}; .*", OURS, SAVING),
    "rank ends, its thread goes on": Kind(order("thread"), r"rank \d .* exited with status 1; .*", OURS, SAVING),
    "error that quotes Horovod": Kind(order("raise"), f"{EXITED}; .*", OURS, SAVING),
    "step skipped by a rank": Kind(
        order("skip"), r"rank \d .* exited with status [01].*", OURS, SAVING, frameworks=LOOPS
    ),
    "variables of another job": Kind(nothing, None, OURS, ("start",), variables=STALE),
    "elastic, SIGKILL of the launcher": Kind(
        to_launcher(signal.SIGKILL), "", ("horovodrun",), options=("--host-discovery-script", "{hosts}")
    ),
    "host discovery that hangs": Kind(
        nothing, ".* did not end within .*", ("horovodrun",), ("start",), options=("--host-discovery-script", "{hangs}")
    ),
    "host discovery without an end": Kind(
        nothing, ".* printed more than .*", ("horovodrun",), ("start",), options=("--host-discovery-script", "{floods}")
    ),
}
LIMITS = {
    "horovodrun": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"},
    "mpirun": {f"PRTE_MCA_oob_tcp_keepalive_{name}": s for name, s in (("time", "2"), ("intvl", "1"), ("probes", "2"))},
    "torchrun": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"},
}
"""Of the wait for a host that is cut off; of torchrun's for a rank that is told to end."""


# The campaign


class Campaign:
    """Draws faults by ``seed`` and their number, causes them in ``place``, and judges."""

    def __init__(self, place, seed):
        import namespaces
        import ranks

        self._place, self._seed, self._dials, self._hosts = place, seed, place / "dials", namespaces.Hosts
        self._environment = {**ranks.rank_environment(), "KERAS_BACKEND": "tensorflow"}
        self.ending = contextlib.ExitStack()
        self._here = {"", *(["cc"] if shutil.which("cc") else []), *([] if namespaces.missing() else ["root"])}
        self._dials.write_bytes(bytes(16))
        self.memory = self._make_cgroup()
        if self.memory is not None:
            self._here.add("cgroup")
        self._scripts = {name: str(place / f"{name}.sh") for name in DISCOVERY}
        for name, line in DISCOVERY.items():
            Path(self._scripts[name]).write_text(f"#!/bin/sh\n{line}\n")
            Path(self._scripts[name]).chmod(0o755)
        if "cc" in self._here:
            shim = str(place / "shim.so")
            build = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-o", shim, "-", "-ldl"]
            subprocess.run(build, input=SHIM.encode(), check=True)
            self._environment.update(LD_PRELOAD=shim, FAULTS_DIALS=str(self._dials))

    def _make_cgroup(self):
        """One of version 1, None where that cannot be."""
        place = Path(f"/sys/fs/cgroup/memory/hvdkit-faults-{os.getpid()}")
        try:
            place.mkdir()
            self.ending.callback(place.rmdir)
        except OSError:
            return None
        return place

    def turn(self, clock_s=0, flush_s=0.0):
        """How wrong the clock is, and how much longer a flush takes, for every process of a job."""
        with self._dials.open("r+b") as dials:
            dials.write(struct.pack("2l", clock_s, round(flush_s * 1e6)))

    @functools.cached_property
    def hosts(self):
        """Started when a fault first needs them."""
        (self._place / "bin").mkdir()
        hosts = self._hosts(self._place / "bin")
        self.ending.callback(hosts.stop)
        hosts.start()
        return hosts

    def can(self, fault):
        return KINDS[fault.kind].needs in self._here

    def draw(self, number, *, each):
        """Depends on the seed and the number alone; ``each``: the kinds in turn."""
        dice = random.Random(f"{self._seed}/{number}")  # noqa: S311
        kind = dice.choice(list(KINDS))
        kind = list(KINDS)[number % len(KINDS)] if each else kind
        of = KINDS[kind]
        drawn = [dice.choice(some) for some in (of.frameworks, of.launchers, of.moments, (0, 1))]
        return Fault(number, kind, *drawn, dice.randint(1, SAVES - 8), dice.random())

    def start(self, fault, place, label):
        environment, options = self._environment, []
        if fault.launcher == "torchrun":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment = {**environment, **LIMITS["torchrun"]}
            words = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        else:
            if "link" in fault.kind:
                environment = {**environment, "PATH": f"{self.hosts.bin}{os.pathsep}{environment['PATH']}"}
                options = ["--hosts", ",".join(f"{name}:1" for name in self.hosts.names[:2])]
                options += [word for limit in LIMITS[fault.launcher].items() for word in ("--env", "=".join(limit))]
                options += [
                    "--env",
                    "FAULTS_EVENTS",
                    "--env",
                    "FAULTS_MARK",
                ]  # mpirun hands few variables to other hosts
            if label == "job" and fault.kind:
                kind = KINDS[fault.kind]
                environment = {**environment, **kind.variables}
                options += [word.format(**self._scripts) for word in kind.options]
            words = ["hvdkit.cli", "launch", "-n", "2", "--launcher", fault.launcher, *options, "--", sys.executable]
        if label == "job" and fault.kind and KINDS[fault.kind].before:
            (place / f"job.events.{fault.rank}").write_text(KINDS[fault.kind].before)
        inside = self.hosts.inside(0) if "link" in fault.kind else []
        if label == "job" and fault.kind and KINDS[fault.kind].needs == "cgroup":
            (self.memory / "memory.limit_in_bytes").write_text("-1")
            inside = ["sh", "-c", f'echo $$ > {self.memory}/tasks; exec "$@"', "sh"]
        return Job(place, label, [*inside, sys.executable, "-m", *words], fault.framework, environment)

    @functools.cache  # noqa: B019
    def undisturbed(self, framework):
        """What the ranks of a training end with that nothing happens to, and the seconds until its first save."""
        (self._place / framework).mkdir()
        begun = time.monotonic()
        job = self.start(Fault(-1, "", framework, "mpirun", "", 0, 0, 0.0), self._place / framework, "job")
        status, *_ = job.end()
        if status != 0 or len(job.said("saved")) != SAVES:
            sys.exit(f"an undisturbed training of {framework} ended with status {status}:\n{job.log()[-4000:]}")
        return job.ends(), job.said("saved")[0][0] - begun

    def strike(self, fault, job, start_s):
        """Wait for the fault's moment and cause it; when the failure was, None where the job was gone before."""
        if KINDS[fault.kind].strike is nothing:
            return nothing(self, fault, job)
        if fault.moment == "start":
            job.wait(seconds=fault.fraction * start_s)
        else:
            job.wait(lambda: len(job.said("saved")) >= fault.after_saves)
            self.turn(flush_s=0.03 if fault.moment == "slow save" else 0)
            if "save" in fault.moment:
                job.wait(lambda: any(job.directory.glob(".writing-*")))
            job.wait(seconds=fault.fraction * (0.1 if fault.moment == "slow save" else 0.01))
        if job.launcher.poll() is not None:
            return None
        asked = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            return KINDS[fault.kind].strike(self, fault, job) or asked
        return None

    def run(self, fault):
        """Cause a fault, start the job again, and judge both; what happened, for a line of JSON."""
        place = self._place / str(fault.number)
        right, start_s = self.undisturbed(fault.framework)
        (place / "run").mkdir(parents=True)
        with contextlib.ExitStack() as mending:
            if fault.kind == "disk full":
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "faults", str(place / "run")], check=True)
                mending.callback(subprocess.run, ["umount", "--lazy", str(place / "run")])
            job = self.start(fault, place, "job")
            mending.callback(job.kill)
            failed = self.strike(fault, job, start_s)
            status, gone, left = job.end()
            self.turn()
            if "link" in fault.kind:  # not before: it takes seconds, and what runs there must end by itself
                self.hosts.mend(1)
            (place / "run" / "filler").unlink(missing_ok=True)
            saved = job.digests("saved")
            lost = audit(place, saved)
            again = self.start(fault, place, "again")
            mending.callback(again.kill)
            again_status, *_ = again.end()
        held = again.digests("holds")
        right = again.ends() if fault.kind == "step skipped by a rank" else right  # its samples are lost
        went_on = min(again.digests("saved"), default="step-9") > max(saved, default="")
        found = {
            "lost": lost,
            "wrong": [name for name in held if held[name] != saved.get(name, held[name])],
            "left running": left,
            "misnamed": [] if self.named(fault, job, status, right, failed) else [f"{status}: {job.cause()}"],
            "not resumed": [] if (again_status, again.ends(), went_on) == (0, right, True) else [str(again_status)],
        }
        facts = {"status": status, "cause": job.cause(), "saves": len(saved), "load": round(os.getloadavg()[0], 1)}
        seconds = None if failed is None or KINDS[fault.kind].cause is None else round(gone - failed, 2)
        if not any(found.values()):
            shutil.rmtree(place)
        return {
            "seed": self._seed,
            **asdict(fault),
            **facts,
            "struck": failed is not None,
            "seconds": seconds,
            "found": found,
        }

    def named(self, fault, job, status, right, failed):
        """Whether the job ended as it should, with the right cause."""
        kind = KINDS[fault.kind]
        if kind.cause is None or failed is None:
            return (status, job.ends()) == (0, right)
        if status is None or (fault.kind == "disk full" and "No space left on device" not in job.log()):
            return False
        if fault.launcher not in OURS or not kind.cause or not (job.said("rank") or kind.options):
            return True
        host = self.hosts.names[1] if "{host}" in kind.cause else ""
        pid = job.pid(fault.rank) if "{pid}" in kind.cause else 0
        expected = kind.cause.format(rank=fault.rank, pid=pid, host=host)
        return re.fullmatch(expected, job.cause()) is not None


def audit(place, saved):
    """Copy each valid checkpoint for the next job to restore; the names of those that are lost or invalid."""
    from hvdkit.errors import CheckpointError
    from hvdkit.steps.manifest import verify

    valid, there = set(), [path.name for path in (place / "run").glob("step-*")]
    for name in there:
        with contextlib.suppress(CheckpointError):
            verify(place / "run" / name)
            shutil.copytree(place / "run" / name, place / "audited" / name / name)
            valid.add(name)
    return sorted({*there, *sorted({*saved, *there})[-KEEP:]} - valid)


def table(results, column):
    """Markdown: a row for each value of ``column``."""
    judged = list(results[0]["found"])
    print(f"| {column} | tried | saves | {' | '.join(judged)} | longest, s |\n|{'---|' * (len(judged) + 4)}")
    for value in sorted({one[column] for one in results}):
        some = [one for one in results if one[column] == value]
        counts = [len(some), sum(one["saves"] for one in some)]
        counts += [sum(len(one["found"][name]) for one in some) for name in judged]
        longest = max((one["seconds"] for one in some if one["seconds"] is not None), default="")
        print(f"| {value} | {' | '.join(map(str, counts))} | {longest} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, help="how many (default 30, or as many as --minutes allows)")
    parser.add_argument("--minutes", type=float, help="no new fault after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the fault of this number alone")
    parser.add_argument("--each", action="store_true", help="every kind in turn")
    parser.add_argument("--word", action="append", default=[], help="only faults with it, such as keras or SIGKILL")
    parser.add_argument("--out", type=Path, help="add a line of JSON for each fault to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    begun, results, bad = time.monotonic(), [], 0
    place = Path(tempfile.mkdtemp(prefix="hvdkit-faults-"))
    campaign = Campaign(place, args.seed)
    numbers = [args.only] if args.only is not None else range(len(KINDS) if args.each else 10**6)
    with campaign.ending:
        drawn = (campaign.draw(number, each=args.each) for number in numbers)
        wanted = (fault for fault in drawn if campaign.can(fault) and all(word in str(fault) for word in args.word))
        for fault in itertools.islice(wanted, args.faults or (None if args.minutes or args.each else 30)):
            if args.minutes and time.monotonic() - begun > 60 * args.minutes:
                break
            one = campaign.run(fault)
            results.append(one)
            wrong = {name: what for name, what in one["found"].items() if what}
            bad += bool(wrong)
            ended = "went on" if one["seconds"] is None else f"{one['seconds']:.1f} s"
            where = f"{fault.kind} ({fault.moment}, rank {fault.rank}), {fault.framework}, {fault.launcher}"
            print(f"{fault.number} {where}: {ended}, {one['saves']} saves, {wrong or 'ok'}", flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(one) + "\n")
    if not results:
        sys.exit("no such fault")
    loads = sorted(one["load"] for one in results)
    print(f"\n{len(results)} faults, {bad} with a loss; load {loads[0]} to {loads[-1]} on {os.cpu_count()} cores\n")
    for column in ("kind", "framework", "launcher"):
        table(results, column)
        print()
    if bad:
        sys.exit(f"see {place}")
    shutil.rmtree(place)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        try:
            train(*sys.argv[2:])
        except BaseException:
            say("failed")
            raise
    else:
        main()
