"""Tables of single clients in a run config: what they become, and what is refused before a run."""

import json
import random

import pytest

from tepal.host.toml import parse_run_config
from tepal.records.run_directory import RunDirectory
from tepal.server_app.config import ConfigError, open_run, read_run_config
from tepal.tools.compare.variants import read_variants
from tepal.training.node_settings import NODE_KEYS, settings_of

TABLES = """
[client.3]
learning-rate = 0.002
[client."5-9"]
local-epochs = 1
[client.7-7]
layer-budget = 2
"""


def refusal(values, clients=10):
    with pytest.raises(ConfigError) as refused:
        read_run_config(values, clients)
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


def test_tables_of_a_file_and_keys_of_the_command_line_are_the_settings_of_their_clients(tmp_path):
    (tmp_path / "own.toml").write_text(TABLES)
    given = parse_run_config([str(tmp_path / "own.toml"), "client.3.batch-size=8", "client.0.learning-rate=1"])
    text = read_run_config(given, 10).rounds.client_settings
    expected = {0: {"learning-rate": 1.0}, 3: {"learning-rate": 0.002, "batch-size": 8}}
    expected |= {7: {"local-epochs": 1, "layer-budget": 2.0}}
    expected |= {k: {"local-epochs": 1} for k in (5, 6, 8, 9)}
    assert {k: settings_of(text, k) for k in range(12)} == {k: expected.get(k, {}) for k in range(12)}
    assert isinstance(settings_of(text, 0)["learning-rate"], float), "as the run's own learning rate"


def test_equal_settings_are_equal_texts_however_they_are_written():
    drawn = random.Random(1)
    for _ in range(30):
        values = {k: drawn.choice([None, 8, 16]) for k in range(12)}
        single = {f"client.{k}.batch-size": value for k, value in values.items() if value}
        ranges = {}
        for k in values:  # every range, of any length, in which all have the same
            for end in range(k, 12):
                if values[k] and len({values[j] for j in range(k, end + 1)}) == 1:
                    ranges[f"client.{k}-{end}.batch-size"] = values[k]
        shuffled = drawn.sample(sorted(ranges), len(ranges))
        one, other = (read_run_config(each) for each in (single, {key: ranges[key] for key in shuffled}))
        assert one == other
        assert {k: settings_of(one.rounds.client_settings, k).get("batch-size") for k in values} == values
        assert read_run_config(one.flat) == one, "as a resumed run and the ServerApp read it"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"client.10.momentum": 0.1}, "client.10.momentum: there are 10 clients, numbered from 0 to 9"),
        ({"client.8-10.momentum": 0.1}, "client.8-10.momentum: there are 10 clients, numbered from 0 to 9"),
        ({"client.-1.momentum": 0.1}, "client.-1.momentum: expected a client's number from 0 on"),
        ({"client.9-5.momentum": 0.1}, "client.9-5.momentum: expected a client's number from 0 on"),
        ({"client.three.momentum": 0.1}, "client.three.momentum: expected a client's number from 0 on"),
        ({"client.3": 0.1}, "client.3=0.1: expected a key after the client, such as client.3.learning-rate"),
        ({"client.3.model": "cnn"}, "client.3.model='cnn': it is the same for all clients: set model without client.…"),
        ({"client.3.strategy": "fedavg"}, "client.3.strategy='fedavg': it is the same for all clients"),
        ({"client.3.blocks.head": "h"}, "client.3.blocks.head='h': it is the same for all clients"),
        ({"client.3.wire-dtype": "int8"}, "client.3.wire-dtype='int8': it is the same for all clients"),
        ({"client.3.deterministic": True}, "client.3.deterministic=True: it is the same for all clients"),
        ({"client.3.partition-id": 1}, "client.3.partition-id=1: the simulation sets it for every client"),
        ({"client.3.lerning-rate": 1}, "client.3.lerning-rate=1: there is no such setting of a client: did you mean"),
        ({"client.3.batch-size": 0}, "client.3.batch-size=0: should be greater than or equal to 1 (examples per step)"),
        ({"client.3.optimizer": "sdg"}, "client.3.optimizer='sdg': did you mean 'sgd'?"),
        (
            {"client.2-5.momentum": 0.1, "client.4-6.momentum": 0.2},
            "client.2-5.momentum=0.1 and client.4-6.momentum=0.2: client 4 would have two values",
        ),
        (
            {"client.2.momentum": 0.1, "client-settings": '{"0-3": {"momentum": 0.2}}'},
            "client.0-3.momentum=0.2 and client.2.momentum=0.1: client 2 would have two values",
        ),
        ({"client-settings": "3"}, "client-settings='3': expected JSON with an object for each client"),
        ({"client-settings": '{"3": 1}'}, "client-settings='{\"3\": 1}': expected JSON"),
        ({"client-settings": '{"3"'}, "client-settings='{\"3\"': expected JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_client_is_one_of_the_problems(given, said):
    first, *others = refusal({**given, "num-server-rounds": 0})
    assert first.startswith(said)
    assert [other.partition(":")[0] for other in others] == ["num-server-rounds=0"]


def test_ranges_that_agree_may_overlap():
    config = read_run_config({"client.2-5.momentum": 0.1, "client.4-6.momentum": 0.1}, 7)
    assert config.clients == {"2-6": {"momentum": 0.1}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "scaffold", "optimizer": "sgd", "client.3.optimizer": "adam"}, "client.3: strategy='scaffold'"),
        ({"client.3.local-epochs": 0}, "client.3: local-epochs=0 and local-steps=0: the client would not train"),
        ({"local-steps": 5, "client.3.local-epochs": 0}, "client.3: local-epochs=0 and local-steps=0: the client"),
        ({"strategy": "pfedme", "pfedme.lambda": 10.0, "client.3.learning-rate": 1}, "client.3: pfedme.lambda=10"),
        ({"client.3.data-path": "site.npz"}, "client.3: data-path='site.npz': expected an absolute path"),
    ],
)
def test_settings_that_do_not_suit_the_run_are_refused_for_that_client_alone(given, said):
    (problem,) = refusal(given)
    assert problem.startswith(said)


