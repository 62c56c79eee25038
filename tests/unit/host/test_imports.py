"""Imports without garbage collection."""

import gc

import pytest

from tepal.host.imports import uncollected


@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_meanwhile_and_afterwards_as_before(before):
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            inside = gc.isenabled()
            raise KeyError
        assert (inside, gc.isenabled()) == (False, before)
    finally:
        (gc.enable if was else gc.disable)()
