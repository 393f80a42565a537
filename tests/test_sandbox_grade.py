"""Grading code by tests: which code passes."""

import textwrap
from collections.abc import Iterator

import pytest

from condensegrpo.sandbox.calls import SandboxLimits
from condensegrpo.sandbox.grade import CodeVerdict, grade
from condensegrpo.sandbox.sandbox import Sandbox

TESTS = ("assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'")
LIMITS = SandboxLimits(seconds=60, memory_mib=256)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(limits=LIMITS) as shared:
        yield shared


def verdict(sandbox: Sandbox, code: str, *tests: str, setup: str = "", entry: tuple[str, ...] = ()) -> CodeVerdict:
    return grade(sandbox, textwrap.dedent(code), tests or TESTS, setup=setup, entry=entry)


def test_right_code_passes(sandbox: Sandbox) -> None:
    result = verdict(sandbox, "def add(a, b): return a + b")
    assert (result.passed, result.reasons, result.all_passed) == ((True,) * 3, ("",) * 3, True)


def test_each_test_is_judged_separately(sandbox: Sandbox) -> None:
    result = verdict(sandbox, "def add(a, b): return a + b if isinstance(a, int) else None")
    assert result.passed == (True, False, False)
    assert result.reasons[1] == "AssertionError"
    assert not result.all_passed


def test_code_without_tests_does_not_pass(sandbox: Sandbox) -> None:
    assert not grade(sandbox, "", []).all_passed


def test_tests_before_an_infinite_loop_keep_their_verdict() -> None:
    code = "def add(a, b):\n  while a == [1]: pass\n  return a + b"
    with Sandbox(limits=SandboxLimits(seconds=2.5, memory_mib=256)) as short:
        result = grade(short, code, TESTS)
    assert result.passed == (True, False, False)
    assert result.reasons[1] == "not judged: the tests ended with the outcome timeout"


