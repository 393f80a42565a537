"""Code that tries to pass tests without doing what they ask. Run like ``hostile.py``, also by another Python as nobody.

As a program: ``python forgeries.py ISOLATION`` prints every verdict, as JSON.
"""

import asyncio
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from condensegrpo.sandbox.calls import CallResult, SandboxLimits
from condensegrpo.sandbox.grade import CodeVerdict, grade
from condensegrpo.sandbox.sandbox import Sandbox

SECONDS = 2.0
LIMITS = SandboxLimits(seconds=SECONDS, memory_mib=256)
TESTS = ("assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'")
# for code that uses the channel itself
TALK = """
        import json, os, struct
        def say(message):
            body = json.dumps(message).encode()
            os.write(3, struct.pack('>Q', len(body)) + body)
        def hear():
            length, = struct.unpack('>Q', os.read(3, 8))
            return json.loads(os.read(3, length))
        """

FORGERIES = {
    "os._exit(0) before the asserts": "import os; os._exit(0)",
    "sys.exit(0) before the asserts": "import sys; sys.exit(0)",
    "raise SystemExit before the asserts": "raise SystemExit",
    "exit within the function": "def add(a, b): raise SystemExit(0)",
    "os._exit within the function": "import os\ndef add(a, b): os._exit(0)",
    "an assertion that always holds": """
        class Always:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
            __hash__ = None
        def add(a, b): return Always()
    """,
    "a number that equals everything": """
        class Always(int):
            def __eq__(self, other): return True
        def add(a, b): return Always(7)
    """,
    "the grader's success text": """
        print('passed\\n[0, true, ""]\\nOK')
        def add(a, b): print('3 passed')
    """,
    "records written to every descriptor": """
        import os
        def add(a, b):
            for fd in range(64):
                for text in (b'0 [0, true, ""]\\n[1, true, ""]\\n', b'{"loaded": true}'):
                    try: os.write(fd, text)
                    except OSError: pass
    """,
    "the channel taken over": """
        import json, os, struct
        def say(message):
            body = json.dumps(message).encode()
            os.write(3, struct.pack('>Q', len(body)) + body)
        say({"loaded": True})
        for _ in range(20):
            say({"value": True, "passed": True, "changed": {"0": True}})
        os._exit(0)
    """,
    "a flood on the channel": "import os\nwhile True: os.write(3, b'\\xff' * 65536)",
    "an answer nested without end": """
        import os, struct
        body = b'{"loaded": true}'
        os.write(3, struct.pack('>Q', len(body)) + body)
        body = b'{"value": ' + b'["list",[' * 100000 + b']]' * 100000 + b'}'
        os.write(3, struct.pack('>Q', len(body)) + body)
    """,
    "asserts disabled in every module": """
        import builtins
        builtins.AssertionError = type('Quiet', (), {})
        builtins.compile = builtins.exec = builtins.isinstance = lambda *a, **k: True
        def add(a, b): return None
    """,
    "tests overwritten on disk": """
        for name in ('tests.py', 'conftest.py', 'sitecustomize.py', 'test_0.py', 'judge.py'):
            open(name, 'w').write('import os; os._exit(0)')
        def add(a, b): return None
    """,
    "the expected value read from memory": """
        import gc, re, sys
        def add(a, b):
            frame, places = sys._getframe(), gc.get_objects()
            while frame:
                places.append(frame.f_locals)
                frame = frame.f_back
            for one in places:
                if isinstance(one, (dict, list, tuple)) and re.search('asser[t] add.[12]', str(one)): return 3
    """,
    "the expected value read from inspect": """
        import inspect
        def add(a, b):
            for frame in inspect.stack():
                for line in frame.code_context or ():
                    if 'assert add(' in line: return eval(line.split('==')[1])
    """,
    "the expected value read from /proc": """
        import glob
        def add(a, b):
            for name in glob.glob('/proc/*/mem') + glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/fd/*'):
                try: text = open(name, 'rb').read(1 << 20)
                except OSError: continue
                if b'assert add(1' in text: return 3
    """,
    "equality of Python's own types patched by ctypes": """
        import ctypes
        def add(a, b): return None
        del __builtins__
    """,
    "a builtin exception redefined by the code": "class AssertionError(Exception): pass\ndef add(a, b): pass",
    "empty code": "",
    "a syntax error": "def add(a, b: return",
    "a loop": "def add(a, b):\n  while True: pass",
    "a loop before the functions": "while True: pass",
    "arguments emptied": "def add(a, b):\n  for one in (a, b):\n    if hasattr(one, 'clear'): one.clear()",
    "an exception named like one of the judge": "def add(a, b): raise type('ConnectionLost', (Exception,), {})('x')",
    "a first message of another form": TALK + "say([1]); os._exit(0)",
    "a first message that fills the memory": TALK
    + """
        body = b'[' + b'[],' * 5_000_000 + b'[]]'
        rest = struct.pack('>Q', len(body)) + body
        while rest: rest = rest[os.write(3, rest):]
    """,
    "answers that raise exceptions that would end the judge": TALK
    + """
        say({"loaded": True})
        kinds = "SystemExit KeyboardInterrupt GeneratorExit ConnectionLost MemoryError StopIteration".split()
        for kind in kinds * 3:
            hear(); say({"error": [kind, "0"]})
    """,
    "handles in place of arguments": TALK
    + """
        say({"loaded": True})
        for n in range(1000):
            hear(); say({"value": ["handle", n], "changed": {"0": ["handle", 5], "1": ["handle", 5]}})
    """,
    "numbers that take forever to compare": """
        from decimal import Decimal
        def add(a, b): return Decimal('1e999999999')
    """,
    "a number that is no number": "def add(a, b): return float('nan')",
    "an object that answers yes to every operation": """
        class Any:
            def __getattr__(self, name): return lambda *a, **k: True
            def __eq__(self, other): return True
            __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
            def __hash__(self): return 0
            def __len__(self): return 3
            def __iter__(self): return iter(())
        def add(a, b): return Any()
    """,
    "the judge's functions replaced in every module": """
        import sys
        def add(a, b):
            for module in list(sys.modules.values()):
                for name in ('_exactly', '_run', 'Remote', 'judge'):
                    try: setattr(module, name, lambda *a, **k: None)
                    except Exception: pass
    """,
    "descriptors sent along the channel": """
        import os, socket
        def add(a, b):
            here = socket.socket(fileno=os.dup(3))
            try: socket.send_fds(here, [b'\\0' * 8], [1, 2])
            except OSError: pass
    """,
    "the channel shut down": """
        import socket
        socket.socket(fileno=3).shutdown(socket.SHUT_RDWR)
        def add(a, b): return 3
    """,
    "a child that answers when its parent has exited": """
        import os, time
        def add(a, b): return None
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
    """,
}

