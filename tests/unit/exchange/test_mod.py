"""What the mod accepts as the app's answer."""

import numpy as np
import pytest

from tepal.exchange.mod import _equal


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "bool"])
def test_a_frozen_entry_is_as_it_was_sent_also_where_it_is_not_a_number(dtype):
    sent = np.array([0, 1, 0], dtype)
    assert _equal(sent.copy(), sent) and not _equal(sent, np.array([1, 1, 0], dtype))
    if sent.dtype.kind in "fc":
        sent[1] = np.nan
        changed = sent.copy()
        changed[2] = 1
        assert _equal(sent.copy(), sent) and not _equal(changed, sent)
