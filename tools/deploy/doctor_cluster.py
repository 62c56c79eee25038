"""The check of a Ray cluster by `tepal doctor --ray`: that it answers, and what its machines have."""

from __future__ import annotations

from collections.abc import Iterator

from tepal.host.superlink import RunError
from tepal.tools.cluster import machine
from tepal.tools.cluster.connection import connected, versions_by_machine
from tepal.tools.deploy.doctor import OK, PROBLEM, Finding

_LEAST = 0.01  # cores: any machine has so many


def check_cluster(address: str) -> Iterator[Finding]:
    """Check that a cluster answers, and that each machine with cores has this one's versions of what is installed here.

    Libraries that are missing here are not compared: no run of this machine needs them.
    """
    try:
        with connected(address, _LEAST) as cluster:
            yield Finding("Ray cluster", OK, cluster.contents)
            ours = {package: of for package, of in machine.versions().items() if of != machine.MISSING}
            for name, theirs in versions_by_machine().items():
                if isinstance(theirs, str):
                    yield Finding(name, PROBLEM, theirs, "see `ray status`, and Ray's logs on that machine")
                    continue
                said = ", ".join(f"{package} {theirs.get(package, machine.MISSING)}" for package in ours)
                if other := [f"{package} {of}" for package, of in ours.items() if theirs.get(package) != of]:
                    remedy = f"install there what is here: {', '.join(other)}; else its runs may fail or differ"
                    yield Finding(name, PROBLEM, said, remedy)
                else:
                    yield Finding(name, OK, said)
    except RunError as error:
        found, _, remedy = str(error).partition(". ")
        yield Finding("Ray cluster", PROBLEM, found, remedy or "name the address that `ray start --head` has printed")
