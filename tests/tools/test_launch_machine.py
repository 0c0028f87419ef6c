"""Cores that a job may use, from recorded descriptions of machines and containers."""

import os

import pytest

from hvdkit.prepare.doctor.host import cpu_quota
from hvdkit.run.launch.facts import physical_cores, usable_cores


def test_hyperthreads_count_once(tmp_path):
    for cpu, siblings in enumerate(("0,2\n", "1,3\n", "0,2\n", "1,3\n")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1


def test_without_a_description_every_cpu_is_a_core(tmp_path):
    assert physical_cores({0, 1, 5}, tmp_path) == 3


def group(directory, files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


@pytest.mark.parametrize(("limit", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None)])
def test_quota_of_cgroup_version_2(tmp_path, limit, quota):
    group(tmp_path / "job/step", {"cpu.max": limit})
    assert cpu_quota("0::/job/step\n", tmp_path) == quota


def test_the_tightest_quota_of_all_levels_counts(tmp_path):
    group(tmp_path / "job", {"cpu.max": "200000 100000\n"})
    group(tmp_path / "job/step", {"cpu.max": "400000 100000\n"})
    assert cpu_quota("0::/job/step\n", tmp_path) == 2.0


@pytest.mark.parametrize(("limit", "quota"), [("300000\n", 3.0), ("-1\n", None)])
def test_quota_of_cgroup_version_1_in_a_container(tmp_path, limit, quota):
    group(tmp_path / "cpu", {"cpu.cfs_quota_us": limit, "cpu.cfs_period_us": "100000\n"})
    membership = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n"
    assert cpu_quota(membership, tmp_path) == quota


def test_no_control_groups_no_quota(tmp_path):
    assert cpu_quota("0::/job\n", tmp_path / "nowhere") is None
    assert cpu_quota("", tmp_path) is None


def test_this_machine_has_at_least_one_core_and_no_more_than_the_affinity_allows():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
