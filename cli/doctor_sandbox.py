"""Which isolation backend of the sandbox works on this machine, found by running code in it that tries to escape."""

from condensegrpo.cli.findings import Finding, ok, warning
from condensegrpo.sandbox.isolation import Isolation
from condensegrpo.sandbox.probing import AUTO, REMEDIES, probe_backends


def sandbox_finding(isolation: str = AUTO) -> Finding:
    """The strongest backend that works, or the one that a configuration asks for."""
    if isolation == Isolation.NONE:
        remedy = "remove sandbox.isolation from the configuration, except on a disposable machine"
        return warning("sandbox", "none: code of a model runs with your own rights", remedy)
    faults = probe_backends()
    wanted = tuple(faults) if isolation == AUTO else (Isolation(isolation),)
    working = next((backend for backend in wanted if faults[backend] is None), None)
    if working is None:
        why = "; ".join(f"{backend}: {faults[backend]}" for backend in wanted)
        remedy = " or ".join(REMEDIES[backend] for backend in wanted)
        return warning("sandbox", f"no isolation backend works, code of a model is not run: {why}", remedy)
    if working is Isolation.LANDLOCK and isolation == AUTO:
        text = f"landlock works, and code cannot start processes; namespaces do not: {faults[Isolation.NAMESPACES]}"
        return warning("sandbox", text, REMEDIES[Isolation.NAMESPACES])
    return ok("sandbox", f"{working}: the code that tried to escape did not succeed")
