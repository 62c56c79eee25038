"""The relay is a network: what goes in comes out, counted, unless it has been cut, slowed down or reset."""

import contextlib
import hashlib
import random
import socket
import socketserver
import threading
import time

import pytest

from tests.integration.relay import Relay


class Echo(socketserver.ThreadingTCPServer):
    """Answers every byte with the same byte, and the end with the end."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.ended = threading.Semaphore(0)
        self.resets = threading.Semaphore(0)
        self.port = self.server_address[1]


class EchoHandler(socketserver.BaseRequestHandler):
    def handle(self):
        try:
            while data := self.request.recv(65536):
                self.request.sendall(data)
            self.server.ended.release()
        except ConnectionResetError:
            self.server.resets.release()


@pytest.fixture
def echo():
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def relay(echo):
    with Relay("127.0.0.1", echo.port) as relay:
        yield relay


@contextlib.contextmanager
def connected(relay, timeout=30.0):
    with socket.create_connection(("127.0.0.1", relay.port), timeout=timeout) as client:
        yield client


def receive(client, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = client.recv(min(65536, count - len(data)))
        assert part, f"the end after {len(data)} of {count} bytes"
        data += part
    return bytes(data)


def sending(client, data: bytes) -> threading.Thread:
    """Send beside the test: until somebody reads, the kernel takes only so much."""

    def send():
        with contextlib.suppress(OSError):
            client.sendall(data)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def wait_until(condition, what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.005)


def silent(client, seconds: float = 0.2) -> bool:
    """Whether nothing at all arrives: no byte, no end, no reset."""
    client.settimeout(seconds)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(30)
    return False


def test_bytes_arrive_unchanged_and_are_counted_in_each_direction(relay):
    data = random.Random(0).randbytes(5_000_000)
    before = time.monotonic()
    with connected(relay) as client:
        thread = sending(client, data)
        assert hashlib.sha256(receive(client, len(data))).digest() == hashlib.sha256(data).digest()
        thread.join()
        wait_until(lambda: relay.down == len(data), "the count of the last chunk")
    assert (relay.up, relay.down) == (len(data), len(data))
    assert relay.moved(before) == (len(data), len(data))
    assert relay.moved(before, before) == relay.moved(time.monotonic()) == (0, 0)
    assert {direction: sum(n for _, way, n in relay.events if way == direction) for direction in ("up", "down")} == {
        "up": len(data),
        "down": len(data),
    }


def test_many_connections_at_once_do_not_mix(relay):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(relay)) for _ in range(20)]
        for number, client in enumerate(clients):
            client.sendall(bytes([number]) * 1000)
        for number, client in enumerate(clients):
            assert receive(client, 1000) == bytes([number]) * 1000
        assert relay.connections == 20
    assert (relay.up, relay.down) == (20_000, 20_000)
    wait_until(lambda: relay.connections == 0, "the relay to close what its clients have closed")


def test_the_end_of_one_direction_is_passed_on_and_the_other_stays_open(relay, echo):
    with connected(relay) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 10) == b"last words"
        assert client.recv(1) == b"", "the server's end"
        assert echo.ended.acquire(timeout=30)


def test_bursts_are_separated_by_pauses(relay):
    with connected(relay) as client:
        for size in (1000, 300):
            client.sendall(b"x" * size)
            receive(client, size)
            time.sleep(0.5)
    (start, end, first), (later, _, second) = relay.bursts("up", gap=0.3)
    assert (first, second) == (1000, 300)
    assert start <= end < later
    assert [count for *_, count in relay.bursts("up", gap=60)] == [1300]
    assert [count for *_, count in relay.bursts("down", gap=0.3)] == [1000, 300]


def test_a_cut_holds_bytes_and_news_back_until_it_is_mended(relay, echo):
    with connected(relay) as client, connected(relay) as other:
        client.sendall(b"before")
        receive(client, 6)
        wait_until(lambda: relay.down == 6, "the count")
        relay.cut()
        client.sendall(b"during")
        other.sendall(b"closed during the cut")
        other.close()
        with connected(relay) as late:
            late.sendall(b"late")
            assert silent(late), "a new connection gets no byte, no end and no reset"
            assert silent(client)
            assert (relay.up, relay.down) == (6, 6)
            assert not echo.ended.acquire(blocking=False)
            relay.mend()
            assert receive(client, 6) == b"during"
            assert receive(late, 4) == b"late"
            assert echo.ended.acquire(timeout=30)


def test_throttling_slows_each_direction_and_ends_when_told(relay):
    data = b"x" * 100_000
    relay.throttle(200_000)
    with connected(relay) as client:
        begun = time.monotonic()
        thread = sending(client, data)
        receive(client, len(data))
        assert time.monotonic() - begun > 0.35, "100 kB at 200 kB/s, less what may have been saved up"
        thread.join()
        relay.throttle(1)
        thread = sending(client, data)
        assert silent(client, 0.1) or relay.up < 2 * len(data)
        relay.throttle(None)
        receive(client, len(data))
        thread.join()
    with pytest.raises(ValueError, match="expected more than 0"):
        relay.throttle(0)


def test_a_slow_upload_can_be_cut_in_its_middle(relay):
    data = b"x" * 2_000_000
    relay.throttle(1_000_000)
    with connected(relay) as client:
        sending(client, data)
        wait_until(lambda: relay.up > 100_000, "the upload to have begun")
        relay.cut()
        cut = relay.up
        assert 100_000 < cut < len(data)
        time.sleep(0.2)
        assert relay.up == cut
        relay.throttle(None)
        assert relay.up == cut, "no limit is no repair"
        relay.mend()
        receive(client, len(data))


@pytest.mark.parametrize("first", ["cut", "mend"])
def test_a_reset_ends_open_connections_on_both_sides_and_new_ones_are_served(relay, echo, first):
    with connected(relay) as client:
        client.sendall(b"before")
        receive(client, 6)
        getattr(relay, first)()
        relay.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert echo.resets.acquire(timeout=30)
        assert relay.connections == 0
    relay.mend()
    with connected(relay) as client:
        client.sendall(b"after")
        assert receive(client, 5) == b"after"


def test_a_reset_by_the_client_is_passed_on(relay, echo):
    with connected(relay) as client:
        client.sendall(b"x")
        receive(client, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert echo.resets.acquire(timeout=30)
    wait_until(lambda: relay.connections == 0, "the relay to forget it")


def test_without_a_target_a_connection_is_reset_and_later_ones_find_the_target_when_it_is_there(echo):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # reserved, but it does not listen
        with Relay("127.0.0.1", nobody.getsockname()[1]) as relay:
            with pytest.raises(ConnectionResetError), connected(relay) as client:
                client.recv(1)
            relay.target = ("127.0.0.1", echo.port)
            with connected(relay) as client:
                client.sendall(b"x")
                assert receive(client, 1) == b"x"


def test_leaving_the_block_closes_everything(echo):
    threads = threading.active_count()
    with Relay("127.0.0.1", echo.port) as relay, connected(relay) as client:
        client.sendall(b"x")
        receive(client, 1)
        relay.cut()
        relay.__exit__()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert echo.resets.acquire(timeout=30)
    wait_until(lambda: threading.active_count() <= threads, "its thread to end")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", relay.port), timeout=5)
