"""The secret of a job comes from its launcher, or from a file that only the user can read."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvdkit.errors import LauncherError
from hvdkit.jobs.launch import supervise
from hvdkit.jobs.launch.model import LaunchPlan
from hvdkit.steps import secret

GIVEN = "0123456789abcdef" * 4


@pytest.fixture
def home(tmp_path):
    """The environment of a user whose secret lies, or comes to lie, in the file ``secret`` of the directory."""
    (tmp_path / "hvdkit").mkdir(mode=0o700)
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def key(environ, job="srun/0/7/0", one_host=False):
    return secret.key(job, environ, one_host=one_host)


def of_file(home, text=GIVEN, mode=0o600):
    path = Path(home["XDG_CONFIG_HOME"]) / "hvdkit" / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_launchers_secret_comes_first_and_each_job_has_its_own_key(home):
    of_file(home)
    given = {**home, secret.VARIABLE: "x" * 32}
    keys = [key(home), key(home, "srun/0/8/0"), key(given), key(given, "srun/0/8/0")]
    assert len({one.value for one in keys}) == 4 and {len(one.value) for one in keys} == {32}
    assert key({secret.VARIABLE: GIVEN}).value == key(home).value
    assert keys[2].source.startswith("HVDKIT_SECRET, fingerprint ") and keys[2].source == keys[3].source
    for one in keys:
        assert GIVEN not in repr(one) and "x" * 32 not in repr(one) and repr(one.value) not in repr(one)


def test_ranks_that_start_at_once_write_one_file_that_only_the_user_can_read(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    with ThreadPoolExecutor(16) as ranks:
        keys = set(ranks.map(lambda _: key(environ).value, range(64)))
    assert len(keys) == 1
    (file,) = (tmp_path / "config" / "hvdkit").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert len(bytes.fromhex(file.read_text())) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(home, mode):
    path = of_file(home, mode=mode)
    with pytest.raises(
        LauncherError, match=rf"^{path} must be a file of yours that only you can read.*mode {mode:04o}"
    ):
        key(home)


def test_a_directory_that_others_can_change_is_refused(home):
    directory = of_file(home).parent
    directory.chmod(0o777)
    with pytest.raises(LauncherError, match=rf"directory that only you can change; {directory} has mode 0777"):
        key(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("which", ["file", "directory"])
def test_what_is_of_another_user_is_refused(home, which):
    path = of_file(home)
    os.chown(path if which == "file" else path.parent, 65534, 65534)
    with pytest.raises(LauncherError, match=r"is of user 65534\. Remove it"):
        key(home)


@pytest.mark.parametrize("odd", ["link", "link to nothing", "FIFO", "directory"])
def test_what_is_no_file_is_refused(home, tmp_path, odd):
    path = of_file(home)
    if odd.startswith("link"):
        target = path.rename(tmp_path / "elsewhere")
        path.symlink_to(target if odd == "link" else tmp_path / "nothing")
    else:
        path.unlink()
        path.mkdir(mode=0o700) if odd == "directory" else os.mkfifo(path, 0o600)
    with pytest.raises(LauncherError, match="secret"):
        key(home)


@pytest.mark.parametrize("text", ["", "short"])
def test_a_short_secret_is_refused(home, text):
    of_file(home, text)
    with pytest.raises(LauncherError, match=rf"must hold at least 32 characters, got {len(text)}; remove it"):
        key(home)
    with pytest.raises(LauncherError, match="HVDKIT_SECRET must have at least 32 characters, got 5"):
        key({**home, secret.VARIABLE: "short"})


def test_without_a_home_ranks_of_one_host_share_a_directory_and_others_are_told(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "file")}
    monkeypatch.setattr(secret.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(LauncherError, match=r"no place for the secret.*Not a directory.*export HVDKIT_SECRET="):
        key(environ)
    assert key(environ, one_host=True).value == key(environ, one_host=True).value
    (directory,) = tmp_path.glob("hvdkit-*")
    directory.chmod(0o777)
    with pytest.raises(LauncherError, match="a directory that only you can change"):
        key(environ, one_host=True)


def test_hvdkit_launch_gives_each_job_a_secret_of_its_own_and_leaves_that_of_the_user(monkeypatch, capfd):
    def shared(**given):
        plan = LaunchPlan(1, "mpirun", (sys.executable, "-c", show), (), {}, {**os.environ, **given}, "RANK")
        assert supervise.run(plan).status == 0
        shown = capfd.readouterr().err
        said = shown.split()[-1]
        assert shown.count("cmdline") == 2 and shown.count(said) == 1, "it is in no argv, which everyone may read"
        return said

    monkeypatch.delenv(secret.VARIABLE, raising=False)
    show = f"""import os
for process in ("self", os.getppid()):
    print("cmdline", open(f"/proc/{{process}}/cmdline").read().replace("cmdline", ""))
print(os.environ[{secret.VARIABLE!r}])"""
    new = [shared(), shared(**{secret.VARIABLE: ""})]
    assert len(set(new)) == 2 and {len(one) for one in new} == {64}
    assert shared(**{secret.VARIABLE: GIVEN}) == GIVEN
    with pytest.raises(LauncherError, match="HVDKIT_SECRET must have at least 32 characters, got 5"):
        shared(**{secret.VARIABLE: "short"})
