"""Which rank's end decides how a job ended."""

import signal

import pytest

from hvdkit.jobs.launch.peer import RankEnd, first_failure, left_early

WELL = RankEnd(0, 0)
LOST_A_PEER = RankEnd(0, 1, knock_on=True)
EXITED = RankEnd(1, 3)
KILLED = RankEnd(1, -signal.SIGKILL)
ENDED_BY_US = RankEnd(2, -signal.SIGTERM, told=True)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], None),
        ([WELL, ENDED_BY_US], None),
        ([WELL, EXITED, ENDED_BY_US], EXITED),
        ([EXITED, KILLED], EXITED),
        ([KILLED, EXITED], KILLED),
        ([LOST_A_PEER, EXITED], EXITED),
        ([LOST_A_PEER, RankEnd(2, 1, knock_on=True)], LOST_A_PEER),
        ([LOST_A_PEER, ENDED_BY_US], LOST_A_PEER),
    ],
)
def test_the_first_failure_of_its_own_decides(ends, expected):
    assert first_failure(ends) is expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], None),
        ([WELL, RankEnd(1, 0)], None),
        ([RankEnd(1, 0), LOST_A_PEER], RankEnd(1, 0)),
        ([LOST_A_PEER, RankEnd(1, 0), RankEnd(2, 0)], RankEnd(1, 0)),
        ([RankEnd(1, 0), ENDED_BY_US], RankEnd(1, 0)),
        ([ENDED_BY_US, RankEnd(1, 0)], None),
        ([RankEnd(1, 0, told=True), LOST_A_PEER], None),
        ([WELL, EXITED, ENDED_BY_US], None),
        ([WELL, LOST_A_PEER, KILLED], None),
        ([LOST_A_PEER, ENDED_BY_US], None),
    ],
)
def test_a_rank_that_ends_well_too_early_is_what_the_others_lost(ends, expected):
    assert left_early(ends) == expected


def test_an_end_in_words_and_as_an_exit_status():
    assert (str(EXITED), EXITED.exit_status) == ("rank 1 exited with status 3", 3)
    assert (str(KILLED), KILLED.exit_status) == ("rank 1 was killed by SIGKILL", 137)
    assert str(RankEnd(1, 3, pid=4711)) == "rank 1 (pid 4711) exited with status 3"
    assert str(RankEnd(4, -60)) == "rank 4 was killed by signal 60"
