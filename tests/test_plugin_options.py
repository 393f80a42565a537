"""Options of plug-ins, validated from the signature of the plug-in."""

import re
from pathlib import Path
from typing import Any

import pytest

from condensegrpo.config.options import build_plugin, check_plugin
from condensegrpo.core.errors import PluginError

PLUG_INS = """
from __future__ import annotations
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol
from annotated_types import Ge, Gt, Lt

if TYPE_CHECKING:
    from nowhere import Unknown

class Typed:
    def __init__(
        self,
        count: Annotated[int, Ge(0)] = 1,
        share: Annotated[float, Gt(0), Lt(1)] | None = None,
        mode: Literal["fast", "exact"] = "fast",
        names: Sequence[str] = (),
        sizes: tuple[int, ...] = (),
        folder: Path = Path("."),
        label: int | str = 0,
        weights: Mapping[str, float] = {},
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name != "self"}

@dataclass(frozen=True)
class Frozen:
    low: float
    high: float = 2.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low={self.low} and high={self.high}: wanted low < high")

@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 1
    share: float = 0.5

@dataclass
class Outer:
    inner: Inner = Inner()
    wide: bool = False

class Nested:
    def __init__(self, one: Outer = Outer(), some: list[Outer] | None = None) -> None:
        self.given = (one, some)

class Untyped:
    def __init__(self, anything, other=None, **more):
        self.given = (anything, other, more)

class Scorer(Protocol):
    def score(self) -> float: ...

class Odd:
    def __init__(self, unknown: Unknown = None, scorer: Scorer = None, frozen: Frozen = None, call: Callable = None):
        self.given = (unknown, scorer, frozen, call)

class Uses:
    def __init__(self, size: int, *, sandbox: Scorer, keep_last: int = 3) -> None:
        self.given = (size, sandbox, keep_last)

class Checks:
    def __init__(self, a: int = 0, b: int = 0, path: str = "") -> None:
        raise RuntimeError("built")

    @staticmethod
    def check_options(*, a: int = 0, b: int = 0, path: str = "") -> None:
        if a > b:
            raise ValueError(f"a={a} is above b={b} at {path!r}")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUG_INS, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"count": "3"}, r"the option count is '3', wanted an integer\."),
        ({"count": True}, "the option count is True, wanted an integer"),
        ({"count": 3.0}, "the option count is 3.0, wanted an integer"),
        ({"count": -1}, "the option count is -1, wanted at least 0"),
        ({"count": None}, "the option count is None, wanted an integer"),
        ({"share": float("nan")}, "the option share is nan, wanted a finite number"),
        ({"share": float("inf")}, "the option share is inf, wanted a finite number"),
        ({"share": True}, "the option share is True, wanted a number"),
        ({"share": 0}, "the option share is 0, wanted greater than 0"),
        ({"share": 1.5}, "the option share is 1.5, wanted less than 1"),
        ({"mode": "exakt"}, "the option mode is 'exakt', wanted 'fast' or 'exact'"),
        ({"names": "one"}, "the option names is 'one', wanted a list"),
        ({"names": ["one", 2]}, r"the option names\[1\] is 2, wanted a string"),
        ({"sizes": [1, "2"]}, r"the option sizes\[1\] is '2', wanted an integer"),
        ({"label": 1.5}, "the option label is 1.5, wanted an integer or a string"),
        ({"weights": {"a": "b"}}, r"the option weights\['a'\] is 'b', wanted a number"),
        ({"folder": object()}, "the option folder is <object"),
    ],
)
def test_a_value_outside_of_its_annotation_is_refused(file: Path, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(PluginError, match=rf"setting up the reward '.*:Typed' \(.*mine\.py:\d+\): {wanted}"):
        build_plugin("rewards", f"{file}:Typed", options)
    with pytest.raises(PluginError, match=wanted):
        check_plugin("rewards", f"{file}:Typed", options)


def test_values_are_converted_as_json_would_convert_them(file: Path) -> None:
    options = {"share": 0.5, "sizes": [1, 2], "folder": "here", "label": "x", "names": ["a"], "weights": {"a": 1}}
    given = build_plugin("tasks", f"{file}:Typed", options).given
    assert {name: given[name] for name in options} == {**options, "sizes": (1, 2), "folder": Path("here")}
    low = build_plugin("tasks", f"{file}:Frozen", {"low": 1}).low
    assert (low, type(low)) == (1.0, float)


def test_a_relation_between_options_is_refused_in_the_words_of_the_plug_in(file: Path) -> None:
    with pytest.raises(
        PluginError,
        match=r"'.*:Frozen' with \{'low': 3\}: low=3.0 and high=2.0: wanted low < high \(.*mine\.py:\d+\)\.",
    ):
        build_plugin("rewards", f"{file}:Frozen", {"low": 3})


def test_a_missing_option_is_named_with_those_that_exist(file: Path) -> None:
    with pytest.raises(PluginError, match=r"the option low is missing\. Its options are: low, high"):
        build_plugin("rewards", f"{file}:Frozen", {})


def test_an_unknown_option_is_refused_with_the_nearest(file: Path) -> None:
    with pytest.raises(PluginError, match=r"no option 'hihg'\. Did you mean 'high'\? Its options are: low, high=2.0\."):
        build_plugin("rewards", f"{file}:Frozen", {"low": 1, "hihg": 2})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"one": {"innr": {}}}, "the option one has no key 'innr'. Did you mean 'inner'?"),
        ({"one": {"inner": {"dept": 1}}}, "one['inner'] has no key 'dept'. Did you mean 'depth'?"),
        ({"some": [{}, {"inner": {"x": 1}}]}, "some[1]['inner'] has no key 'x'. Known here: depth, share"),
        ({"one": {"inner": {"share": float("nan")}}}, "one['inner']['share'] is nan, wanted a finite number."),
        ({"one": {"inner": {"depth": "1"}}}, "one['inner']['depth'] is '1', wanted an integer."),
    ],
)
def test_keys_of_an_option_that_is_a_dataclass_are_checked(file: Path, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(PluginError, match=re.escape(wanted)):
        build_plugin("rewards", f"{file}:Nested", options)
    one, some = build_plugin("rewards", f"{file}:Nested", {"one": {"inner": {"depth": 2}}, "some": [{}]}).given
    assert (one.inner.depth, some[0].inner.depth) == (2, 1)


def test_parameters_without_annotations_take_anything(file: Path) -> None:
    built = build_plugin("rewards", f"{file}:Untyped", {"anything": "3", "more": True})
    assert built.given == ("3", None, {"more": True})


def test_annotations_that_cannot_be_checked_take_anything(file: Path) -> None:
    thing = object()
    built = build_plugin("rewards", f"{file}:Odd", {"unknown": 1, "scorer": thing, "call": 2})
    assert built.given == (1, thing, None, 2)


def test_arguments_are_supplied_only_where_the_signature_has_them(file: Path) -> None:
    thing = object()
    supplied = {"sandbox": thing, "keep_last": 5, "max_model_len": 9}
    assert build_plugin("tools", f"{file}:Uses", {"size": 1}, supplied).given == (1, thing, 5)
    assert build_plugin("tools", f"{file}:Uses", {"size": 1, "keep_last": 0}, supplied).given == (1, thing, 0)
    assert build_plugin("tools", f"{file}:Frozen", {"low": 1}, supplied).low == 1


def test_what_is_supplied_is_no_option_that_a_message_lists(file: Path) -> None:
    with pytest.raises(PluginError, match=r"Its options are: size, keep_last=3\."):
        build_plugin("tools", f"{file}:Uses", {"sandboxx": 1}, {"sandbox": object()})


def test_a_check_calls_only_check_options(file: Path) -> None:
    check_plugin("samplers", f"{file}:Checks", {"a": 1, "b": 2}, {"path": "p"})
    with pytest.raises(PluginError, match=r"sampler '.*:Checks' with \{'a': 2\}: a=2 is above b=0 at 'p'"):
        check_plugin("samplers", f"{file}:Checks", {"a": 2}, {"path": "p"})
