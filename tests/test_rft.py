"""The control of studies that imitates successes: its advantages, by the name that a study gives it."""

from command import ROOT

from condensegrpo.algorithms.credit import Estimator
from condensegrpo.algorithms.invariance import SCORES, check_estimator
from condensegrpo.core.plugins import load_plugin


def test_successes_count_1_at_each_of_their_turns_whatever_their_siblings_did() -> None:
    rft = Estimator(load_plugin("estimators", f"{ROOT}/studies/rft.py:rft"))
    check_estimator(rft)
    assert rft(SCORES).advantage_NK.tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]]
    half_right = SCORES._replace(correct_N=SCORES.correct_N / 2)
    assert not rft(half_right).advantage_NK.any()
