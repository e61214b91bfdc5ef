"""Frames on a socket, however the stream is cut, and with a reader that does not read."""

import fcntl
import resource
import socket
import threading

from rekindle.link.frames import FrameBuffer, FrameSender, can_receive, framed, receive

MESSAGES = [b"", b"a", b"\x00" * 5, b"long" * 100, b"", b"last"]


def test_messages_are_found_however_the_stream_is_cut() -> None:
    stream = b"".join(map(framed, MESSAGES))
    for size in (1, 2, 3, 4, 5, 7, 64, len(stream)):
        buffer = FrameBuffer()
        found: list[bytes] = []
        for start in range(0, len(stream), size):
            found += buffer.feed(stream[start : start + size])
        assert found == MESSAGES
    for cut in range(len(stream)):
        buffer = FrameBuffer()
        assert [*buffer.feed(stream[:cut]), *buffer.feed(stream[cut:])] == MESSAGES


def test_a_socket_over_1023_can_be_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2_000)), hard))
    near, far = socket.socketpair()
    with near, far, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 1_500)) as high:
        assert not can_receive(high, 0.0)
        far.sendall(b"x")
        assert can_receive(high, 5.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_that_is_cut_off_by_the_end_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(b"whole") + framed(b"cut off")[:-1])
        ours.close()
        assert receive(theirs) == b"whole"
        assert receive(theirs) is None
        assert receive(theirs) is None


def test_sending_never_waits_for_a_reader_and_everything_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender = FrameSender(ours)
        messages = [b"%06d" % number + b"x" * (number % 5_000) for number in range(2_000)]
        for message in messages:  # would block for ever: nobody reads
            sender.send(message)
        assert [receive(theirs) for _ in messages] == messages
        sender.close(10)


def test_messages_of_several_threads_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)

        def send_all(name: int) -> None:
            for number in range(200):
                sender.send(b"%d:%d:" % (name, number) + b"x" * 3_000)

        threads = [threading.Thread(target=send_all, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        arrived = [(receive(theirs) or b"").split(b":")[:2] for _ in range(800)]
        for name in range(4):
            mine = [int(number) for who, number in arrived if int(who) == name]
            assert mine == list(range(200))
        sender.close(10)


def test_closing_waits_until_everything_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        sender.send(b"x" * 10_000_000)
        closing = threading.Thread(target=sender.close, args=(60,))
        closing.start()
        assert receive(theirs) == b"x" * 10_000_000
        closing.join(10)
        assert not closing.is_alive()


def test_sending_to_a_reader_that_has_left_is_harmless() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        sender = FrameSender(ours)
        for _ in range(10):
            sender.send(b"x" * 100_000)
        sender.close(10)
