"""Which trajectories of a file the options of ``condensegrpo inspect`` mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.inspection import views
from condensegrpo.inspection.records import IndexedTrajectory, groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Options that select trajectories; None: not given."""

    group: str | None = None  # 6/12, or 12
    trajectory: str | None = None  # 6/12/3, 12/3, or its number in order, 99 or #99
    where: str | None = None
    sort: str | None = None

    @property
    def given(self) -> bool:
        """Whether any option was given."""
        return any((self.group, self.trajectory, self.where, self.sort))

    @property
    def is_named(self) -> bool:
        """Whether a group or a trajectory is named."""
        return bool(self.group or self.trajectory)

    def within(self, view: views.ReadyView | None) -> "Choice":
        """The same among the trajectories of a ready view, in its order unless ``sort`` is given."""
        if view is None:
            return self
        where = f"({view.where}) and ({self.where})" if self.where else view.where
        return Choice(group=self.group, trajectory=self.trajectory, where=where, sort=self.sort or view.sort)

    def of(self, every: Sequence[IndexedTrajectory]) -> tuple[IndexedTrajectory, ...]:
        """The trajectories that match, in order. Without options: those of the first group with a signal.

        Raises:
            DataError: none matches.
            ConfigError: ``where`` or ``sort`` cannot be read.
        """
        meant = self.named(every)
        matches = views.select(meant, where=self.where, sort=self.sort, most=len(every)).records
        if not matches:
            raise DataError(
                f"looking for trajectories where {self.where}: none of {len(every)} is left. Try another step or a "
                f"wider condition; on a terminal, or with --html FILE, all steps are searched."
                if self.where
                else f"looking for trajectory {self.trajectory} in group {self.group}: it is in another group. Leave "
                f"--group out."
            )
        if not self.given:
            by_group = groups(matches)
            return next((group for group in by_group if group.signal), by_group[0]).siblings
        return matches

    def named(self, every: Sequence[IndexedTrajectory]) -> list[IndexedTrajectory]:
        """Those of the named group and with the named id; all if none is named.

        Raises:
            DataError: there is no such group or trajectory.
        """
        group = _meant("group", self.group, [record.figures.group_id for record in every])
        named = _meant("trajectory", self.trajectory, [record.id for record in every])
        return [record for record in every if group in (None, record.figures.group_id) and named in (None, record.id)]


def one_view(names: Sequence[str]) -> str | None:
    """The view of ``--view``; None: not given.

    Raises:
        ConfigError: several views are named.
    """
    if len(names) > 1:
        raise ConfigError(f"reading --view: found {' and '.join(names)}, wanted one view. Add a condition by --where.")
    return next(iter(names), None)


def check_output(page: Path | None, picture: Path | None) -> None:
    """Check the files of ``--html`` and ``--svg``.

    Raises:
        ConfigError: a file has another ending, or both are given.
    """
    for file, endings in ((page, (".html", ".htm")), (picture, (".svg",))):
        if file is not None and file.suffix not in endings:
            raise ConfigError(f"writing {file}: wanted a name that ends in .html, for a page, or .svg, for a picture.")
    if page is not None and picture is not None:
        raise ConfigError(
            f"reading --html and --svg: found {page} and {picture}, wanted one file. Run the command for each."
        )


def _meant(kind: str, given: str | None, every: Sequence[str]) -> str | None:
    """The id that is meant by itself, by its end (12/3 for 6/12/3), or by its number in order (3 or #3), from 0.

    Raises:
        DataError: none is meant.
    """
    ids = list(dict.fromkeys(every))
    if given is None or given in ids:
        return given
    number = given.removeprefix("#")
    ends = [name for name in ids if name.endswith(f"/{number}")]
    if number.isdecimal() and (kind == "trajectory" or not ends):  # 12 is also the group 6/12
        ends = ids[int(number) :][:1]
    if not ends:
        more = f" and {len(ids) - 12} more" if len(ids) > 12 else ""
        raise DataError(f"looking for {kind} {given!r}: there are {', '.join(ids[:12])}{more}.")
    return ends[0]
