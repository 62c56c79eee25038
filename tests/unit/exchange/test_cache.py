import errno
import fcntl
import os
import shutil
import threading
import time

import numpy as np
import pytest

from tepal.exchange import cache as cache_module
from tepal.exchange import cache_usage, files
from tepal.exchange.cache import ClientCache, forget_parts
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


@pytest.fixture
def no_links(monkeypatch):
    """A file system without hard links."""

    def refused(*paths, **how):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)


def test_without_hard_links_damaged_content_is_not_copied_again(cache, tmp_path, no_links):
    values = values_of(1)
    part = part_of(values)
    cache.keep(part, values)
    files = [*tmp_path.rglob("*.safetensors")]
    assert len(files) == 2, "the content, and the client's copy of it"
    for file in files:
        with file.open("r+b") as damaged:
            damaged.seek(-3, os.SEEK_END)
            damaged.write(b"xxx")
    assert cache.find(part) == {} and not [*tmp_path.rglob("*.safetensors")]
    cache.keep(part, values)
    assert cache.find(part).keys() == values.keys()


def test_without_hard_links_the_copies_of_ended_runs_are_removed(tmp_path, no_links, monkeypatch):
    monkeypatch.setattr(cache_usage, "_LISTED_EVERY", 0)
    size = 4 * 10_000 + 1000
    for run in range(6):
        for client in range(3):
            values = values_of(10 * run + client, 10_000)
            ClientCache(tmp_path, f"run-{run}", f"c{client}", limit=8 * size).keep(part_of(values), values)
    assert disk(tmp_path) <= 8 * size + 2 * size, "the last one was written after the limit was met, and copied"


def test_a_copy_that_does_not_fit_on_the_disk_is_no_part(cache, tmp_path, no_links, monkeypatch):
    def full(source, target):
        target.write_bytes(source.read_bytes()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    values = values_of(1)
    cache.keep(part_of(values), values)
    assert cache.holds() == () and "cannot be cached" in cache.notes[0]


def test_parts_of_an_unfinished_exchange_are_found_and_then_dropped(cache):
    values = values_of(1)
    cache.keep(part_of(values), values, waiting=True)
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
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
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


def fill(client, seeds, size=1000):
    """Keep one part per seed, each of a block of its own."""
    for seed in seeds:
        values = values_of(seed, size)
        client.keep(part_of(values, f"block {seed}"), values)


@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["far from the limit", "at the limit"])
def test_a_file_that_vanishes_while_the_cache_is_listed_does_not_count(tmp_path, limit):
    content = tmp_path / "other" / "content"
    content.mkdir(parents=True)
    (content / "gone.safetensors").symlink_to(tmp_path / "nowhere")  # it is listed, and there is no file to look at
    client = ClientCache(tmp_path, "e", "c", limit)
    fill(client, range(10))
    assert client.notes == []
    assert len(client.holds()) == (10 if limit == 10**9 else 4)  # of 4.3 kB each


def test_a_part_that_is_removed_while_it_is_read_is_not_held_and_nothing_is_said(cache, monkeypatch):
    values = values_of(1)
    cache.keep(part_of(values), values)
    read = cache_module.read_arrays

    def too_late(path, digests):
        path.unlink()
        return read(path, digests)

    monkeypatch.setattr(cache_module, "read_arrays", too_late)
    assert cache.find(part_of(values)) == {} and cache.notes == []


def test_two_processes_that_write_the_same_part_at_once_share_one_copy(tmp_path, monkeypatch):
    """As when all clients of a simulation get the frozen block in one round."""
    values = values_of(1, 100_000)
    part = part_of(values)
    one, other = (ClientCache(tmp_path, "e", f"client-{k}") for k in range(2))
    write = cache_module.write_arrays

    def overtaken(path, arrays, **options):
        monkeypatch.setattr(cache_module, "write_arrays", write)
        other.keep(part, values)
        write(path, arrays, **options)

    monkeypatch.setattr(cache_module, "write_arrays", overtaken)
    one.keep(part, values)
    assert one.holds() == other.holds() == (part.id,)
    assert disk(tmp_path) < 1.1 * 400_000


def test_a_cache_of_many_files_is_not_listed_at_each_write(tmp_path, monkeypatch):
    """At the limit a listing frees a tenth of it: 10 of 100 parts of 4.3 kB."""
    fill(ClientCache(tmp_path, "other", "c"), range(1000, 1010))
    listed, scandir = [], os.scandir

    def counted(path="."):
        listed.append(os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    client, content = ClientCache(tmp_path, "e", "c", limit=430_000), str(tmp_path / "other" / "content")
    fill(client, range(80))
    assert content not in listed, "the number of bytes is known from the first listing"
    fill(client, range(80, 160))
    assert 1 <= listed.count(content) <= 2 * 10, "each listing reads a folder twice"
    assert 0.85 * 430_000 < disk(tmp_path) <= 430_000


def test_the_number_of_bytes_on_disk_is_checked_every_ten_minutes(tmp_path, monkeypatch):
    client = ClientCache(tmp_path, "e", "c", limit=30_000)
    fill(client, range(2))
    fill(ClientCache(tmp_path / "elsewhere", "other", "c"), range(10, 14))
    (tmp_path / "elsewhere" / "other").rename(tmp_path / "other")  # which nobody has counted
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 601)
    fill(client, [2])
    assert disk(tmp_path) <= 30_000


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"bytes": "x", "listed": 0}', b'{"bytes": 1e999, "listed": 0}'])
def test_an_unreadable_number_of_bytes_is_counted_again(tmp_path, text):
    client = ClientCache(tmp_path, "e", "c", limit=20_000)
    fill(client, range(4))
    (tmp_path / "usage.json").write_bytes(text)
    fill(client, range(4, 6))
    assert client.notes == [] and disk(tmp_path) <= 20_000 and len(client.holds()) == 4


