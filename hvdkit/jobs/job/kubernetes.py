"""An ``MPIJob`` for Kubernetes, which the Kubeflow MPI Operator runs, in the place of a batch script.

The operator starts a pod for each worker, with sshd in it, and a launcher pod, which finds them in a host file that
``hvdkit launch`` reads.

Source: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go and pkg/controller/mpi_job_controller.go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.job import script
from hvdkit.jobs.job.site import OPTIONS, BatchJob, seconds
from hvdkit.jobs.launch.options import as_words

NAME = "kubernetes"
SUBMIT = "kubectl create -f"
ROOT = "/root/.ssh"
_READ = ("nodes", "ppn", "walltime", "name", "depth", "gpus_per_node")
"""What an MPIJob has a place for."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 63
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_VOLUME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?):(/[A-Za-z0-9._/-]{1,255})")
_DIRECTORY = re.compile(r"/[A-Za-z0-9._/-]{1,255}")


def write(
    job: BatchJob,
    image: str | None,
    volumes: Sequence[str],
    ssh_directory: str,
) -> str:
    """The text of the MPIJob, as JSON, which ``kubectl`` takes like YAML.

    Args:
        job: what the user asks for; a host is a worker pod.
        image: has hvdkit, Horovod, MPI and sshd in it.
        volumes: ``CLAIM:DIRECTORY`` each, a claim of a volume and where every pod has it.
        ssh_directory: where the user of the image expects the keys that the operator makes.
    Raises:
        InvalidArgumentError: see ``script.check``; no image; a name, volume or directory that cannot be right, or an
            option that only batch systems know.
    """
    script.check(job)
    job = replace(job, ppn=job.ppn or job.gpus_per_node or 1)
    for name, option in OPTIONS.items():
        if name not in _READ and getattr(job, name):
            raise InvalidArgumentError(f"{option.flags[0]} is for batch systems; leave it out with --system {NAME}.")
    longest = f"{job.name}-worker-{job.nodes - 1}"
    if _LABEL.fullmatch(job.name) is None or len(longest) > _LONGEST_LABEL:
        raise InvalidArgumentError(
            f"--name must be small letters, digits and - from a letter on, at most {_LONGEST_LABEL} with what its pods "
            f"add ({longest}), got {job.name!r}."
        )
    if image is None or _IMAGE.fullmatch(image) is None:
        raise InvalidArgumentError(
            f"--image must name a container image with hvdkit, Horovod, MPI and sshd in it, got {image!r}."
        )
    if _DIRECTORY.fullmatch(ssh_directory) is None:
        raise InvalidArgumentError(f"--ssh-dir must be a directory such as {ROOT}, got {ssh_directory!r}.")
    return json.dumps(_mpi_job(job, image, _claims(volumes), ssh_directory), indent=2) + "\n"


def _claims(volumes: Sequence[str]) -> dict[str, str]:
    """Directory to claim."""
    found = {}
    for volume in volumes:
        match = _VOLUME.fullmatch(volume)
        if match is None or match[3] in found:
            raise InvalidArgumentError(
                f"--volume must be CLAIM:DIRECTORY, each directory once, as in results:/results, got {volume!r}."
            )
        found[match[3]] = match[1]
    return found


def _mpi_job(job: BatchJob, image: str, claims: Mapping[str, str], ssh_directory: str) -> dict[str, Any]:
    """The MPIJob as a mapping. ``claims``: directory to volume claim."""
    ppn = job.ranks_per_node
    # Not --depth: pods on one host see the same cores, and would tie their ranks to the same ones.
    options = {"n": job.nodes * ppn, "ppn": ppn, "threads": job.depth}
    launch = ["hvdkit", "launch", *as_words(options)]
    limits: dict[str, Any] = {} if job.depth is None else {"cpu": ppn * job.depth}
    limits |= {} if job.gpus_per_node is None else {"nvidia.com/gpu": job.gpus_per_node}
    volumes = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims.values())
    ]
    mounts = [{"name": f"volume-{number}", "mountPath": directory} for number, directory in enumerate(claims)]
    # The launcher starts no rank and takes no part of the workers' share.
    launcher = {
        "name": "launcher",
        "image": image,
        # Kubernetes puts variables in for $(NAME)
        "command": [word.replace("$", "$$") for word in (*launch, "--", *job.command)],
        "volumeMounts": mounts,
    }
    # The operator's own command, and for a user who is not root that of its images, with a file beside the keys.
    above = ssh_directory.rstrip("/").rpartition("/")[0]
    sshd = ["/usr/sbin/sshd", "-De", *([] if ssh_directory == ROOT else ["-f", f"{above}/.sshd_config"])]
    worker: dict[str, Any] = {"name": "worker", "image": image, "command": sshd}
    worker |= {"resources": {"limits": limits}} if limits else {}
    # Containers have 64 MiB of shared memory otherwise; NCCL, MPI and PyTorch's loaders need more.
    worker["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}, *mounts]  # noqa: S108
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": job.name},
        "spec": {
            "slotsPerWorker": ppn,
            "sshAuthMountPath": ssh_directory,
            "launcherCreationPolicy": "WaitForWorkersReady",
            # A command that fails would be started six times more, each time from the start.
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": 0,
                **({} if job.walltime is None else {"activeDeadlineSeconds": seconds(job.walltime)}),
            },
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, launcher, volumes, ssh_directory),
                "Worker": _replicas(job.nodes, worker, [shm, *volumes], ssh_directory),
            },
        },
    }


def _replicas(count: int, container: dict[str, Any], volumes: list[Any], ssh_directory: str) -> dict[str, Any]:
    # Keys that another user owns cannot be read; 1000 is the user of the operator's own images.
    user = {} if ssh_directory == ROOT else {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}
    pod = {**user, "containers": [container], "volumes": volumes}
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}
