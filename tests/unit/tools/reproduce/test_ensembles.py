"""Fed-ensemble's experiments: what they train on, and what they say of scores that are known."""

import json

from tepal.tools.reproduce.ensemble_images import EnsembleCifar10, EnsembleCifar100, EnsembleMnist
from tepal.tools.reproduce.ensemble_shakespeare import EnsembleShakespeare, texts_by_role, write_roles
from tests.unit.tools.reproduce.test_reproduce_runs import values


def test_pooled_data_is_trained_on_in_as_many_steps_as_the_clients_have_together():
    for experiment in (EnsembleMnist(), EnsembleCifar10(), EnsembleCifar100()):
        for full in (False, True):
            trials = {trial.name: trial.options for trial in experiment.trials(full)}
            pooled, fedavg = trials["pooled-1"], trials["fedavg-iid-1"]
            assert pooled["clients"] == 1 and pooled["config"]["min-clients"] == 1
            steps = [of["clients"] * of["config"].get("local-steps", 0) for of in (pooled, fedavg)]
            assert steps[0] == steps[1] and (steps[0] > 0) != full
            kept = {**fedavg["config"], **{key: pooled["config"][key] for key in ("min-clients", "local-steps")
                                           if key in pooled["config"]}}  # fmt: skip
            assert pooled["config"] == kept


def test_pooled_data_is_in_both_tables_and_in_no_claim():
    found = {
        f"{name}-{seed}": values(score + 0.001 * seed, settings={})
        for name, score in {
            "fedavg-iid": 0.8, "fedensemble-iid": 0.82, "fedavg-two-labels": 0.6, "fedensemble-two-labels": 0.65,
            "pooled": 0.9,
        }.items() for seed in (1, 2, 3)
    }  # fmt: skip
    results = EnsembleCifar10().results(found)
    tables = {table.title: table for table in results.tables}
    for split, (fedavg, ensemble) in {"iid": (0.8643, 0.8799), "two labels": (0.6611, 0.7118)}.items():
        rows = {row[0]: row for row in tables[f"Accuracy, {split}, 3 seeds"].rows}
        assert rows["pooled data"][1].startswith("0.9020 ± ") and rows["pooled data"][4] is None
        assert (rows["FedAvg"][4], rows["Fed-ensemble"][4]) == (fedavg, ensemble)
    claims = {claim.text.partition(" (")[0]: claim for claim in results.claims}
    larger = claims["The gain over FedAvg is larger with two labels per client than iid"]
    assert larger.measured.startswith("+0.0300 (") and "(0.0507 two labels, 0.0156 iid)" in larger.text
    assert claims["Iid, Fed-ensemble is better than the others"].measured.startswith("+0.0200 (")


def test_cifar_100_is_compared_iid_alone():
    found = {f"{name}-{seed}": values(score + 0.001 * seed, settings={})
             for name, score in {"fedavg-iid": 0.2, "fedensemble-iid": 0.25}.items() for seed in (1, 2)}  # fmt: skip
    results = EnsembleCifar100().results(found)
    assert [table.title for table in results.tables] == ["Accuracy, iid, 2 seeds", "Accuracy by modes, iid, 2 seeds"]
    assert [claim.verdict for claim in results.claims] == ["holds"]


def test_by_labels_per_client_the_papers_table_is_beside_ours():
    found = {
        f"{method}-{split}-{seed}": values(0.1 * place + 0.001 * seed, settings={})
        for place, split in enumerate(("two-labels", "4-labels", "10-labels"), 1)
        for method in ("fedavg", "fedprox", "fedensemble") for seed in (1, 2)
    }  # fmt: skip
    (table,) = (table for table in EnsembleCifar10().results(found).tables if "by labels" in table.title)
    assert [list(row) for row in table.rows][1:] == [
        [count, *(each for paper in papers for each in (f"{mean} ± 0.0007", paper))]
        for count, mean, papers in ((4, "0.2015", (0.839, 0.844, 0.8612)), (10, "0.3015", (0.8652, 0.8677, 0.8794)))
    ]  # fmt: skip


# --- Shakespeare ----------------------------------------------------------------------------------------------------


def test_roles_of_the_search_and_of_the_seeds_are_others_and_test_text_is_not_trained_on(tmp_path):
    texts = {f"play/{k}": f"{k:04d}." * (320 if k % 2 else 100) for k in range(130)}
    seen = list[set[str]]()
    for number in range(6):
        write_roles(tmp_path / f"{number}.jsonl", texts, number, full=False)
        rows = [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
        seen.append({row["role"] for row in rows})
        assert len(rows) == 20 and len(seen[-1]) == 10
        for train, test in zip(rows[::2], rows[1::2], strict=True):
            text = texts[train["role"]]
            assert train["split"] == "train" and test["split"] == "test" and train["text"] + test["text"] == text
            assert len(train["text"]) == len(test["text"]) == 800
    assert len(set().union(*seen)) == 60


def test_leafs_windows_are_joined_to_the_texts_that_they_are_of(tmp_path):
    texts = {"one": "To be, or not to be, that is the question: whether", "two": "Words, words, words. " * 5}
    windows = {role: [(text[k : k + 20], text[k + 20]) for k in range(len(text) - 20)] for role, text in texts.items()}
    user_data = {role: {"x": [x for x, _ in of], "y": [y for _, y in of]} for role, of in windows.items()}
    (tmp_path / "train.json").write_text(json.dumps({"users": list(texts), "user_data": user_data}))
    assert texts_by_role(tmp_path / "train.json") == texts


def test_a_finding_says_whether_the_accuracy_turns_before_the_last_round():
    found = {}
    for seed in (1, 2, 3):
        shift = 0.001 * seed
        rising = [(0, 0.1), (5, 0.2), (10, 0.3 + shift)]
        turning = [(0, 0.1), (5, 0.3 + shift), (10, 0.25 + 2 * shift)]
        for method, curve in (("fedavg", turning), ("fedensemble", rising)):
            found[f"{method}-{seed}"] = values(curve[-1][1], curve=curve, rounds=10, settings={})
    results = EnsembleShakespeare().results(found)
    assert results.findings[-3:] == [
        "FedAvg's accuracy is highest before the last round with 3 of 3 seeds (after round 5 to 5 of 10); after the "
        "last it is 0.0480 lower, on average over the seeds.",
        "Fed-ensemble's accuracy is highest before the last round with 0 of 3 seeds (after round 10 to 10 of 10); "
        "after the last it is 0.0000 lower, on average over the seeds.",
        "Fed-ensemble's last round less the best one of FedAvg: +0.0000 (+0.0000 to +0.0000, undecided).",
    ]
    assert [claim.verdict for claim in results.claims] == ["holds", "holds", "holds"]
