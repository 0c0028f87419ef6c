"""What strangers, and ranks of other jobs, do to rank 0's meeting: they are dropped, and the ranks meet."""

import json
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdkit.errors import LauncherError
from hvdkit.steps import meeting
from hvdkit.steps.secret import Key

pytestmark = pytest.mark.slow

KEY = Key(secrets.token_bytes(32), "a test")
NONCE = "0" * 32
HELLO = f"hvdkit-meeting 2 {NONCE}\n".encode()
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)
JUNK = {
    "a number": b"5\n",
    "null": b"null\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": TLS_HELLO,
    "the old greeting": b'{"key": "00", "rank": 1, "host": "h"}\n',
    "an open end": b"[" * 300_000,
    "a hello and junk": HELLO + b"5\n",
    "a hello and no code": HELLO + b'{"rank": 1, "size": 3, "host": "h"}\n',
    "a hello and a false code": HELLO + b"0" * 64 + b' {"rank": 1, "size": 3, "host": "h"}\n',
    "not a nonce": b"hvdkit-meeting 2 " + b"g" * 32 + b"\n",
    "not UTF-8": b"\xff\xfe\n",
    "half a hello": HELLO[:20],
}


def visit(rank, size=3, key=KEY, timeout=20.0, host="h"):
    return meeting.meet(rank, size, "127.0.0.1", key, None, host=f"{host}{rank}", timeout=timeout)


@contextmanager
def rank_0(size=3, timeout=20.0):
    """Rank 0 as it waits; its result in the end, a meeting or an error."""
    with ThreadPoolExecutor(1) as pool:

        def wait():
            arguments = (0, size, "127.0.0.1", KEY, lambda address, by_rank: {"ranks": len(by_rank)})
            return meeting.meet(*arguments, host="h0", timeout=timeout)

        waiting = pool.submit(wait)
        yield waiting


