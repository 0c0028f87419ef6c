"""Batch scripts: what they say, that nothing in them is read otherwise than typed, and those in jobs/."""

import importlib.resources
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.bench.scaling_cli import scaling
from hvdkit.run.job import script, site
from hvdkit.run.job.model import Job
from hvdkit.run.job.systems import SYSTEMS
from hvdkit.run.launch.cli import launch

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").rglob("*.sh"))
JOB = Job(2, 4, "00:30:00", ("python", "train.py", "--epochs", "3"), account="me")
NASTY = ("python", "my train.py", 'it\'s $HOME `id` \\ "q"', "", "*", "~", "!x", "{a,b}", "#PBS -q other", "é;rm -rf /",
         "\\", "~/data", "then", "it\u2019s \u201cq\u201d")  # fmt: skip


def job(capsys, *words):
    status = cli.run(["job", *words])
    return status, *capsys.readouterr()


def launch_lines(text):
    return [line for line in text.splitlines() if line.startswith(("hvdkit launch ", "hvdkit bench scaling "))]


def parsed(line):
    """The options of a ``hvdkit launch`` or ``hvdkit bench scaling`` line, read by its own parser."""
    words = shlex.split(line.split(" > ")[0], comments=True)
    command, start = (scaling, 3) if words[1] == "bench" else (launch, 2)
    return command.make_context(command.name, words[start:]).params


def launches(line):
    """The arguments of ``hvdkit launch`` for each job that a line of a ready script starts."""
    words = shlex.split(line.split(" > ")[0], comments=True)
    if words[1] == "launch":
        return [words[2:]]
    options = parsed(line)
    passed_on = ["--launcher", options["launcher"]]
    passed_on += ["--depth", str(options["depth"])] if options["depth"] else []
    found = []
    for n in options["ranks"]:
        ppn = ["--ppn", str(min(n, options["ppn"]))] if options["ppn"] else []
        found.append(["-n", str(n), *ppn, *passed_on, "--", *options["command"]])
    return found


def passes_shellcheck(text):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=text, capture_output=True, text=True)
    return done.returncode == 0 or done.stdout


