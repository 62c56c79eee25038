"""Sizes that people write, and what the system lets this process have."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.host.limits import Limits, parse_size

POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("900MB", 943_718_400), ("1.5G", 1_610_612_736), ("2GiB", 2_147_483_648), (" 512 kb ", 524_288)],
)
def test_sizes_are_read_as_they_are_written(text, size):
    assert parse_size(text) == size


@given(st.integers(0, 4095), st.sampled_from(sorted(POWERS)), st.sampled_from(["", "b", "B", "iB"]), st.booleans())
def test_units_are_powers_of_1024(number, unit, byte, upper):
    text = f"{number} {unit.upper() if upper else unit}{byte}"
    assert parse_size(text) == number * 1024 ** POWERS[unit]


@given(st.text(max_size=8))
def test_anything_else_is_refused_with_what_is_expected(text):
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*[kmgtKMGT]?(i?[bB])?\s*", text, re.I):
        return
    with pytest.raises(ValueError, match="is not a size: expected a number with KB, MB, GB or TB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "-1GB", "1e9", "GB", "1,5GB", "2 GB 3", "NaN", "inf", "0x10", "1_000"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_a_number_beyond_everything_is_refused_as_well():
    with pytest.raises(ValueError, match="is not a size"):
        parse_size("9" * 400)


@pytest.fixture
def tree(tmp_path):
    """A control group tree, and the file that says where in it this process is."""
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    inner = mount / "system.slice" / "tepal.service"
    inner.mkdir(parents=True)
    membership.write_text("0::/system.slice/tepal.service\n")
    return mount, membership, inner


def test_the_smallest_limit_of_a_group_and_those_above_holds(tree):
    mount, membership, inner = tree
    (inner / "memory.max").write_text("3000000\n")
    (inner.parent / "memory.max").write_text("2000000\n")
    (mount / "memory.max").write_text("max\n")
    assert Limits(mount, membership).memory == 2_000_000


def test_no_limit_is_zero(tree):
    mount, membership, inner = tree
    assert Limits(mount, membership).memory == 0
    (inner / "memory.max").write_text("max\n")
    assert Limits(mount, membership).memory == 0


def test_a_limit_of_a_neighbour_does_not_hold(tree):
    mount, membership, inner = tree
    other = inner.parent / "other.service"
    other.mkdir()
    (other / "memory.max").write_text("5\n")
    assert Limits(mount, membership).memory == 0


def test_processes_killed_for_want_of_memory_are_counted(tree):
    mount, membership, inner = tree
    limits = Limits(mount, membership)
    assert limits.killed == 0
    (inner / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 7\n")
    assert limits.killed == 2


@pytest.mark.parametrize("membership", ["", "1:name=systemd:/user.slice\n2:memory:/user.slice\n", "0::/../../other\n"])
def test_other_kinds_of_control_groups_are_no_limit(tmp_path, membership):
    file = tmp_path / "membership"
    file.write_text(membership)
    limits = Limits(tmp_path / "no such mount", file)
    assert (limits.memory, limits.killed) == (0, 0)


def test_a_system_without_control_groups_has_no_limit(tmp_path):
    limits = Limits(tmp_path, tmp_path / "absent")
    assert (limits.memory, limits.killed) == (0, 0)


def test_this_machines_own_limits_can_be_read():
    limits = Limits()
    assert limits.memory >= 0 and limits.killed >= 0
