"""What an anchor is: a part of a text that a summary in other words would lose, such as a number, a path or an error.

Build 1142 failed: ValueError: bad id 'u_17' in src/app.py:88
number 1142 · error ValueError: bad id 'u_17' in src/app.py:88
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

Kind = Literal["url", "error", "quote", "path", "number", "identifier", "name"]
KINDS: tuple[Kind, ...] = ("url", "error", "quote", "path", "number", "identifier", "name")

# every repetition is bounded, so that no text takes longer than its length times a constant
_PATTERNS: dict[Kind, str] = {  # the first that matches at a place wins
    "url": r"https?://[^\s<>\"'`)\]}]{1,200}(?![^\s<>\"'`)\]}])|\w[\w.+-]{0,60}@[\w-]{1,60}(?:\.[\w-]{1,20}){1,4}(?!\w)",
    "error": r"(?:[\w.]{0,60}(?:Error|Exception|Warning)|(?i:error|fatal|failed))\b: [^\n]{1,160}",
    "quote": r"\"[^\"\n]{1,80}\"(?:\s?:)?|`[^`\n]{1,80}`|“[^”\n]{1,80}”",
    "path": r"(?=[~./\\]|\S{0,60}[._\d]|\w{1,60}[/\\]\w{1,60}[/\\])"  # and/or is none
    r"(?:(?:~|\.{1,2}|[A-Za-z]:)?[/\\])?\.?\w[\w.@+-]{0,60}(?:[/\\][\w.@+-]{1,60}){1,12}(?::\d{1,6}){0,2}(?!\w)"
    r"|(?:~|\.{1,2})?[/\\]\.?\w[\w.@+-]{0,60}(?!\w)|\w[\w-]{1,60}\.[A-Za-z]\w{0,4}(?::\d{1,6}){0,2}(?!\w)",
    "number": r"[$€£]?[-+]?\d{1,30}(?:[.,:/-]\d{1,30}){0,6}[%A-Za-z]{0,3}(?![.,:/-]?\w)",
    "identifier": r"(?=\w{0,60}[_\d]|\w{0,60}[a-z][A-Z]|[A-Z]{2})\w{2,60}(?:-\w{1,30}){0,5}(?!\w)",
    "name": r"(?<=[\w,;’'] )(?!I\b)[A-Z][\w’'-]{1,30}(?: [A-Z][\w’'-]{1,30}){0,3}(?!\w)",
}


@lru_cache(maxsize=8192)
def anchors(text: str, kinds: tuple[Kind, ...] = KINDS) -> tuple[str, ...]:
    """The anchors of a text, verbatim, each once, in order. Of a long error message the first 160 characters."""
    matches = (match[0].rstrip() for match in _compiled(kinds).finditer(text))
    bare = (match.strip('“”"`') for match in matches if not match.endswith('":'))  # a key of JSON
    stripped = (match.lstrip(" ,;:").rstrip(" .,;:") for match in bare)
    return tuple(dict.fromkeys(anchor for anchor in stripped if anchor))


@lru_cache(maxsize=64)
def _compiled(kinds: Sequence[Kind]) -> re.Pattern[str]:
    return re.compile("|".join(rf"(?<!\w)(?:{pattern})" for kind, pattern in _PATTERNS.items() if kind in kinds))
