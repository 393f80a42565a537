"""Whether the package of a plug-in is installed, checked without importing it. Standard library only."""

from importlib.util import find_spec


def check_installed(package: str, *, extra: str, instead: str) -> None:
    """Refuse a plug-in whose package is missing.

    Args:
        extra: of condensegrpo, which installs the package.
        instead: what the user can do without it.
    """
    if find_spec(package) is None:
        raise ValueError(
            f"{package} is not installed. Run pip install 'condensegrpo[{extra}]' (in a clone: pip install -e "
            f"'.[{extra}]'), or {instead}"
        )
