"""Packages that only an extra installs: what is missing, and how to install it. Standard library only."""

from importlib.util import find_spec

TRAIN = frozenset(  # packages of the extra ``train``, by the names they are imported by
    ("torch", "deepspeed", "peft", "datasets", "matplotlib", "scipy", "bm25s", "math_verify")
)


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'condensegrpo[{extra}]' (in a clone: pip install -e '.[{extra}]')"


def missing_package(error: BaseException) -> str | None:
    """The message of an import that the extra ``train`` would satisfy, without a full stop; None: of another error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"importing {name}: it is not installed. Run {install('train')}" if name in TRAIN else None


def check_installed(package: str, *, extra: str, instead: str) -> None:
    """Refuse a plug-in whose package is missing.

    Args:
        extra: of condensegrpo, which installs the package.
        instead: what the user can do without it.
    """
    if find_spec(package) is None:
        raise ValueError(f"{package} is not installed. Run {install(extra)}, or {instead}")
