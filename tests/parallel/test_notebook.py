"""``%%ranks``: cells on the ranks of a job, in a real kernel."""

import contextlib
import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster
from ranks import missing, rank_environment

MISSING = [name for name in ("ipykernel", "nbclient", "mpi4py", "matplotlib") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
ROOT = Path(__file__).parents[2]


def kernel_environment(directory):
    return {**rank_environment(), "IPYTHONDIR": str(directory / "ipython")}


def lines_of(shown):
    return sorted(line for line in shown[0].splitlines() if line.startswith("["))


class Kernel:
    """A kernel with the extension, and what its cells show."""

    def __init__(self, directory):
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=kernel_environment(directory), cwd=str(directory))
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        self.run("%load_ext hvdkit.notebook")

    def run(self, cell, interrupt_at=None):
        """The text that a cell shows, its figures, and the last line of its error, "" for none.

        Args:
            interrupt_at: interrupt the kernel once the cell has shown this.
        """
        text, figures, interrupted = "", [], False

        def show(message):
            nonlocal text, interrupted
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "display_data":
                figures.extend(name for name in content["data"] if name.startswith("image/"))
            if interrupt_at and interrupt_at in text and not interrupted:
                interrupted = True
                self.manager.interrupt_kernel()

        reply = self._client.execute_interactive(cell, output_hook=show, timeout=180, allow_stdin=False)["content"]
        error = f"{reply['ename']}: {reply['evalue']}" if reply["status"] == "error" else ""
        return text, figures, error

    def lines(self, cell):
        """What a cell prints, sorted by rank; it must not fail."""
        text, _, error = shown = self.run(cell)
        assert not error, (error, text)
        return lines_of(shown)

    def end(self):
        self._client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    yield kernel
    kernel.end()


def test_what_cannot_be_is_one_sentence(kernel):
    for cell, message in {
        "%%ranks\n1": "there are no ranks yet; `%%ranks 2` starts two",
        "%%ranks two\n1": "got 'two'; a number of ranks comes first",
        "%%ranks 2 --treads 1\n1": "No such option '--treads'",
        "%%ranks 2 -n 3\n1": "got 2 ranks and -n 3",
        "%ranks 0": "0 is not in the range",
        "%ranks 2 'a": "No closing quotation",
    }.items():
        text, _, error = kernel.run(cell)
        assert error.startswith("UsageError: %ranks: ") and message in error
        assert "Traceback" not in text


def test_variables_live_on_and_each_line_has_its_rank(kernel):
    assert kernel.lines("%%ranks 2 --threads 1\nimport os\nrank = int(os.environ['RANK'])\nrank") == ["[0] 0", "[1] 1"]
    assert kernel.lines("%%ranks\nrank += 10\nprint('now', rank)") == ["[0] now 10", "[1] now 11"]
    assert kernel.lines("%%ranks 2\nprint('without newline', end='')") == [
        "[0] without newline",
        "[1] without newline",
    ]
    text, _, _ = kernel.run("%ranks")
    assert re.fullmatch(r"rank 0: pid \d+ on \S+; rank 1: pid \d+ on \S+\n", text)


def test_figures_are_the_root_s(kernel):
    cell = "%%ranks 2\nimport matplotlib.pyplot as plt\nplt.plot([rank, 2]);"
    text, figures, error = kernel.run(cell)
    assert (figures, error) == (["image/png"], ""), text


def test_a_rank_that_fails_ends_the_cell_of_all_and_variables_stay(kernel):
    kernel.run("%%ranks 2\nimport os, time\nrank = int(os.environ['RANK'])")
    text, _, error = kernel.run("%%ranks\nif rank:\n    1 / 0\ntime.sleep(600)")
    assert error == "RanksError: rank 1: ZeroDivisionError: division by zero"
    assert "[1] ZeroDivisionError" in text and "[0] KeyboardInterrupt" in text
    assert kernel.lines("%%ranks\nrank") == ["[0] 0", "[1] 1"]
    _, _, error = kernel.run("%%ranks\nraise ValueError('first\\nsecond')")
    assert re.fullmatch(r"RanksError: rank \d: ValueError: first", error)


def test_an_interrupt_ends_a_cell(kernel):
    kernel.run("%%ranks 2\nimport time\nkept = 1")
    _, _, error = kernel.run("%%ranks\nprint('here', flush=True)\ntime.sleep(600)", interrupt_at="] here")
    assert error == "RanksError: interrupted"
    assert kernel.lines("%%ranks\nkept") == ["[0] 1", "[1] 1"]


