"""The ready MPIJob, by the operator's published schema; and ``hvdkit launch`` in the operator's launcher pod."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from hvdkit import cli

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests/data/kubernetes/mpijob_v2beta1.json").read_text())["openAPIV3Schema"]
READY = (ROOT / "jobs/kubernetes/mpijob.yaml").read_text()
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def wrong(value, schema, where="MPIJob"):
    """What the schema of a custom resource refuses in a value; a field that it does not have, too."""
    if schema.get("x-kubernetes-int-or-string"):
        right = type(value) in (int, str) and re.search(schema.get("pattern", ""), str(value))
        return [] if right else [f"{where}: {value!r} is no quantity"]
    kind = KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{where}: {value!r} is no {schema['type']}"]
    found = [f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is none of {schema['enum']}")
    if kind is list:
        return found + [one for inner in value for one in wrong(inner, schema["items"], f"{where}[]")]
    for name, inner in value.items() if kind is dict else ():
        below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if below is not None:
            found += wrong(inner, below, f"{where}.{name}")
        elif "properties" in schema:
            found.append(f"{where} has no {name}")
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("replicas: 2", 'replicas: "2"'), "MPIJob.spec.mpiReplicaSpecs.Worker.replicas: '2' is no integer"),
        (("emptyDir", "emptyDirectory"), "...Worker.template.spec.volumes[] has no emptyDirectory"),
        (("mountPath", "path"), "...containers[].volumeMounts[] lacks mountPath"),
        (("slotsPerWorker", "slots"), "MPIJob.spec has no slots"),
    ],
)
def test_the_published_schema_takes_the_ready_job_and_would_find_a_mistake(change, message):
    assert wrong(yaml.safe_load(READY), SCHEMA) == []
    found = wrong(yaml.safe_load(READY.replace(*change)), SCHEMA)
    assert any(problem.endswith(message.removeprefix("...")) for problem in found), found


def test_the_ready_job_starts_as_many_ranks_as_its_workers_have_slots(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = yaml.safe_load(READY)["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    hvdkit, *words = launcher["command"]
    pods = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert hvdkit == "hvdkit" and words[:5] == ["launch", "-n", str(pods * 4), "--ppn", "4"]
    hosts = ["--hosts", ",".join(f"pod{number}:{spec['slotsPerWorker']}" for number in range(pods))]
    assert cli.run([words[0], "--dry-run", "--launcher", "mpirun", *hosts, *words[1:]]) == 0, capsys.readouterr().err


# In the launcher pod

POD = {"K_MPI_JOB_ROLE": "launcher", "NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
WORKERS = ["cnn-worker-0.cnn.default.svc", "cnn-worker-1.cnn.default.svc"]
"""The operator's names of its pods (mpi_job_controller.go, newConfigMap)."""
PODS = {
    "OpenMPI": ({"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
                 "OMPI_MCA_orte_set_default_slots": "4"}, "OMPI_MCA_orte_default_hostfile", "{} slots=4\n"),
    "Intel": ({"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10", "I_MPI_PERHOST": "4"},
              "I_MPI_HYDRA_HOST_FILE", "{}:4\n"),
    "MPICH": ({"HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"}, "HYDRA_HOST_FILE", "{}:4\n"),
}  # fmt: skip


@pytest.fixture
def pod(monkeypatch, tmp_path):
    """Sets the environment of a launcher pod for an MPI; the host file that it names."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE", "COBALT_NODEFILE", "LSB_DJOB_RANKFILE"):
        monkeypatch.delenv(name, raising=False)

    def enter(mpi):
        variables, name, line = PODS[mpi]
        file = tmp_path / "hostfile"
        file.write_text("".join(map(line.format, WORKERS)))
        for key, value in {**POD, **variables, name: str(file)}.items():
            monkeypatch.setenv(key, value)
        return file

    return enter


def planned(capsys, *words):
    status = cli.run(["launch", "--dry-run", "--launcher", "mpirun", *words, "--", "echo", "started"])
    out, err = capsys.readouterr()
    return status, shlex.split(out), err


@pytest.mark.parametrize("mpi", PODS)
@pytest.mark.parametrize("ppn", [["--ppn", "4"], []])
def test_launch_starts_the_ranks_on_the_operators_workers(pod, capsys, mpi, ppn):
    pod(mpi)
    status, words, err = planned(capsys, "-n", "8", *ppn)
    assert status == 0, err
    hosts = words[words.index("--host" if "--host" in words else "-hosts") + 1]
    assert hosts.split(",") == [f"{name}:4" for name in WORKERS]
    assert words[words.index("-n") + 1] == "8"


def test_launch_in_the_launcher_pod_refuses_more_ranks_than_slots_and_a_file_that_is_gone(pod, capsys):
    file = pod("OpenMPI")
    status, _, err = planned(capsys, "-n", "9")
    assert status == 2 and "9 ranks are more than the 8 slots" in err
    file.unlink()
    status, _, err = planned(capsys, "-n", "8")
    assert status == 2 and f"{file} cannot be read" in err


@pytest.mark.parametrize("changes", [{"K_MPI_JOB_ROLE": "worker"}, {"K_MPI_JOB_ROLE": ""}])
def test_the_file_counts_in_the_launcher_pod_alone_and_hosts_that_are_named_before_it(
    pod, capsys, monkeypatch, changes
):
    pod("OpenMPI")
    status, words, _ = planned(capsys, "-n", "2", "--hosts", "h1,h2")
    assert status == 0 and "h1:1,h2:1" in words
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    status, words, _ = planned(capsys, "-n", "2")
    assert status == 0 and not any(WORKERS[0] in word for word in words)
