"""The pause before the first request."""

from hypothesis import given
from hypothesis import strategies as st

from tepal.host.flower.polling import FirstPause


@given(st.lists(st.floats(0, 100)))
def test_it_is_half_of_the_shortest_of_the_last_four_waits_and_at_most_a_quarter_of_a_second(waits):
    pause = FirstPause()
    assert pause.seconds == 0
    for number, wait in enumerate(waits, 1):
        pause.waited(wait)
        assert pause.seconds == min(0.25, *(each / 2 for each in waits[max(number - 4, 0) : number]))
