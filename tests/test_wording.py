"""Numbers in messages agree with their nouns."""

from condensegrpo.core.wording import plural, ranges


def test_nouns_agree_with_their_numbers() -> None:
    assert plural(1, "result") == "1 result"
    assert plural(0, "result") == "0 results"
    assert plural(2, "micro-batch", "micro-batches") == "2 micro-batches"
    assert (plural(1.0, "second"), plural(0.5, "second")) == ("1 second", "0.5 seconds")


def test_numbers_in_a_row_are_written_as_ranges() -> None:
    assert ranges([7, 1, 2, 3, 10, 9]) == "1–3, 7, 9–10"
    assert ranges([4]) == "4"