WAITS = """%%ranks 2
import os
from mpi4py import MPI
if os.environ["RANK"] == "0":
    print("waits", flush=True)
    MPI.COMM_WORLD.Barrier()
"""


def test_ranks_that_wait_for_another_are_ended_and_it_is_said_where_they_were(kernel):
    text, _, error = kernel.run(WAITS, interrupt_at="[0] waits")
    assert error.startswith("RanksError: interrupted; rank 0 could not be interrupted, so every rank was ended")
    assert "rank 0 was here:" in text and "MPI.COMM_WORLD.Barrier()" in text and "run_cell" not in text
    assert kernel.lines("%%ranks\n'new ones'") == ["[0] 'new ones'", "[1] 'new ones'"]


def test_a_rank_that_is_killed_is_one_sentence_and_others_take_its_place(kernel):
    cell = "%%ranks 2\nimport os, signal, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)"
    text, _, error = kernel.run(f"{cell}\ntime.sleep(600)")
    assert error.startswith("RanksError: The ranks are gone (status 137)")
    assert re.search(r"hvdkit launch: rank 1 \(pid \d+\) was killed by SIGKILL", text)
    assert kernel.lines("%%ranks\n'new ones'") == ["[0] 'new ones'", "[1] 'new ones'"]


def test_others_take_their_place_when_asked(kernel):
    def pids():
        return {int(line.split()[1]) for line in kernel.lines("%%ranks\nimport os; os.getpid()")}

    def gone(pids):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):  # the suite's time limit ends this
            time.sleep(0.05)

    kernel.run("%ranks 2")
    first = pids()
    kernel.run("%ranks stop")
    kernel.run("%ranks 2")
    second = pids()
    assert not first & second
    kernel.run("%ranks 1")
    third = pids()
    assert len(third) == 1
    kernel.run("%ranks stop")
    gone(first | second | third)
    assert "there are no ranks yet" in kernel.run("%%ranks\n1")[2]


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_ranks_end_with_the_kernel(tmp_path, how):
    kernel = Kernel(tmp_path)
    pids = [int(line.split()[1]) for line in kernel.lines("%%ranks 2\nimport os; os.getpid()")]
    kernel.manager.shutdown_kernel(now=how == "is killed")
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.05)


IN_SLURM = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in ["%load_ext hvdkit.notebook", CELL, "%ranks stop"]:
    shell.run_cell(cell).raise_error()
"""


@pytest.mark.root
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason="needs Slurm (Debian: apt install slurm-wlm munge)")
def test_a_notebook_in_an_allocation_has_its_ranks_on_the_nodes(tmp_path):
    cell = "%%ranks 2 --launcher srun --ppn 1\nimport os; os.environ['SLURMD_NODENAME']"
    cluster = slurm_cluster.Cluster(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        try:
            cluster.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        program = [sys.executable, "-c", IN_SLURM.replace("CELL", repr(cell))]
        done = cluster.run("salloc", "-N", "2", "-n", "2", *program, PYTHONPATH=str(ROOT), IPYTHONDIR=str(tmp_path))
    nodes = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    assert len(nodes) == 2 and len(set(nodes)) == 2 and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)  # its ranks import PyTorch nine times
@pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod (`make test` installs all)")
def test_the_class_of_eight_cells(tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "eight_cells.ipynb", 4)
    client = nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=kernel_environment(tmp_path))
    shown, heading = {}, "0"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = cell.source.removeprefix("## ").partition(".")[0]
            continue
        text, kinds = shown.setdefault(heading, ["", []])
        for output in cell.outputs:
            text += output.get("text", output.get("evalue", ""))
            kinds += output.get("data", {})
        shown[heading][0] = text
    assert {"[0] rank 0 of 2, started by Open MPI", "[1] rank 1 of 2, started by Open MPI"} <= set(lines_of(shown["1"]))
    assert shown["2"][0].count("28 steps of 32 samples") == 2
    (of_root, of_other) = (line.partition(" ")[2] for line in lines_of(shown["3"]))
    losses = json.loads(of_root.partition("]")[0] + "]")
    assert of_root == of_other and len(losses) == 4
    assert shown["4"][1].count("image/png") == 1
    assert "was killed by SIGKILL" in shown["5"][0] and "The ranks are gone (status 137)" in shown["5"][0]
    later = json.loads(lines_of(shown["6"])[0].partition(" ")[2])
    assert len(later) == 2 and max(later) < min(losses)
    assert "allreduce.gradients" in shown["7"][0]
    assert "n = 1: " in shown["8"][0] and "n = 2: " in shown["8"][0]
