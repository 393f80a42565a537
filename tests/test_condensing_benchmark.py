"""The benchmark of condensers that need a model: what trajectories ask for alike is computed once."""

from pathlib import Path

import pytest
from condensing import NAMES, make_model, played


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_model(made)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_eight_trajectories_that_say_the_same_cost_one(name: str, folder: Path) -> None:
    apart, alike = (played(name, folder, problems=1, turns=10, alike=same) for same in (False, True))
    assert int(apart[1]) == 8 * int(alike[1]) > 0
    assert apart[-1] != alike[-1]
    assert played(name, folder, problems=1, turns=10, alike=True)[-1] == alike[-1]
