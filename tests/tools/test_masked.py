"""What a report to be shown to anybody leaves out."""

import pytest

from hvdkit.common import masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("WANDB_API_KEY=5ekr1t rest", "WANDB_API_KEY=*** rest"),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1:5/abc", "HOROVOD_GLOO_RENDEZVOUS_ADDR=***"),
        ("AWS_SECRET_ACCESS_KEY: 5ekr1t", "AWS_SECRET_ACCESS_KEY: ***"),
        ('{"password": "5 ekr1t", "n": 2}', '{"password": ***, "n": 2}'),
        ("mysql --password 5ekr1t -h x; --token=5ekr1t", "mysql --password *** -h x; --token=***"),
        ("https://ada:5ekr1t@h.org/x and http://5ekr1t@h/y", "https://***@h.org/x and http://***@h/y"),
        ("http://h/x?token=5ekr1t&n=2", "http://h/x?token=***&n=2"),
        ("Authorization: Bearer eyJh.5ekr1t", "Authorization: Bearer ***"),
        ("hf_5ekr1t5ekr1t5 ghp_5ekr1t5ekr1t5 AKIA5EKR1T5EKR1T5", "*** *** ***"),
        ("key " + "5e" * 16, "key ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\n5ekr1t\n-----END RSA PRIVATE KEY-----.", "***."),
    ],
)
def test_a_secret_is_masked(text, shown):
    assert masked.without_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "OMP_NUM_THREADS=4, HOROVOD_FUSION_THRESHOLD=67108864, built with openmpi@4.1.5, 0 tokens",
        "ssh://host/path, see https://docs.org/a?b=c, torch 2.13.0+cpu at 0x7f00deadbeef, skip sk-learn",
    ],
)
def test_everything_else_stays(text):
    assert masked.without_secrets(text) == text


def test_users_and_hosts_are_masked(monkeypatch):
    monkeypatch.setenv("HOME", "/data/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr("socket.gethostname", lambda: "node17.cluster.org")
    text = "/data/ada/x /data/adam /home/bob/y /Users/bob: ada@node17 at node17.cluster.org, /scratch/ada_2/z"
    shown = "~/x /data/adam /home/USER/y /Users/USER: USER@HOST at HOST, /scratch/USER_2/z"
    assert masked.without_names(text) == shown
