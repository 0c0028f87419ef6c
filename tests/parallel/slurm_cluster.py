"""A real Slurm of two nodes on this machine, for test_slurm.py: munged, slurmctld and two slurmd."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "sinfo")
SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> list[str]:
    """What a cluster needs and this machine has not."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM}") is None]
    return lacking + (["root"] if os.geteuid() != 0 else [])


class Cluster:
    """Nodes n1 and n2 with 2 cores each; ``environment`` is what a user's shell needs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SYSTEM}"}

    def start(self) -> None:
        munge = self._directory / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        (self._directory / "slurm.conf").write_text(self._configuration(munge))
        key, files = ["--key-file", str(munge / "key")], ["socket", "pid-file", "log-file", "seed-file"]
        self._start("munged", "--foreground", "--force", *key, *(f"--{name}={munge / name}" for name in files))
        self._wait(lambda: (munge / "socket").exists())
        configured = ["-D", "-f", self.environment["SLURM_CONF"]]
        self._start("slurmctld", *configured)
        for node in ("n1", "n2"):
            self._start("slurmd", *configured, "-N", node)
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%t %D").stdout.split() == ["idle", "2"])

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**os.environ, **self.environment, **variables}, capture_output=True, text=True, timeout=240
        )

    def _start(self, program: str, *arguments: str) -> None:
        found = shutil.which(program, path=self.environment["PATH"])
        with (self._directory / f"{program}.out").open("ab") as output:
            self._processes.append(subprocess.Popen([str(found), *arguments], stdout=output, stderr=output))

    def _wait(self, ready) -> None:
        deadline = time.monotonic() + 60
        while not ready():
            logs = {file.name: file.read_text(errors="replace")[-1500:] for file in self._directory.glob("*.out")}
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm does not start on this machine: {logs}")
            time.sleep(0.2)

    def _configuration(self, munge: Path) -> str:
        host, directory = socket.gethostname(), self._directory
        (directory / "state").mkdir()
        ports = []
        for _ in range(3):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports.append(free.getsockname()[1])
        lines = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": ports[0],
            "SlurmUser": "root",
            "AuthInfo": f"socket={munge / 'socket'},cred_expire=5",  # a job that is queued again waits for that
            "StateSaveLocation": directory / "state",
            "SlurmdSpoolDir": directory / "spool.%n",
            "SlurmctldPidFile": directory / "slurmctld.pid",
            "SlurmdPidFile": directory / "slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/affinity",
            "SelectType": "select/cons_tres",
            "MpiDefault": "none",
            "ReturnToService": 2,
        }
        nodes = f"NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2"
        partition = "PartitionName=all Nodes=ALL Default=YES\n"
        return "\n".join([*(f"{name}={value}" for name, value in lines.items()), nodes, partition])
