"""`tepal doctor`: each check finds what is wrong, says what to do, and is silent about what is well."""

import datetime
import email.utils
import http.server
import json
import os
import shutil
import socket
import ssl
import tarfile
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tepal.host.flower.patches import FLOWER
from tepal.tools.cli.main import main
from tepal.tools.deploy import doctor, provision
from tepal.tools.deploy.doctor import OK, PROBLEM, SKIPPED, WARNING, Finding
from tepal.tools.deploy.provision import make, read_site


@pytest.fixture
def fleet(tmp_path):
    return make(tmp_path / "fleet", hosts=["localhost"], sites=["north"])


def states(findings):
    return {each.check: each.state for each in findings}


# --- the installation -------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Packages in the place of torch and torchvision, in processes that are started."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))

    def write(name, text):
        package = tmp_path / "packages" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(text)

    return write


TORCH = """
__version__ = "9.8.7"
class version: cuda, hip = {cuda!r}, None
class cuda:
    is_available = staticmethod(lambda: {gpus} > 0)
    device_count = staticmethod(lambda: {gpus})
    get_device_name = staticmethod(lambda i: "Accelerator")
"""


def test_a_torchvision_that_does_not_belong_to_torch_is_found(fake, tmp_path):
    fake("torch", TORCH.format(cuda=None, gpus=0))
    fake("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    torch, vision, gpu = doctor.torch_and_gpu(devices=tmp_path)
    assert (torch.state, vision.state, gpu.state) == (OK, PROBLEM, OK)
    assert "torch 9.8.7" in torch.found and "torchvision::nms" in vision.found and "one index" in vision.remedy


def test_torch_and_torchvision_that_pair_are_well(fake, tmp_path):
    fake("torch", TORCH.format(cuda="12.9", gpus=2))
    fake("torchvision", "__version__ = '1.2'")
    torch, vision, gpu = doctor.torch_and_gpu(devices=tmp_path)
    assert {torch.state, vision.state, gpu.state} == {OK}
    assert "built for 12.9" in torch.found and gpu.found == "torch finds Accelerator, Accelerator"


def test_a_gpu_that_torch_does_not_see_is_a_warning(fake, tmp_path):
    fake("torch", TORCH.format(cuda=None, gpus=0))
    fake("torchvision", "__version__ = '1.2'")
    (tmp_path / "nvidia0").touch()
    *_, gpu = doctor.torch_and_gpu(devices=tmp_path)
    assert gpu.state == WARNING and "built for CPUs" in gpu.found
    fake("torch", TORCH.format(cuda="12.9", gpus=0))
    *_, gpu = doctor.torch_and_gpu(devices=tmp_path)
    assert gpu.state == WARNING and "nvidia-smi" in gpu.remedy


@pytest.mark.parametrize(
    "broken, said",
    [("raise ImportError('libcudart.so.12')", "libcudart.so.12"), ("import os; os._exit(5)", "status 5")],
)
def test_a_torch_that_breaks_at_import_is_found(fake, tmp_path, broken, said):
    fake("torch", broken)
    [torch] = doctor.torch_and_gpu(devices=tmp_path)
    assert torch.state == PROBLEM and said in torch.found and torch.remedy


def test_another_flower_or_python_is_a_problem():
    assert doctor.flower_version(FLOWER).state == OK
    other = doctor.flower_version("1.40.0")
    assert other.state == PROBLEM and f"flwr=={FLOWER}" in other.remedy
    assert doctor.python_version((3, 11, 0)).state == OK
    assert doctor.python_version((3, 10, 9)).state == PROBLEM


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_a_problem_only_where_it_was_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [named] = doctor.check_ports([port])
        monkeypatch.setattr(doctor, "SERVER_PORTS", (port,))
        [usual] = doctor.check_ports(())
    assert (named.state, usual.state) == (PROBLEM, WARNING) and str(port) in named.remedy
    [free] = doctor.check_ports([port])
    assert free.state == OK


def test_a_folder_that_will_be_made_is_judged_by_the_one_above(tmp_path, monkeypatch):
    found = doctor.folder("runs folder", tmp_path / "a" / "b")
    assert found.state == OK and "will be created" in found.found and not (tmp_path / "a").exists()
    usage = type("Usage", (), {"free": 400e6})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert doctor.folder("runs folder", tmp_path).state == PROBLEM
    usage.free = 4e9
    assert doctor.folder("runs folder", tmp_path).state == WARNING


def test_a_folder_that_cannot_be_written_to_is_a_problem(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    found = doctor.folder("cache folder", tmp_path)
    assert found.state == PROBLEM and str(tmp_path) in found.found and f"chown -R {os.geteuid()}" in found.remedy


@pytest.mark.parametrize(
    "free, limit, state", [(8e9, 0, OK), (8e9, 1e9, WARNING), (1e9, 0, WARNING), (1e8, 8e9, PROBLEM)]
)
def test_memory_is_what_the_machine_and_the_container_leave(free, limit, state):
    assert doctor._memory(free, limit, "").state == state


# --- credentials ------------------------------------------------------------------------------------------------------


def test_good_credentials_are_well(fleet):
    assert states(doctor.check_credentials(fleet.folder)) == {"credentials": OK, "private keys": OK}
    assert states(doctor.check_site(fleet.archive("north"))) == {"site's archive": OK, "site": OK}
    with tarfile.open(fleet.archive("north")) as archive:
        archive.extractall(fleet.folder.parent, filter="data")
    [found] = doctor.check_site(fleet.folder.parent / "north")
    assert found.state == OK and "localhost:9092" in found.found


@pytest.mark.parametrize("file", ["server/server.key", "ca/ca.key", "sites/north.tar.gz"])
def test_a_private_key_that_others_can_read_is_named_with_the_command_that_mends_it(fleet, file):
    (fleet.folder / file).chmod(0o640)
    *_, modes = doctor.check_credentials(fleet.folder)
    assert modes.state == PROBLEM and modes.remedy == f"chmod 600 {fleet.folder / file}"


def test_a_key_of_another_certificate_is_found(fleet, tmp_path):
    shutil.copy(make(tmp_path / "other", hosts=["localhost"], sites=["north"]).server.key, fleet.server.key)
    [found] = doctor.check_credentials(fleet.folder)
    assert found.state == PROBLEM and found.found == f"{fleet.server.key} does not belong to {fleet.server.certificate}"
    assert found.remedy == "copy both from the same provisioning"


def test_certificates_that_end_soon_or_have_ended_are_found(fleet, monkeypatch):
    class Later(datetime.datetime):
        days = 0

        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) + datetime.timedelta(days=cls.days)

    monkeypatch.setattr(doctor, "datetime", Later)
    Later.days = 340
    assert states(doctor.check_credentials(fleet.folder))["credentials"] == WARNING
    Later.days = 366
    [found] = doctor.check_credentials(fleet.folder)
    assert found.state == PROBLEM and "expired" in found.found and "tepal provision renew" in found.remedy
    monkeypatch.setattr(doctor, "days_left", lambda certificate: provision.SOON - 1)
    assert states(doctor.check_site(fleet.archive("north")))["site"] == WARNING


def test_what_is_no_site_or_no_credentials_is_a_problem(fleet, tmp_path):
    (tmp_path / "notes.tar.gz").write_text("x")
    assert states(doctor.check_site(tmp_path / "notes.tar.gz"))["site"] == PROBLEM
    [nothing] = doctor.check_site(tmp_path / "nothing")
    assert nothing.state == PROBLEM and "tar -xzf" in nothing.remedy
    [nothing] = doctor.check_credentials(tmp_path)
    assert nothing.state == PROBLEM and "ca.crt" in nothing.found + nothing.remedy
    fleet.server.certificate.unlink()
    [lacking] = doctor.check_credentials(fleet.folder)
    assert lacking.state == PROBLEM and "server.crt" in lacking.found


@pytest.mark.parametrize("part", ["", "server", "server/revoked"])
def test_a_folder_that_is_closed_to_this_user_is_named_with_who_may_read_it(fleet, monkeypatch, part):
    where, scandir = fleet.folder / part, os.scandir

    def refuse(path):
        if path == where:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may open all
    [found] = doctor.check_credentials(fleet.folder)
    assert found.state == PROBLEM and found.remedy.startswith("Run the command with sudo")
    said = f"{where} cannot be read by this user (uid {os.geteuid()}) and belongs to uid {where.stat().st_uid}"
    assert said in found.found
    for command in (["list", str(fleet.folder)], ["add", str(fleet.folder), "--site", "west"]):
        done = CliRunner().invoke(main, ["provision", *command])
        assert done.exit_code == 1 and "belongs to uid" in done.stderr and "Errno" not in done.stderr


def test_a_certificate_that_is_closed_to_this_user_is_named_too(fleet, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(doctor.node_keys.Path, "read_bytes", refuse)
    [found] = doctor.check_credentials(fleet.folder)
    assert found.state == PROBLEM and "ca.crt cannot be read by this user" in found.found
    assert found.remedy.startswith("Run the command with sudo")


# --- the clock --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(fleet):
    """An HTTPS server with the fleet's certificate, whose clock differs from this machine's by `server.differs`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def date_time_string(self, timestamp=None):
            return email.utils.formatdate(time.time() + self.server.differs, usegmt=True)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(fleet.server.certificate, fleet.server.key)
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        serving.differs = 0.0
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


@pytest.mark.parametrize(
    "differs, state",
    [(0, OK), (-60, PROBLEM), (4, WARNING), (60, WARNING), (400, PROBLEM)],
    ids=["equal", "this one ahead", "a little behind", "behind", "far behind"],
)
def test_the_clock_is_compared_with_the_servers(server, fleet, differs, state):
    server.differs = differs
    address = f"localhost:{server.server_port}"
    for named in ({"certificates": fleet.folder}, {"site": fleet.archive("north")}):
        found = doctor.clock(address, **named)
        assert found.state == state, found
    assert doctor.clock(address, fleet.ca_certificate).state == state


def test_a_server_that_does_not_answer_is_a_problem(fleet):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        found = doctor.clock(f"localhost:{nobody.getsockname()[1]}", fleet.folder)
    assert found.state == PROBLEM and "does not answer" in found.found


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(doctor, "torch_and_gpu", lambda: iter([Finding("torch", OK, "torch 1")]))


def test_the_status_is_1_where_there_is_a_problem(without_torch, fleet, tmp_path):
    arguments = ["doctor", "--runs", str(tmp_path), "--json", "--credentials", str(fleet.folder)]
    well = CliRunner().invoke(main, arguments)
    found = {each["check"]: each for each in json.loads(well.stdout)}
    assert well.exit_code == 0 and found["credentials"]["state"] == OK
    assert found["clock"]["state"] == SKIPPED and "--superlink" in found["clock"]["remedy"]
    assert found["runs folder"]["remedy"] == ""
    fleet.server.key.chmod(0o644)
    ill = CliRunner().invoke(main, arguments[:-3] + arguments[-2:])
    assert ill.exit_code == 1
    lines = ill.stdout.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("problem")]
    assert "private keys" in lines[at] and lines[at + 1].split() == ["→", "chmod", "600", str(fleet.server.key)]


@pytest.mark.parametrize(
    ("environment", "skipped"),
    [
        ({"TEPAL_CREDENTIALS": "/app/credentials", "TEPAL_STATE": "{state}"}, "cache folder"),
        ({"TEPAL_SITE": "/app/site", "TEPAL_CACHE": "{state}"}, "runs folder"),
    ],
)
def test_a_container_writes_to_the_folders_of_its_image_alone(
    without_torch, tmp_path, monkeypatch, environment, skipped
):
    temporary_file, state = doctor.tempfile.TemporaryFile, tmp_path / "state"
    state.mkdir()

    def refuse(dir):
        if dir != state:
            raise OSError(30, "Read-only file system")
        return temporary_file(dir=dir)

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    given = {key: value.format(state=state) for key, value in environment.items()}
    done = CliRunner().invoke(main, ["doctor", "--json"], env=given)
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.exit_code == 0, done.stdout
    assert [name for name in ("runs folder", "cache folder") if found[name]["state"] == SKIPPED] == [skipped]


@pytest.fixture
def closed_to_us(monkeypatch):
    """Closes a folder to this user, who may be root: nothing below it can be looked at."""

    def close(folder):
        before = os.stat

        def refuse(path, *args, **options):
            if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return before(path, *args, **options)

        monkeypatch.setattr(os, "stat", refuse)

    return close


def test_a_private_key_in_a_folder_that_is_closed_to_this_user_is_passed_over(fleet, closed_to_us):
    fleet.server.key.chmod(0o640)
    closed_to_us(fleet.folder / "ca")
    *_, modes = doctor.check_credentials(fleet.folder)
    assert modes.state == PROBLEM and modes.remedy == f"chmod 600 {fleet.server.key}"


def test_a_site_that_is_closed_to_this_user_is_a_problem(fleet, tmp_path, closed_to_us):
    shutil.unpack_archive(fleet.archive("north"), tmp_path, filter="data")
    closed_to_us(tmp_path / "north")
    [found] = doctor.check_site(tmp_path / "north")
    assert found.state == PROBLEM and "cannot be read by this user" in found.found and "chown -R" in found.remedy


def test_a_folder_below_one_that_is_closed_to_this_user_is_a_problem(tmp_path, closed_to_us):
    closed_to_us(tmp_path / "closed")
    found = doctor.folder("runs folder", tmp_path / "closed" / "runs")
    assert found.state == PROBLEM and "cannot be written to: Permission denied" in found.found


def test_the_archive_that_is_looked_at_stays_as_it_is(fleet):
    before = fleet.archive("north").read_bytes()
    list(doctor.check_site(fleet.archive("north")))
    assert fleet.archive("north").read_bytes() == before
    assert [path.name for path in (fleet.folder / "sites").iterdir()] == ["north.tar.gz"]
    with pytest.raises(provision.ProvisionError):
        read_site(fleet.folder / "sites" / "north")
