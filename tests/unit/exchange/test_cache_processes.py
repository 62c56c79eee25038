"""Several processes that share a cache folder at its limit."""

import multiprocessing
import random
import threading
from logging import getLogger

import numpy as np
import pytest

from tepal.exchange.cache import ClientCache, forget_parts
from tepal.exchange.parts import Part, digest

SIZE, ONE = 1000, 4264  # elements of a part, and the bytes of its file


def values_of(seed):
    return {"a": np.random.default_rng(seed).normal(size=SIZE).astype(np.float32), "count": np.array(seed)}


def part_of(values, block):
    return Part("model", block, tuple(values), tuple(digest(array) for array in values.values()))


def use(root, number, threads, stores, limit, forgets, results):
    """What one process does: each thread is a client, which stores parts and reads those that it stored last."""
    getLogger("flwr").setLevel("ERROR")  # not a line for each time that the limit is reached
    notes, wrong = [], []

    def client_of(thread):
        at_random = random.Random(f"{number} {thread}")
        client = ClientCache(root, f"e{thread % 2}", f"client-{number}-{thread}", limit=limit)
        stored = []
        for _ in range(stores // threads):
            seed = at_random.randrange(60)
            stored.append((seed, f"block {seed % 20}"))
            values = values_of(seed)
            client.keep(part_of(values, stored[-1][1]), values, waiting=at_random.random() < 0.1)
            seed, block = at_random.choice(stored[-10:])
            values = values_of(seed)
            found = client.find(part_of(values, block))
            same = found.keys() == values.keys() and all(np.array_equal(found[name], values[name]) for name in values)
            if found and not same:
                wrong.append((seed, block))
            if at_random.random() < 0.05:
                client.drop_waiting()
            if forgets and at_random.random() < 0.02:
                forget_parts(root / "e0")
        client.drop_waiting()
        notes.extend(client.notes)

    running = [threading.Thread(target=client_of, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    results.put((notes, wrong))


def check_processes(root, *, processes, threads, stores, parts, forgets):
    """Run `use` in several processes. `parts`: the limit of the cache."""
    system = multiprocessing.get_context("spawn")
    results, limit = system.Queue(), parts * ONE + 100
    running = [
        system.Process(target=use, args=(root, number, threads, stores, limit, forgets, results))
        for number in range(processes)
    ]
    for process in running:
        process.start()
    found = [results.get(timeout=250) for _ in running]
    for process in running:
        process.join()
    assert found == [([], [])] * processes, "failed stores, and parts that were read with other values"
    contents = {path.stat().st_ino: path.stat().st_size for path in root.glob("*/content/*.safetensors")}
    links = {path.stat().st_ino for path in root.glob("*/clients/*/*")}
    assert sum(contents.values()) <= limit + processes * threads * ONE
    assert contents.keys() == links, "no content without a link, and no link without content"
    assert list(root.rglob(".*")) == [], "no files that are being written"


@pytest.mark.parametrize("forgets", [False, True], ids=["the limit alone", "and parts are forgotten"])
def test_processes_and_threads_that_store_at_the_limit_do_not_fail(tmp_path, forgets):
    check_processes(tmp_path, processes=2, threads=2, stores=120, parts=3, forgets=forgets)


@pytest.mark.long
@pytest.mark.parametrize("parts", [1, 3, 20])
def test_four_processes_that_always_evict_leave_nothing_and_never_fail(tmp_path, parts):
    check_processes(tmp_path, processes=4, threads=1, stores=1000, parts=parts, forgets=False)
