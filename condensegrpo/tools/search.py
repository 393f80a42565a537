"""The search tool: BM25 (Okapi, https://doi.org/10.1561/1500000019) over a corpus of passages, by the library bm25s."""

from typing import Annotated

from annotated_types import Ge

from condensegrpo.tools.corpus_index import opened

MAX_QUERY = 1000  # characters of a query that are read


class Search:
    """The tool ``search``: the best passages of a local corpus for a query."""

    def __init__(
        self,
        *,
        corpus: str,
        passages: Annotated[int, Ge(1)] = 3,
        passage_chars: Annotated[int, Ge(1)] = 800,
        cache: str | None = None,
    ) -> None:
        """Open the index of a corpus, which is built once and then memory-mapped.

        Args:
            corpus: a JSONL file (also .gz), see ``corpus_index.opened``.
            passages: to show for a query, at most.
            passage_chars: of one passage that are shown.
            cache: folder of the indices; by default ``condensegrpo/search`` in the user's cache folder.

        Raises:
            DataError: the corpus is missing, empty or damaged.
        """
        self._index = opened(corpus, cache)
        self._passages = passages
        self._passage_chars = passage_chars

    def __call__(self, query: str) -> str:
        """Searches a collection of passages and returns those that match the query best.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages with their titles, best first.
        """
        passages = self._index.best(query[:MAX_QUERY], self._passages)
        if not passages:
            return f"No passage holds a word of {query[:80]!r}."
        return "\n\n".join(
            f"[{rank}] {passage.title}\n{passage.text[: self._passage_chars]}".strip()
            for rank, passage in enumerate(passages, start=1)
        )
