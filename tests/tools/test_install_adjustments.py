"""The table of source adjustments: exact matches, every row or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.errors import InstallError
from hvdkit.prepare.install.adjust import apply, describe
from hvdkit.prepare.install.adjustments import ADJUSTMENTS, ALWAYS, Adjustment, Target, applying, digest

BOTH = Target(frozenset({"torch", "tensorflow"}), "none")


def row(**changes: object) -> Adjustment:
    fields = {"name": "row", "file": "a.txt", "old": "one", "new": "1", "when": ALWAYS, "why": "because"}
    return Adjustment(**{**fields, **changes})  # type: ignore[arg-type]


def source_for(tree: Path, rows: tuple[Adjustment, ...]) -> None:
    """Files in which every old text of the rows occurs as often as the row says."""
    for adjustment in rows:
        file = tree / adjustment.file
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_text() if file.exists() else ""
        missing = adjustment.count - before.count(adjustment.old)
        file.write_text(before + "".join(f"x\n{adjustment.old}\ny\n" for _ in range(missing)))


def test_every_row_replaces_its_text_as_often_as_it_says(tmp_path: Path) -> None:
    source_for(tmp_path, ADJUSTMENTS)
    apply(tmp_path, ADJUSTMENTS)
    top = (tmp_path / "CMakeLists.txt").read_text()
    assert "CMAKE_CXX_STANDARD 20" in top
    assert "CMAKE_CXX_STANDARD 14" not in top
    assert "resize(size_)" in (tmp_path / "horovod/common/gloo/gloo_controller.cc").read_text()
    assert "iface = global_context.gloo_iface_;" in (tmp_path / "horovod/common/gloo/gloo_context.cc").read_text()
    assert "xla_mpi_ops" not in (tmp_path / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "distutils" not in (tmp_path / "horovod/runner/js_run.py").read_text()
    assert "distutils" not in (tmp_path / "horovod/torch/CMakeLists.txt").read_text()


@pytest.mark.parametrize(("text", "found"), [("nothing", "0 times"), ("one and one", "2 times")])
def test_a_wrong_number_of_matches_is_an_error_that_says_both_numbers(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InstallError, match=rf"a\.txt .*'row' expects its text once and found it {found}"):
        apply(tmp_path, [row()])


def test_a_failing_row_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("nothing")
    with pytest.raises(InstallError):
        apply(tmp_path, [row(), row(name="second", file="b.txt")])
    assert (tmp_path / "a.txt").read_text() == "one"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"a\.txt is missing"):
        apply(tmp_path, [row()])


def test_several_matches_can_be_asked_for_and_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\none\r\n")
    apply(tmp_path, [row(count=2)])
    assert (tmp_path / "a.txt").read_bytes() == b"1\r\n1\r\n"


def test_two_rows_on_one_file_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    apply(tmp_path, [row(), row(name="second", old="1", new="uno")])
    assert (tmp_path / "a.txt").read_text() == "uno"


@pytest.mark.parametrize(
    ("frameworks", "gpu", "has", "lacks"),
    [
        ({"torch"}, "none", {"cxx20-torch", "no-cuda-torch", "gloo-stall-inspector"}, {"no-xla-ops"}),
        ({"tensorflow"}, "none", {"no-xla-ops", "no-cuda-search"}, {"cxx20-torch", "python-include"}),
        ({"torch", "tensorflow"}, "nccl", {"cxx20-torch", "no-xla-ops"}, {"no-cuda-search", "no-cuda-torch"}),
    ],
)
def test_rows_apply_to_what_is_built(frameworks: set[str], gpu: str, has: set[str], lacks: set[str]) -> None:
    names = {adjustment.name for adjustment in applying(Target(frozenset(frameworks), gpu))}
    assert has <= names
    assert not lacks & names


def test_plain_leaves_out_what_only_makes_it_faster() -> None:
    frameworks = frozenset({"torch", "tensorflow"})
    faster = {row.name for row in applying(Target(frameworks, "none"))}
    plain = {row.name for row in applying(Target(frameworks, "none", plain=True))}
    assert plain < faster
    assert {name.split("-")[0] for name in faster - plain} == {"cycle", "torch"}
    assert "gloo-stall-inspector" in plain


def test_the_digest_changes_with_what_is_changed_and_not_with_the_reason() -> None:
    assert digest([row()]) == digest([row(why="another reason")])
    assert len({digest([row()]), digest([row(new="2")]), digest([row(old="two")]), digest([row(count=2)])}) == 4


def test_the_table_as_text_gives_every_row_its_reason() -> None:
    text = describe(BOTH)
    for adjustment in ADJUSTMENTS:
        assert adjustment.name in text
        assert adjustment.why in text
        assert adjustment.file in text


def test_names_are_unique() -> None:
    assert len({adjustment.name for adjustment in ADJUSTMENTS}) == len(ADJUSTMENTS)
