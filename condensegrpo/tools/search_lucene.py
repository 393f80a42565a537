"""The search tool over a Lucene index, by pyserini (needs Java); ``search`` needs neither."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from condensegrpo.tools.search import MAX_QUERY


@dataclass(eq=False, kw_only=True)
class SearchLucene:
    """The tool ``search_lucene``: the best passages of a Lucene index for a query.

    ``ValueError``: pyserini is not installed, Java is missing, or there is no such index.
    """

    index: str  # folder of a Lucene index made by pyserini, or the name of one of its prebuilt indices
    passages: Annotated[int, Ge(1)] = 3  # to show for a query, at most
    passage_chars: Annotated[int, Ge(1)] = 800  # of one passage that are shown

    def __post_init__(self) -> None:
        self._searcher = _searcher(self.index)

    def __call__(self, query: str) -> str:
        """Searches a collection of passages and returns those that match the query best.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages, best first.
        """
        hits = self._searcher.search(query[:MAX_QUERY], self.passages)
        texts = (_text(self._searcher.doc(hit.docid).raw()) for hit in hits)
        shown = [f"[{rank}] {text[: self.passage_chars]}" for rank, text in enumerate(texts, start=1)]
        return "\n\n".join(shown) or f"No passage holds a word of {query[:80]!r}."


def _searcher(index: str) -> Any:  # noqa: ANN401  pyserini has no types
    try:
        from pyserini.search.lucene import LuceneSearcher
    except Exception as error:  # the boundary to pyserini and its JVM, which fail in their own ways
        raise ValueError(
            f"pyserini cannot be loaded ({type(error).__name__}: {error}). Install it with pip install pyserini and a "
            f"Java of version 21, or use the tool search, which needs neither"
        ) from error
    return LuceneSearcher(index) if Path(index).is_dir() else LuceneSearcher.from_prebuilt_index(index)


def _text(raw: str) -> str:
    """The passage of a stored document: JSON with ``contents``, or plain text."""
    try:
        document = json.loads(raw)
    except ValueError:
        return raw
    return str(document.get("contents", raw)) if isinstance(document, dict) else raw
