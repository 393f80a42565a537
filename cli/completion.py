"""What the shell completes: names of shipped configurations and folders of runs. Imports nothing heavy."""

from pathlib import Path

import condensegrpo.configs


def config_names(incomplete: str) -> list[str]:
    """The shipped configurations whose names begin so; where none does, the shell completes files."""
    shipped = Path(condensegrpo.configs.__file__).parent.glob("*.yaml")
    return sorted(file.stem for file in shipped if file.stem.startswith(incomplete))


def run_folders(incomplete: str) -> list[str]:
    """The runs in ``runs/`` whose paths begin so, sweeps' runs included."""
    configurations = (file for pattern in ("*/config.yaml", "*/*/config.yaml") for file in Path("runs").glob(pattern))
    return sorted(str(file.parent) for file in configurations if str(file.parent).startswith(incomplete))
