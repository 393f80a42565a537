"""Python's parser for code that several threads parse. Standard library only.

``ast.parse`` counts its depth in one place for all threads (CPython 3.11, issue 106905): two at once may fail with
``SystemError: AST constructor recursion depth mismatch``.
"""

import ast
from threading import Lock

_parser = Lock()


def parsed(source: str) -> ast.Module:
    """The syntax tree of a program, as ``ast.parse`` gives and refuses it."""
    with _parser:
        return ast.parse(source)


def parsed_expression(source: str) -> ast.Expression:
    """The syntax tree of an expression, as ``ast.parse`` gives and refuses it."""
    with _parser:
        return ast.parse(source, mode="eval")
