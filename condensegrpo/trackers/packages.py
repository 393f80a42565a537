"""Whether the package of a tracker is installed, checked without importing it."""

from importlib.util import find_spec


def check_package_installed(package: str) -> None:
    """Refuse a tracker whose package is missing.

    Raises:
        ValueError: it is not installed; says what to install.
    """
    if find_spec(package) is None:
        raise ValueError(
            f"the package {package} is not installed. Run pip install 'condensegrpo[{package}]' (in a clone: "
            f"pip install -e '.[{package}]'), or take the tracker out of the configuration"
        )