def connect(host="127.0.0.1"):
    """A connection to the port on which rank 0 listens."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for port in meeting.ports(KEY)[:3]:
            try:
                return socket.create_connection((host, port), timeout=20)
            except ConnectionRefusedError:
                time.sleep(0.01)
    raise AssertionError("rank 0 does not listen")


def throw(data):
    """Say something to rank 0; what it answers until it hangs up."""
    with connect() as stranger:
        answer = b""
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while more := stranger.recv(4096):
                answer += more
        except (ConnectionError, OSError):
            pass
        return answer


def met(waiting, *others):
    assert waiting.result(30).hosts == ("h0", "h1", "h2")
    for other in others:
        assert other.hosts == ("h0", "h1", "h2") and other.told == {"ranks": 3}


def both_come():
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(visit, (1, 2)))


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_whatever_is_thrown_at_it_is_dropped(junk):
    with rank_0() as waiting:
        for _ in range(3):
            throw(junk)
        met(waiting, *both_come())


def test_what_was_dropped_is_counted_where_ranks_are_missing():
    with rank_0(timeout=3.0) as waiting:
        for junk in JUNK.values():
            throw(junk)
        with pytest.raises(LauncherError) as missing:
            waiting.result(30)
    said = str(missing.value)
    assert said.startswith("ranks 1-2 did not come to rank 0 within 3 s; look for their errors")
    dropped = "12 other connections dropped: 2 gone, 7 of something else, 3 without the secret."
    assert said.endswith(f"; {dropped}"), said
    assert "\n" not in said and "its secret (a test)" in said


def dribble(connection, stop):
    while not stop.wait(0.05):
        try:
            connection.sendall(b"x")
        except OSError:
            return


def test_hundreds_that_are_silent_or_slow_neither_keep_ranks_out_nor_hold_the_deadline(monkeypatch):
    stop = threading.Event()
    with ExitStack() as stack:
        stack.callback(stop.set)
        with rank_0() as waiting:
            held = [stack.enter_context(connect()) for _ in range(2 * meeting._STRANGERS)]
            for one in held[-20:]:
                threading.Thread(target=dribble, args=(one, stop), daemon=True).start()
            met(waiting, *both_come())
        monkeypatch.setattr(meeting, "_STRANGERS", 8)
        with rank_0(timeout=2.0) as waiting:
            for one in [stack.enter_context(connect()) for _ in range(20)]:
                threading.Thread(target=dribble, args=(one, stop), daemon=True).start()
            with pytest.raises(
                LauncherError, match=r"^ranks 1-2 did not come.* within 2 s.*dropped: .*too many at once"
            ):
                waiting.result(30)


def test_a_stranger_who_is_slow_is_dropped_after_a_while(monkeypatch):
    monkeypatch.setattr(meeting, "_PROOF_S", 0.3)
    with rank_0() as waiting, connect() as slow:
        slow.sendall(HELLO)
        assert slow.recv(4096)
        assert slow.recv(4096) == b""  # without another byte
        met(waiting, *both_come())


def test_a_visitor_whom_somebody_slow_answers_keeps_its_deadline():
    stop = threading.Event()
    with ExitStack() as stack:
        stack.callback(stop.set)
        slow = stack.enter_context(socket.create_server(("127.0.0.1", meeting.ports(KEY)[0])))

        def answer():
            while True:
                try:
                    dribbled = stack.enter_context(slow.accept()[0])
                except OSError:
                    return
                threading.Thread(target=dribble, args=(dribbled, stop), daemon=True).start()

        threading.Thread(target=answer, daemon=True).start()
        visitor = stack.enter_context(ThreadPoolExecutor(1)).submit(visit, 1, timeout=1.0)
        with pytest.raises(LauncherError, match=r"rank 1 did not find rank 0 on 127\.0\.0\.1 within 1 s"):
            visitor.result(30)


HELLOS = st.sampled_from([b"", HELLO, HELLO[:-1], b"hvdkit-meeting 2 ", b"hvdkit-meeting 1 " + HELLO[-33:]])
BODIES = st.sampled_from([b'{"rank": 1, "size": 2, "host": "x"}', b"{}", b"[" * 500, b"5"])
BYTES = st.binary(max_size=600)
STRANGE = st.one_of(
    st.tuples(HELLOS, BYTES),
    st.tuples(HELLOS, st.binary(min_size=32, max_size=32).map(bytes.hex).map(str.encode), st.just(b" "), BODIES, BYTES),
)


def test_no_bytes_are_a_rank():
    with rank_0(size=2, timeout=120) as waiting:

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(STRANGE)
        def thrown(parts):
            answer = throw(b"".join(parts) + b"\n")
            assert answer.count(b"\n") <= 1 and b"host" not in answer
            assert not waiting.done()

        thrown()
        assert visit(1, size=2).hosts == ("h0", "h1") == waiting.result(30).hosts


def overhear(waiting_port):
    """Let rank 1 visit rank 0 through a spy; what each of them said."""
    said = {"visitor": b"", "rank 0": b""}

    def pass_on(source, target, who):
        try:
            while data := source.recv(4096):
                said[who] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as spy, ThreadPoolExecutor(3) as pool:
        talk = pool.submit(visit_at, spy.getsockname()[1])
        with spy.accept()[0] as visitor, waiting_port as door:
            both = [pool.submit(pass_on, visitor, door, "visitor"), pool.submit(pass_on, door, visitor, "rank 0")]
            talk.result(30)
            [one.result(30) for one in both]
    return said


def visit_at(port):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        until = time.monotonic() + 20
        return meeting._talk(connection, KEY, {"rank": 1, "size": 2, "host": "h1"}, until, until)


def test_what_was_overheard_is_worth_nothing():
    """Neither said again, nor said back in the other direction."""
    with rank_0(size=2) as waiting:
        said = overhear(connect())
        assert waiting.result(30).hosts == ("h0", "h1")
    with rank_0(size=2) as waiting:
        assert throw(said["visitor"]).count(b"\n") == 1
        with connect() as stranger, stranger.makefile("rb") as stream:
            stranger.sendall(HELLO)
            _, _, proof = stream.readline().partition(b" ")
            stranger.sendall(proof)
            assert stream.readline() == b""
        assert not waiting.done()
        visit(1, size=2)
        assert waiting.result(30).hosts == ("h0", "h1")
    with socket.create_server(("127.0.0.1", 0)) as false, ThreadPoolExecutor(1) as pool:
        talk = pool.submit(visit_at, false.getsockname()[1])
        with false.accept()[0] as visitor:
            visitor.recv(4096)
            visitor.sendall(said["rank 0"])
            with pytest.raises(ValueError, match="what answers there has another secret"):
                talk.result(30)


@pytest.mark.parametrize(
    ("rank", "size", "reason"),
    [
        (3, 3, "rank 3 is none of the ranks 1 to 2 that rank 0 waits for"),
        (-1, 3, "rank -1 is none of the ranks"),
        ("1", 3, "rank 1 is none of the ranks"),
        (1, 4, "rank 1 says that there are 4 ranks, rank 0 that there are 3"),
    ],
)
def test_a_rank_of_another_world_is_refused_with_a_sentence(rank, size, reason):
    with rank_0() as waiting:
        with pytest.raises(LauncherError, match=f"^rank 0 refused this process: {reason}"):
            visit(rank, size)
        met(waiting, *both_come())


def test_a_rank_comes_once_and_after_it_has_gone_again():
    with rank_0() as waiting:
        with connect() as first, first.makefile("rb") as stream:
            join(first, stream, 1)
            until = time.monotonic() + 20
            with pytest.raises(LauncherError, match="a rank 1 is there already, on first; this one is on h1"):
                while time.monotonic() < until:  # until rank 0 has heard the first one
                    visit(1, timeout=0.2)
        met(waiting, *both_come())


def join(connection, stream, rank):
    connection.sendall(HELLO)
    nonce, _, proof = stream.readline().rstrip(b"\n").partition(b" ")
    conversation = meeting._Conversation(KEY, NONCE + nonce.decode())
    assert conversation.open("rank 0", proof) == {}
    connection.sendall(conversation.seal("visitor", {"rank": rank, "size": 3, "host": "first"}))


def test_another_secret_is_said_on_both_sides(monkeypatch):
    here = meeting.ports(KEY)
    monkeypatch.setattr(meeting, "ports", lambda _key: here)
    with rank_0(size=2, timeout=2.0) as waiting:
        with pytest.raises(LauncherError) as visitor:
            visit(1, size=2, key=Key(bytes(32), "another file, fingerprint 00"), timeout=1.0)
        with pytest.raises(LauncherError, match=r"dropped: .* gone"):
            waiting.result(30)
    assert "have the same secret (here: another file, fingerprint 00)" in str(visitor.value)


def test_it_listens_on_one_address():
    with rank_0() as waiting:
        connect().close()
        for port in meeting.ports(KEY)[:3]:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)
        met(waiting, *both_come())


def test_codes_differ_by_speaker_turn_and_nonce():
    one, other = meeting._Conversation(KEY, "a"), meeting._Conversation(KEY, "b")
    codes = {talk.seal(who, {}).split()[0] for talk in (one, other) for who in ("rank 0", "visitor") for _ in range(2)}
    assert len(codes) == 8
    assert json.loads(one.seal("visitor", {"rank": 1}).partition(b" ")[2]) == {"rank": 1}