def passes_bash(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return done.returncode == 0 or done.stderr


def test_the_script_for_polaris_word_for_word():
    job_ = Job(2, 4, "00:30:00", ("python", "train.py"), "cnn", "debug-scaling", "me", 16)
    assert script.write(job_, site.find("pbs", "polaris"), "/venv/bin") == (
        "#!/bin/bash -l\n"
        "#PBS -N cnn\n"
        "#PBS -l select=2:system=polaris\n"
        "#PBS -l place=scatter\n"
        "#PBS -l walltime=00:30:00\n"
        "#PBS -j oe\n"
        "#PBS -q debug-scaling\n"
        "#PBS -A me\n"
        "#PBS -l filesystems=home:eagle\n"
        "\n"
        "module use /soft/modulefiles\n"
        "module load conda\n"
        "conda activate base\n"
        'export PATH=/venv/bin:"$PATH"  # the hvdkit that wrote this script\n'
        "\n"
        'cd "$PBS_O_WORKDIR" || exit 1\n'
        "hvdkit launch -n 8 --ppn 4 --depth 16 --launcher mpiexec -- python train.py\n"
    )


@pytest.mark.parametrize(
    ("site_name", "changes", "expected"),
    [
        ("pbs", {"gpus_per_node": 4, "depth": 8}, ["#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4"]),
        ("pbs", {}, ["#PBS -l select=2:ncpus=4:mpiprocs=4", "#PBS -A me", "hvdkit launch -n 8 --ppn 4 -- python"]),
        (
            "slurm",
            {"depth": 16, "gpus_per_node": 4, "queue": "gpu"},
            [
                "#SBATCH --job-name=hvdkit",
                "#SBATCH --nodes=2",
                "#SBATCH --ntasks-per-node=4",
                "#SBATCH --cpus-per-task=16",
                "#SBATCH --gpus-per-node=4",
                "#SBATCH --time=00:30:00",
                "#SBATCH --output=%x.%j.log",
                "#SBATCH --partition=gpu",
                "#SBATCH --account=me",
                'cd "$SLURM_SUBMIT_DIR" || exit 1',
                "hvdkit launch -n 8 --ppn 4 --depth 16 --launcher srun --gpus-per-node 4 -- python train.py",
            ],
        ),
        (
            "lsf",
            {"walltime": "01:59:01", "gpus_per_node": 4},
            ["#BSUB -n 8", '#BSUB -R "span[ptile=4]"', '#BSUB -gpu "num=4"', "#BSUB -W 02:00", "#BSUB -P me"],
        ),
        (
            "summit",
            {"gpus_per_node": 4},
            [
                "#BSUB -nnodes 2",
                "#BSUB -o hvdkit.%J.log",
                'cd "$LS_SUBCWD" || exit 1',
                "hvdkit launch -n 8 --ppn 4 --depth 7 --launcher jsrun --gpus-per-node 4 -- python",
            ],
        ),
        (
            "theta",
            {},
            [
                "#COBALT -n 2",
                "#COBALT -t 00:30:00",
                "#COBALT -O hvdkit",
                "#COBALT -q debug-cache-quad",
                "#COBALT --attrs filesystems=home,theta-fs0",
                "hvdkit launch -n 8 --ppn 4 --depth 16 --launcher aprun -- python train.py",
            ],
        ),
    ],
)
def test_what_each_system_is_told(site_name, changes, expected):
    values = {field: getattr(JOB, field) for field in JOB.__dataclass_fields__} | changes
    lines = script.write(Job(**values), site.find(None, site_name), "/venv/bin").splitlines()
    for start in expected:
        assert any(line.startswith(start) for line in lines), (start, lines)
    body = next(index for index, line in enumerate(lines) if line == "")
    prefix = SYSTEMS[site.find(None, site_name).system].prefix
    assert all(line.startswith(prefix) for line in lines[1:body])


@pytest.mark.parametrize("site_name", site.known())
def test_every_script_is_clean_and_launches_what_was_typed(site_name):
    asked = Job(2, 4, "00:30:00", NASTY, account="me", gpus_per_node=4, depth=2, queue="q")
    text = script.write(asked, site.find(None, site_name), "/my venv/of $USER/it's/bin")
    assert passes_bash(text) is True
    (line,) = launch_lines(text)
    options = parsed(line)
    assert options["command"] == NASTY
    assert (options["n"], options["ppn"], options["depth"]) == (8, 4, 2)
    assert passes_shellcheck(text) is True


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=12), min_size=1, max_size=4))
def test_whatever_is_typed_reaches_the_command_as_it_is(words):
    text = script.write(Job(1, 1, "00:01:00", ("x", *words)), site.find("slurm", None), "/venv/bin")
    (line,) = launch_lines(text)
    shown = f"hvdkit() {{ printf '%s\\0' \"$@\"; }}\n{line}"
    said = subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout.decode().split("\0")
    assert said[said.index("--") + 1 : -1] == ["x", *words]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--walltime", "30"], "HH:MM:SS"),
        (["--walltime", "00:00:00"], "above zero"),
        (["--walltime", "00:61:00"], "HH:MM:SS"),
        (["--walltime", "00:30:00\n#PBS -q x"], "HH:MM:SS"),
        (["--walltime", "00:30:00\n"], "HH:MM:SS"),
        (["--queue", "a b"], "--queue must be a name"),
        (["--queue", "q\n#PBS -A other"], "--queue must be a name"),
        (["--queue", ""], "--queue must be a name"),
        (["--account", "$(id)"], "--account must be a name"),
        (["--account", "-x"], "--account must be a name"),
        (["--name", "1st"], "--name must be a name"),
        (["--name", "a/b"], "--name must be a name"),
        (["--nodes", "0"], "--nodes"),
        (["--ppn", "-4"], "--ppn"),
        (["--depth", "-1"], "--depth"),
        (["--system", "loadleveler"], "--system"),
        (["--system", "pbs", "--site", "theta"], "Site theta has cobalt, and --system says pbs"),
        (["--site", "nosuch"], "neither one of cobalt, lsf, pbs, polaris"),
        (["--site", "polaris"], "give it with --account"),
        (["-o", "nosuch/job.sh"], "No such file"),
    ],
)
def test_bad_usage_is_one_sentence_and_nothing_is_written(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    usual = ["--nodes", "2", "--ppn", "4", "--walltime", "00:30:00"]
    system = [] if "--site" in options else ["--system", "pbs"]
    status, out, err = job(capsys, *system, *usual, *options, "--", "python", "train.py")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["a\nb", "a\r#PBS -q x", "a\x07"])
def test_no_line_of_the_command_becomes_a_line_of_the_script(capsys, word):
    usual = ["--system", "lsf", "--nodes", "2", "--ppn", "4", "--walltime", "00:30:00"]
    status, out, err = job(capsys, *usual, "--", "python", "-c", word)
    assert (status, out) == (2, "")
    assert "line break" in err and err.count("\n") == 1
    assert job(capsys, *usual)[0] == 2


