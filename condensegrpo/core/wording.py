"""Numbers in messages. Standard library only."""


def counted(number: float, singular: str, plural: str = "") -> str:
    """``1 group``, ``2 groups``, ``0.5 seconds``; the plural has an s unless it is given."""
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{number:g} {noun}" if isinstance(number, float) else f"{number} {noun}"
