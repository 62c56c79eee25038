"""Whether a server can listen on a port, and which hosts are asked without a proxy."""

import errno
import re
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import httpx
import pytest
import yaml
from flwr.proto.control_pb2 import ListRunsRequest, ListRunsResponse

from tepal.host.addresses import unused_proxy, why_taken, without_proxy
from tepal.host.processes import flower_environment, free_port
from tepal.host.superlink import control_client
from tests.packages import ROOT

PROXIES = [f"{scheme}_proxy" for scheme in ("http", "https", "all")]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in (*PROXIES, "no_proxy", "no_grpc_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "")  # so that the environment is restored whatever a test does to it
            monkeypatch.delenv(each)


@pytest.fixture
def server():
    """Makes a server on this machine that answers every request with `content`, and the list of its requests."""
    made = []

    def serve(content=b""):
        requests = []

        class Recorder(BaseHTTPRequestHandler):
            def answer(self):
                requests.append(self.requestline)
                self.send_response(200)
                self.send_header("Content-Type", "application/protobuf")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_CONNECT = answer

            def log_message(self, *_):
                pass

        made.append(HTTPServer(("127.0.0.1", 0), Recorder))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{made[-1].server_port}", requests

    yield serve
    for each in made:
        each.shutdown()
        each.server_close()


# ---- proxies -----------------------------------------------------------------------------------------------------


def test_a_control_port_is_asked_directly_whatever_proxy_is_set(server, monkeypatch):
    proxy, through = server()
    control, asked = server(ListRunsResponse().SerializeToString())
    for name in PROXIES:
        monkeypatch.setenv(name, f"http://{proxy}")
    monkeypatch.setenv("NO_PROXY", "intranet.example.org")
    client = control_client(control, None)
    assert client.ListRuns(ListRunsRequest()) == ListRunsResponse()
    client.close()
    assert (len(asked), through) == (1, [])
    httpx.get("http://elsewhere.example.org")
    assert len(through) == 1, "the proxy is kept for all else"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "10.0.0.7", "fd00::5", "control.example.org"])
def test_processes_of_flower_ask_this_machine_and_the_control_port_directly(tmp_path, monkeypatch, host):
    monkeypatch.setenv("no_proxy", "intranet.example.org, 10.1.0.0/16")
    monkeypatch.setenv("NO_PROXY", "other.example.org")
    environment = flower_environment(tmp_path, f"[{host}]" if ":" in host else host)
    assert environment["no_proxy"] == environment["NO_PROXY"]
    hosts = environment["no_proxy"].split(",")
    assert {host, "127.0.0.1", "intranet.example.org", "10.1.0.0/16", "other.example.org"} <= set(hosts)
    assert len(set(hosts)) == len(hosts)


@pytest.mark.parametrize("host", ["", "a/b", "*", "a:b", "ä.example.org", "a,b"])
def test_what_is_no_host_is_never_added(monkeypatch, host):
    found = without_proxy(host)
    assert found == without_proxy()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    httpx.Client().close()


@pytest.mark.parametrize("value", ["http://proxy.example.org:3128", "http://user:p@ss@proxy.example.org:3128"])
def test_a_message_names_the_proxy_that_was_not_used_without_its_password(monkeypatch, value):
    assert unused_proxy("fleet.example.org") == ""
    monkeypatch.setenv("HTTPS_PROXY", value)
    said = unused_proxy("fleet.example.org")
    assert "proxy.example.org:3128" in said and "HTTPS_PROXY" in said and "ss@" not in said and "user" not in said


@pytest.mark.parametrize(
    ("excepted", "host"),
    [("", "127.0.0.1"), ("", "[::1]"), ("*", "fleet.example.org"), ("example.org", "fleet.example.org")],
)
def test_a_proxy_that_is_not_for_a_host_is_not_named(monkeypatch, excepted, host):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", excepted)
    assert unused_proxy(host) == ""


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_an_asterisk_keeps_meaning_no_proxy_and_grpc_asks_this_machine_directly(server, monkeypatch, name):
    proxy, through = server()
    monkeypatch.setenv("http_proxy", f"http://{proxy}")
    monkeypatch.setenv(name, "*")
    for each, value in without_proxy("10.0.0.7").items():
        monkeypatch.setenv(each, value)
    assert all(urllib.request.proxy_bypass(host) for host in ("elsewhere.example.org", "10.0.0.7"))
    httpx.Client().close()
    with grpc.insecure_channel(f"127.0.0.1:{free_port()}") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/tepal/Ask")(b"", timeout=10)
    assert through == []


@pytest.mark.parametrize("own", ["", "inner.example.org"])
def test_grpc_keeps_a_list_of_its_own(monkeypatch, own):
    monkeypatch.setenv("no_proxy", "intranet.example.org")
    monkeypatch.setenv("no_grpc_proxy", own)
    hosts = without_proxy("10.0.0.7")["no_grpc_proxy"].split(",")
    assert hosts == [own or "intranet.example.org", "127.0.0.1", "localhost", "::1", "10.0.0.7"]


@pytest.mark.parametrize("client", ["client-1", "client-2", "client-3"])
def test_the_clients_of_compose_ask_their_server_directly_whatever_proxy_docker_names(monkeypatch, client):
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "intranet.example.org")
    found = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"]
    for name, value in found[client]["environment"].items():
        monkeypatch.setenv(name, value)
    (host,) = re.findall(r"--host (\S+)", "".join(found["provision"]["command"]))
    assert host in without_proxy()["no_grpc_proxy"].split(",")


# ---- ports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["127.0.0.1", "0.0.0.0", "localhost", ""])
def test_a_port_where_another_server_listens_is_taken(server, place):
    port = server()[0].rpartition(":")[2]
    assert f"port {port} is used by another program" in why_taken(f"{place}:{port}", 0)
    assert why_taken(f"{place}:{free_port()}", 0) == ""


def test_a_port_whose_server_is_just_ending_is_free_soon():
    with socket.create_server(("127.0.0.1", 0)) as ending:
        address = f"127.0.0.1:{ending.getsockname()[1]}"
        # A connection that the server has closed keeps the port for a minute, but not from another server.
        with socket.create_connection(ending.getsockname()) as client:
            ending.accept()[0].close()
            client.recv(1)
        timer = threading.Timer(0.5, ending.close)
        timer.start()
        assert why_taken(address, 20) == ""
        timer.join()


def test_an_address_of_another_machine_or_none_is_left_to_the_server_to_refuse():
    for address in ("192.0.2.1:8000", "no such host:8000", "no port", "127.0.0.1:99999"):
        assert why_taken(address, 0) == ""


def test_a_port_that_this_user_may_not_use_is_said_at_once(monkeypatch):
    def refuse(self, place):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", type("Refusing", (socket.socket,), {"bind": refuse}))
    assert re.match("this user may not listen on port 80,", why_taken("127.0.0.1:80", 60))