# what only passes if a test can be fooled: code, test
FOOLED = {
    "a loop of the test ended by StopIteration": (
        "def f(x): raise StopIteration",
        "assert all(map(f, [1, 2]))",
    ),
    "a list of the test ended by StopIteration": (
        "def f(x): raise StopIteration",
        "assert list(map(f, [1, 2])) == []",
    ),
    "a module of the library redefined by the code": (
        "class sys: getsizeof = lambda x: 0\ndef f(x): return 0",
        "assert f((1, 2)) == sys.getsizeof((1, 2))",
    ),
    "a class of the library redefined by the code": (
        "def Counter(x): return 0\ndef f(x): return 0",
        "assert f('aab') == Counter('aab')",
    ),
    "an object that contains everything": (
        "class A:\n  def __contains__(self, x): return True\ndef f(x): return A()",
        "assert 3 in f(1)",
    ),
    "an object that is near everything": (
        "class A(float):\n  def __sub__(self, x): return 0.0\n  __rsub__ = __sub__\ndef f(x): return A(7)",
        "assert abs(f(1) - 3) < 1e-6 and abs(3 - f(1)) < 1e-6",
    ),
    "a dictionary with every key": (
        "class D(dict):\n  def __missing__(self, key): return 3\n  def __eq__(self, other): return True\n"
        "def f(x): return D()",
        "assert f(1)['a'] == 3 or f(1) == {'a': 3}",
    ),
    "a text that equals every text": (
        "class S(str):\n  def __eq__(self, other): return True\n  __hash__ = str.__hash__\ndef f(x): return S('no')",
        "assert f(1) == 'yes'",
    ),
    "a builtin function redefined by the code": (
        "def sorted(x): return []\ndef f(x): return []\nimport builtins\nbuiltins.sorted = sorted",
        "assert f([2, 1]) == sorted([2, 1])",
    ),
    "a class that only claims to be a list": (
        "class L:\n  __class__ = list\n  def __eq__(self, other): return True\ndef f(x): return L()",
        "assert isinstance(f(1), list)",
    ),
}


def work() -> dict[str, tuple[str, Sequence[str], Sequence[str]]]:
    """Code, tests and entry by name."""
    forged = {name: (textwrap.dedent(code), TESTS, ()) for name, code in FORGERIES.items()}
    return {**forged, **{name: (code, (test,), ("f",)) for name, (code, test) in FOOLED.items()}}


async def run_all(isolation: str) -> dict[str, CodeVerdict]:
    """The verdict of each forgery, several at a time."""
    with Sandbox(isolation=isolation, limits=LIMITS, parallel=6) as sandbox:
        verdicts = [
            asyncio.to_thread(grade, sandbox, code, tests, entry=entry) for code, tests, entry in work().values()
        ]
        return dict(zip(work(), await asyncio.gather(*verdicts), strict=True))


def encoded(isolation: str) -> str:
    return json.dumps({name: asdict(verdict) for name, verdict in asyncio.run(run_all(isolation)).items()})


def decoded(text: str) -> dict[str, CodeVerdict]:
    return {name: _verdict(**data) for name, data in json.loads(text).items()}


def _verdict(*, passed: list[bool], reasons: list[str], judge: dict[str, Any], code: dict[str, Any]) -> CodeVerdict:
    results = [replace(CallResult(**data), records=()) for data in (judge, code)]
    return CodeVerdict(passed=tuple(passed), reasons=tuple(reasons), judge=results[0], code=results[1])


if __name__ == "__main__":
    print(encoded(sys.argv[1]))
