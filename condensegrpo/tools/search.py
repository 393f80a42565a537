"""The search tools: BM25 (Okapi, https://doi.org/10.1561/1500000019) by the library bm25s, and Lucene by pyserini.

The index of a corpus is built once per version of the file, then memory-mapped by every process:

    <cache>/<key>/passages.jsonl   the passages, one JSON object a line
                  offsets.npy      where each line begins
                  *.index.*        bm25s's own files

The key is made of the corpus file's path, size and time of change. An index is written to a temporary folder and then
renamed, so that no process reads an incomplete index.
"""

import hashlib
import json
import mmap
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from annotated_types import Ge

from condensegrpo.core.errors import DataError, DataMissing
from condensegrpo.storage.files import user_cache
from condensegrpo.storage.rows import read_file

LAYOUT = "1"  # of what is written; another one is another key
_STOPWORDS = "english"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text that a search returns."""

    title: str  # may be empty
    text: str


class CorpusIndex:
    """An index on disk. Safe for concurrent queries from several threads."""

    def __init__(self, folder: Path) -> None:
        import bm25s  # here: it takes a second that a run without search need not wait for

        self._scores = bm25s.BM25.load(folder, mmap=True, show_progress=False, load_corpus=False)
        self._tokenize = bm25s.tokenize
        self._offsets: npt.NDArray[np.int64] = np.load(folder / "offsets.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as file:
            self._passages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def search(self, query: str, count: int) -> tuple[Passage, ...]:
        """The ``count`` passages that match best, best first; fewer if fewer hold any word of the query."""
        words = self._tokenize(query, stopwords=_STOPWORDS, return_ids=False, show_progress=False)
        if not any(word in self._scores.vocab_dict for word in words[0]):
            return ()
        numbers, scores = self._scores.retrieve(
            words, k=min(count, len(self)), show_progress=False, backend_selection="numpy"
        )
        matches = [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]
        lines = [self._passages[int(self._offsets[number]) : int(self._offsets[number + 1])] for number in matches]
        return tuple(Passage(title=title, text=text) for title, text in map(json.loads, lines))


def open_index(corpus: str, cache: str | None = None) -> CorpusIndex:
    """The index of a corpus, built if this machine has none of this version of the file.

    Args:
        corpus: a JSONL file (also .gz). A row is a passage: ``text`` or ``contents``, and ``title`` if it has one; or
            it is a question with its passages in ``ctxs``, as in NQ-open files. A repeated passage counts once.
        cache: folder of the indices.

    Raises:
        DataMissing: there is no such file.
        DataError: it is empty or damaged, or a row is no passage.
    """
    path = Path(corpus).expanduser().resolve()
    if not path.is_file():
        raise DataMissing(
            f"opening the search corpus {corpus}: there is no such file (looked for {path}). Give a JSONL file of "
            f"passages with title and text as the option corpus of the tool search"
        )
    state = path.stat()
    key = hashlib.blake2b(
        f"{LAYOUT}\n{path}\n{state.st_size}\n{state.st_mtime_ns}".encode(), digest_size=12
    ).hexdigest()
    folder = user_cache() / "search" if cache is None else Path(cache).expanduser()
    with _OPENING:
        return _opened(path, folder / f"{path.stem[:40]}-{key}")


_OPENING = threading.Lock()  # one index is not built twice by one process


@lru_cache(maxsize=4)
def _opened(corpus: Path, folder: Path) -> CorpusIndex:
    if not folder.is_dir():
        _build(corpus, folder)
    return CorpusIndex(folder)


def _build(corpus: Path, folder: Path) -> None:
    import bm25s

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".building-{uuid4().hex}")
    try:
        temporary.mkdir()
        texts = _write_passages(corpus, temporary)
        words = bm25s.tokenize(texts, stopwords=_STOPWORDS, show_progress=False)
        if not words.vocab:
            raise DataError(f"indexing the search corpus {corpus}: its {len(texts)} passages hold no word to search by")
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        index.save(temporary, show_progress=False)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its index is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_passages(corpus: Path, temporary: Path) -> list[str]:
    """Write the passages and their offsets; returns the texts to index."""
    texts: list[str] = []
    offsets = [0]
    digests: set[bytes] = set()
    with (temporary / "passages.jsonl").open("wb") as file:
        for passage in _passages(corpus):
            line = json.dumps([passage.title, passage.text], ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            digest = hashlib.blake2b(line, digest_size=16).digest()
            if digest not in digests:
                digests.add(digest)
                offsets.append(offsets[-1] + file.write(line))
                texts.append(f"{passage.title}\n{passage.text}")
    if not texts:
        raise DataError(f"indexing the search corpus {corpus}: it is empty, wanted at least one passage")
    np.save(temporary / "offsets.npy", np.array(offsets, dtype=np.int64))
    return texts


def _passages(corpus: Path) -> Iterator[Passage]:
    for number, row in enumerate(read_file(corpus), start=1):
        contexts = row.get("ctxs")
        for passage in contexts if isinstance(contexts, list) else [row]:
            text = passage.get("text", passage.get("contents")) if isinstance(passage, dict) else None
            if not isinstance(text, str):
                columns = ", ".join(map(repr, passage)) if isinstance(passage, dict) else type(passage).__name__
                raise DataError(
                    f"indexing the search corpus {corpus}: row {number} has no column 'text' or 'contents' with a "
                    f"text. It has: {columns or 'none'}"
                )
            yield Passage(title=str(passage.get("title") or ""), text=text)


MAX_QUERY = 1000  # characters of a query that are read


@dataclass(eq=False, kw_only=True)
class Search:
    """Finds the best passages of a local corpus for a query.

    Its index is built once and then memory-mapped. ``DataError``: the corpus is missing, empty or damaged.
    """

    corpus: str  # a JSONL file (also .gz), see ``open_index``
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
        passages = self._index.search(query[:MAX_QUERY], self.passages)
        if not passages:
            return f"No passage holds a word of {query[:80]!r}."
        return "\n\n".join(
            f"[{rank}] {passage.title}\n{passage.text[: self.passage_chars]}".strip()
            for rank, passage in enumerate(passages, start=1)
        )


@dataclass(eq=False, kw_only=True)
class SearchLucene:
    """Finds the best passages of a Lucene index for a query.

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
