"""Ranks that know only their number find each other over TCP."""

import hashlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdkit.errors import LauncherError
from hvdkit.steps import bootstrap, meeting
from hvdkit.steps.launchers import Launched, detect
from hvdkit.steps.secret import Key


def named(job):
    return Key(hashlib.sha256(f"{os.getpid()} {job}".encode()).digest(), "a test")


def meet(ranks, size, key, hosts=None, timeout=20.0):
    """What each of the ranks knows afterwards, or its error."""

    def tell(address, by_rank):
        return {"port": 4711, "address": address, "size": len(by_rank)}

    def one(rank):
        host = hosts[rank] if hosts else None
        try:
            return meeting.meet(rank, size, "127.0.0.1", named(key), tell, host=host, timeout=timeout)
        except LauncherError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_learn_where_all_are():
    hosts = ["a", "b", "a", "b", "a"]
    met = meet(range(5), 5, "job 1", hosts)
    for one in met:
        assert one.hosts == tuple(hosts) and one.address == one.own_address == "127.0.0.1"
        assert one.told == {"port": 4711, "address": "127.0.0.1", "size": 5}
    places = [met[0].place(rank) for rank in range(5)]
    assert places == [(0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2), (1, 2, 1, 2), (2, 3, 0, 1)]


def test_jobs_on_one_host_never_mix():
    keys = [f"job {number}" for number in range(8)]
    with ThreadPoolExecutor(len(keys)) as pool:
        jobs = list(pool.map(lambda key: meet(range(3), 3, key, [key] * 3), keys))
    assert [{host for one in job for host in one.hosts} for job in jobs] == [{key} for key in keys]


@pytest.mark.slow
def test_a_stranger_on_the_first_port_does_not_disturb():
    with socket.create_server(("", meeting.ports(named("job 3"))[0])):  # takes connections and never answers
        met = meet(range(2), 2, "job 3")
    assert met[0].hosts == met[1].hosts


@pytest.mark.slow
def test_who_is_missing_is_said():
    (alone,) = meet([0], 3, "job 4", timeout=1.0)
    assert "ranks 1-2 did not come to rank 0 within 1 s" in alone
    (lost,) = meet([1], 3, "job 5", timeout=1.0)
    assert "rank 1 did not find rank 0 on 127.0.0.1 within 1 s" in lost


class Horovod:
    def __init__(self, mpi, gloo=True):
        self.mpi_built, self.gloo_built = (lambda: mpi), (lambda: gloo)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def test_gloo_is_needed_where_mpi_would_not_find_the_ranks(monkeypatch):
    launched = detect(SLURM)
    monkeypatch.setattr(bootstrap, "loaded_mpi", lambda: "Open MPI v5.0.11")
    assert bootstrap.is_needed(Horovod(mpi=True), launched, SLURM)
    assert not bootstrap.is_needed(Horovod(mpi=True), launched, {**SLURM, "PMIX_RANK": "1"})
    assert bootstrap.is_needed(Horovod(mpi=True), launched, {**SLURM, "PMI_RANK": "1"})  # Open MPI 5 knows PMIx only
    monkeypatch.setattr(bootstrap, "loaded_mpi", lambda: "MPICH Version: 4.1")
    assert not bootstrap.is_needed(Horovod(mpi=True), launched, {**SLURM, "PMI_RANK": "1"})
    assert bootstrap.is_needed(Horovod(mpi=False), launched, {**SLURM, "PMI_RANK": "1"})
    assert bootstrap.is_needed(Horovod(mpi=True), launched, {**SLURM, "PMIX_RANK": "1", "HOROVOD_CONTROLLER": "gloo"})
    assert not bootstrap.is_needed(Horovod(mpi=True), launched, {**SLURM, "HOROVOD_CONTROLLER": "mpi"})
    assert not bootstrap.is_needed(Horovod(mpi=True, gloo=False), launched, SLURM)
    without_hosts = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert not bootstrap.is_needed(Horovod(mpi=True), launched, without_hosts)
    elsewhere = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PBS_NODEFILE": "/of/the/first/host/alone"}
    assert not bootstrap.is_needed(Horovod(mpi=False), detect(elsewhere), elsewhere)


def test_keys_tell_job_steps_apart():
    keys = {
        bootstrap.key(detect(SLURM), {**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})
        for job in "12"
        for step in "01"
    }
    assert len(keys) == 4 and None not in keys
    assert bootstrap.key(Launched("srun", 0, 2, None, None), {}) is None


def test_interfaces_are_found_by_address():
    assert bootstrap.interface_of("127.0.0.1") == "lo"
    with pytest.raises(LauncherError, match=r"no network interface of this host has the address 203\.0\.113\.9"):
        bootstrap.interface_of("203.0.113.9")