def test_a_process_that_cannot_lock_caches_all_the_same(tmp_path, monkeypatch):
    def without_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    client = ClientCache(tmp_path, "e", "c", limit=20_000)
    fill(client, range(10))
    assert client.notes == [] and len(client.holds()) == 4 and disk(tmp_path) <= 20_000


def test_what_killed_processes_left_is_removed(tmp_path):
    """Content without a link, and a file that was being written. A link without content is counted again."""
    client = ClientCache(tmp_path, "e", "c")
    fill(client, range(3))
    folder, links = tmp_path / "e" / "content", sorted((tmp_path / "e" / "clients" / "c").iterdir())
    unused, in_use = (folder / link.name.rpartition("@")[2] for link in links[:2])
    links[0].unlink()
    in_use.unlink()
    for name in (".writing-1", ".writing-2", ".tmpAbCdEf"):  # the last as the library of the format names its files
        (folder / name).write_bytes(b"x" * 100)
        os.utime(folder / name, None if name == ".writing-2" else (0, 0))
    (tmp_path / "usage.json").unlink()  # so that the folder is listed
    fill(client, [3])
    assert unused.exists(), "another process may be about to link to it"
    assert in_use.exists() and in_use.samefile(links[1])
    assert [path.name for path in folder.glob(".*")] == [".writing-2"]


def test_content_that_nobody_has_linked_to_for_a_minute_is_removed(tmp_path, monkeypatch):
    client = ClientCache(tmp_path, "e", "c")
    fill(client, range(2))
    link = next((tmp_path / "e" / "clients" / "c").iterdir())
    link.unlink()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 700)
    fill(client, [2])
    assert not (tmp_path / "e" / "content" / link.name.rpartition("@")[2]).exists()
    assert disk(tmp_path) == 2 * 4264


def test_a_process_alone_never_exceeds_the_limit(tmp_path):
    client = ClientCache(tmp_path, "e", "c", limit=10_000)
    for number in range(30):
        fill(client, [number], size=120)
        assert disk(tmp_path) <= 10_000
    assert len(client.holds()) > 4


def test_of_many_threads_one_lists_the_cache(tmp_path, monkeypatch):
    fill(ClientCache(tmp_path, "other", "c"), [1000])
    (tmp_path / "usage.json").unlink()
    listings, contents = [], cache_usage._listed

    def slow(root):
        listings.append(root)
        time.sleep(0.1)  # for the others to reach the same point
        return contents(root)

    monkeypatch.setattr(cache_usage, "_listed", slow)
    clients = [ClientCache(tmp_path, "e", f"client-{k}") for k in range(6)]
    threads = [threading.Thread(target=fill, args=(client, [k])) for k, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listings == [tmp_path]
    assert [len(client.holds()) for client in clients] == [1] * 6


def test_what_others_remove_leaves_room_for_more(tmp_path):
    client = ClientCache(tmp_path, "mine", "c", limit=100_000)
    other = ClientCache(tmp_path, "other", "c", limit=100_000)
    fill(client, range(3))
    fill(other, range(100, 117))
    forget_parts(tmp_path / "other")
    fill(client, range(3, 20))
    assert len(client.holds()) == 20 and client.notes == []
    assert 80_000 < disk(tmp_path) < 100_000


def test_a_cache_folder_that_was_emptied_is_used_again(tmp_path):
    client = ClientCache(tmp_path, "e", "c", limit=50_000)
    fill(client, range(8))
    shutil.rmtree(tmp_path / "e")
    fill(client, range(20, 30))
    assert len(client.holds()) == 10 and client.notes == []


def test_room_is_made_for_other_experiments_and_no_client_holds_what_was_dropped(tmp_path):
    values = values_of(1)
    part = part_of(values, "shared")
    old = [ClientCache(tmp_path, "old", f"client-{k}") for k in range(3)]
    for client in old:
        client.keep(part, values)
    os.utime(tmp_path / "old" / "content" / f"{part.id}.safetensors", (1000, 1000))
    new = ClientCache(tmp_path, "new", "c", limit=9_000)
    fill(new, [2, 3])
    assert [client.holds() for client in old] == [(), (), ()] and len(new.holds()) == 2
    assert disk(tmp_path) <= 9_000
