"""The bootstrap over problems: intervals of means and of paired differences. Pure functions.

Samples of one problem resemble each other, so whole problems are drawn with replacement, each with all its samples
(the cluster bootstrap, https://doi.org/10.1017/CBO9780511802843, ch. 3.8). Suffix _G: problems; _R: resamples.
"""

from collections.abc import Mapping, Sequence

import torch

from condensegrpo.metrics.estimates import Interval

RESAMPLES = 10_000
Values = Mapping[str, Sequence[float]]  # problem → the values of its samples, at least one each


def bootstrap_interval(values: Values, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean over all samples, with the 2.5 % and 97.5 % quantiles of the means of resampled problems.

        mean* = Σ_g s_g / Σ_g n_g      over G problems g drawn with replacement; s_g: sum, n_g: number of its samples

    One problem alone says nothing about others: its bounds are None. Where all problems agree the interval has no
    width, which does not mean that the rate is known exactly.

    Raises:
        ValueError: there is no problem, or one without a sample.
    """
    total_G, size_G = _sums(values)
    mean = float(total_G.sum() / size_G.sum())
    if len(values) == 1:
        return Interval(mean, None, None)
    drawn_RG = _draws(len(values), seed, resamples)
    means_R = total_G[drawn_RG].sum(1) / size_G[drawn_RG].sum(1)
    return Interval(mean, *_quantiles(means_R))


def paired_difference(ours: Values, theirs: Values, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """``ours`` less ``theirs``, by problem, so that how hard a problem is cancels out.

        mean_g (mean of ours_g − mean of theirs_g), each problem counted once; interval as of ``bootstrap_interval``

    Raises:
        ValueError: the two are not of the same problems.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(
            f"comparing by problem: {len(ours.keys() ^ theirs.keys())} problems are on one side only; wanted the same "
            f"problems on both"
        )
    means = {problem: _mean(ours[problem]) - _mean(theirs[problem]) for problem in sorted(ours)}
    return bootstrap_interval({problem: [value] for problem, value in means.items()}, seed=seed, resamples=resamples)


def _sums(values: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and numbers of samples by problem, in the order of their names, so that the order given does not matter."""
    empty = [problem for problem, found in values.items() if not len(found)]
    if empty or not values:
        raise ValueError(f"a bootstrap needs at least one sample of every problem, found none of {empty or 'any'}")
    ordered = [values[problem] for problem in sorted(values)]
    total_G = torch.tensor([sum(found) for found in ordered], dtype=torch.float64)
    return total_G, torch.tensor([len(found) for found in ordered], dtype=torch.float64)


def _draws(problems: int, seed: int, resamples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(problems, (resamples, problems), generator=generator)


def _quantiles(means_R: torch.Tensor) -> tuple[float, float]:
    low, high = torch.quantile(means_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found)
