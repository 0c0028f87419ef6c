"""Options that several commands share are read alike: what is wrong is said in a sentence, with status 2."""

import click
import pytest

from hvdkit import cli, commands

JOB = ["--", "true"]
LIMITS = [
    ["emulate", "-n", "2", "--sizes", "4", "--timeout"],
    ["bench", "scaling", "-n", "1", "-o", "r.json", *JOB, "--timeout"],
    ["tune", "-n", "2", *JOB, "--budget"],
    ["launch", "-n", "2", *JOB, "--stall-timeout"],
]
QUANTITIES = [
    ["emulate", "-n", "2", "--sizes", "4", "--cycle-time-ms"],
    ["emulate", "-n", "2", "--sizes", "4", "--fusion-threshold-mb"],
    ["launch", "-n", "2", *JOB, "--cycle-time-ms"],
    ["launch", "-n", "2", *JOB, "--fusion-threshold-mb"],
]
FILES = [
    ["emulate", "-n", "2", "--sizes", "4", "--json"],
    ["emulate", "-n", "2", "--sizes", "4", "--report"],
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
    assert f"expected a number of seconds above 0, got {float(value)}" in refused(words, value, capsys)


@pytest.mark.parametrize("words", QUANTITIES, ids=name)
@pytest.mark.parametrize("value", ["-0.5", "inf", "nan"])
def test_a_quantity_is_not_below_0(words, value, capsys):
    assert f"expected a number from 0 on, got {float(value)}" in refused(words, value, capsys)


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
