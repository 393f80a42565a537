"""Text for the terminal: control characters of a model's text are shown, not executed."""

import unicodedata


def neutral(text: str) -> str:
    """``text`` with every control and invisible character replaced by a visible sign.

    ASCII control characters become their pictures, such as ␛; others, such as marks of the direction of writing, their
    code points: ⟨U+202E⟩. Line feeds stay. Rich markup is not parsed from ``Text``.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char == "\n" else _visible(char) for char in text)


def one_line(text: str, width: int) -> str:
    """Neutral text on one line of at most ``width`` characters."""
    flat = neutral(text).replace("\n", "⏎")
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def excerpt(text: str, *, characters: int) -> str:
    """Neutral text of at most ``characters``, saying how much was left out."""
    if len(text) <= characters:
        return neutral(text)
    return f"{neutral(text[:characters])}… ({len(text) - characters} more characters: --full)"


def _visible(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return char
