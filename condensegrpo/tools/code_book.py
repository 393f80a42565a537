"""The tool of the task ``codes``: a book of made-up codes. Standard library only."""

import hashlib


def code_book(query: str) -> str:
    """Looks up the digit of a code.

    Args:
        query: The words of the code, such as "red gold snow".

    Returns:
        One digit.
    """
    words = query.split()
    if not words:
        raise ValueError("found no word, wanted those of a code, such as 'red gold snow'")
    return str(int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest(), "big") % 10)
