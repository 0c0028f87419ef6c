"""Step 1: topology and launcher detection."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdkit import InvalidArgumentError, LauncherError, Topology, TopologyMismatchError
from hvdkit.steps import launchers, starting

RECORDED = json.loads((Path(__file__).parent / "launcher_environments.json").read_text())


@pytest.mark.parametrize("case", RECORDED, ids=[case["case"] for case in RECORDED])
def test_recorded_environments_are_recognised(case):
    found = launchers.detect(case["environ"])
    expected = case["expected"]
    if expected is None:
        assert found is None
    else:
        assert found == launchers.Launched(**expected)


@pytest.mark.parametrize("case", RECORDED, ids=[case["case"] for case in RECORDED])
def test_without_a_place_no_launcher_is_found(case):
    assert launchers.detect(launchers.without_place(case["environ"])) is None


def test_what_tunes_or_describes_stays():
    kept = {
        **{
            "HOROVOD_GLOO_IFACE": "eth0",
            "HOROVOD_CPU_OPERATIONS": "ccl",
            "OMPI_MCA_btl": "self",
            "PMIX_MCA_gds": "hash",
        },
        **{"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "PRTE_MCA_plm": "ssh", "PMI_MAX_KVS_ENTRIES": "9"},
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2", "NCCL_SOCKET_IFNAME": "eth0"},
        **{
            "HYDRA_BOOTSTRAP": "ssh",
            "FLUX_URI": "local:///x",
            "I_MPI_PIN": "0",
            "HVDKIT_SECRET": "x",
            "PBS_JOBID": "1",
        },
    }
    assert launchers.without_place(kept) == kept
    horovodruns = {"HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    assert launchers.without_place({**horovodruns, "NCCL_SOCKET_IFNAME": "lo"}) == {}


HOROVODRUN = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("above", "launcher"),
    [
        ([], "horovodrun"),
        ([HOROVODRUN, HOROVODRUN], "Open MPI"),  # left in the shell, mpirun in it
        ([{**HOROVODRUN, **OPEN_MPI}, HOROVODRUN, {}], "Open MPI"),  # a wrapper around the rank
        ([OPEN_MPI, OPEN_MPI], "horovodrun"),  # horovodrun in a rank of mpirun
        (
            [{**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}],
            "horovodrun",
        ),  # mpirun in a rank of mpirun, and the table's order
        ([{}, HOROVODRUN], "horovodrun"),
        ([{**HOROVODRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}], "Open MPI"),  # left by two jobs, mpirun in it
    ],
)
def test_the_innermost_launcher_counts(above, launcher):
    found = launchers.detect({**HOROVODRUN, **OPEN_MPI}, above)
    assert (found.launcher, found.rank) == (launcher, 0 if launcher == "horovodrun" else 1)


def test_hvdkit_launch_says_the_place_of_another_launcher_in_the_words_of_torchrun():
    words = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (
        launchers.detect({**HOROVODRUN, **OPEN_MPI, **words}, [{**HOROVODRUN, **OPEN_MPI}, HOROVODRUN, {}]).launcher
        == "Open MPI"
    )
    assert launchers.detect({"ALPS_APP_PE": "1", **words}, [{"ALPS_APP_PE": "1"}, {}]).launcher == "aprun"
    within = {**OPEN_MPI, **words, "WORLD_SIZE": "8"}  # what speaks like torchrun in a rank of mpirun
    assert launchers.detect(within, [OPEN_MPI]).size == 8 and launchers.detect(within, []).size == 2


def test_a_rank_that_horovodrun_did_not_give_is_an_error():
    environ = {**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "5000"}
    given = [{"HOROVOD_GLOO_RENDEZVOUS_PORT": "5000"}, {}]
    assert (
        launchers.detect(environ, given).launcher == launchers.detect(environ, [environ, {}]).launcher == "horovodrun"
    )
    with pytest.raises(LauncherError, match=r"HOROVOD_RANK=0 and HOROVOD_SIZE=1 were set before, by another job"):
        launchers.detect(environ, [{**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4999"}])


def test_a_launcher_without_its_rank_is_an_error_and_never_rank_zero():
    with pytest.raises(LauncherError, match=r"Open MPI started .* OMPI_COMM_WORLD_SIZE is not set.*known: horovodrun"):
        launchers.detect({"OMPI_COMM_WORLD_RANK": "0"})
    for size in ("HOROVOD_SIZE", "JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        with pytest.raises(LauncherError, match=rf"\({size} is set\) but \w+_RANK is not set, so its rank is unknown"):
            launchers.detect({size: "4"})


@pytest.mark.parametrize("rank", ["", "one", "-1", "1.5", "²"])
def test_a_rank_that_is_no_number_is_named(rank):
    with pytest.raises(LauncherError, match="HOROVOD_RANK must be a number"):
        launchers.detect({"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2"})


def test_a_rank_beyond_the_size_is_refused():
    with pytest.raises(LauncherError, match="OMPI_COMM_WORLD_RANK=4 with a size of 4"):
        launchers.detect({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"})


def test_topology_is_immutable_and_checked():
    world = Topology(1, 4, 1, 2, 0, 2, "srun")
    assert not world.is_root and Topology(0, 1).is_root
    with pytest.raises(AttributeError):
        world.rank = 0  # type: ignore[misc]
    for bad in ((4, 4), (-1, 4), (0, 0), (True, 2), (0.0, 1)):
        with pytest.raises(InvalidArgumentError):
            Topology(*bad)


def test_agreeing_launcher_is_confirmed():
    world = Topology(1, 4)
    assert starting._confirm(world, 1, 4, "srun", "Open MPI v5") is world


@pytest.mark.parametrize(
    ("seen", "told", "explains"),
    [
        (Topology(0, 1), (2, 4), "every process would train alone"),
        (Topology(1, 4), (0, 2), "Two launchers are nested"),
        (Topology(1, 4), (2, 4), "Two launchers are nested"),
    ],
)
def test_disagreement_names_both_sides(seen, told, explains):
    with pytest.raises(TopologyMismatchError, match=explains) as raised:
        starting._confirm(seen, *told, "srun", "Open MPI v5.0.11")
    assert f"srun started rank {told[0]} of {told[1]}" in str(raised.value)
    assert f"(over Open MPI v5.0.11) sees rank {seen.rank} of {seen.size}" in str(raised.value)


def test_what_a_launcher_does_not_say_comes_from_horovod():
    world = Topology(3, 8, 1, 2, 1, 4, "aprun")
    assert starting._confirm(world, 3, None, "aprun", "MPICH") is world
    with pytest.raises(TopologyMismatchError, match=r"aprun started rank 3, but Horovod .* sees rank 0 of 1"):
        starting._confirm(Topology(0, 1), 3, None, "aprun", "MPICH")


class OneProcess:
    """What Horovod says when it was started without a launcher."""

    def __getattr__(self, name):
        return lambda: int(name.endswith("size"))


class Communicator:
    """Rank 3 of 4, two on each of two hosts; ``Split`` gives those of one place on all hosts."""

    def __init__(self, rank, size):
        self.Get_rank, self.Get_size = lambda: rank, lambda: size

    def Split_type(self, kind):  # noqa: N802
        assert kind == "one host"
        return Communicator(1, 2)

    def Split(self, color, key):  # noqa: N802
        assert (color, key) == (1, 3)
        return Communicator(1, 2)


def test_mpi4py_answers_as_horovod_does(monkeypatch):
    monkeypatch.setattr(starting, "loaded_mpi", lambda: "Open MPI v5")
    mpi = SimpleNamespace(COMM_WORLD=Communicator(3, 4), COMM_TYPE_SHARED="one host")
    environ = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert starting.start(starting.Mpi4py(lambda: mpi), environ) == Topology(3, 4, 1, 2, 1, 2, "Open MPI")
    with pytest.raises(TopologyMismatchError, match=r"Open MPI started rank 3 of 4, but .* sees rank 0 of 1"):
        mpi.COMM_WORLD.Get_rank, mpi.COMM_WORLD.Get_size = lambda: 0, lambda: 1
        mpi.COMM_WORLD.Split = lambda color, key: Communicator(0, 1)
        starting.start(starting.Mpi4py(lambda: mpi), environ)


def test_a_process_without_a_launcher_says_that_it_is_alone(caplog):
    assert starting.start(OneProcess(), {}) == Topology(0, 1, 0, 1, 0, 1, "none")
    (record,) = caplog.records
    assert "no launcher started this process (known: horovodrun, torchrun, jsrun" in record.getMessage()
    assert "trains alone, as rank 0 of 1" in record.getMessage()
