"""Which rung of the sandbox holds on this machine, found out by running code on it that tries to get out."""

from condensegrpo.cli.findings import Finding, ok, warning
from condensegrpo.sandbox.ladder import AUTO, CURES, faults
from condensegrpo.sandbox.setting import Rung


def sandbox_finding(rung: str = AUTO) -> Finding:
    """The strongest rung that holds, or the one that a configuration asks for."""
    if rung == Rung.NONE:
        cure = "leave sandbox.rung away on a machine that has anything to lose"
        return warning("sandbox", "none: code that a model wrote runs with your rights", cure)
    found = faults()
    wanted = tuple(found) if rung == AUTO else (Rung(rung),)
    holding = next((one for one in wanted if found[one] is None), None)
    if holding is None:
        why = "; ".join(f"{one}: {found[one]}" for one in wanted)
        cure = " or ".join(CURES[one] for one in wanted)
        return warning("sandbox", f"no rung holds, code that a model wrote is not run: {why}", cure)
    if holding is Rung.LANDLOCK and rung == AUTO:
        text = f"landlock: it holds, and code cannot start processes; namespaces do not: {found[Rung.NAMESPACES]}"
        return warning("sandbox", text, CURES[Rung.NAMESPACES])
    return ok("sandbox", f"{holding}: code that tried to get out of it did not")
