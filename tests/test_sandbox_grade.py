"""Grading: what right code earns, and that nothing else earns it."""

import textwrap
from collections.abc import Iterator

import pytest

from condensegrpo.sandbox.grade import CodeVerdict, grade, grade_now
from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.sandbox import Sandbox

TESTS = ("assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'")
LIMITS = SandboxLimits(seconds=5, memory_mib=256)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(limits=LIMITS) as one:
        yield one


def verdict(sandbox: Sandbox, code: str, *tests: str, setup: str = "", entry: tuple[str, ...] = ()) -> CodeVerdict:
    return grade_now(sandbox, textwrap.dedent(code), tests or TESTS, setup=setup, entry=entry)


def test_right_code_passes(sandbox: Sandbox) -> None:
    found = verdict(sandbox, "def add(a, b): return a + b")
    assert (found.passed, found.reasons, found.all_passed) == ((True,) * 3, ("",) * 3, True)


def test_each_test_is_judged_by_itself(sandbox: Sandbox) -> None:
    found = verdict(sandbox, "def add(a, b): return a + b if isinstance(a, int) else None")
    assert found.passed == (True, False, False)
    assert found.reasons[1] == "AssertionError"
    assert not found.all_passed


async def _graded(sandbox: Sandbox) -> CodeVerdict:
    return await grade(sandbox, "def add(a, b): return a + b", TESTS)


def test_grading_awaited_is_grading_that_blocks(sandbox: Sandbox) -> None:
    import asyncio

    assert asyncio.run(_graded(sandbox)).passed == (True,) * 3


def test_no_tests_are_no_pass(sandbox: Sandbox) -> None:
    assert not grade_now(sandbox, "", []).all_passed


def test_tests_that_were_judged_before_a_loop_keep_their_verdict(sandbox: Sandbox) -> None:
    found = verdict(sandbox, "def add(a, b):\n  while a == [1]: pass\n  return a + b")
    assert found.passed == (True, False, False)
    assert found.reasons[1] == "not judged: the tests ended with the outcome timeout"


PLAIN = {
    "numbers": ("1 << 200", "-1.5", "float('inf')", "1j", "True", "None", "2**53"),
    "text and bytes": ("'ä\\ud800\\n'", "b'\\x00'", "bytearray(b'a')"),
    "containers": ("(1, (2,), [])", "{1: {'a': {2, 3}}}", "frozenset({(1,)})", "range(3)"),
    "types": ("int", "frozenset"),
    "of the library": (
        "__import__('collections').deque([1], 2)",
        "__import__('collections').Counter('aab')",
        "__import__('collections').OrderedDict(b=1, a=2)",
        "__import__('decimal').Decimal('1.10')",
        "__import__('fractions').Fraction(1, 3)",
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_cross_both_ways_with_their_types(sandbox: Sandbox, kind: str) -> None:
    tests = [f"assert (same({one}), type(same({one}))) == ({one}, type({one}))" for one in PLAIN[kind]]
    found = verdict(sandbox, "def same(x): return x", *tests)
    assert found.all_passed, found.reasons


def test_nan_is_still_no_equal_of_itself(sandbox: Sandbox) -> None:
    tests = ("x = nan(); assert x != x", "assert nan() == nan()")
    assert verdict(sandbox, "def nan(): return float('nan')", *tests).passed == (True, False)


def test_subclasses_of_plain_types_compare_as_they_would_in_one_process(sandbox: Sandbox) -> None:
    code = """
        from collections import defaultdict, namedtuple
        from enum import IntEnum
        def f(): return defaultdict(int, a=1)
        def g(): return namedtuple('P', 'x y')(1, 2)
        def h(): return IntEnum('E', 'A').A
    """
    tests = ("assert f() == {'a': 1}", "assert g() == (1, 2)", "assert h() == 1")
    assert verdict(sandbox, code, *tests).all_passed


def test_what_a_function_changes_in_place_is_changed_for_the_tests(sandbox: Sandbox) -> None:
    code = "def f(a, d, s):\n  a.sort(); d['x'] = 1; s.discard(1)\n  return a"
    test = "a, d, s = [3, 1], {}, {1, 2}; f(a, d, s); assert (a, d, s) == ([1, 3], {'x': 1}, {2})"
    assert verdict(sandbox, code, test).all_passed


def test_objects_of_the_code_are_used_from_the_tests(sandbox: Sandbox) -> None:
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


def test_exceptions_of_the_code_are_raised_in_the_tests(sandbox: Sandbox) -> None:
    code = "class Own(Exception): pass\ndef f(x):\n  if x: raise ValueError('no')\n  raise Own('mine')"
    test = "try: f(1)\nexcept ValueError as error: assert str(error) == 'no'\nelse: assert False"
    found = verdict(sandbox, code, test, "f(0)", "g()")
    assert found.passed == (True, False, False)
    assert found.reasons[1:] == ("Raised: Own: mine", "NameError: name 'g' is not defined")


def test_tests_may_hold_a_check_function(sandbox: Sandbox) -> None:
    setup = "import math\ndef check(candidate):\n  assert math.isclose(candidate(0.5), 0.25)"
    assert verdict(sandbox, "def sq(x): return x * x", "check(sq)", setup=setup).all_passed


def test_a_function_named_as_one_of_pythons_own_is_the_codes_only_if_named_as_entry(sandbox: Sandbox) -> None:
    code = "def sum(a, b): return a + b\ndef set(x): return 7\ndef sorted_set(x): return [9]"
    found = verdict(sandbox, code, "assert sum(1, 2) == 3", "assert set(sorted_set(1)) == set([1])", entry=("sum",))
    assert found.passed == (True, False)
    assert verdict(sandbox, code, "assert sum(1, 2) == 3").passed == (False,)


def test_functions_handed_over_are_refused_in_words(sandbox: Sandbox) -> None:
    found = verdict(sandbox, "def f(g): return g()", "assert f(lambda: 1) == 1")
    assert "hand over function" in found.reasons[0]


def test_what_only_a_script_does_is_not_run(sandbox: Sandbox) -> None:
    code = "def add(a, b): return a + b\nif __name__ == '__main__': print(input())"
    assert verdict(sandbox, code).all_passed


def test_what_the_code_prints_is_reported(sandbox: Sandbox) -> None:
    assert verdict(sandbox, "print('hello')\ndef add(a, b): return a + b").code.stdout == "hello\n"


def test_a_module_of_the_library_need_not_be_imported_by_the_tests(sandbox: Sandbox) -> None:
    assert verdict(sandbox, "def root(x): return x ** 0.5", "assert math.isclose(root(4), 2)").all_passed


def test_where_the_names_under_test_are_given_the_others_are_not_the_codes(sandbox: Sandbox) -> None:
    code = "expected = 3\ndef add(a, b): return 3"
    found = verdict(sandbox, code, "assert add(1, 2) == expected", entry=("add",))
    assert found.reasons == ("NameError: name 'expected' is not defined: under test are add",)
    assert verdict(sandbox, code, "assert add(1, 2) == expected").all_passed


def test_records_that_are_longer_than_what_is_kept_fail_their_tests_only(sandbox: Sandbox) -> None:
    tests = ["assert add(1, 2) == 3", *["assert 0, chr(0) * 1000"] * 800, "assert add(1, 2) == 3"]
    found = verdict(sandbox, "def add(a, b): return a + b", *tests)
    assert found.passed == (True, *[False] * 800, True)
    assert "not judged: the tests ended with the outcome finished" in found.reasons
