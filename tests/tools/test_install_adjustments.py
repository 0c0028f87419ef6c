"""The patches of Horovod's source: exact matches, every hunk or none."""

from __future__ import annotations

import configparser
import itertools
import re
from pathlib import Path

import pytest

import hvdkit
from hvdkit.errors import InstallError
from hvdkit.prepare.install import adjust, build
from hvdkit.prepare.install.adjust import CONDITIONS, Patch, apply, applying, digest, parse, patches
from hvdkit.prepare.install.facts import Options
from hvdkit.prepare.install.here import cache_directory

TARGETS = [
    Options(gpu, frameworks=tuple(frameworks), plain=plain)
    for frameworks in ({"torch"}, {"tensorflow"}, {"torch", "tensorflow"})
    for gpu, plain in itertools.product(("none", "nccl", "mpi"), (False, True))
]
RELEASED = cache_directory() / "sources" / build.SOURCE
HUNK = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@")


def diff_of(one: Patch) -> str:
    (file,) = (Path(adjust.__file__).parent / "patches").glob(f"??-{one.name}.patch")
    return f"--- {file.read_text().partition('--- ')[2]}"


def patch(
    name: str = "row", *, file: str = "a.txt", old: str = "one", new: str = "1", when: str = "always", why: str = "why"
) -> Patch:
    """One that changes a line between two others."""
    diff = f"--- a/{file}\n+++ b/{file}\n@@ -1,3 +1,3 @@\n x\n-{old}\n+{new}\n y\n"
    return parse(name, f"When: {when}\nUpstream: no issue found\n\n{why}\n\n{diff}")


def released(tree: Path) -> None:
    """Files that have, at the lines which the patches state, what the patches say that the released source has."""
    files: dict[str, dict[int, str]] = {}
    for name, diff in [(one.name, diff_of(one)) for one in patches()]:
        number, lines = 0, {}
        for line in diff.splitlines():
            if line.startswith("--- a/"):
                lines = files.setdefault(line.removeprefix("--- a/"), {})
            elif found := HUNK.match(line):
                number = int(found[1])
            elif not line.startswith("+"):
                assert lines.setdefault(number, line[1:]) == line[1:], f"{name} and another differ on line {number}"
                number += 1
    for file, known in files.items():
        text = "".join(f"{known.get(number, f'line {number}')}\n" for number in range(1, max(known) + 1))
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(text)


@pytest.mark.parametrize("target", TARGETS, ids=lambda one: f"{'+'.join(sorted(one.frameworks))}-{one.gpu}-{one.plain}")
def test_the_patches_of_every_build_apply_to_one_source(tmp_path: Path, target: Options) -> None:
    """No patch stands on another, nor on a line that another takes away."""
    released(tmp_path)
    apply(tmp_path, applying(target))
    top = (tmp_path / "CMakeLists.txt").read_text()
    assert "CMAKE_CXX_STANDARD 20" in top
    assert "CMAKE_CXX_STANDARD 14" not in top
    assert "resize(size_)" in (tmp_path / "horovod/common/gloo/gloo_controller.cc").read_text()
    assert "iface = global_context.gloo_iface_;" in (tmp_path / "horovod/common/gloo/gloo_context.cc").read_text()
    assert "distutils" not in (tmp_path / "horovod/runner/js_run.py").read_text()
    has = {"torch": "distutils", "tensorflow": "xla_mpi_ops"}
    for framework, gone in has.items():
        text = (tmp_path / f"horovod/{framework}/CMakeLists.txt").read_text()
        assert (gone in text) == (framework not in target.frameworks)
        assert ("UNITY_BUILD ON" in text) == (framework in target.frameworks and target.gpu == "none")


@pytest.mark.skipif(not build.is_released(RELEASED), reason="the cache has no source of Horovod: hvdkit install")
def test_every_hunk_is_where_it_says_in_the_released_source(tmp_path: Path) -> None:
    tree = build.unpack(RELEASED, tmp_path)
    for one in patches():
        for (line, _, _, _), hunk in zip(HUNK.findall(diff_of(one)), one.hunks, strict=True):
            lines = (tree / hunk.file).read_text().splitlines(keepends=True)[int(line) - 1 :]
            assert "".join(lines).startswith(hunk.old), f"{one.name}, line {line}"


