"""`condensegrpo play`: an episode typed at a terminal or from a file; the sampler `scripted`."""

import contextlib
import os
import pty
import re
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from command import ENVIRONMENT, ROOT, at_terminal, run, succeed
from forked import ForkedCommand
from typer.testing import CliRunner

from condensegrpo.api import rollout
from condensegrpo.cli.app import app
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.learner.new_model import new_config, new_tokenizer
from condensegrpo.learner.settings import NewModel
from condensegrpo.samplers.scripted import scripted
from condensegrpo.tasks.ledger import Ledger

EPISODE = ("play", "quickstart", "--problem", "1")  # of eval-1:5+1-3+3+1
LARGE = ("rollout.limits.max_context_tokens=1500", "rollout.limits.max_output_tokens=100")
REPLIES = (*["<note> 5 </note>"] * 5, "<answer> 7 </answer>")


def at_a_terminal(*arguments: str, kind: str, replies: Sequence[str] = ()) -> tuple[int, str]:
    """The exit code of a command at a terminal, and what was shown while the replies were typed."""
    terminal, end = pty.openpty()
    with Connection(end) as other_end:
        program = partial(at_terminal, other_end)
        process = ForkedCommand(arguments, cwd=ROOT, environment=ENVIRONMENT, more={"TERM": kind}, program=program)
    typed, shown = list(replies), ""
    with contextlib.suppress(OSError):  # the process has closed the terminal
        while part := os.read(terminal, 4096):
            shown += part.decode(errors="replace")
            if typed and shown.count("your reply: ") > len(replies) - len(typed):
                os.write(terminal, f"{typed.pop(0)}\n".encode())
    os.close(terminal)
    return process.wait(), shown


def test_a_person_plays_at_a_terminal_and_gets_the_reward() -> None:
    code, shown = at_a_terminal(*EPISODE, kind="dumb", replies=("<note> \\\n5 </note>", *REPLIES[1:]))
    assert code == 0, shown
    assert "turn 0: the prompt, 10 of 64 tokens, a reply has at most 24" in shown
    assert "<|im_start|> user start 5 keep a note <|im_end|> <|im_start|> assistant" in shown
    assert "turn 5   condensed by last_k" in shown
    assert "score 1   answered '7'" in shown


def test_a_terminal_shows_what_is_loaded_before_the_first_prompt() -> None:
    code, shown = at_a_terminal("play", "quickstart", "--problem", "999", kind="xterm")
    assert code == 2, shown
    texts = ("loading transformers", "reading the problems of ledger", "reading --problem")
    positions = [shown.index(text) for text in texts]
    assert positions == sorted(positions)


def test_replies_come_from_a_file_and_the_longest_text_of_the_prompt_chooses_them(tmp_path: Path) -> None:
    file = tmp_path / "replies.yaml"
    file.write_text(
        "".join(f"{key}: {list(texts)}\n" for key, texts in {"keep": ["no"], "start 5 keep": REPLIES}.items())
    )
    out = succeed(*EPISODE, "--replies", str(file), "sampler.options.max_batch=1")  # not used
    assert "score 1   answered '7'" in out
    assert out.count("<answer> 7 </answer>") == 2  # as it is said, and in the episode at the end


def test_a_script_that_ends_early_shows_the_turns_that_were_played_and_nothing_is_said_of_probabilities(
    tmp_path: Path,
) -> None:
    file = tmp_path / "replies.yaml"
    file.write_text(str(list(REPLIES[:2])))
    done = run(*EPISODE, "--replies", str(file))
    assert done.returncode == 1
    assert "saying reply 2 of a trajectory, counted from 0: the script has 2 for it" in done.stderr
    episode = done.stdout.partition("the episode")[2]
    assert episode.count("reply") - episode.count("replies") >= 2
    assert re.search(r"turn 1 .*\n(.*\n)*? *reply +<note> 5 </note>", episode)
    assert "probability" not in episode


def test_tools_and_their_results_are_shown(tmp_path: Path) -> None:
    (tmp_path / "replies.yaml").write_text(
        """['<tool>{"name": "calculator", "args": {"expression": "6*7"}}</tool>', x]"""
    )
    tools = ("rollout.tools={use: [calculator], format: tagged}", "model.new.tokenizer=bpe", *LARGE)
    out = succeed(*EPISODE, *tools, "--replies", str(tmp_path / "replies.yaml"))
    assert 'calculator({"expression": "6*7"})' in out
    assert re.search("then calculator +<result>42</result>", out)


def test_of_code_that_is_run_what_was_said_is_shown_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "replies.yaml").write_text("['<code>print(6 * 7)</code>', '<answer> 7 </answer>']")
    tools = ("rollout.tools={use: [python], format: code}", "model.new.tokenizer=bpe", *LARGE)
    out = succeed(*EPISODE, *tools, "--replies", str(tmp_path / "replies.yaml"))
    assert re.search(r"reply +<code>print\(6 \* 7\)</code>", out)
    assert "tool_call" not in out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--problem", "999999"), "reading --problem: found 999999, and the eval problems are"),
        (("--replies", "/nowhere.yaml"), "reading the replies of /nowhere.yaml: No such file or directory. Wanted a"),
    ],
)
def test_what_cannot_be_played_is_an_error(arguments: tuple[str, ...], fault: str) -> None:
    done = run("play", "quickstart", *arguments)
    assert done.returncode == 2
    assert fault in done.stderr


def test_replies_that_are_no_yaml_are_one_line_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "replies.yaml"
    file.write_text("a: [1\nb: 2")
    done = run("play", "quickstart", "--replies", str(file))
    place = f"error: reading the replies of {file}: it is not YAML: line 2, column 2: expected ',' or ']', but got ':'."
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(place)


def test_the_end_of_the_input_leaves_the_episode_quietly() -> None:
    left = CliRunner().invoke(app, EPISODE, input=b"<note> 5 </note>\n", catch_exceptions=False)
    assert left.exit_code == 0
    assert left.output.splitlines()[-1] == "left after 1 reply: the episode is not scored"
    assert "malformed" not in left.output


def test_bytes_that_are_no_text_are_replaced() -> None:
    played = CliRunner().invoke(app, EPISODE, input=b"5 \xff\n", catch_exceptions=False)
    assert "your reply: 5 \ufffd\n" in played.output
    assert "score 0   no answer" in played.output


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    made = new_tokenizer(Ledger().corpus(), kind="words", vocab_size=2048)
    made.save_pretrained(tmp_path)
    new_config(NewModel(max_positions=2048), vocab_size=len(made)).save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_sampler_scripted_says_the_texts_of_the_configuration_in_every_trajectory(tokenizer: str) -> None:
    sampler = {"name": "scripted", "options": {"replies": {"start 5": list(REPLIES)}}}
    problem = Ledger(min_ops=3, max_ops=6).problems("eval")[1]
    forgets = "condenser.options={keep_last: 0}"  # later prompts are equal to the first one
    several = rollout(
        "quickstart", forgets, model=tokenizer, n=3, problems=[problem], sampler=sampler, observer=Observer()
    )
    assert [each.figures.correct for each in several] == [1.0] * 3


def test_a_script_is_a_list_of_texts_or_one_for_each_problem(tokenizer: str) -> None:
    with pytest.raises(ConfigError, match="wanted one of the options replies and file"):
        scripted(model_path=tokenizer)
    (Path(tokenizer) / "numbers.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"it holds something else\. Wanted a YAML file with a list of texts"):
        scripted(file=f"{tokenizer}/numbers.yaml", model_path=tokenizer)
