import errno
import os

import numpy as np
import pytest

from tepal.exchange.cache import ClientCache
from tepal.exchange.parts import Part, digest


def values_of(seed, size=1000):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=size).astype(np.float32), "count": np.array(seed)}


def part_of(values, block="query_key"):
    return Part("mode/1", block, tuple(values), tuple(digest(array) for array in values.values()))


def disk(root):
    return sum(inode.st_size for inode in {p.stat().st_ino: p.stat() for p in root.rglob("*.safetensors")}.values())


@pytest.fixture
def cache(tmp_path):
    return ClientCache(tmp_path, "experiment/1", "site 1")


def test_what_is_kept_is_found_bit_for_bit_by_a_new_process(cache, tmp_path):
    values = values_of(1)
    cache.keep(part_of(values), values)
    again = ClientCache(tmp_path, "experiment/1", "site 1")
    found = again.find(part_of(values))
    assert again.holds() == (part_of(values).id,)
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in values.items()}
    assert found["count"].shape == ()


def test_another_client_or_experiment_holds_nothing(cache, tmp_path):
    values = values_of(1)
    cache.keep(part_of(values), values)
    for experiment, client in (("experiment/1", "site 2"), ("experiment/2", "site 1")):
        other = ClientCache(tmp_path, experiment, client)
        assert other.find(part_of(values)) == {} and other.holds() == ()


def test_a_newer_part_takes_the_place_of_the_older_one_of_its_block(cache, tmp_path):
    old, new, other = values_of(1), values_of(2), values_of(3)
    for part, values in ((part_of(old), old), (part_of(other, "value"), other), (part_of(new), new)):
        cache.keep(part, values)
    assert sorted(cache.holds()) == sorted([part_of(new).id, part_of(other, "value").id])
    assert cache.find(part_of(old)) == {}
    assert len(list((tmp_path / "experiment%2F1" / "content").iterdir())) == 2


def test_many_clients_share_one_copy_until_the_last_lets_go(tmp_path):
    values, newer = values_of(1, 100_000), values_of(2, 100_000)
    clients = [ClientCache(tmp_path, "e", f"client-{k}") for k in range(50)]
    for client in clients:
        client.keep(part_of(values), values)
    assert disk(tmp_path) < 1.1 * 400_000
    for client in clients[:-1]:
        client.keep(part_of(newer), newer)
    assert clients[-1].find(part_of(values)).keys() == values.keys()
    assert disk(tmp_path) < 2.2 * 400_000
    clients[-1].keep(part_of(newer), newer)
    assert disk(tmp_path) < 1.1 * 400_000


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "text"])
def test_a_damaged_file_is_dropped_and_can_be_kept_again(cache, tmp_path, harm):
    values = values_of(1)
    part = part_of(values)
    cache.keep(part, values)
    file = next((tmp_path / "experiment%2F1" / "content").iterdir())
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[-3] ^= 1
    with file.open("r+b") as damaged:  # in place: the client's hard link must see it
        damaged.truncate(0 if harm in ("empty", "text") else len(data) // 2 if harm == "cut" else len(data))
        damaged.write(b"no safetensors" if harm == "text" else data if harm == "flip" else b"")
    assert cache.find(part) == {}
    assert cache.holds() == () and not file.exists()
    cache.keep(part, values)
    assert cache.find(part).keys() == values.keys()


def test_parts_of_an_unfinished_exchange_are_found_and_then_dropped(cache):
    values = values_of(1)
    cache.keep_waiting(part_of(values), values)
    assert cache.holds() == ()
    assert cache.find(part_of(values)).keys() == values.keys()
    cache.drop_waiting()
    assert cache.find(part_of(values)) == {}


def test_the_limit_drops_what_was_used_longest_ago(tmp_path):
    first, second, third = values_of(1), values_of(2), values_of(3)
    cache = ClientCache(tmp_path, "e", "c", limit=10_000)
    for age, (block, values) in enumerate((("first", first), ("second", second))):
        cache.keep(part_of(values, block), values)
        content = tmp_path / "e" / "content" / f"{part_of(values, block).id}.safetensors"
        os.utime(content, (1000 + age, 1000 + age))
    cache.find(part_of(first, "first"))  # used just now
    cache.keep(part_of(third, "third"), third)
    assert set(cache.holds()) == {part_of(first, "first").id, part_of(third, "third").id}
    assert disk(tmp_path) <= 10_000


def test_a_full_disk_keeps_nothing_and_does_no_harm(cache, monkeypatch, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    values = values_of(1)
    with caplog.at_level("WARNING", logger="flwr"):
        cache.keep(part_of(values), values)
    assert cache.holds() == () and cache.find(part_of(values)) == {}


def test_names_of_clients_cannot_leave_the_cache_folder(tmp_path):
    values = values_of(1)
    root = tmp_path / "root"
    ClientCache(root, "../../e", "../../../etc/passwd").keep(part_of(values), values)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert disk(root) > 0
