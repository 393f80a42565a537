"""The files of BFCL's memory benchmark with other content."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Said = Mapping[str, Sequence[Sequence[str]]]  # by scenario, the messages of each conversation
Asked = Sequence[tuple[str, str, list[str]]]  # scenario, question, answers


def write_memory_questions(folder: Path, said: Said, asked: Asked) -> Path:
    """Write the benchmark's three kinds of files; returns the folder."""

    def lines(path: str, rows: list[dict[str, object]]) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def turn(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    numbered = [(f"memory_{number}", *rest) for number, rest in enumerate(asked)]
    lines("BFCL_v4_memory.json", [{"id": i, "scenario": s, "question": [turn(q)]} for i, s, q, _ in numbered])
    lines("possible_answer/BFCL_v4_memory.json", [{"id": i, "ground_truth": a} for i, _, _, a in numbered])
    for scenario, conversations in said.items():
        talks: list[dict[str, object]] = [
            {"id": f"prereq_{at}", "scenario": scenario, "question": [turn(text) for text in talk]}
            for at, talk in enumerate(conversations)
        ]
        lines(f"memory_prereq_conversation/memory_{scenario}.json", talks)
    return folder