PLAIN = {
    "numbers": ("1 << 200", "-1.5", "float('inf')", "1j", "True", "None", "2**53"),
    "text and bytes": ("'ä\\ud800\\n'", "b'\\x00'", "bytearray(b'a')"),
    "containers": ("(1, (2,), [])", "{1: {'a': {2, 3}}}", "frozenset({(1,)})", "range(3)"),
    "types": ("int", "frozenset"),
    "types of the library": (
        "__import__('collections').deque([1], 2)",
        "__import__('collections').Counter('aab')",
        "__import__('collections').OrderedDict(b=1, a=2)",
        "__import__('decimal').Decimal('1.10')",
        "__import__('fractions').Fraction(1, 3)",
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_keep_their_types_in_both_directions(sandbox: Sandbox, kind: str) -> None:
    tests = [f"assert (same({text}), type(same({text}))) == ({text}, type({text}))" for text in PLAIN[kind]]
    result = verdict(sandbox, "def same(x): return x", *tests)
    assert result.all_passed, result.reasons


def test_nan_does_not_equal_itself(sandbox: Sandbox) -> None:
    tests = ("x = nan(); assert x != x", "assert nan() == nan()")
    assert verdict(sandbox, "def nan(): return float('nan')", *tests).passed == (True, False)


def test_subclasses_of_plain_types_compare_as_in_one_process(sandbox: Sandbox) -> None:
    code = """
        from collections import defaultdict, namedtuple
        from enum import IntEnum
        def f(): return defaultdict(int, a=1)
        def g(): return namedtuple('P', 'x y')(1, 2)
        def h(): return IntEnum('E', 'A').A
    """
    tests = ("assert f() == {'a': 1}", "assert g() == (1, 2)", "assert h() == 1")
    assert verdict(sandbox, code, *tests).all_passed


def test_arguments_changed_in_place_are_changed_for_the_tests(sandbox: Sandbox) -> None:
    code = "def f(a, d, s):\n  a.sort(); d['x'] = 1; s.discard(1)\n  return a"
    test = "a, d, s = [3, 1], {}, {1, 2}; f(a, d, s); assert (a, d, s) == ([1, 3], {'x': 1}, {2})"
    assert verdict(sandbox, code, test).all_passed


def test_the_tests_use_objects_of_the_code(sandbox: Sandbox) -> None:
    code = """
        class Node:
            def __init__(self, value): self.value, self.left = value, None
        def depth(node): return 1 + depth(node.left) if node else 0
        def numbers():
            yield from (1, 2)
        class Box:
            def __len__(self): return 3
            def __getitem__(self, n): return n * 2
            def __iter__(self): return iter((5, 7))
    """
    setup = "root = Node(1); root.left = Node(2)"
    tests = (
        "assert depth(root) == 2",
        "assert root.left.value == 2",
        "assert list(numbers()) == [1, 2]",
        "assert (len(Box()), Box()[4], 5 in Box(), 6 in Box()) == (3, 8, True, False)",
        "assert root.left is root.left and root == root",
    )
    assert verdict(sandbox, code, *tests, setup=setup).reasons == ("",) * 5


def test_an_error_of_python_that_takes_more_than_a_text_is_one_of_its_kind(sandbox: Sandbox) -> None:
    code = """
    def decode(data): return data.decode("utf-8")
    def encode(text): return text.encode("ascii")
    def several(): raise ExceptionGroup("two", [ValueError("one")])
    """
    tests = (
        "try: decode(b'\\xff')\nexcept UnicodeDecodeError: pass\nelse: assert False",
        "try: encode('\u00e4')\nexcept ValueError: pass\nelse: assert False",
        "several()",
    )
    result = verdict(sandbox, code, *tests)
    assert result.passed == (True, True, False)
    assert result.reasons[2] == "Raised: ExceptionGroup: two (1 sub-exception)"


def test_exceptions_of_the_code_are_raised_in_the_tests(sandbox: Sandbox) -> None:
    code = "class Own(Exception): pass\ndef f(x):\n  if x: raise ValueError('no')\n  raise Own('mine')"
    test = "try: f(1)\nexcept ValueError as error: assert str(error) == 'no'\nelse: assert False"
    result = verdict(sandbox, code, test, "f(0)", "g()")
    assert result.passed == (True, False, False)
    assert result.reasons[1:] == ("Raised: Own: mine", "NameError: name 'g' is not defined")


def test_tests_may_define_a_check_function(sandbox: Sandbox) -> None:
    setup = "import math\ndef check(candidate):\n  assert math.isclose(candidate(0.5), 0.25)"
    assert verdict(sandbox, "def sq(x): return x * x", "check(sq)", setup=setup).all_passed


def test_a_function_with_the_name_of_a_builtin_is_under_test_only_if_entry_names_it(sandbox: Sandbox) -> None:
    code = "def sum(a, b): return a + b\ndef set(x): return 7\ndef sorted_set(x): return [9]"
    result = verdict(sandbox, code, "assert sum(1, 2) == 3", "assert set(sorted_set(1)) == set([1])", entry=("sum",))
    assert result.passed == (True, False)
    assert verdict(sandbox, code, "assert sum(1, 2) == 3").passed == (False,)


def test_a_function_as_argument_is_refused_with_a_message(sandbox: Sandbox) -> None:
    result = verdict(sandbox, "def f(g): return g()", "assert f(lambda: 1) == 1")
    assert "pass a value of type function" in result.reasons[0]


def test_code_under_name_main_is_not_run(sandbox: Sandbox) -> None:
    code = "def add(a, b): return a + b\nif __name__ == '__main__': print(input())"
    assert verdict(sandbox, code).all_passed


def test_the_output_of_the_code_is_reported(sandbox: Sandbox) -> None:
    assert verdict(sandbox, "print('hello')\ndef add(a, b): return a + b").code.stdout == "hello\n"


def test_tests_use_modules_of_the_library_without_importing_them(sandbox: Sandbox) -> None:
    assert verdict(sandbox, "def root(x): return x ** 0.5", "assert math.isclose(root(4), 2)").all_passed


def test_with_entry_other_names_are_not_taken_from_the_code(sandbox: Sandbox) -> None:
    code = "expected = 3\ndef add(a, b): return 3"
    result = verdict(sandbox, code, "assert add(1, 2) == expected", entry=("add",))
    assert result.reasons == ("NameError: name 'expected' is not defined: under test are add",)
    assert verdict(sandbox, code, "assert add(1, 2) == expected").all_passed


def test_records_beyond_the_kept_length_fail_only_their_tests(sandbox: Sandbox) -> None:
    tests = ["assert add(1, 2) == 3", *["assert 0, chr(0) * 1000"] * 800, "assert add(1, 2) == 3"]
    result = verdict(sandbox, "def add(a, b): return a + b", *tests)
    assert result.passed == (True, *[False] * 800, True)
    assert "not judged: the tests ended with the outcome finished" in result.reasons
