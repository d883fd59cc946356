"""Stop strings of a request whose text nobody takes apart."""

from pyllama_raw.core.request import StopString
from pyllama_raw.core.sequence import TextStops
from pyllama_raw.core.text import StopStrings
from tests.core.support import STOP_TOKEN, make_request


def test_a_token_that_ends_the_output_has_no_text():
    """
    Its name may spell a stop string; only other tokens are looked at.
    """
    stops = TextStops(make_request(stop=StopStrings((b"ab",))))

    ends = [
        stops.take(STOP_TOKEN, b"ab", is_last=False),
        stops.take(97, b"a", is_last=False),
        stops.take(98, b"b", is_last=False),
    ]

    assert ends == [None, None, StopString("ab")]
