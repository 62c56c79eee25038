"""What is in the images, and what is not."""

import json
import os
import re
import subprocess
import tarfile
from pathlib import PurePosixPath

import pytest

from tepal.host.superlink import stage_app
from tepal.models.weights import shipped
from tests.containers.engine import BUILD_ARGUMENTS, CLIENT, REVISION, ROOT, SERVER, UID, VERSION, docker, inspect
from tests.packages import PACKAGES

pytestmark = [pytest.mark.containers, pytest.mark.usefixtures("images")]
both = pytest.mark.parametrize("image", [SERVER, CLIENT])

# A key itself, not the words with which a program looks for one.
PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}")
SECRET_NAMES = re.compile(r"(\.key|\.pem|\.p12|\.pfx|\.netrc|\.pypirc|\.env|id_(rsa|dsa|ecdsa|ed25519)|pip\.conf)$")
CERTIFICATES_OF_ALL = {"cacert.pem", "roots.pem"}
"""Public authorities, which requests and grpc bring along."""


def run(image: str, *command: str) -> str:
    """Run a command as the container would be: without a network, on a root that cannot be written."""
    return docker("run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", image, *command)


@both
def test_it_is_run_by_nobody_in_particular(image):
    config = inspect(image)["Config"]
    assert (config["User"], config["WorkingDir"]) == (f"{UID}:{UID}", "/app")
    assert run(image, "id").split() == [f"uid={UID}(app)", f"gid={UID}(app)", f"groups={UID}(app)"]


