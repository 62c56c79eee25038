"""What a loopback deployment tells its nodes; tests/integration/test_loopback.py runs whole deployments."""

import contextlib
from types import SimpleNamespace

import pytest
from flwr.common.config import parse_config_args
from typer.main import get_command

from tepal.host.superlink import Clock
from tepal.host.toml import parse_run_config
from tepal.tools.cli.node import app
from tepal.tools.deploy import loopback
from tepal.tools.deploy.loopback import _node, _supernode
from tepal.tools.deploy.provision import make

CONFIG = {
    "data-path": "/data/a = b/c=d.csv",
    "quoted": "she said \"x = 1\" and 'y'",
    "one-kind": "it's",
    "lines": "first = 1\nsecond\u2028third\r\n\tend",
    "empty": "",
    "looks-like-toml": "node.toml",
    "separate.key": " padded ",
    "umlaut": "Zürich",
    "partition-id": 3,
    "share": 1e-05,
    "yes": True,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loopback") / "fleet"
    return make(folder, hosts=["localhost"], sites=["site-1"], port=9092, unpacked=True).unpacked("site-1")


@pytest.mark.parametrize(
    "config", [CONFIG, {}, *({key: value} for key, value in CONFIG.items())], ids=["all", "none", *CONFIG]
)
@pytest.mark.parametrize("command", [_node, _supernode])
def test_a_node_gets_every_value_of_its_config_as_it_is(tmp_path, site, command, config):
    """Read by Flower's own parser, as `flower-supernode` does, and by that of `tepal node`."""
    arguments = command(site, tmp_path / "site-1.sock", config)
    (given,) = arguments[arguments.index("--node-config") + 1 :]
    expected = config if command is _node else {"name": "site-1", **config}
    for found in (parse_config_args([given]), parse_run_config([given])):
        assert found == expected
        assert {key: type(value) for key, value in found.items()} == {k: type(v) for k, v in expected.items()}


def test_a_node_does_not_follow_the_variables_of_another_on_this_machine(tmp_path, monkeypatch):
    options = {option.envvar for option in get_command(app).params if option.envvar}
    options |= {"TEPAL_NODE_CONFIG", "TEPAL_NODE_DATA", "TEPAL_NODE_METRICS_TOKEN"}  # not read by typer
    assert len(options) > 20
    for name in options:
        monkeypatch.setenv(name, "of another")
    monkeypatch.setenv("TEPAL_OF_THE_APP", "kept")
    environments = {}

    @contextlib.contextmanager
    def started(command, *, env, name="superlink", **_):
        environments[name] = env
        yield SimpleNamespace(kill=lambda: None)

    for name in ("connect", "wait_for_http", "wait_for_node"):
        monkeypatch.setattr(loopback, name, lambda *_, **__: None)
    monkeypatch.setattr(loopback, "started", started)
    monkeypatch.setattr(loopback, "open_fleet", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(loopback, "align", lambda *_: [])
    with loopback.deployment(tmp_path, [{}, {}], Clock(lambda *_: None, None), tmp_path / "cache"):
        pass
    for site in ("site-1", "site-2"):
        assert options & environments[site].keys() == {"TEPAL_NODE_SPARE"}  # how much memory nodes here may take
        assert environments[site]["TEPAL_CACHE"] == str(tmp_path / "cache" / site)
        assert environments[site]["TEPAL_OF_THE_APP"] == "kept" and environments[site]["FLWR_HOME"]
