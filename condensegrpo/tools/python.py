"""The tool ``python``: runs code that a model wrote, in the sandbox."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from condensegrpo.sandbox.calls import CallOutcome
from condensegrpo.sandbox.sandbox import Sandbox


@dataclass(eq=False, kw_only=True)
class Python:
    """Runs Python code in the sandbox: each call starts a fresh interpreter; its result is what the code prints.

    ``SandboxError``: no isolation backend works on this machine.
    """

    sandbox: Sandbox  # in which the code runs; the assembly passes the one of the configuration
    # time limit of one call, in place of the sandbox's. Set the time limit of the rollout's tools well above it: that
    # one includes the time that a call waits for other calls.
    seconds: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        self.sandbox.open()

    async def __call__(self, code: str) -> str:
        """Runs Python code and returns what it prints. Nothing is kept between two calls.

        Args:
            code: Python source. Print what you need to know.

        Returns:
            The output of the code.
        """
        result = await self.sandbox.run_python(code, seconds=self.seconds)
        if result.outcome is CallOutcome.FINISHED:
            return result.stdout
        output = "\n".join(text.strip() for text in (result.stdout, result.stderr) if text.strip())
        if result.outcome is CallOutcome.FAILED and output:
            raise RuntimeError(output)
        stopped = f"the code was stopped ({result.outcome}) {result.detail}".strip()
        raise RuntimeError(f"{stopped}\n{output}" if output else stopped)
