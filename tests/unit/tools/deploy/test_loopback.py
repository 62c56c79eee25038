"""What a loopback deployment tells its nodes; tests/integration/test_loopback.py runs whole deployments."""

import pytest
from flwr.common.config import parse_config_args

from tepal.host.toml import parse_run_config
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