def test_the_line_that_submits_can_be_pasted(capsys, tmp_path):
    file = tmp_path / "my job.sh"
    usual = ["--nodes", "2", "--ppn", "4", "--walltime", "00:30:00", "-o", str(file)]
    _, _, err = job(capsys, "--system", "lsf", *usual, "--", "x")
    assert err.endswith(f"submit it: bsub < '{file}'\n")


def test_a_file_is_written_once_unless_forced(capsys, tmp_path):
    file = tmp_path / "job.sh"
    words = ["--system", "slurm", "--nodes", "1", "--ppn", "2", "--walltime", "0:10:00", "-o", str(file)]
    status, out, err = job(capsys, *words, "--", "true")
    assert (status, out) == (0, "")
    assert f"sbatch {file}" in err
    first = file.read_text()
    assert f"export PATH={Path(sys.executable).parent}:" in first
    status, _, err = job(capsys, *words, "--", "false")
    assert status == 2 and "--force to overwrite" in err
    assert file.read_text() == first
    assert job(capsys, *words, "--force", "--", "false")[0] == 0
    assert launch_lines(file.read_text())[0].endswith("-- false")


# Sites


def test_a_site_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('system = "slurm"\ndirectives = ["--constraint=a100"]\nsetup = ["module load cuda"]\ndepth = 3\n')
    text = script.write(JOB, site.find(None, str(file)), "/venv/bin")
    assert "#SBATCH --constraint=a100\n" in text
    assert "\nmodule load cuda\n" in text
    assert "--depth 3 " in launch_lines(text)[0]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "'system' is missing"),
        ('system = "condor"', "'system' must be one of pbs"),
        ("system = 3", "'system' must be one of pbs"),
        ('system = "pbs"\ncolour = 1', "'colour' is not one of"),
        ('system = "pbs"\nsetup = "module load x"', "'setup' must be a list of single lines, got 'module load x'"),
        ('system = "pbs"\nsetup = [1]', "'setup' must be a list"),
        ('system = "pbs"\ndirectives = ["a\\nb"]', "'directives' must be a list of single lines"),
        ('system = "pbs"\ndepth = 0', "'depth' must be a number above 0"),
        ('system = "pbs"\ndepth = true', "'depth' must be a number above 0"),
        ('system = "pbs"\nlauncher = "rocket"', "'launcher' must be one of auto"),
        ('system = "pbs"\naccount_required = "yes"', "'account_required' must be true or false"),
        ('system = "pbs"\nqueue = "a\\nb"', "'queue' must be a single line"),
        ('system = "pbs"\nshell = "/bin/bash"', "'shell' must be a line that begins with #!"),
        ("system = ", "cannot be read"),
    ],
)
def test_a_bad_site_file_is_one_sentence_with_key_and_file(tmp_path, text, key):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=re.escape(key)) as caught:
        site.find(None, str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sites_are_known_by_name_and_travel_with_the_package():
    assert set(SYSTEMS) | {"polaris", "theta"} <= set(site.known())
    assert all(site.find(None, name).name == name for name in site.known())
    assert importlib.resources.files("hvdkit.run.job").joinpath("sites/polaris.toml").is_file()
    assert "hvdkit.run.job = sites/*.toml" in (ROOT / "setup.cfg").read_text()


# jobs/


def test_there_is_a_script_for_each_place_and_purpose():
    found = {(file.parent.name, file.stem) for file in JOBS}
    places = ("local", "polaris", "theta", "slurm", "lsf")
    assert {(place, purpose) for place in places for purpose in ("train", "timeline", "scaling", "profile")} <= found


@pytest.mark.parametrize("file", JOBS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_ready_script_is_short_clean_and_only_launches(file):
    text = file.read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    assert passes_bash(text) is True
    commands = [line for line in lines if "hvdkit " in line and not line.startswith("#")]
    assert commands and commands == launch_lines(text)
    for line in commands:
        options = parsed(line)
        program, *words = options["command"]
        assert program == "python" and (ROOT / words[0]).is_file()
        if "n" in options:
            assert options["ppn"] is None or options["n"] % options["ppn"] == 0
    known = ("#", "hvdkit launch ", "hvdkit bench scaling ", "cd ", "export PATH=")
    others = [line for line in lines if line and not line.startswith(known)]
    assert all(line.startswith(("module ", "conda ")) for line in others)
    assert passes_shellcheck(text) is True


@pytest.mark.parametrize("file", JOBS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_command_line_of_a_ready_script_can_be_planned(file, capsys, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE", "COBALT_NODEFILE", "LSB_DJOB_RANKFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    for line in launch_lines(file.read_text()):
        for words in launches(line):
            assert cli.run(["launch", "--dry-run", *words]) == 0
            shown = shlex.split(capsys.readouterr().out)
            assert "examples/pytorch/cnn.py" in shown
