"""Keys and values of many replies, a slot each: for every layer (slots, heads, length, size), zeros where unused.

Slots know which tokens they hold and whose they are. A trajectory that is between two replies keeps its slot, so that a
prompt that continues the last one is not computed again; the one that was idle the longest gives its slot away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from condensegrpo.core.shared_sequence import common_prefix

ALIGNED = 16  # floats of 64 bytes: lengths and head sizes are padded to multiples, see packed_attention.py
SHORTEST = 2 * ALIGNED  # positions of a slot
LONGER = 1.25  # factor by which the length of slots grows at least, as far as replies can need it
MORE = 1 / 16  # of the slots are added at least; few, as nothing says how many trajectories will come


def up(number: int, multiple: int) -> int:
    """The next multiple: up(17, 16) ─▶ 32."""
    return -(-number // multiple) * multiple


@dataclass(slots=True, kw_only=True)
class Slot:
    """The content of a slot."""

    ids: Sequence[int] = ()  # tokens whose keys and values it holds, from position 0 on
    trajectory: str = ""  # whose they are; "": nobody's
    used: int = 0  # when it was released last
    busy: bool = False  # its reply is under way


@dataclass(slots=True, kw_only=True)
class Slots:
    """At most ``most`` slots; memory grows as it is needed."""

    most: int
    slots: list[Slot] = field(default_factory=list)
    length: int = 0  # positions of each slot
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values
    _clock: int = 0

    def take(self, prompt: Sequence[int], trajectory: str) -> tuple[int, int]:
        """A slot for a prompt, and how many of its first tokens the slot already holds; the last one never counts.

        There must be fewer than ``most`` busy ones.
        """
        slots = enumerate(self.slots) if trajectory else ()
        idle = next((index for index, slot in slots if slot.trajectory == trajectory and not slot.busy), None)
        index = self._unused() if idle is None else idle
        slot = self.slots[index]
        kept = 0 if idle is None else common_prefix(slot.ids, prompt[:-1])
        slot.busy, slot.trajectory = True, trajectory
        return index, kept

    def release(self, index: int, ids: Sequence[int]) -> None:
        """End the use of a slot, which holds ``ids``: they stay for its trajectory's next prompt, if it has one."""
        self._clock += 1
        slot = self.slots[index]
        slot.busy, slot.used, slot.ids = False, self._clock, ids if slot.trajectory else ()

    def reserve(self, length: int, limit: int) -> None:
        """Make room for ``length`` positions in every slot, one layer after another.

        Args:
            limit: most positions that the replies under way can need.
        """
        if length > self.length:
            self.length = up(max(length, SHORTEST, min(int(self.length * LONGER), limit)), ALIGNED)
        for layer, (keys, values) in self.layers.items():
            if keys.shape[2] < self.length or keys.shape[0] < len(self.slots):
                self.layers[layer] = (self._grown(keys), self._grown(values))

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; the first call shows what they look like: (·, heads, ·, size)."""
        if layer not in self.layers:
            self.layers[layer] = (self._new(key), self._new(value))
        return self.layers[layer]

    def swap(self, index: int, other: int) -> None:
        """Exchange two slots and what they hold."""
        self.slots[index], self.slots[other] = self.slots[other], self.slots[index]
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[[index, other]] = tensor[[other, index]]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one."""
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Free everything. No slot may be busy."""
        self.slots.clear()
        self.layers.clear()
        self.length = 0

    def _unused(self) -> int:
        """The first free slot, else a new one, else that of the trajectory that was idle the longest."""
        slots = enumerate(self.slots)
        free = next((index for index, slot in slots if not slot.busy and not slot.trajectory), None)
        if free is None and len(self.slots) < self.most:
            more = min(self.most, max(len(self.slots) + 1, int(len(self.slots) * (1 + MORE))))
            free = len(self.slots)
            self.slots.extend(Slot() for _ in range(free, more))
        if free is None:
            idle = [index for index, slot in enumerate(self.slots) if not slot.busy]
            free = min(idle, key=lambda index: self.slots[index].used)
        return free

    def _new(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(self.slots), like.shape[1], self.length, up(like.shape[-1], ALIGNED))

    def _grown(self, tensor: Tensor) -> Tensor:
        grown = tensor.new_zeros(len(self.slots), tensor.shape[1], self.length, tensor.shape[-1])
        grown[: tensor.shape[0], :, : tensor.shape[2]] = tensor
        return grown