@both
def test_it_says_what_it_is_and_how_its_health_is_found_out(image):
    config = inspect(image)["Config"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == image.partition(":")[0]
    assert (labels["version"], labels["revision"], labels["licenses"]) == (VERSION, REVISION, "Apache-2.0")
    what = "server" if image == SERVER else "node"
    assert config["Cmd"] == ["tepal", what]
    assert config["Healthcheck"]["Test"] == ["CMD", "tepal", what, "status"]


def test_only_the_fleet_api_is_meant_to_be_reached_from_outside():
    assert list(inspect(SERVER)["Config"]["ExposedPorts"]) == ["9092/tcp"]
    assert not inspect(CLIENT)["Config"].get("ExposedPorts")


@both
def test_nothing_calls_out_and_state_has_its_place(image):
    environment = dict(pair.split("=", 1) for pair in inspect(image)["Config"]["Env"])
    expected = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    assert expected.items() <= environment.items()
    assert environment["FLWR_HOME"].startswith("/app/state/")


@both
def test_nothing_in_it_installs_or_builds(image):
    programs = "pip pip3 uv uvx easy_install gcc cc g++ c++ clang ld as make cmake ninja cargo rustc git hatch"
    found = run(image, "sh", "-c", f"for name in {programs}; do command -v $name; done; true")
    assert found == ""
    modules = ["pip", "setuptools", "wheel", "ensurepip", "hatchling", "uv", "pytest"]
    code = f"import importlib.util as i; print([name for name in {modules} if i.find_spec(name)])"
    for python in ("/opt/venv/bin/python", "/usr/local/bin/python"):
        assert run(image, python, "-c", code).strip() == "[]"


@both
def test_all_that_is_needed_can_be_imported_without_a_place_to_write(image):
    code = f"PACKAGES = {PACKAGES}" + """
import pkgutil, sys, time
begun = time.monotonic()
import tepal, torch, sklearn.datasets, plotly, flwr.serverapp, flwr.clientapp
print(torch.__version__, f"{time.monotonic() - begun:.1f} s")
missing = []
for package in PACKAGES:
    __import__(f"tepal.{package}")
    for module in pkgutil.walk_packages(sys.modules[f"tepal.{package}"].__path__, f"tepal.{package}."):
        if not module.name.endswith(".app"):  # is part of a bundle, and names its packages as they lie there
            try:
                __import__(module.name)
            except ModuleNotFoundError as error:
                if error.name not in ("ray", "flwr_datasets"):  # simulation
                    missing.append(f"{module.name}: {error}")
assert not missing, missing
model = torch.nn.Linear(8, 8)
model(torch.ones(2, 8)).sum().backward()
torch.optim.AdamW(model.parameters()).step()
assert sklearn.datasets.load_digits().data.shape == (1797, 64)
"""
    print(run(image, "python", "-c", code))


@pytest.mark.skipif("TORCH_INDEX_URL" in os.environ, reason="whichever torch TORCH_INDEX_URL has")
def test_cuda_is_not_in_it():
    code = "import importlib.metadata as m; print([d.name for d in m.distributions() if d.name.startswith('nvidia')])"
    assert run(CLIENT, "python", "-c", code).strip() == "[]"


@both
def test_its_bytecode_is_there_and_in_force(image):
    """Else every start on a read-only root compiles what it imports."""
    code = """
import importlib.util, pathlib, sys
for name in ("json", "torch", "flwr.app", "tepal.exchange.mod"):
    source = importlib.util.find_spec(name).origin
    assert pathlib.Path(importlib.util.cache_from_source(source)).exists(), source
    if "/opt/venv/" in source:  # the last bits: by hash, and unchecked
        assert pathlib.Path(importlib.util.cache_from_source(source)).read_bytes()[4:8] == bytes([1, 0, 0, 0]), source
"""
    run(image, "python", "-c", code)


@pytest.mark.parametrize("image", [SERVER, CLIENT])
def test_trained_weights_are_there_by_name_and_undamaged(image):
    code = "from tepal.models.weights import checked_file, shipped; print(*(n for n in shipped() if checked_file(n)))"
    assert run(image, "python", "-c", code).split() == [*shipped()]


def test_the_server_has_the_app_that_it_submits(tmp_path):
    """The bundle's files and no more than that."""
    code = """
import sys
from pathlib import Path
from tepal.host.superlink import stage_app
print(*sorted(map(str, stage_app(Path("/opt/tepal"), Path("/tmp/app")))), sep="\\n")
"""
    staged = set(run(SERVER, "python", "-c", code).split())
    assert {"pyproject.toml", "tepal/__init__.py", "server_app/app.py", "client_app/app.py"} <= staged
    assert staged == {str(path) for path in stage_app(ROOT, tmp_path)} - {".gitignore"}
    top = set(run(SERVER, "ls", "-A", "/opt/tepal").split())
    assert top == {name.partition("/")[0] for name in staged} | {"LICENSE", "constraints.txt"}


def test_both_have_their_large_layer_in_common():
    """It is stored, sent and fetched once; and a change of code changes a small one."""
    server, client = (inspect(image)["RootFS"]["Layers"] for image in (SERVER, CLIENT))
    shared = sum(one == other for one, other in zip(server, client, strict=False))
    assert len(server) - shared <= 3 and len(client) - shared <= 2
    history = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", CLIENT)
    sizes = {line.split()[2]: int(line.split()[0]) / 1e6 for line in history.splitlines() if " COPY /opt/" in line}
    assert sizes["/opt/venv"] > 500 and sizes["/opt/project"] < 10
    assert 1 < sizes["/opt/weights"] < 10  # which stay as they are when code changes
    print(
        f"dependencies {sizes['/opt/venv']:.0f} MB, weights {sizes['/opt/weights']:.1f} MB, tepal "
        f"{sizes['/opt/project']:.1f} MB"
    )
    for image in (SERVER, CLIENT):
        print(f"{image} {inspect(image)['Size'] / 1e6:.0f} MB")


def test_both_are_built_alike_as_far_as_they_can_be():
    begin, end = "ARG PYTHON_IMAGE", "# ----------"
    texts = ((ROOT / "docker" / f"{name}.Dockerfile").read_text() for name in ("server", "client"))
    server, client = (text[text.index(begin) : text.rindex(end)] for text in texts)
    assert server == client


def test_no_secret_is_in_any_layer():
    """Neither in the image as it is nor in a layer that a later one covers; nor in what is told of its making."""
    found, names, files, layers = [], [], 0, 0
    with subprocess.Popen(["docker", "save", SERVER, CLIENT], stdout=subprocess.PIPE) as saving:
        with tarfile.open(fileobj=saving.stdout, mode="r|") as archive:
            for member in archive:
                layer = archive.extractfile(member) if member.isfile() else None
                if layer is None or not is_layer(member):
                    continue
                layers += 1
                with tarfile.open(fileobj=layer, mode="r|*") as content:
                    for file in content:
                        if not file.isfile():
                            continue
                        files += 1
                        name = PurePosixPath(file.name)
                        if SECRET_NAMES.search(name.name) and name.name not in CERTIFICATES_OF_ALL:
                            names.append(file.name)
                        if file.size < 2**20 and PRIVATE_KEY.search(content.extractfile(file).read()):
                            found.append(file.name)
        assert saving.wait() == 0
    assert layers >= 5 and files > 10_000, "the images were not read"
    assert found == []
    assert [name for name in names if not name.startswith(("etc/ssl/certs/", "etc/pip.conf"))] == []
    for image in (SERVER, CLIENT):
        told = docker("history", "--no-trunc", "--format", "{{json .}}", image) + json.dumps(inspect(image)["Config"])
        assert not [name for name in BUILD_ARGUMENTS if name != "PYTHON_IMAGE" and f"{name}=" in told]


def is_layer(member: tarfile.TarInfo) -> bool:
    """Layers are blobs, or layer.tar in older engines; what describes them is JSON and small."""
    return member.name.endswith("layer.tar") or (member.name.startswith("blobs/") and member.size > 20_000)
