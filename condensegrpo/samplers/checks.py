"""Checks what a sampler is given: the limits of a request, the names and shapes of new weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.trajectory import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, *, room: int | None, limit: str, longer: str
) -> None:
    """Check that a request has a prompt and a reply, which fit together.

    Args:
        room: most tokens of a prompt with its reply; None: not known.
        limit: what says so.
        longer: how there is more room.
    """
    tokens, most = len(prompt_ids), params.max_tokens
    if not tokens or most < 1 or not params.temperature >= 0:
        raise SamplerError(
            f"sampling a reply: found a prompt of {tokens} tokens, max_tokens={most} and "
            f"temperature={params.temperature}; wanted at least one token of each and a temperature of at least 0."
        )
    if room is not None and tokens + most > room:
        raise SamplerError(
            f"sampling a reply: a prompt of {tokens} tokens and max_tokens={most} make {tokens + most}, and {limit}. "
            f"Lower rollout.limits.max_context_tokens or rollout.limits.max_output_tokens, or {longer}."
        )


@dataclass(slots=True, kw_only=True)
class UpdateCheck:
    """Checks the tensors of an update one by one and raises after the last: a reload must not stop halfway."""

    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[frozenset[str], ...]  # names of the same weight: several where it is tied
    taken: set[str] = field(default_factory=set)
    fault: str = ""  # the first

    @classmethod
    def of(cls, model: "nn.Module") -> Self:
        """The check of one update of a model in transformers."""
        names: dict[int, set[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), set()).add(name)
        return cls(
            shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
            groups=tuple(frozenset(group) for group in names.values()),
        )

    def takes(self, name: str, tensor: "Tensor") -> bool:
        """Whether a tensor can be loaded."""
        if name not in self.shapes:
            self.fault = self.fault or (
                f"{name!r} is no weight of its model, which has {len(self.shapes)} from {min(self.shapes)!r} to "
                f"{max(self.shapes)!r}. Learner and sampler must load the same architecture."
            )
            return False
        if tuple(tensor.shape) != self.shapes[name]:
            self.fault = self.fault or (
                f"{name!r} has the shape {tuple(tensor.shape)}, the sampler's model wants {self.shapes[name]}. Gather "
                f"sharded weights before handing them over."
            )
            return False
        self.taken.add(name)
        return True

    def nbytes(self, dtype: "torch.dtype") -> int:
        """Bytes of all weights in a type, tied ones once."""
        return sum(math.prod(self.shapes[min(group)]) for group in self.groups) * dtype.itemsize

    def passed(self, named_tensors: NamedTensors) -> "Iterator[tuple[str, Tensor]]":
        """Yield the tensors that match, and raise after the last one unless all of them did; see ``complete``."""
        yield from ((name, tensor) for name, tensor in named_tensors if self.takes(name, tensor))
        self.complete()

    def complete(self) -> None:
        """Check that every weight was given, under one of its names."""
        missing = [min(group) for group in self.groups if not group & self.taken]
        if not self.fault and missing:
            self.fault = (
                f"{len(missing)} of {len(self.groups)} were not given, the first is {min(missing)!r}. The sampler now "
                f"holds old and new weights: hand over all of them."
            )
        if self.fault:
            raise SamplerError(f"updating the sampler's weights: {self.fault}")
