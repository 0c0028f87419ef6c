"""What the doctor reads from the machine: control groups, drivers, mpirun, variables; on made-up file trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_install_find import program

from hvdkit.prepare.doctor import host


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "cpu,cpuacct/a/cpu.cfs_"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 1.5),
        ("0::/job/step", {"job/step/cpu.max": "50000 100000", "job/cpu.max": "150000 100000"}, 0.5),
        ("0::/", {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {}, None),
        ("3:cpu,cpuacct:/a", {V1 + "quota_us": "200000", V1 + "period_us": "100000"}, 2.0),
        ("3:cpu,cpuacct:/a", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("5:cpuset:/a", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_tightest_cpu_quota_counts(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float | None
) -> None:
    root = write(tmp_path / "cgroup", files)
    assert host.cpu_quota(membership + "\n", root) == expected


def test_gpus_are_those_that_the_drivers_show(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   32\n",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "IRQ:   33\n",
            "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
            "sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\nsimd_count 440\n",
        },
    )
    assert host.gpus(root) == ("NVIDIA H200", "NVIDIA GPU", "AMD GPU")
    assert host.gpus(tmp_path / "nothing") == ()


def test_mpirun_on_path_comes_before_the_one_of_the_environment(tmp_path: Path) -> None:
    typed = program(tmp_path / "usr/mpirun", "printf 'HYDRA build details:\\n    Version: 4.2.0\\n'")
    own = program(tmp_path / "env/bin/mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    launchers = host.mpi_launchers({"PATH": str(typed.parent)}, [own.parent, own.parent])
    assert [(one.path, one.first_on_path, str(one)) for one in launchers] == [
        (str(typed), True, "MPICH 4.2.0"),
        (str(own), False, "Open MPI 5.0.11"),
    ]


@pytest.mark.parametrize("text", ["exit 1", "echo 'pals 1.2'", "kill -9 $$", "printf '\\377'"])
def test_an_mpirun_that_does_not_say_what_it_is_is_unknown(tmp_path: Path, text: str) -> None:
    typed = program(tmp_path / "mpiexec", text)
    (launcher,) = host.mpi_launchers({"PATH": str(tmp_path)}, [])
    assert (launcher.path, launcher.implementation, launcher.version) == (str(typed), "", "")


def test_only_variables_that_matter_are_shown() -> None:
    environ = {"HOROVOD_TIMELINE": "t", "OMP_NUM_THREADS": "2", "AWS_SECRET": "x", "HOROVOD_HOSTNAME": "node-17"}
    assert host.relevant(environ) == {"HOROVOD_TIMELINE": "t", "OMP_NUM_THREADS": "2"}


def test_the_machine_has_cores_and_no_name() -> None:
    seen = host.look()
    assert 1 <= seen.affinity <= seen.cores
    assert os.uname().nodename not in seen.platform.split()
