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
    # a hash of its own: the task's split is decided by a hash of the same text, and must say nothing about the digit
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8, person=b"code_book").digest()
    return str(int.from_bytes(digest, "big") % 10)
