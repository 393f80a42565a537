"""The search tool on small corpora: what is found, that the index is built once, and what is wrong with a corpus."""

import gzip
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import DataError, PluginError
from condensegrpo.tools import search as search_module
from condensegrpo.tools.search import Search, open_index

PASSAGES = (
    {"title": "Paris", "text": "Paris is the capital of France, on the river Seine."},
    {"title": "Rome", "text": "Rome is the capital of Italy, on the river Tiber."},
    {"title": "Otter", "text": "Otters are mammals that live in rivers and eat fish."},
)


def corpus(folder: Path, rows: Sequence[Any] = PASSAGES, name: str = "corpus.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def search(folder: Path, rows: Sequence[Any] = PASSAGES, **options: Any) -> Search:
    return Search(corpus=corpus(folder, rows), cache=str(folder / "cache"), **options)


def test_the_passage_that_matches_best_comes_first(tmp_path: Path) -> None:
    found = search(tmp_path)("What is the capital of Italy?")
    assert found.startswith("[1] Rome\nRome is the capital of Italy")
    assert "[2] Paris" in found
    assert "Otter" not in found  # shares no word with the query


def test_as_many_passages_are_shown_as_asked_for_and_each_is_cut(tmp_path: Path) -> None:
    assert search(tmp_path, passages=1, passage_chars=8)("capital of France") == "[1] Paris\nParis is"


@pytest.mark.parametrize("query", ["", "zebra", "the of", "!?", "\0", "\ud800"])
def test_a_query_that_matches_nothing_says_so(tmp_path: Path, query: str) -> None:
    assert search(tmp_path)(query).startswith("No passage holds a word of")


def test_a_query_of_a_megabyte_is_cut(tmp_path: Path) -> None:
    assert search(tmp_path)("capital " * 200_000).startswith("[1] ")


def test_the_passages_of_an_nq_open_file_are_a_corpus_and_each_counts_once(tmp_path: Path) -> None:
    rows = [{"question": "?", "ctxs": list(PASSAGES[:2])}, {"question": "?", "ctxs": list(PASSAGES[1:])}]
    assert len(open_index(corpus(tmp_path, rows), str(tmp_path / "cache"))) == 3


def test_a_corpus_in_the_columns_of_pyserini_and_packed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "1", "contents": "a lonely badger"}\n'))
    assert Search(corpus=str(path), cache=str(tmp_path / "cache"))("badger") == "[1] \na lonely badger"


def test_the_index_is_built_once_for_a_file_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    search_module._opened.cache_clear()  # as another process
    (folder / "offsets.npy").touch()
    before = sorted((entry.name, entry.stat().st_mtime_ns) for entry in folder.iterdir())
    path = tmp_path / "corpus.jsonl"
    assert "Rome" in Search(corpus=str(path), cache=str(tmp_path / "cache"))("Italy")
    assert sorted((entry.name, entry.stat().st_mtime_ns) for entry in folder.iterdir()) == before

    path.write_text('{"text": "Bern is the capital of Switzerland"}\n')
    changed = Search(corpus=str(path), cache=str(tmp_path / "cache"))
    assert "Bern" in changed("capital")
    assert "Rome" not in changed("capital")


def test_the_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    open_index(corpus(tmp_path))
    assert list((tmp_path / "home/condensegrpo/search").iterdir())


def test_many_threads_may_search_at_once(tmp_path: Path) -> None:
    tool = search(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(tool, ["capital of Italy"] * 64))) == 1


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "is empty, wanted at least one passage"),
        (b'{"title": "x"}\n', r"row 1 has no column 'text' or 'contents' with a text\. It has: 'title'"),
        (b'{"text": "a b"}\n{"ctxs": ["x"]}\n', "row 2 has no column 'text'"),
        (b'{"text": "..."}\n', "hold no word to search by"),
        (b'{"text": "fine"}\n{"text": "cut', "line 2: the last line is cut off"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_said_and_no_half_index_is_left(
    tmp_path: Path, content: bytes, wanted: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=wanted):
        Search(corpus=str(path), cache=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no such file .*title and text"):
        Search(corpus=str(tmp_path / "none.jsonl"))


def test_no_passages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="the option passages is 0, wanted at least 1"):
        build_plugin("tools", "search", {"corpus": str(tmp_path), "passages": 0})


def test_the_schema_tells_the_model_what_a_query_is(tmp_path: Path) -> None:
    function = get_json_schema(search(tmp_path).__call__)["function"]
    assert function["description"].startswith("Searches a collection of passages")
    assert function["parameters"]["required"] == ["query"]


def test_an_index_on_another_library_says_what_it_needs() -> None:
    from condensegrpo.tools.search import SearchLucene

    with pytest.raises(ValueError, match=r"pip install pyserini.*Java.*the tool search, which needs neither"):
        SearchLucene(index="wikipedia-dpr")
