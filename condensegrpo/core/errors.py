"""Every error that condensegrpo raises on purpose.

    CondenseError
    ├── ConfigError          the configuration is wrong; raised before any model is loaded
    │   ├── PluginError      a plug-in is unknown, cannot be imported or refuses its options
    │   └── ModelMissing     the model is not on this machine, nor on a Hub that can be reached
    ├── DataError            a file or dataset does not hold what it should
    │   ├── DataMissing      it is not on this machine, nor on a Hub that can be reached
    │   └── TrajectoryFileError  a trajectory file is truncated, of another version or breaks an invariant
    ├── RolloutError         a trajectory cannot be sampled as configured
    │   ├── TooManyFailed    most trajectories failed; every rank raises it
    │   ├── PrefixBroken     a prompt does not continue the last one and no condensation was declared
    │   ├── ContextOverflow  a prompt does not fit, whatever the condenser did
    │   ├── EnvironmentLost  what an environment needs is gone, such as its server
    │   ├── SummaryRefused   a summary was not written, or cannot be used
    │   └── SamplerError     the sampler failed
    │       └── ServerUnreachable  a server of it cannot be reached or fails; a retry may succeed
    ├── SandboxError         no sandbox holds on this machine, or its server ended
    ├── ScoreError           a reward is not a finite number
    ├── LearnerError         the optimiser step cannot be taken as configured
    │   └── CheckpointError  a checkpoint is damaged, incomplete or of another run
    └── RunError             the run folder is in use, missing or full
        └── Interrupted      the run was stopped before there was anything to save

A message says what was being done, what was found, what was wanted and what to do now. Errors come back from worker
processes, so none defines ``__init__`` (they must unpickle): named constructors build the messages.
"""

from collections.abc import Callable
from functools import cached_property, wraps
from types import FunctionType
from typing import ParamSpec, Self, TypeVar

from condensegrpo.core.packages import missing_package


class CondenseError(Exception):
    """Base of every error that condensegrpo raises on purpose."""


class ConfigError(CondenseError):
    """The configuration is wrong."""


class PluginError(ConfigError):
    """A plug-in is unknown, cannot be imported or refuses its options."""


class ModelMissing(ConfigError):
    """The model is not on this machine, nor on a Hub that can be reached."""


class DataError(CondenseError):
    """A file or dataset does not hold what it should."""


class DataMissing(DataError):
    """A file or dataset is not on this machine, nor on a Hub that can be reached."""


class TrajectoryFileError(DataError):
    """A trajectory file is truncated, of another version or breaks an invariant."""


class RolloutError(CondenseError):
    """A trajectory cannot be sampled as configured."""


class TooManyFailed(RolloutError):
    """Most trajectories of a batch failed, or all: every rank raises it."""


class PrefixBroken(RolloutError):
    """A prompt does not begin with the last prompt and output, and no condensation was declared."""

    @classmethod
    def at(cls, *, turn: int, position: int, expected: int, found: int | None) -> Self:
        """The error for the first token that differs; ``found=None`` says that the prompt ended there."""
        ending = "ends" if found is None else f"holds {found}"
        return cls(
            f"turn {turn} does not continue turn {turn - 1}: at token {position} the prompt {ending}, the earlier turn "
            f"had {expected}, and no condensation was declared there. The text was probably tokenised again; build the "
            f"prompt from token ids, or declare the rewrite in Turn.condensation."
        )


class ContextOverflow(RolloutError):
    """A prompt does not fit its budget, whatever the condenser did."""

    @classmethod
    def at(cls, *, turn: int, tokens: int, budget: int) -> Self:
        """The error for a prompt of ``tokens`` where ``budget`` were allowed."""
        return cls(
            f"the prompt of turn {turn} needs {tokens} tokens and the context budget is {budget}: raise "
            f"rollout.limits.max_context_tokens or choose a condenser that keeps less"
        )


class EnvironmentLost(RolloutError):
    """What an environment needs is gone, such as its server. Raised by one of its tools, it ends the trajectory."""


class SummaryRefused(RolloutError):
    """A summary was not written, or cannot be used; nothing of it gets into a context."""


class SamplerError(RolloutError):
    """The sampler failed."""

    @classmethod
    def no_model(cls, path: str, error: Exception) -> Self:
        """The error for a folder or Hub id that holds no model."""
        return cls(
            f"loading the sampler's model from {path!r}: {error} Wanted a Hugging Face folder or Hub id of a causal "
            f"language model."
        )

    @classmethod
    def not_numbers(cls, sampled: str) -> Self:
        """The error for logits that are infinite or not numbers."""
        return cls(
            f"sampling {sampled}: the model's logits are not numbers, nothing can be drawn. The weights have probably "
            f"diverged: look at the last optimiser steps, lower the learning rate."
        )


class ServerUnreachable(SamplerError):
    """A sampler's server cannot be reached, or fails: a retry may succeed."""


class SandboxError(CondenseError):
    """No sandbox holds on this machine, or the one in use has ended."""


class ScoreError(CondenseError):
    """A reward is not a finite number."""


class LearnerError(CondenseError):
    """The optimiser step cannot be taken as configured."""


class CheckpointError(LearnerError):
    """A checkpoint is damaged, incomplete or of another run."""


class RunError(CondenseError):
    """The run folder is in use, missing or full."""


class Interrupted(RunError):
    """The run was stopped before there was anything to save."""


C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")


def concise(function: Callable[P, T]) -> Callable[P, T]:
    """Let errors that are raised on purpose show the line of the caller and the message, no lines of this package."""

    @wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except CondenseError as error:
            raise error.with_traceback(None) from None
        except ModuleNotFoundError as error:
            if (text := missing_package(error)) is None:
                raise
            raise ConfigError(f"{text}.") from None

    return called


def concise_class(kind: C) -> C:
    """Make the constructor, the public methods and the properties of a class ``concise``."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name not in ("__init__", "__getitem__"):
            continue
        if isinstance(member, FunctionType):
            setattr(kind, name, concise(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(concise(member.fget)))
        elif isinstance(member, cached_property):
            member.func = concise(member.func)
    return kind
