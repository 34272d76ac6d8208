"""Stop strings are found wherever the text is cut, and nothing of them is shown."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopScanner, StopStrings

LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=5)


def by_definition(text, stops, begin=0):
    """The first to be complete after begin, reading on; of several at once the longest."""
    for end in range(begin + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(text, stops, cuts, *, includes_stop=False):
    """What is shown at each push, and the stop string found."""
    scanner = StopScanner(StopStrings(stops), includes_stop=includes_stop)
    bounds = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    shown = []
    for begin, end in pairwise(bounds):
        piece, stop = scanner.push(text[begin:end])
        shown.append(piece)
        if stop is not None:
            return shown, stop
    return [*shown, scanner.finish()], None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 50), max_size=8))
def test_equals_the_naive_definition_however_the_text_is_cut(text, stops, cuts):
    shown, stop = scan(text, stops, cuts)
    assert ("".join(shown), stop) == by_definition(text, stops)


@given(text=LETTERS, stops=STOPS, begin=st.integers(0, 30))
def test_what_is_complete_in_text_that_may_not_stop_is_ordinary_text(text, stops, begin):
    scanner = StopScanner(StopStrings(stops))
    shown, stop = "", None
    for position, char in enumerate(text):
        piece, stop = scanner.push(char, may_stop=position >= begin)
        shown += piece
        if stop is not None:
            break
    else:
        shown += scanner.finish()
    expected, expected_stop = by_definition(text, stops, begin)
    assert stop == expected_stop
    assert shown == expected


@given(text=LETTERS, stops=STOPS)
def test_shows_at_once_what_cannot_begin_a_stop_string(text, stops):
    scanner = StopScanner(StopStrings(stops))
    shown = ""
    for position, char in enumerate(text):
        piece, stop = scanner.push(char)
        shown += piece
        if stop is not None:
            return
        held = text[len(shown) : position + 1]
        ends = [text[begin : position + 1] for begin in range(position + 1)]
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        assert held == max((end for end in ends if end in beginnings), key=len, default="")


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 50), max_size=8))
def test_a_stop_string_is_kept_where_that_is_asked(text, stops, cuts):
    shown, stop = scan(text, stops, cuts, includes_stop=True)
    before, expected = by_definition(text, stops)
    assert ("".join(shown), stop) == (before + (expected or ""), expected)


def test_of_two_that_end_together_the_longer_one_is_cut_out():
    assert scan("x: END", ["END", ": END"], []) == (["x"], ": END")


def test_one_that_is_complete_earlier_wins_over_one_that_began_earlier():
    assert scan("abcd", ["abcd", "bc"], [1, 2, 3]) == (["", "", "a"], "bc")


def test_a_beginning_that_comes_to_nothing_is_shown():
    assert scan("a\n\nHum", ["\n\nHuman:"], [1, 3]) == (["a", "", "", "\n\nHum"], None)


def test_a_match_may_begin_inside_a_failed_one():
    assert scan("aab", ["ab"], [1, 2]) == (["", "a", ""], "ab")


def test_long_stop_strings_cost_nothing_before_the_text_resembles_them():
    stops = StopStrings(["ab" * 100 + "c", "a" * 200])
    scanner = StopScanner(stops)
    assert scanner.push("xyz ab") == ("xyz ", None)
    assert max(map(len, stops._borders)) <= 2
    assert scanner.push("ab" * 50 + "!")[1] is None
    assert 90 < len(stops._borders[0]) < 110
