"""Options that several commands share are read alike: what is wrong is said in a sentence, with status 2."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hvdkit import cli
from hvdkit.common import commands

JOB = ["--", "true"]
TIMELINE = str(Path(__file__).parents[1] / "data" / "timelines" / "torch-mpi-2ranks-cycles.json")
LIMITS = [
    ["emulate", "-n", "2", "--sizes", "4", "--timeout"],
    ["bench", "scaling", "-n", "1", "-o", "r.json", *JOB, "--timeout"],
    ["tune", "-n", "2", *JOB, "--budget"],
    ["launch", "-n", "2", *JOB, "--stall-timeout"],
]
QUANTITIES = [
    ["launch", "-n", "2", *JOB, "--cycle-time-ms"],
    ["launch", "-n", "2", *JOB, "--fusion-threshold-mb"],
]
FILES = [
    ["emulate", "-n", "2", "--sizes", "4", "--json"],
    ["emulate", "-n", "2", "--sizes", "4", "--plot"],
    ["bench", "scaling", "-n", "1", *JOB, "-o"],
    ["tune", "-n", "2", *JOB, "-o"],
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(words, value, capsys):
    """What is said of an option with this value; the option comes before the command to run."""
    *before, option = words
    at = before.index("--") if "--" in before else len(before)
    assert cli.run([*before[:at], option, value, *before[at:]]) == 2
    said = capsys.readouterr().err
    assert option in said
    return " ".join(said.split())


def name(words):
    return f"{words[0]} {words[-1]}"


@pytest.mark.parametrize("words", LIMITS, ids=name)
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_a_time_limit_is_above_0(words, value, capsys):
    assert f"expected a finite number above 0, got {float(value)}" in refused(words, value, capsys)


@pytest.mark.parametrize("words", QUANTITIES, ids=name)
@pytest.mark.parametrize("value", ["-0.5", "inf", "nan"])
def test_a_quantity_is_not_below_0(words, value, capsys):
    assert f"expected a finite number of at least 0, got {float(value)}" in refused(words, value, capsys)


@pytest.mark.parametrize(
    ("read", "value"),
    [(commands.not_below_0, 0.0), (commands.not_below_0, 2.5), (commands.seconds_above_0, 0.5)]
    + [(read, None) for read in (commands.not_below_0, commands.seconds_above_0, commands.output_file)],
)
def test_what_is_right_is_taken_as_it_is(read, value):
    @click.command()
    @click.option("--value", type=float, callback=read)
    def command(value):
        return value

    given = [] if value is None else ["--value", str(value)]
    assert command.main(given, standalone_mode=False) == value


@pytest.mark.parametrize("words", FILES, ids=name)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(words, capsys, tmp_path):
    assert "is a directory; give the path of a file in it" in refused(words, str(tmp_path), capsys)
    nowhere = tmp_path / "nowhere" / "file.json"
    assert "does not exist or cannot be written to" in refused(words, str(nowhere), capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["emulate", "bench scaling", "tune", "launch"])
@pytest.mark.parametrize("value", ["X", "=1", "1X=2", "A-B=1"])
def test_a_variable_has_a_name(command, value, capsys):
    words = [*command.split(), "-n", "2", *JOB, "--env"]
    assert f"expected NAME=VALUE, got {value!r}" in refused(words, value, capsys)


COUNTS = [
    ["plan", "memory", "--parameters", "7B", "-n"],
    ["bench", "scaling", "-o", "r.json", *JOB, "-n"],
    ["plan", "scale", "--at"],
]


@pytest.mark.parametrize("words", [*COUNTS, ["plan", "memory", "--input-shape"]], ids=name)
def test_numbers_of_thousands_of_digits_are_refused_in_a_sentence(words, capsys):
    said = refused(words, "9" * 5000, capsys)
    assert "commas between them" in said and "(5000 characters)" in said and len(said) < 600


TOO_LONG = [*FILES, ["launch", "-n", "2", *JOB, "--timeline"], ["launch", "-n", "2", *JOB, "--autotune-log"]]


@pytest.mark.parametrize("words", TOO_LONG, ids=name)
def test_a_name_that_is_too_long_is_refused_before_anything_runs(words, capsys):
    said = refused(words, "x" * 300, capsys)
    assert "cannot be a path (File name too long)" in said and len(said) < 600


@pytest.mark.parametrize(
    "words",
    [
        ["emulate", "sizes", "--sizes", "4", "-o"],
        ["job", "--system", "slurm", "--nodes", "1", "--ppn", "1", "--walltime", "00:10:00", *JOB, "--site"],
        ["launch", "-n", "2", "--dry-run", "--"],
        ["trace", "summary"],
        ["timeline", "summary"],
    ],
    ids=name,
)
def test_any_other_name_that_is_too_long_is_one_sentence(words, capsys):
    *before, last = words
    at = before.index("--") if "--" in before else len(before)
    status = cli.run([*before[:at], last, "x" * 300 + ".py", *before[at:]])
    assert status in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["doctor", "--timeout"], ["doctor", "--job", "--timeout"], ["diff", "a", "b", "--fail-below"]],
    ids=name,
)
def test_what_is_no_number_is_in_no_range(words, capsys):
    assert "got nan" in refused(words, "nan", capsys)


TRANSFORMER = ["--parameters", "7B", "--layers", "2", "--sequence", "8", "--hidden", "8"]


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["plan", "memory", *TRANSFORMER, "--json", "--batch", "3"], "--batch-size"),
    ],
    ids=["batch"],
)
def test_options_of_several_commands_have_one_name(words, same, capsys):
    assert cli.run(["emulate", "sizes", "--sizes", "4000,8", "-o", "p.json"]) == 0
    capsys.readouterr()
    assert cli.run(words) == 0
    before = capsys.readouterr().out
    assert cli.run([*words[:-2], same, words[-1]]) == 0
    assert capsys.readouterr().out == before
    assert cli.run(words[:-2]) == 0
    assert capsys.readouterr().out != before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hvdkit.cli", "check", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == (
        "hvdkit: Nothing more could be written (No space left on device); free space, or write to another place.\n"
    )


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_failure_and_no_file_takes_their_place(tmp_path, closed):
    plan = tmp_path / "plan.json"
    words = [sys.executable, "-m", "hvdkit.cli", "emulate", "sizes", "--sizes", "4000,8", "-o", str(plan)]
    subprocess.run(words, check=True)
    expected = plan.read_bytes()
    plan.unlink()
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert plan.read_bytes() == expected


def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr("hvdkit.common.json_files.decode", full)
    (tmp_path / "r.json").touch()
    assert cli.run(["bench", "show", "r.json"]) == 1
    assert capsys.readouterr().err.startswith("hvdkit: The memory does not suffice")


@pytest.mark.parametrize(
    "words", [("check", "--help"), ("timeline", "summary", TIMELINE), ("explain", TIMELINE)], ids=str
)
def test_a_reader_that_has_enough_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit.cli", *words], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["click", "hvdkit.read.timeline.cli"])
def test_ctrl_c_while_the_command_line_loads_is_quiet(module):
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = ["timeline", "--help"]
from hvdkit.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode in (130, -2), done.stderr


def test_mpiruns_names_of_options(capsys):
    words = [["-n", "4", "--hosts", "a:2,b:2"], ["-np", "4", "-H", "a:2,b:2"]]
    shown = [
        (cli.run(["launch", "--dry-run", "--env", "MASTER_PORT=9", *some, "--", "true"]), capsys.readouterr().out)
        for some in words
    ]
    assert shown[0] == shown[1] and shown[0][0] == 0


@pytest.mark.parametrize(
    "words",
    [
        "check gone.py",
        "timeline summary gone",
        "timeline report gone -o r.html",
        "diff gone gone",
        "timeline merge gone gone -o both",
        "trace summary gone",
        "mpi-profile show gone",
        "emulate sizes --timeline gone",
        "emulate show gone",
        "emulate -n 2 --plan gone",
        "plan scale --fit gone",
        "bench show gone",
        "launch -n 2 --tuned gone -- true",
        "launch -n 2 --hostfile gone -- true",
    ],
)
def test_an_input_that_is_missing_is_status_2(words, capsys):
    assert cli.run(words.split()) == 2
    err = capsys.readouterr().err
    assert "gone" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        (
            "matplotlib",
            ["plan", "steps", "--samples", "64", "--batch-size", "4", "--lr", "1", "-n", "1", "--plot", "r.svg"],
            "report",
        ),
        ("jinja2", ["timeline", "report", "a.json", "-o", "report.html"], "report"),
        ("scipy", ["diff", "a.json", "b.json"], "analysis"),
        ("scipy", ["tune", "-n", "1", "-o", "tuned.json", *JOB], "analysis"),
        ("scipy", ["bench", "scaling", "-n", "1", "-o", "r.json", *JOB], "analysis"),
    ],
)
def test_a_package_of_an_extra_that_is_missing_is_one_sentence(tmp_path, package, words, extra):
    code = f"import sys; sys.modules[{package!r}] = None; from hvdkit.cli import main; main({words!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(f", which is not installed; pip install 'hvdkit[{extra}]'.\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["bench"], ["examples"]])
def test_a_group_without_a_command_prints_its_help(words, capsys):
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith(" ".join(["Usage: hvdkit", *words])) and err == ""


def test_help_has_the_four_groups_and_each_command_stands_on_its_floor(capsys):
    assert cli.run(["--help"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"{heading}:") for heading in cli.FLOORS]
    assert len(places) == 4 and places == sorted(places)
    for (heading, table), floor in zip(cli.FLOORS.items(), ("prepare", "jobs", "measure", "read"), strict=True):
        part = said.partition(f"{heading}:")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in part.splitlines()[1:] if line[2:3].strip()] == list(table)
        assert {module.split(".")[1] for module, _ in table.values()} == {floor}


def test_a_command_that_moved_says_where_and_that_is_there(capsys):
    top = click.Context(cli.hvdkit_command)
    commands_of_top = {(name,): cli.hvdkit_command.get_command(top, name) for name in cli.COMMANDS}
    groups = {words: one for words, one in {(): cli.hvdkit_command, **commands_of_top}.items() if hasattr(one, "moved")}
    gone = {(*words, old): now for words, group in groups.items() for old, now in group.moved.items()}
    assert gone[("predict",)] == "hvdkit plan scale" and gone[("emulate", "plan")] == "hvdkit emulate sizes"
    assert {words[0] for words in gone if len(words) > 1} == {"timeline", "trace", "mpi-profile", "emulate", "bench"}
    for words, now in gone.items():
        typed, group = " ".join(["hvdkit", *words]), " ".join(["hvdkit", *words[:-1]])
        assert cli.run([*words, "--json"]) == 2
        assert capsys.readouterr().err == f"hvdkit: '{typed}' is '{now}' now (see '{group} --help').\n"
        name, *target = itertools.takewhile(lambda word: word.islower() and word[0] != "-", now.split())
        if name == "hvdkit":  # else an address
            assert cli.run([*target, "--help"]) == 0, now
            assert capsys.readouterr().out.startswith(f"Usage: {' '.join(['hvdkit', *target])} "), now
