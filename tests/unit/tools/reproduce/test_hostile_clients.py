"""Hostile clients: what each attack sends, by formulas of its own; and the experiment on few clients and rounds."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tepal.exchange.header import Header
from tepal.exchange.manifest import PARTS
from tepal.exchange.parts import unpack
from tepal.server_app.config import defaults, read_run_config
from tepal.server_app.run import build_model
from tepal.tools.reproduce import runner
from tepal.tools.reproduce.attacks import ATTACKS, LABEL_FLIP, LITTLE, NO_ATTACK, Population, little_z
from tepal.tools.reproduce.experiment import TrialInputs
from tepal.tools.reproduce.hostile_clients import METHODS, SETTINGS, HostileClients, _kept_text, settings_of
from tepal.tools.reproduce.runs import measured
from tests.answers import returned_by
from tests.quiet import quiet  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_report")

CLIENTS, HOSTILE, SEED = 5, 1, 3
CONFIG = {
    "strategy": "fedavg", "num-server-rounds": 1, "local-steps": 2, "partitioner": "iid", "fraction-evaluate": 0.0,
    "score-in-training": False, "min-clients": CLIENTS, "seed": SEED,
}  # fmt: skip


def normal(z):
    return (1 + math.erf(z / math.sqrt(2))) / 2


@pytest.mark.parametrize(
    ("clients", "hostile", "supporters"), [(50, 12, 14), (50, 24, 2), (51, 24, 2), (20, 4, 7), (5, 1, 2)]
)
def test_z_leaves_as_many_honest_clients_outside_as_a_majority_needs(clients, hostile, supporters):
    """`supporters`, with the hostile clients, are more than half; just so many of the honest are beyond z."""
    assert supporters + hostile > clients / 2 >= supporters + hostile - 1
    honest = clients - hostile
    assert normal(little_z(clients, hostile)) == pytest.approx((honest - supporters) / honest, abs=1e-9)


@pytest.mark.parametrize(("clients", "hostile"), [(10, 0), (10, 5), (4, 3)])
def test_without_hostile_clients_or_with_half_of_all_there_is_no_z(clients, hostile):
    with pytest.raises(ValueError, match="less than half"):
        little_z(clients, hostile)


def test_an_unknown_attack_is_refused():
    with pytest.raises(ValueError, match="unknown attack 'x': allowed are none, sign flip"):
        Population(4, 1, "x", 0)


def first_updates(attack, folder):
    """Client number → name → update in round 1, as the answers carry it; and the number of the hostile client."""
    population, sent = Population(CLIENTS, HOSTILE, attack, SEED), {}
    start = {name: value.numpy() for name, value in build_model(read_run_config({**defaults(), **CONFIG}))[0]
             .state_dict().items()}  # fmt: skip

    def spy(node, message, reply):
        header = Header.from_content(reply.content)
        if header.action == "train":
            values = unpack(reply.content[PARTS]["model"], returned_by(message)["model"])
            sent[node.config["partition-id"]] = {name: values[name] - start[name] for name in values}
        return reply

    def grid(nodes, values):
        connected = population.grid(nodes, values)
        connected.spoil = spy
        return connected

    measured(CONFIG, CLIENTS, folder, grid=grid)
    (hostile,) = population.hostile
    return sent, hostile


@pytest.fixture(scope="module")
def honest_updates(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
        return first_updates(NO_ATTACK, tmp_path_factory.mktemp("honest") / "run")


@pytest.mark.parametrize("attack", ATTACKS[1:])
def test_hostile_clients_send_what_the_attack_says_and_others_what_they_trained(attack, honest_updates, tmp_path):
    (before, hostile), (sent, same) = honest_updates, first_updates(attack, tmp_path / "run")
    assert hostile == same and sorted(sent) == list(range(CLIENTS))
    others = [k for k in range(CLIENTS) if k != hostile]
    for k in others:
        for name, update in sent[k].items():
            np.testing.assert_array_equal(update, before[k][name])
    if attack == LABEL_FLIP:
        assert any(not np.array_equal(sent[hostile][name], update) for name, update in before[hostile].items())
        return
    if attack == "noise":
        drawn = np.concatenate([update.ravel() for update in sent[hostile].values()])
        assert abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1) < 0.02
        return
    for name, update in sent[hostile].items():
        own = before[hostile][name]
        if attack == LITTLE:
            columns = np.stack([before[k][name].astype(np.float64) for k in others])
            centre = sum(columns) / len(others)
            spread = np.sqrt(sum((column - centre) ** 2 for column in columns) / len(others))
            expected = centre - little_z(CLIENTS, HOSTILE) * spread
        else:
            expected = {"sign flip": -own, "scaled by 100": 100 * own}[attack]
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=2e-6)


def test_flipped_labels_are_the_classes_in_reverse(tmp_path, monkeypatch):
    seen = {}

    def train_client(client, msg):
        seen[client.name] = client.batches.labels
        return original(client, msg)

    from tepal.client_app import app

    original = app.train_client
    monkeypatch.setattr(app, "train_client", train_client)
    _, hostile = first_updates(NO_ATTACK, tmp_path / "honest")
    before = seen.pop(f"client-{hostile}")
    first_updates(LABEL_FLIP, tmp_path / "hostile")
    after = seen[f"client-{hostile}"]
    assert (before + after == 9).all() and len(set(before.tolist())) > 5


def cut(trial):
    """The trial with five clients, one of them hostile, and two rounds of two steps."""
    config = {**trial.options["config"], "num-server-rounds": 2, "local-steps": 2, "min-clients": CLIENTS}
    return replace(trial, options={**trial.options, "config": config, "clients": CLIENTS, "hostile": HOSTILE})


def computed(folder, method, attacks, settings):
    """The values of the method's trials with these attacks and settings, and the first seed."""
    experiment, found = HostileClients(), {}
    for trial in experiment.trials(False):
        config = trial.options["config"]
        asked = trial.options["attack"] in attacks and config["robust"] in settings and config["seed"] == 1
        if asked and config["strategy"] == METHODS[method]["strategy"]:
            found[trial.name] = experiment.compute(cut(trial), TrialInputs(folder))
    return json.loads(json.dumps(found))