def test_a_resumed_run_has_its_clients_settings_and_takes_no_others(tmp_path):
    kept = read_run_config({"client.2-3.momentum": 0.1})
    directory = RunDirectory.create(tmp_path, "fedavg", kept.flat)
    resume = {"resume": str(directory.path)}
    assert open_run(resume)[0].clients == {"2-3": {"momentum": 0.1}}
    same = {"client.3.momentum": 0.1, "client.2.momentum": 0.1}
    assert open_run({**resume, **same})[0].clients == {"2-3": {"momentum": 0.1}}
    with pytest.raises(ConfigError, match="these keys cannot change in a resumed run, leave them out: client-settings"):
        open_run({**resume, "client.3.momentum": 0.2})
    with pytest.raises(ConfigError, match=r"client\.3\.momentum=2: should be less than 1"):
        open_run({**resume, "client.3.momentum": 2})


def test_the_keys_are_those_of_local_training_and_of_a_node():
    """What all clients must share is not among them: it decides what is sent, who trains, and what is comparable."""
    shared = {"model", "strategy", "seed", "dataset", "wire-dtype", "score-in-training", "deterministic"}
    assert not {*shared, "train-together", "partition-id"} & {*NODE_KEYS}
    assert {*NODE_KEYS} >= {"learning-rate", "local-epochs", "batch-size", "augment-crop", "layer-budget", "data-path"}
    assert json.loads(read_run_config({}).rounds.client_settings or "{}") == {}


def test_a_variants_file_has_them_in_common_and_in_a_variant(tmp_path):
    (tmp_path / "variants.toml").write_text(
        '[common.client.3]\nbatch-size = 8\n[[variant]]\nname = "a"\nstrategy = "fedavg"\n'
        'client.1.data-path = "site.npz"\n[variant.client."2-3"]\nmomentum = 0.5\n'
    )
    (tmp_path / "site.npz").touch()
    file = read_variants(tmp_path / "variants.toml")
    ((variant,),) = (section.variants for section in file.sections)
    assert read_run_config({**file.common, **variant.run_config}, 4).clients == {
        "1": {"data-path": str(tmp_path / "site.npz")},
        "2": {"momentum": 0.5},
        "3": {"batch-size": 8, "momentum": 0.5},
    }
