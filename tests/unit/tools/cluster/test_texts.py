"""Texts with the paths of another machine."""

import json
import tomllib
from html import escape, unescape

import pytest
import tomli_w
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tepal.tools.cluster.texts import in_html, in_json, in_toml, replaced

# Without control characters, for some of which TOML and JSON have different forms.
PATHS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=9).map("/{}".format)


@settings(max_examples=40)
@given(st.tuples(PATHS, PATHS).filter(lambda pair: pair[0] not in pair[1]), st.text("ab ", max_size=4))
@example(("/tmp/d/x", '/home/rené/a "b"\\<c>&\''), "")
def test_a_path_is_found_as_a_text_writes_it_and_put_in_so_that_the_text_can_be_read(paths, after):
    (there, here), after = paths, f" {after}"
    to, back = {there: here}, {here: there}
    config = {"dataset": there + after, "seed": 7}
    other = {"dataset": here + after, "seed": 7}
    toml, ascii_ = tomli_w.dumps(config).encode(), json.dumps(config).encode()
    assert tomllib.loads(replaced(toml, to, in_toml).decode()) == other
    assert json.loads(replaced(ascii_, to, in_json)) == other
    assert json.loads(replaced(json.dumps(config, ensure_ascii=False).encode(), to, in_toml)) == other
    assert unescape(replaced(escape(there + after).encode(), to, in_html).decode()) == here + after
    assert replaced((there + after).encode(), to).decode() == here + after
    if here not in there + after:
        assert json.loads(replaced(json.dumps(other).encode(), back, in_json)) == config


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_paths_the_longer_one_is_meant_and_nothing_is_replaced_twice(order):
    paths = dict([("/d/cifar10", "/x/1"), ("/d/cifar100", "/x/2"), ("/x/1", "/wrong")][::order])
    text = b'{"a": "/d/cifar100", "b": "/d/cifar10", "c": "/d/cifar10/test", "d": "/d/cifar"}'
    assert replaced(text, paths) == b'{"a": "/x/2", "b": "/x/1", "c": "/x/1/test", "d": "/d/cifar"}'


def test_without_paths_a_text_stays():
    assert replaced(b"\xff\0 text", {}) == b"\xff\0 text"
    assert replaced(b"\xff /a", {"/a": "/b"}) == b"\xff /b"
