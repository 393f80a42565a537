"""What a call of the tools calculator and search costs, and what an index of 100,000 made-up passages does.

    python benchmarks/tools.py nq-open-oracle.jsonl.gz

The corpus is a JSONL file as the tool search reads it. Its questions are the queries, or its titles if it has none.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path

from condensegrpo.storage.rows import Row, read_file
from condensegrpo.tools.calculator import calculator
from condensegrpo.tools.search import Search

CALLS, PASSAGES, WORDS, VOCABULARY = 1000, 100_000, 100, 50_000


def timed(call: Callable[[str], object], arguments: Sequence[str]) -> str:
    """Median and 95th percentile of the time of a call."""
    times = []
    for argument in arguments:
        begin = time.perf_counter()
        call(argument)
        times.append(1000 * (time.perf_counter() - begin))
    middle, late = statistics.median(times), statistics.quantiles(times, n=20)[-1]
    return f"median {middle:.2f} ms, 95 % within {late:.2f} ms, {len(times)} calls"


def opened(corpus: str, cache: str) -> tuple[Search, float]:
    """The tool, and the seconds that it took to build its index."""
    begin = time.perf_counter()
    tool = Search(corpus=corpus, cache=cache)
    return tool, time.perf_counter() - begin


def expressions(rng: random.Random) -> list[str]:
    """Such as a model writes for school problems."""
    number, sign = (lambda: str(rng.randrange(1, 1000))), (lambda: rng.choice("+-*/"))
    return [f"({number()} {sign()} {number()}) {sign()} {number()}" for _ in range(CALLS)]


def queries(corpus: Path) -> list[str]:
    """Questions of the corpus, or titles."""
    rows = islice(read_file(corpus), CALLS)
    return [str(row.get("question") or row.get("title") or "") for row in rows]


def found(corpus: Path, tool: Search) -> str:
    """How often an answer stands in what is shown for its question, asked as it stands."""
    rows = [row for row in read_file(corpus) if isinstance(row.get("answers"), list)]
    if not rows:
        return "the corpus has no answers"
    hits = sum(any(answer.lower() in shown for answer in row["answers"]) for row, shown in _searched(rows, tool))
    return f"an answer stands in the result for {hits / len(rows):.3f} of {len(rows)} questions"


def _searched(rows: Sequence[Row], tool: Search) -> Iterator[tuple[Row, str]]:
    return ((row, tool(str(row["question"])).lower()) for row in rows)


def made_up(folder: Path, rng: random.Random) -> tuple[Path, list[str]]:
    """A corpus whose words come as often as in a language (Zipf), and queries of six of them."""
    weights = list(accumulate(1 / rank for rank in range(1, VOCABULARY + 1)))
    path = folder / "made_up.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(PASSAGES):
            words = rng.choices(range(VOCABULARY), cum_weights=weights, k=WORDS)
            file.write(json.dumps({"title": f"t{number}", "text": " ".join(f"w{word}" for word in words)}) + "\n")
    chosen = [rng.choices(range(VOCABULARY), cum_weights=weights, k=6) for _ in range(CALLS // 4)]
    return path, [" ".join(f"w{word}" for word in words) for words in chosen]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    corpus = parser.parse_args().corpus
    rng = random.Random(0)
    print(f"load of the machine {os.getloadavg()[0]:.1f}")
    print(f"calculator: {timed(calculator, expressions(rng))}")
    with tempfile.TemporaryDirectory() as folder:
        tool, seconds = opened(corpus, folder)
        calls = timed(tool, queries(Path(corpus)))
        print(f"search, {corpus}: index in {seconds:.1f} s (loading the library included), {calls}")
        for passages, characters in ((1, 240), (3, 600)):
            tool = Search(corpus=corpus, passages=passages, passage_chars=characters, cache=folder)
            print(f"  {passages} passages of {characters} characters: {found(Path(corpus), tool)}")
        path, words = made_up(Path(folder), rng)
        tool, seconds = opened(str(path), folder)
        print(f"search, {PASSAGES} passages of {WORDS} words: index in {seconds:.1f} s, {timed(tool, words)}")


if __name__ == "__main__":
    main()
