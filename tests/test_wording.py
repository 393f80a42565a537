"""Numbers in messages agree with their nouns."""

from condensegrpo.core.wording import counted


def test_nouns_agree_with_their_numbers() -> None:
    assert counted(1, "result") == "1 result"
    assert counted(0, "result") == "0 results"
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"
    assert (counted(1.0, "second"), counted(0.5, "second")) == ("1 second", "0.5 seconds")
