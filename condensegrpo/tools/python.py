"""The tool ``python``: runs what a model wrote, in the sandbox."""

from condensegrpo.sandbox.current import current
from condensegrpo.sandbox.ran import Outcome, Ran


class Python:
    """The tool ``python``: every call begins with nothing, and what it prints is its result."""

    def __init__(self, *, seconds: float | None = None) -> None:
        """Open the sandbox.

        Args:
            seconds: that one call may run, in place of ``sandbox.seconds``. Set ``rollout.tool_seconds`` well above it:
                that counts the time too that a call waits for others.

        Raises:
            SandboxError: no sandbox holds on this machine.
        """
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds}: wanted a number above 0")
        self._seconds = seconds
        current().open()

    async def __call__(self, code: str) -> str:
        """Runs Python code and returns what it prints. Nothing is kept between two calls.

        Args:
            code: Python source. Print what you need to know.

        Returns:
            What the code printed.
        """
        ran = await current().run_python(code, seconds=self._seconds)
        if ran.outcome is not Outcome.FINISHED:
            raise RuntimeError(_fault(ran))
        return ran.stdout


def _fault(ran: Ran) -> str:
    said = "\n".join(text.strip() for text in (ran.stdout, ran.stderr) if text.strip())
    how = "" if ran.outcome is Outcome.FAILED and said else f"the code was ended ({ran.outcome}) {ran.detail}".strip()
    return "\n".join(filter(None, (how, said)))
