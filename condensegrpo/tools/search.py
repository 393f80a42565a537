"""The search tool: BM25 (Okapi, https://doi.org/10.1561/1500000019) over a corpus of passages, by the library bm25s."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from condensegrpo.tools.corpus_index import open_index

MAX_QUERY = 1000  # characters of a query that are read


@dataclass(eq=False, kw_only=True)
class Search:
    """The tool ``search``: the best passages of a local corpus for a query.

    Its index is built once and then memory-mapped. ``DataError``: the corpus is missing, empty or damaged.
    """

    corpus: str  # a JSONL file (also .gz), see ``corpus_index.opened``
    passages: Annotated[int, Ge(1)] = 3  # to show for a query, at most
    passage_chars: Annotated[int, Ge(1)] = 800  # of one passage that are shown
    cache: str | None = None  # folder of the indices; None: ``condensegrpo/search`` in the user's cache folder

    def __post_init__(self) -> None:
        self._index = open_index(self.corpus, self.cache)

    def __call__(self, query: str) -> str:
        """Searches a collection of passages and returns those that match the query best.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages with their titles, best first.
        """
        passages = self._index.best(query[:MAX_QUERY], self.passages)
        if not passages:
            return f"No passage holds a word of {query[:80]!r}."
        return "\n\n".join(
            f"[{rank}] {passage.title}\n{passage.text[: self.passage_chars]}".strip()
            for rank, passage in enumerate(passages, start=1)
        )
