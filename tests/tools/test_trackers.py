"""Trackers write with the libraries themselves; what they wrote is read back with these."""

import struct
import subprocess
import sys
import time

import pytest

from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.observe import trackers
from hvdkit.observe.trackers import Progress, checked_trackers, tracker


def train(name, directory, first, steps, report=None):
    """What a monitor says in a job that is killed: it does not close."""
    one = tracker(name, directory)
    one.begin(first, 400)
    for step in steps:
        one.log(step, {"loss": 1.0 / step, "samples_per_s": 640.0})
    if report:
        one.report(report)
    return one


def twice(name, directory):
    """Killed after 150, resumed at 100: what is to be read back is 50, 100, 150, 200, each once."""
    train(name, directory, 0, (50, 100, 150), "first")
    train(name, directory, 100, (150, 200), "second").close()


def test_names_that_are_none():
    with pytest.raises(
        InvalidArgumentError, match="there is no tracker 'tensorbord'; expected one of tensorboard, mlflow"
    ):
        checked_trackers(["tensorbord"], None)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_library_is_one_error(name, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingFrameworkError, match=rf"pip install 'hvdkit\[{name}\]'"):
        checked_trackers([name], tmp_path)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install tensorboard)")
    twice("tensorboard", tmp_path)
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1]).Reload()\n"
        "print([(one.step, round(one.value, 6)) for one in found.Scalars('loss')])\n"
        "print([(one.step, one.tensor_proto.string_val[0]) for one in found.Tensors('reports')])\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "tensorboard")]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "[(50, 0.02), (100, 0.01), (150, 0.006667), (200, 0.005)]"
    assert said[1] == "[(150, b'first'), (200, b'second')]"


def test_tensorboard_does_not_import_tensorflow(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install tensorboard)")
    code = (
        "import sys, pathlib; from hvdkit.observe.trackers import tracker\n"
        "one = tracker('tensorboard', pathlib.Path(sys.argv[1]))\n"
        "one.begin(0); one.log(1, {'a': 1.0}); one.report('x'); one.close()\n"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'hvdkit[mlflow]')")
    pytest.importorskip("alembic", reason="alembic is not installed (pip install 'hvdkit[mlflow]')")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    twice("mlflow", tmp_path / "digits")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'digits' / 'mlflow.db'}")
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    steps = [(one.step, round(one.value, 6)) for one in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(set(steps)) == [(50, 0.02), (100, 0.01), (150, 0.006667), (200, 0.005)]
    assert run.data.tags["mlflow.note.content"] == "- first\n- second\n"
    failed = train("mlflow", tmp_path / "digits", 200, (250,))
    failed.fail()
    failed.close()
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'hvdkit[wandb]')")
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    first = train("wandb", tmp_path / "digits", 0, (50, 100), "first")
    first.close()
    time.sleep(1.1)  # it names its folders by the second
    second = train("wandb", tmp_path / "digits", 100, (150,))
    second.fail()
    second.close()
    files = sorted((tmp_path / "digits").rglob("*.wandb"))
    found = [record for file in files for record in records(file)]
    assert len(files) == 2
    assert {one.run.run_id for one in found if one.HasField("run")} == {
        (tmp_path / "digits" / "wandb-run").read_text().strip()
    }
    logged = [item for one in found if one.HasField("history") for item in one.history.item]
    losses = [item.value_json for item in logged if (item.key or ".".join(item.nested_key)) == "loss"]
    assert [round(float(one), 6) for one in losses] == [0.02, 0.01, 0.006667]
    assert [one.alert.text for one in found if one.HasField("alert")] == ["first"]
    assert [one.exit.exit_code for one in found if one.HasField("exit")] == [0, 1]


def records(file):
    """What a file of an offline run holds: LevelDB's log format after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of it, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_prometheus(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    odd = 'a "run"\\of\nmine'
    one = tracker("prometheus", tmp_path / odd)
    one.begin(0, 400)
    one.log(50, {"loss": 0.25, 'odd "name"\n': 1e-300})
    one.report("x")
    file = tmp_path / odd / "metrics.prom"
    found = {
        (sample.name, sample.labels.get("name")): (sample.value, sample.labels["run"])
        for family in parser.text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    assert found["hvdkit_step", None] == (50.0, odd) and found["hvdkit_steps", None] == (400.0, odd)
    assert found["hvdkit_value", "loss"] == (0.25, odd) and found["hvdkit_value", 'odd "name"\n'] == (1e-300, odd)
    assert found["hvdkit_reports_total", None] == (1.0, odd)
    assert [path.name for path in file.parent.iterdir()] == ["metrics.prom"], "a collector meets no half of it"


def test_prometheus_keeps_the_old_file_where_it_cannot_write(tmp_path, monkeypatch):
    one = tracker("prometheus", tmp_path)
    one.begin(0)
    before = (tmp_path / "metrics.prom").read_text()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers.Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        one.log(50, {"loss": 1.0})
    assert (tmp_path / "metrics.prom").read_text() == before


@pytest.mark.parametrize("steps", [400, None])
def test_progress_is_a_line_for_each_window(capsys, steps):
    shown = Progress()
    shown.begin(0, steps)
    for step in (50, 100, 400):
        shown.log(step, {"loss": 0.5, "samples_per_s": 640.0, "grad_norm": 2.0, "step_s": 0.5})
    shown.report("x")
    shown.close()
    of, left = ("/400", ("  3 min left", "  2 min left", "")) if steps else ("", ("", "", ""))
    assert capsys.readouterr().out.splitlines() == [
        f"step {step}{of}  loss 0.5  640 samples/s{rest}" for step, rest in zip((50, 100, 400), left, strict=True)
    ]
