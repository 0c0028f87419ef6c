"""Whatever stands at the place of a file that a command reads ends it with one sentence, in little memory and time.

The commands are those of the click tree: one with a new parameter for a file fails here until it has a row.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hvdkit.cli import hvdkit_command

JOB = ["--", "true"]
SHEET = ["job", "--nodes", "1", "--ppn", "1", "--walltime", "00:10:00"]
NETWORK = ["--alpha-us", "1", "--bandwidth-gbit", "1", "--ppn", "1", "--at", "4"]
READS = {
    "check": [["check", "BAD"]],
    "launch": [["launch", "-n", "2", "--dry-run", option, "BAD", *JOB] for option in ("--hostfile", "--tuned")],
    "job": [[*SHEET, "--site", "BAD", *JOB]],
    "watch": [["watch", "BAD"]],
    "tune": [["tune", "-n", "2", "--hostfile", "BAD", *JOB]],
    "bench scaling": [["bench", "scaling", "-n", "2", "-o", "r.json", "--hostfile", "BAD", *JOB]],
    "bench show": [["bench", "show", "BAD"]],
    "emulate": [
        ["emulate", "-n", "2", "--hostfile", "BAD", "--sizes", "4"],
        *[["emulate", "-n", "2", option, "BAD"] for option in ("--timeline", "--plan")],
    ],
    "emulate sizes": [["emulate", "sizes", option, "BAD"] for option in ("--timeline", "--plan")],
    "emulate show": [["emulate", "show", "BAD"]],
    "install": [["install", "--from", "BAD"]],
    "port": [["port", "BAD"]],
    "plan scale": [["plan", "scale", "--fit", "BAD", "BAD"], ["plan", "scale", *NETWORK, "--plan", "BAD"]],
    "explain": [["explain", "BAD"]],
    "timeline summary": [["timeline", "summary", "BAD"]],
    "timeline report": [["timeline", "report", "BAD", "-o", "r.html"]],
    "diff": [["diff", "BAD", "GOOD"], ["diff", "GOOD", "BAD"], ["diff", "BAD", "BAD"]],
    "timeline merge": [["timeline", "merge", place, other, "--output", "m.json"]
                       for place, other in (("BAD", "GOOD"), ("GOOD", "BAD"))],
    "trace summary": [["trace", "summary", "BAD"]],
    "mpi-profile show": [["mpi-profile", "show", "BAD"]],
}  # fmt: skip
"""Command lines by command; BAD is the file that is none."""
NOT_READ = {
    "-o", "--output", "--json", "--plot", "--report", "--autotune-log", "--mpi-profile",
    "--torch-profile", "--stall-dir", "--stage-dir", "--explain-dir", "--host-discovery-script", "--html", "--monitor",
}  # fmt: skip
"""Parameters that name what is written, or run: these have tests of their own."""
WRITTEN = {("launch", "--timeline"), ("install", "--wheel"), ("examples copy", "directory"), ("doctor", "--report-to")}
NESTED = 100_000
GOOD = Path(__file__).parents[1] / "data" / "timelines" / "torch-mpi-2ranks-cycles.json"


def test_every_command_that_reads_a_file_has_a_row():
    found = {}
    for name, parameter in parameters(hvdkit_command, click.Context(hvdkit_command), ""):
        option = max(parameter.opts, key=len)
        if option not in NOT_READ and (name, option) not in WRITTEN:
            found.setdefault(name, set()).add(option if option.startswith("-") else parameter.name)
    assert found.keys() == READS.keys()
    for name, options in found.items():
        said = {word for words in READS[name] for word in words if word.startswith("--")}
        assert {option for option in options if option.startswith("--")} <= said, name


def parameters(command, context, name):
    """Every parameter of the tree that may be a file that is read: of click's type, or that says so."""
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            part = command.get_command(context, word)
            yield from parameters(part, click.Context(part, context, word), f"{name} {word}".strip())
    for parameter in command.params:
        says = re.search(r"FILE|SCRIPT|\.json", str(parameter.metavar or ""))
        if isinstance(parameter.type, click.Path | click.File) or says:
            yield name, parameter


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "endless").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "directory").mkdir()
    (folder / "unreadable").symlink_to("/proc/self/mem")  # opens, and reading fails; a mode stops no superuser
    with (folder / "sparse").open("wb") as file:
        file.truncate(2 << 30)
    (folder / "bomb").write_bytes(gzip.compress(bytes(1 << 24)) * 96)
    (folder / "lists").write_text("[" * NESTED)
    (folder / "objects").write_text('{"a":' * NESTED)
    (folder / "table").write_text("a = " + "[" * NESTED + "]" * NESTED)
    return folder


KINDS = [
    "endless", "pipe", "directory", "unreadable", "sparse", "bomb", "lists", "objects", "table", "missing",
]  # fmt: skip


@pytest.fixture(scope="module")
def said(bad, tmp_path_factory):
    """What each command line says, by kind of file; from one process, since what commands import takes seconds."""
    here = tmp_path_factory.mktemp("here")
    thrown = {kind: [row(words, bad / kind) for rows in READS.values() for words in rows] for kind in KINDS}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("throw_files.py")],
        input=json.dumps([thrown["missing"], [words for rows in thrown.values() for words in rows]]),
        capture_output=True, text=True, cwd=here, check=True,
    )  # fmt: skip
    assert not list(here.iterdir())
    answers = map(json.loads, done.stdout.splitlines())
    return {kind: [(" ".join(words), *next(answers)) for words in rows] for kind, rows in thrown.items()}


def row(words, bad):
    places = {"BAD": str(bad), "GOOD": str(GOOD)}
    return [places.get(word, word) for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_file_is_one_sentence(said, kind):
    wrong = [
        (words, status, error)
        for words, status, error in said[kind]
        if status not in (1, 2) or error.count("\n") != 1 or not error.startswith("hvdkit: ") or len(error) > 1500
    ]
    assert not wrong