def test_the_experiment_runs_on_few_clients_and_shows_what_is_lost(tmp_path):
    found = computed(tmp_path, "FedAvg", [NO_ATTACK, LITTLE], ["none", "trimmed"])
    assert len(found) == 4
    for values in found.values():
        assert values["rounds"] == 2 and 0 <= values["server"] <= 1 and 0 <= values["honest"] <= 1
    results = HostileClients().results(found)
    assert [len(table.rows) for table in results.tables[:2]] == [2, 2]
    assert "</html>" in runner._page(HostileClients(), results, [])


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_every_setting_and_attack(tmp_path, method):
    found = computed(tmp_path, method, ATTACKS, SETTINGS)
    assert len(found) == len(ATTACKS) * len(settings_of(method))
    assert HostileClients().results(found).tables


def test_losses_are_against_the_same_seed_without_attack_and_have_intervals():
    """Three seeds; the accuracies are chosen so that mean and deviation can be read off."""

    def values(accuracy):
        return {"server": accuracy, "honest": 0.1, "lowest_accuracy": None, "highest_accuracy": None}

    found = {f"digits-fedavg-none-none-{seed}": values(accuracy) for seed, accuracy in ((1, 0.8), (2, 0.9), (3, 0.85))}
    found |= {f"digits-fedavg-signflip-none-{seed}": values(of) for seed, of in ((1, 0.7), (2, 0.8), (3, 0.75))}
    found |= {f"digits-fedavg-signflip-median-{seed}": values(of) for seed, of in ((1, 0.79), (2, 0.89), (3, 0.84))}
    found["digits-fedavg-noise-median-2"] = values(0.875)
    accuracies, lost = HostileClients().results(found).tables
    half = 4.302653 * 0.05 / math.sqrt(3)  # Student's t with two degrees of freedom
    assert list(accuracies.rows[0]) == ["FedAvg", "none", f"0.8500 ± {half:.4f}", f"0.7500 ± {half:.4f}", *[None] * 4]
    assert list(lost.rows[0][2:4]) == ["+0.0000 ± 0.0000 yes", "+0.1000 ± 0.0000 no"]
    assert list(lost.rows[1])[:4] == ["FedAvg", "median", None, "+0.0100 ± 0.0000 yes"]
    assert list(lost.rows[1])[4:] == [None, "+0.0250 undecided", None, None]
    (finding,) = HostileClients().results(found).findings
    assert "none 0 of 1, median 1 of 2." in finding


def test_a_loss_is_decided_only_if_its_whole_interval_is_on_one_side():
    losses = [0.01, 0.012, 0.014], [0.03, 0.032, 0.034], [0.0, 0.02, 0.03], [0.0], []
    assert [_kept_text(each) for each in losses] == [
        "+0.0120 ± 0.0050 yes", "+0.0320 ± 0.0050 no", "+0.0167 ± 0.0379 undecided", "+0.0000 undecided", None,
    ]  # fmt: skip


def test_accuracy_of_personal_models_is_that_of_the_honest_clients():
    of = {"server": None, "honest": 0.4, "clients": 0.9, "lowest_accuracy": None, "highest_accuracy": None}
    (accuracies, _) = HostileClients().results({"digits-fedacs-none-none-1": of}).tables
    assert accuracies.rows[0][:3] == ("FedACS", "none", "0.4000")