def test_the_lines_that_hunks_state_are_those_that_they_have() -> None:
    """So that ``patch`` and ``git apply`` can read them, too."""
    for one in patches():
        heads = [tuple(map(int, found)) for found in HUNK.findall(diff_of(one))]
        assert len(heads) == len(one.hunks) > 0
        for (_, before, _, after), hunk in zip(heads, one.hunks, strict=True):
            assert (before, after) == (hunk.old.count("\n"), hunk.new.count("\n")), one.name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nothing\n", "0 times"),
        ("x\none\nz\n", "0 times"),
        ("x\n one\ny\n", "0 times"),
        ("ax\none\ny\n", "0 times"),
        ("x\none\ny\nx\none\ny\n", "2 times"),
    ],
    ids=["absent", "another line after it", "indented", "part of a line", "twice"],
)
def test_anything_but_one_match_is_an_error_that_says_how_many(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InstallError, match=rf"a\.txt .*'row' expects its text once and found it {found}"):
        apply(tmp_path, [patch()])


def test_a_failing_patch_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\none\ny\n")
    (tmp_path / "b.txt").write_text("nothing")
    with pytest.raises(InstallError):
        apply(tmp_path, [patch(), patch("second", file="b.txt")])
    assert (tmp_path / "a.txt").read_text() == "x\none\ny\n"


def test_two_patches_of_one_file_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\none\ny\n")
    apply(tmp_path, [patch(), patch("second", old="1", new="uno")])
    assert (tmp_path / "a.txt").read_text() == "x\nuno\ny\n"


@pytest.mark.parametrize(
    ("frameworks", "gpu", "has", "lacks"),
    [
        (
            {"torch"},
            "none",
            {"cxx20-torch", "no-cuda-torch", "gloo-stall-inspector"},
            {"no-xla-ops", "torch-through-host"},
        ),
        ({"torch"}, "nccl", {"torch-through-host", "torch-driver-name"}, {"no-cuda-torch"}),
        ({"tensorflow"}, "none", {"no-xla-ops", "no-cuda-search"}, {"cxx20-torch", "python-include"}),
        (
            {"torch", "tensorflow"},
            "nccl",
            {"cxx20-torch", "no-xla-ops", "bfloat16-torch"},
            {"no-cuda-search", "no-cuda-torch", "bfloat16-tensorflow"},
        ),
    ],
)
def test_patches_apply_to_what_is_built(frameworks: set[str], gpu: str, has: set[str], lacks: set[str]) -> None:
    names = {one.name for one in applying(Options(gpu, frameworks=tuple(frameworks)))}
    assert has <= names
    assert not lacks & names


def test_plain_leaves_out_what_only_makes_it_faster_and_bfloat16() -> None:
    frameworks = ("torch", "tensorflow")
    faster = {one.name for one in applying(Options(frameworks=frameworks))}
    plain = {one.name for one in applying(Options(frameworks=frameworks, plain=True))}
    assert faster - plain == {
        "cycle-on-request", "torch-sleeping-wait", "mpi-in-parts", "gloo-loop-yields", "gloo-send-buffer",
        "gloo-receive-first", "int8",
        "bfloat16", "bfloat16-torch", "bfloat16-tensorflow",
    }  # fmt: skip
    assert plain < faster


def test_the_digest_changes_with_what_is_changed_and_not_with_the_reason() -> None:
    assert digest([patch()]) == digest([patch(why="another reason")])
    assert len({digest([one]) for one in (patch(), patch(new="2"), patch(old="two"), patch(file="b.txt"))}) == 4


def test_every_patch_says_when_and_why_and_what_is_known_upstream() -> None:
    assert len({one.name for one in patches()}) == len(patches()) > 10
    for one in patches():
        assert len(one.why) > 30
        assert re.match(r"(horovod|gloo) (issues?|pull requests?) \d+|no issue found$", one.upstream)
        assert set(one.when.split(", ")) <= CONDITIONS.keys()


def test_the_patches_are_part_of_the_package() -> None:
    settings = configparser.ConfigParser()
    settings.read(Path(hvdkit.__file__).parent.parent / "setup.cfg")
    assert "patches/*" in settings["options.package_data"]["hvdkit.prepare.install"]
    assert {file.suffix for file in (Path(adjust.__file__).parent / "patches").iterdir()} == {".patch"}
