"""The build record: written, read back without importing Horovod, and refused when it is not one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_doctor_checks import RECORD as BOTH

from hvdkit.common import json_files
from hvdkit.errors import InstallError
from hvdkit.prepare.install.record import RECORD_NAME, BuildRecord, MpiRecord, mpi_bin, read_record

RECORD = replace(BOTH, tensorflow=None, adjustments=("cxx20", "gloo-stall-inspector"))


@pytest.fixture
def fake_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `horovod` that raises when it is imported."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    return package


def decoded(tmp_path: Path, text: str) -> BuildRecord | None:
    (tmp_path / RECORD_NAME).write_text(text)
    return read_record(tmp_path)


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    for record in (RECORD, replace(RECORD, mpi=None, torch=None, tensorflow="2.21.0", gpu="nccl")):
        assert decoded(tmp_path, json_files.encode(record)) == record


def test_the_installed_record_is_read_without_importing_horovod(fake_horovod: Path) -> None:
    (fake_horovod / RECORD_NAME).write_text(json_files.encode(RECORD))
    assert read_record() == RECORD


def test_a_horovod_of_other_origin_has_no_record(fake_horovod: Path) -> None:
    assert read_record() is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[1]", "it is no JSON object"),
        (json.dumps({"schema": 2}), "it does not say what it is"),
        (json.dumps({"kind": "horovod-build", "schema": 1}), "object missing required field `horovod`"),
        (json_files.encode(RECORD).replace('"schema": 1', '"schema": 2'), "wrote it with schema 2"),
        (json_files.encode(RECORD).replace('"cp311"', "311"), "python is 311: expected `str`"),
        (json_files.encode(RECORD).replace('"bin": "bin"', '"bin": null'), "mpi.bin is null: expected `str`"),
        (json_files.encode(RECORD).replace('"cxx20"', "20"), "adjustments[0] is 20: expected `str`"),
    ],
)
def test_what_is_no_record_is_refused_with_the_reason_and_the_fix(fake_horovod: Path, text: str, reason: str) -> None:
    (fake_horovod / RECORD_NAME).write_text(text)
    with pytest.raises(InstallError) as caught:
        read_record()
    assert reason in str(caught.value)
    assert "hvdkit install --force" in str(caught.value)


def test_the_mpi_of_a_wheel_moves_with_the_environment_and_another_stays() -> None:
    assert mpi_bin(RECORD) == Path(sys.prefix) / "bin"
    system = replace(RECORD, mpi=MpiRecord("MPICH", "4.0", "/opt/mpich/bin", wheel=False))
    assert mpi_bin(system) == Path("/opt/mpich/bin")
    assert mpi_bin(replace(RECORD, mpi=None)) is None
