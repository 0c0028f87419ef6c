"""An MPIJob: what it says, that the operator's published schema takes it, and ``hvdkit launch`` in its launcher pod."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.jobs.job import kubernetes
from hvdkit.jobs.job.site import BatchJob

SCHEMA = json.loads((Path(__file__).parents[1] / "data/kubernetes/mpijob_v2beta1.json").read_text())["openAPIV3Schema"]
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
TYPED = ["--nodes", "2", "--ppn", "4", "--walltime", "02:00:30"]
USER_SSH = "/home/mpiuser/.ssh"
GOLDEN = """\
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: cnn}
spec:
  slotsPerWorker: 4
  sshAuthMountPath: /home/mpiuser/.ssh
  launcherCreationPolicy: WaitForWorkersReady
  runPolicy: {cleanPodPolicy: Running, backoffLimit: 0, activeDeadlineSeconds: 7230}
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: Never
      template:
        spec:
          securityContext: {runAsUser: 1000, fsGroup: 1000}
          containers:
            - name: launcher
              image: site/train:1
              command: [hvdkit, launch, "-n", "8", "--ppn", "4", "--threads", "2", "--", python, train.py]
              volumeMounts: [{name: volume-0, mountPath: /results}]
          volumes: [{name: volume-0, persistentVolumeClaim: {claimName: results}}]
    Worker:
      replicas: 2
      restartPolicy: Never
      template:
        spec:
          securityContext: {runAsUser: 1000, fsGroup: 1000}
          containers:
            - name: worker
              image: site/train:1
              command: [/usr/sbin/sshd, -De, -f, /home/mpiuser/.sshd_config]
              resources: {limits: {cpu: 8, nvidia.com/gpu: 4}}
              volumeMounts: [{name: shm, mountPath: /dev/shm}, {name: volume-0, mountPath: /results}]
          volumes:
            - {name: shm, emptyDir: {medium: Memory}}
            - {name: volume-0, persistentVolumeClaim: {claimName: results}}
"""


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


def write(capsys, *options, command=("python", "train.py")):
    words = ["job", "--system", "kubernetes", "--image", "site/train:1", *TYPED, *options]
    status = cli.run([*words, "--", *command])
    return status, *capsys.readouterr()


def container(text, role):
    (one,) = json.loads(text)["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return one


def test_an_mpi_job_word_for_word(capsys, tmp_path):
    options = ["--depth", "2", "--gpus-per-node", "4", "--volume", "results:/results", "--name", "cnn"]
    status, text, err = write(capsys, *options)
    assert (status, json.loads(text), err) == (0, yaml.safe_load(GOLDEN), "")
    file = tmp_path / "job.yaml"
    status, out, err = write(capsys, *options, "-o", str(file))
    assert (status, out, err) == (0, "", f"{file} is written; submit it: kubectl create -f {file}\n")
    assert file.read_text() == text


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--gpus-per-node", "1", "--depth", "3"],
        ["--volume", "a:/a", "--volume", "b:/b/c"],
        ["--ssh-dir", "/root/.ssh"],
    ],
)
def test_the_published_schema_takes_it(capsys, options):
    status, text, _ = write(capsys, *options)
    assert status == 0 and wrong(json.loads(text), SCHEMA) == []


def test_root_needs_no_user_and_no_file_for_sshd(capsys):
    text = write(capsys, "--ssh-dir", "/root/.ssh")[1]
    assert "runAsUser" not in text
    assert container(text, "Worker")["command"] == ["/usr/sbin/sshd", "-De"]


def passed_on(word):
    """What Kubernetes makes of a word of a command: $$ is $, and for $(NAME) it takes the value of a variable."""
    return re.sub(r"\$(\$|\([^)]*\))?", lambda found: {None: "$", "$": "$"}.get(found[1], "VALUE"), word)


@settings(max_examples=200)
@example(["a\u2028b\x85", "\U0001f600 é"])
@given(
    st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=12) | st.just("$(HOME)$$x"), max_size=4)
)
def test_whatever_is_typed_reaches_the_command_as_it_is(words):
    job = BatchJob(1, 2, "00:01:00", ("x", *words))
    command = container(kubernetes.write(job, "i", (), USER_SSH), "Launcher")["command"]
    assert [passed_on(word) for word in command] == ["hvdkit", "launch", "-n", "2", "--ppn", "2", "--", "x", *words]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "a b"], "--image must name a container image with hvdkit, Horovod, MPI and sshd in it, got 'a b'"),
        (["--name", "CNN"], "--name must be small letters, digits and - from a letter on"),
        (["--name", "a" * 55], f"at most 63 with what its pods add ({'a' * 55}-worker-1)"),
        (["--volume", "results"], "--volume must be CLAIM:DIRECTORY"),
        (["--volume", "a:/x", "--volume", "b:/x"], "each directory once"),
        (["--volume", 'a:/x"'], "--volume must be CLAIM:DIRECTORY"),
        (["--ssh-dir", "keys"], "--ssh-dir must be a directory such as /root/.ssh, got 'keys'"),
        (["--queue", "gpu"], "--queue is for batch systems; leave it out with --system kubernetes"),
        (["--account", "me"], "--account is for batch systems"),
        (["--site", "polaris"], "--site is for batch systems"),
        (["--walltime", "30"], "HH:MM:SS"),
        (["--system", "slurm"], "--image and --volume are for --system kubernetes"),
    ],
)
def test_what_cannot_be_is_one_sentence(capsys, options, message):
    status, out, err = write(capsys, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_there_is_no_default_image(capsys):
    assert cli.run(["job", "--system", "kubernetes", *TYPED, "--", "x"]) == 2
    assert "got None" in capsys.readouterr().err


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
