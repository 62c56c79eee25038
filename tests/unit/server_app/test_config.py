import re
import tomllib

import pytest

from tepal.records.run_directory import CONFIG, RunDirectory
from tepal.server_app.config import ConfigError, defaults, open_run, read_run_config
from tepal.tools.compare.variants import read_variants
from tests.packages import ROOT


def flat(table, prefix=""):
    found = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_flower_knows_every_key_with_our_default():
    """Flower refuses a key that is not in pyproject.toml, and takes its default from there."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert flat(pyproject["tool"]["flwr"]["app"]["config"]) == defaults()


def test_an_empty_config_is_the_default_run():
    config = read_run_config({})
    assert config.flat == {**defaults(), "fedfrozen.warmup-rounds": 6}, "three tenths of 20 rounds"
    assert (config.rounds.strategy, config.rounds.model, config.data.dataset) == ("fedfrozen", "tiny-vit", "digits")
    assert (config.rounds.num_server_rounds, config.fedfrozen.warmup_rounds) == (20, 6)


@pytest.mark.parametrize(("rounds", "warmup"), [(1, 1), (2, 1), (3, 1), (5, 2), (10, 3), (20, 6), (100, 30)])
def test_the_warmup_follows_the_number_of_rounds_unless_it_is_given(rounds, warmup):
    config = read_run_config({"num-server-rounds": rounds})
    assert config.fedfrozen.warmup_rounds == config.flat["fedfrozen.warmup-rounds"] == warmup
    given = read_run_config({"num-server-rounds": rounds, "fedfrozen.warmup-rounds": 0})
    assert given.fedfrozen.warmup_rounds == 0
    assert read_run_config({"num-server-rounds": rounds, "strategy": "fedavg"}).fedfrozen.warmup_rounds == -1


def test_the_warmup_of_a_mode_follows_the_rounds_that_train_it():
    ensemble = {"strategy": "fedensemble", "fedensemble.member": "fedfrozen", "fedensemble.modes": 4}
    assert read_run_config({**ensemble, "num-server-rounds": 40}).fedfrozen.warmup_rounds == 12
    config = read_run_config({**ensemble, "fedensemble.strata": 2, "num-server-rounds": 40})
    assert config.fedfrozen.warmup_rounds == 5, "three tenths of 40 · (1 − (3/4)²) rounds"


def test_values_reach_their_section():
    config = read_run_config({"seed": 7, "fedfrozen.ridge": 0.5, "local-steps": 3, "dirichlet-alpha": 0.1})
    assert (config.rounds.seed, config.data.seed) == (7, 7)
    assert (config.fedfrozen.ridge, config.training.local_steps, config.data.dirichlet_alpha) == (0.5, 3, 0.1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "fedfrozn"}, r"strategy='fedfrozn': did you mean 'fedfrozen'\? allowed are fedavg, fedfrozen"),
        ({"model": "tiny-vti"}, r"unknown model 'tiny-vti': did you mean 'tiny-vit'"),
        ({"dataset": "digit"}, r"dataset='digit' is not known \(did you mean 'digits'"),
        ({"num-server-round": 3}, r"'num-server-round' is not a key of the run config: did you mean 'num-server-r"),
        ({"warmup-rounds": 3}, r"did you mean 'fedfrozen\.warmup-rounds'"),
        ({"zzz": 3, "qqq": 1, "yyy": 2}, r"'zzz', 'qqq', 'yyy' are not keys of the run config: allowed are au"),
        ({"zzz": 3}, r"'zzz' is not a key of the run config: allowed are augment-crop, augment-flip, autocast, batch"),
        ({"fraction-train": 1.5}, r"fraction-train=1\.5: should be less than or equal to 1"),
        ({"num-server-rounds": 0}, r"num-server-rounds=0: should be greater than or equal to 1"),
        ({"learning-rate": "fast"}, r"learning-rate='fast': should be a valid number"),
        ({"fedfrozen.ridge": -1}, r"fedfrozen\.ridge=-1: should be greater than or equal to 0"),
        ({"fedfrozen.warmup-rounds": -2}, r"fedfrozen\.warmup-rounds=-2"),
        ({"dirichlet-alpha": 0}, r"dirichlet-alpha=0: should be greater than 0"),
        ({"model": "linear-attention"}, r"partitioner='dirichlet' divides .* by their classes, but model='linear-att"),
        ({"model": "linear-attention", "partitioner": "iid"}, r"has images, but the model needs numbers: choose a"),
        (
            {"model": "linear-attention", "strategy": "fedbe", "server-share": 0.2, "partitioner": "iid"},
            r"strategy='fedbe' distils probabilities of classes, but model='linear-attention' is for sequence-reg",
        ),
        ({"model": "linear-attention", "dataset": "local"}, r"set features and outputs \(for example"),
        ({"feature-columns": "age"}, r"is for image-classification, but feature-columns='age' is for numbers: leave"),
        ({"wire-dtype": "auto", "wire-top-k": 0.1}, r"wire-top-k=0.1, and wire-dtype-up is 'auto', .*set wire-top-k=0"),
        ({"wire-dtype": "rank4", "wire-top-k": 0.1}, r"wire-dtype-up is 'rank4', .*says how much.*set wire-top-k=0"),
        ({"wire-dtype-down": "auto", "wire-top-k-down": 0.1}, r"wire-dtype-down is 'auto', .*set wire-top-k-down=0"),
        (
            {"wire-budget": "2MB"},
            r"wire-budget='2MB' .*'auto' can .* wire-dtype-down is 'float32' and wire-dtype-up is 'float32': set wire-d"
        ),
        (
            {"wire-budget": "2MB", "wire-dtype": "auto", "wire-dtype-up": "float32"},
            r"wire-budget='2MB' applies to both directions, .*, but wire-dtype-up is 'float32': set wire-dtype='auto'"
        ),
        (
            {"wire-budget": "2MB", "wire-dtype-down": "int8", "wire-dtype-up": "auto"},
            r"wire-budget='2MB' applies to both directions, .*, but wire-dtype-down is 'int8': set wire-dtype='auto'"
        ),
        *(
            ({"wire-budget": text, "wire-dtype": "auto"}, f"wire-budget={text!r}: expected a number of bytes above 0")
            for text in ("1,000,000", "2,5MB", "1.5.2", "2MB per round", "0.5", "0MB", "-5", "1e3", "inf", " ")
        ),
        ({"wire-budget": "2 apples", "wire-dtype": "auto"}, r"wire-budget='2 apples': expected a number of bytes"),
        ({"max-replies": 2, "min-replies": 3}, r"max-replies=2 is less than min-replies=3"),
        ({"pretrained": "tiny-vit-digits,"}, r"pretrained='tiny-vit-digits,' has nothing before or after a comma"),
        ({"pretrained": ","}, r"pretrained=',' has nothing before or after a comma"),
        ({"pretrained": "tiny-vit-digit"}, r"no weights are named 'tiny-vit-digit': did you mean 'tiny-vit-digits'"),
        ({"pretrained": "a, b", "strategy": "fedavg"}, r"names 2 sources, but strategy='fedavg' starts from one"),
        (
            {"pretrained": "a, b", "strategy": "fedensemble", "fedensemble.modes": 3},
            r"names 2 sources, but fedensemble\.modes=3: name one for all modes, or one for each",
        ),
        (
            {"augment-crop": 2, "augment-flip": True, "model": "char-lstm", "dataset": "plays.txt"},
            r"augment-crop=2 and augment-flip=true: only images are augmented, but model='char-lstm' is for .* them",
        ),
        ({"deterministic": True, "max-replies": 2}, r"deterministic=true and max-replies=2: .*set max-replies=0"),
        ({"local-epochs": 0}, r"clients would not train"),
        ({"dataset": "local"}, r"set image-shape and classes"),
        ({"dataset": "/nowhere/x.npz"}, r"/nowhere/x\.npz"),
        ({"server-share": 0.6}, r"server-share=0\.6: should be less than or equal to 0\.5"),
        ({"fedamp.sigma": 0}, r"fedamp\.sigma=0: should be greater than 0"),
        ({"fedamp.lambda": -1}, r"fedamp\.lambda=-1: should be greater than or equal to 0"),
        ({"lambda": 1}, r"did you mean 'ditto\.lambda' or 'pfedme\.lambda' or 'fedamp\.lambda'\?"),
        ({"strategy": "fedbe"}, r"server-share=0\.0 the server has none: set server-share.*or fedbe\.distil=false"),
        (
            {"strategy": "fedbe", "dataset": "local", "image-shape": "1x8x8", "classes": 10, "server-share": 0.2},
            r"dataset='local' the server has none.*or fedbe\.distil=false",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_is_allowed(values, said):
    with pytest.raises(ConfigError, match=said):
        read_run_config(values)


def test_the_path_of_weights_may_have_a_comma(tmp_path):
    (tmp_path / "a, b").mkdir()
    config = read_run_config({"pretrained": str(tmp_path / "a, b"), "strategy": "fedavg"})
    assert config.rounds.sources == (str(tmp_path / "a, b"),)


def test_a_file_that_is_named_like_shipped_weights_is_no_misspelling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-vit-digit").mkdir()
    assert read_run_config({"pretrained": "tiny-vit-digit"}).rounds.sources == ("tiny-vit-digit",)


@pytest.mark.parametrize("values", [{"server-share": 0.1}, {"fedbe.distil": False}])
def test_fedbe_runs_with_unlabelled_examples_or_without_distillation(values):
    assert read_run_config({"strategy": "fedbe", **values}).rounds.strategy == "fedbe"


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        read_run_config({"strategy": "x", "batch-size": 0, "sead": 1})
    assert len(str(error.value).splitlines()) == 4


def test_a_warm_up_as_long_as_the_run_is_a_warning(caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config({"fedfrozen.warmup-rounds": 20})
    assert "this run is FedAvg" in caplog.text


AUTO_ALONE = {"wire-dtype": "auto", "wire-error-feedback": False}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"wire-left-out": 0.3, "wire-dtype": "int8"}, "wire-left-out=0.3 has no effect: .*Set wire-dtype='auto', or"),
        ({"wire-left-out": 0.3, "wire-dtype-up": "auto"}, ""),
        ({"wire-left-out": 0.3, "wire-dtype-down": "auto"}, ""),
        ({"wire-dtype-whole": "int4"}, "wire-dtype-whole=\"int4\" has no effect: .* wire-dtype-down='float32' sends v"),
        ({"wire-dtype-whole": "int4", "wire-dtype-up": "sign"}, "wire-dtype-whole=\"int4\" has no effect: "),
        ({"wire-dtype-whole": "int4", "wire-dtype": "sign"}, ""),
        ({"wire-dtype-whole": "int4", "wire-top-k-down": 0.1}, ""),
        ({"wire-reference-megabytes": 10}, "wire-reference-megabytes=10.0 has no effect: it applies to differences"),
        ({"wire-reference-megabytes": 10, "wire-dtype": "rank2"}, ""),
        (AUTO_ALONE, ""),
        (AUTO_ALONE | {"robust": "clip"}, ""),
        (AUTO_ALONE | {"strategy": "ditto"}, ""),
        (AUTO_ALONE | {"wire-left-out": 0.0}, "wire-error-feedback=false has no effect with wire-left-out=0: "),
        (AUTO_ALONE | {"wire-budget": "2MB"}, "wire-error-feedback=false has no effect with wire-budget='2MB': "),
        (AUTO_ALONE | {"robust": "clip+krum"}, r"wire-error-feedback=false has no effect with robust='clip\+krum': "),
        *(
            (AUTO_ALONE | {"strategy": name, "fedbe.distil": False}, f"false has no effect with strategy='{name}': ")
            for name in ("fedbe", "feddyn", "fedacs", "fedamp")
        ),
        (AUTO_ALONE | {"strategy": "scaffold", "optimizer": "sgd"}, "has no effect with strategy='scaffold': "),
        ({"wire-error-feedback": False, "wire-dtype": "int8", "strategy": "fedacs"}, ""),
    ],
)
def test_a_key_of_the_encoding_without_effect_is_a_warning(values, said, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config(values)
    assert re.search(said, caplog.text) if said else "has no effect" not in caplog.text


PFEDME = {"strategy": "pfedme", "learning-rate": 0.1, "pfedme.lambda": 15.0}


def test_steps_of_pfedme_that_go_beyond_their_target_are_a_warning(caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config(PFEDME)
    assert "learning-rate=0.1 times pfedme.lambda=15 is 1.5: above 1, each step" in caplog.text
    assert "goes beyond θ. Lower learning-rate, lower pfedme.lambda, or set pfedme.outer-step" in caplog.text


def test_all_warnings_of_a_method_are_shown(caplog):
    values = {"strategy": "pfedme", "momentum": 0.9, "optimizer": "sgd", "learning-rate": 0.1, "pfedme.lambda": 15.0}
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config(values)
    assert "momentum=0.9: its steps are" in caplog.text and "times pfedme.lambda=15 is 1.5" in caplog.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "pfedme", "momentum": 0.9, "optimizer": "sgd"}, "strategy='pfedme' with momentum=0.9: its steps"),
        (
            {"strategy": "fedensemble", "fedensemble.assign": "highest-loss", "score-in-training": False},
            "fedensemble.assign='highest-loss' with score-in-training=false: the modes' losses",
        ),
    ],
)
def test_a_key_of_a_method_without_effect_is_a_warning(values, said, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config(values)
        assert said in caplog.text
        caplog.clear()
        read_run_config({**values, "momentum": 0.0, "score-in-training": True})
        assert "pfedme" not in caplog.text and "fedensemble" not in caplog.text


@pytest.mark.parametrize("robust", ["none", "clip", "median"])
@pytest.mark.parametrize("strategy", ["scaffold", "feddyn", "fedavg"])
def test_corrections_that_the_server_merges_in_part_are_a_warning(strategy, robust, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config({"strategy": strategy, "robust": robust, "optimizer": "sgd"})
    warned = "a client keeps all of its correction" in caplog.text
    assert warned == (strategy != "fedavg" and robust != "none")


@pytest.mark.parametrize(
    "values",
    [
        {"learning-rate": 0.05},
        {"pfedme.lambda": 10.0},
        {"pfedme.outer-step": 1.0},
        {"learning-rate": 1.0, "pfedme.outer-step": 0.5},
        {"strategy": "fedavg"},
    ],
)
def test_other_steps_of_pfedme_are_no_warning(values, caplog):
    with caplog.at_level("WARNING", logger="flwr"):
        read_run_config(PFEDME | values)
    assert "goes beyond" not in caplog.text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (PFEDME | {"learning-rate": 0.2}, "diverges if their product is 2 or more; .* or set pfedme.outer-step"),
        ({"pfedme.outer-step": 1.5}, "pfedme.outer-step=1.5: should be less than or equal to 1"),
        ({"fedbe.temperature": 0.0}, "fedbe.temperature=0.0: should be greater than 0"),
        ({"fedbe.variance-scale": -1.0}, "fedbe.variance-scale=-1.0: should be greater than 0"),
    ],
)
def test_steps_temperatures_and_scales_out_of_range_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        read_run_config(values)


VARIANTS = {
    ROOT / "conf/tour.toml": (3, 13), ROOT / "conf/encodings.toml": (2, 9), ROOT / "conf/encodings-many.toml": (1, 2),
    ROOT / "conf/encodings-methods.toml": (4, 8),
}  # fmt: skip
"""Variants that are compared, not run configs: the numbers of sections and variants."""


@pytest.mark.parametrize("path", sorted({*(ROOT / "conf").glob("*.toml")} - VARIANTS.keys()), ids=lambda p: p.name)
def test_every_experiment_of_conf_can_be_run(path):
    assert read_run_config(flat(tomllib.loads(path.read_text())))


@pytest.mark.parametrize("path", VARIANTS, ids=lambda p: p.name)
def test_every_variant_of_a_file_can_be_run(path):
    file = read_variants(path)
    variants = [variant for section in file.sections for variant in section.variants]
    assert (len(file.sections), len(variants)) == VARIANTS[path]
    for variant in variants:
        assert read_run_config({**file.common, **variant.run_config}).rounds.strategy == variant.strategy


@pytest.mark.parametrize("strategy", ["fedamp", "fedavg"])
def test_a_run_of_an_earlier_version_without_a_unit_is_resumed_with_absolute_distances(tmp_path, strategy):
    kept = read_run_config({"strategy": strategy, "fedamp.sigma": 100.0, "fedamp.alpha": 10.0}).flat
    earlier = RunDirectory.create(tmp_path, strategy, {key: kept[key] for key in kept if key != "fedamp.unit"})
    assert "unit" not in (earlier.path / CONFIG).read_text()
    given = {**defaults(), "resume": str(earlier.path)}
    config, _ = open_run(given)
    assert (config.fedamp.unit, config.fedamp.sigma, config.fedamp.alpha) == ("absolute", 100.0, 10.0)
    assert open_run({**given, "fedamp.unit": "absolute"})[0] == config
    later = RunDirectory.create(tmp_path, strategy, kept)
    assert open_run({**given, "resume": str(later.path)})[0].fedamp.unit == "median"
    with pytest.raises(ConfigError, match=r"cannot change .*fedamp\.unit='absolute' \(the run has 'median'\)"):
        open_run({**given, "resume": str(later.path), "fedamp.unit": "absolute"})


def test_a_resumed_run_keeps_the_warmup_that_its_rounds_gave(tmp_path):
    kept = read_run_config({"strategy": "fedfrozen", "num-server-rounds": 20}).flat
    values = {**defaults(), "resume": str(RunDirectory.create(tmp_path, "fedfrozen", kept).path)}
    key, more = "fedfrozen.warmup-rounds", {**values, "num-server-rounds": 50}
    for named in (set(), {key}, {key, "num-server-rounds"}):
        assert open_run(more, given=named)[0].flat == {**kept, "num-server-rounds": 50, "resume": values["resume"]}
    assert open_run({**more, key: 6}, given={key})[0].fedfrozen.warmup_rounds == 6
    with pytest.raises(ConfigError, match=r"cannot change .* fedfrozen.warmup-rounds=15 \(the run has 6\)"):
        open_run({**more, key: 15}, given={key})


def test_a_resumed_run_takes_defaults_that_are_known_to_be_given(tmp_path):
    kept = read_run_config({"strategy": "fedavg", "num-server-rounds": 9, "patience": 3}).flat
    values = {**defaults(), "resume": str(RunDirectory.create(tmp_path, "fedavg", kept).path)}
    left_out, _ = open_run(values)
    assert (left_out.rounds.num_server_rounds, left_out.rounds.patience) == (9, 3)
    config, _ = open_run(values, given={"num-server-rounds", "patience", "resume"})
    assert (config.rounds.num_server_rounds, config.rounds.patience) == (20, 0)
    assert open_run(config.flat)[0] == config  # as the ServerApp reads it again
    assert open_run({**values, "resume-with": "patience"})[0].rounds.patience == 0
    with pytest.raises(ConfigError, match="'pattience' is not a key of the run config: did you mean 'patience'"):
        open_run({**values, "resume-with": "pattience"})
    with pytest.raises(ConfigError, match=r"cannot change .* strategy='fedfrozen'"):
        open_run(values, given={"strategy"})
