"""Memory of a device whose tensors own their bytes: a block as the tensors that hold its bytes at the moment.

A part of such a device gives its results as new tensors. To copy each of them to its place in one large tensor would be
an operation of the device for every result. Here a result is laid over what was there before, and copied only if a
larger tensor around it is read as a whole, whose view it then is.

This leans on what programs do: a view lies within its buffer, has its dtype, and does not cut across other views of it;
buffers share bytes only when one of them is dead before the other is first written. So a tensor that is covered in
part, by one of another dtype or one that reaches beyond it, is dead, and goes; reading it raises. One that is covered
by a tensor of its dtype within it may be dead or not: it stays below until it is overwritten. By such dead tensors a
block takes more memory than its size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any, Protocol

from npubundle.tensor import TensorType
from npurt.devices.device import Region
from npurt.errors import DeviceError


class Tensors(Protocol):
    """What a block needs of the device's library. Its tensors are contiguous; what it raises passes through."""

    def empty(self, kind: TensorType) -> Any:
        """A new tensor of any content."""

    def zeros(self, kind: TensorType) -> Any:
        """A new tensor of zeros."""

    def view(self, tensor: Any, offset: int, kind: TensorType) -> Any:
        """The tensor of this type that starts `offset` bytes into another one and shares its memory."""

    def copy(self, source: Any, target: Any) -> None:
        """Overwrite one tensor with another of its type, in the order of the device's other work."""


class Place:
    """Where a tensor lies in a block: the handle of its region."""

    __slots__ = ("kind", "memory", "start", "stop")

    def __init__(self, memory: TensorMemory, start: int, kind: TensorType) -> None:
        self.memory = memory
        self.start = start
        self.stop = start + kind.nbytes
        self.kind = kind

    def contains(self, other: Place) -> bool:
        """Whether all bytes of another place are bytes of this one."""
        return self.start <= other.start and other.stop <= self.stop

    def overlaps(self, other: Place) -> bool:
        """Whether the two places share bytes."""
        return self.start < other.stop and other.start < self.stop


class TensorMemory:
    """A block of `nbytes`. Bytes that nothing was written to are zero and take no memory until they are read."""

    def __init__(self, tensors: Tensors, nbytes: int) -> None:
        self._tensors = tensors
        self._nbytes = nbytes
        self._ground = _Layer()

    def region(self, offset: int, kind: TensorType) -> Region:
        """The tensor at byte `offset`; its handle is a `Place`. Raises ValueError for one outside, or without bytes."""
        if not 0 <= offset < offset + kind.nbytes <= self._nbytes:
            raise ValueError(f"{kind} at byte {offset} of a block of {self._nbytes}")
        return Region(kind, Place(self, offset, kind))

    def read(self, place: Place) -> Any:
        """The tensor that lies there, put together from its parts if need be."""
        held = self._top(place)
        if held is None:
            return self._gathered(place)
        if not held.has(place.kind.dtype):
            raise _dead(place)
        above = held.above.overlapping(place)
        if held.covers_only(place):
            self._merge(held, above)
            return held.tensor if held.place.kind == place.kind else self._view(held, place)
        self._merge(held, [one for one in above if not place.contains(one.place)])
        return self._part(held, place) if held.above.overlapping(place) else self._view(held, place)

    def put(self, place: Place, tensor: Any) -> None:
        """Lay a tensor there that nobody else writes to from now on."""
        below = None
        layer = self._ground
        while (around := layer.around(place)) and around.may_lie_below(place):
            below, layer = around, around.above
        for held in layer.overlapping(place):
            layer.remove(held)
            if below is None:
                self._end(held, place)
            elif not place.contains(held.place):
                self._merge_one(below, held)
        layer.add(_Held(place, tensor))

    def room(self, place: Place) -> Any:
        """A tensor that lies there, for one who overwrites all of it."""
        held = self._top(place)
        if held is not None and held.place.start == place.start and held.place.kind == place.kind:
            held.above = _Layer()
            return held.tensor
        tensor = self._tensors.empty(place.kind)
        self.put(place, tensor)
        return tensor

    def clear(self) -> None:
        """Forget all tensors."""
        self._ground = _Layer()

    def held_bytes(self) -> int:
        """Bytes of all tensors of the block."""
        return sum(held.place.kind.nbytes for held in self._ground.all() if held.tensor is not None)

    def _end(self, held: _Held, place: Place) -> None:
        """What is left of a tensor that ends, since another is laid over it: what lay on it, and dead bytes."""
        end = held.place.start
        for one in sorted([_Held(place), *held.survivors(place)], key=lambda one: one.place.start):
            self._bury(end, min(one.place.start, held.place.stop))
            if one.place is not place:
                self._ground.add(one)
            end = one.place.stop
        self._bury(end, held.place.stop)

    def _bury(self, start: int, stop: int) -> None:
        if start < stop:
            self._ground.add(_Held(Place(self, start, TensorType("bool", (stop - start,)))))

    def _top(self, place: Place) -> _Held | None:
        """The topmost tensor that holds all bytes of a place."""
        top = None
        layer = self._ground
        while around := layer.around(place):
            top, layer = around, around.above
        return top

    def _view(self, held: _Held, place: Place) -> Any:
        key = place.start, place.kind
        view = held.views.get(key)
        if view is None:
            view = held.views[key] = self._tensors.view(held.tensor, place.start - held.place.start, place.kind)
        return view

    def _merge(self, held: _Held, above: list[_Held]) -> None:
        """Copy tensors that lie on another one into it."""
        for one in above:
            held.above.remove(one)
            self._merge_one(held, one)

    def _merge_one(self, held: _Held, one: _Held) -> None:
        self._merge(one, one.above.direct())
        self._tensors.copy(one.tensor, self._view(held, one.place))

    def _part(self, held: _Held, place: Place) -> Any:
        """A part of a tensor with what lies on it, as one that lives on when the tensor below does not."""
        own = self._tensors.empty(place.kind)
        self._tensors.copy(self._view(held, place), own)
        return self._laid_over(place, own, held.above.overlapping(place))

    def _gathered(self, place: Place) -> Any:
        """What lies in a place that no tensor holds, as one tensor."""
        parts = self._ground.overlapping(place)
        if not all(part.has(place.kind.dtype) and place.contains(part.place) for part in parts):
            raise _dead(place)
        whole = sum(part.place.kind.nbytes for part in parts) == place.kind.nbytes
        tensor = self._tensors.empty(place.kind) if whole else self._tensors.zeros(place.kind)
        return self._laid_over(place, tensor, parts)

    def _laid_over(self, place: Place, tensor: Any, parts: list[_Held]) -> Any:
        made = _Held(place, tensor)
        for part in parts:
            self._merge_one(made, part)
        self.put(place, tensor)
        return tensor


class _Layer:
    """Tensors side by side, none of which overlaps another."""

    __slots__ = ("_held", "_starts")

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}  # by first byte
        self._starts: list[int] = []  # the same, sorted

    def around(self, place: Place) -> _Held | None:
        """What holds all bytes of a place."""
        index = bisect_right(self._starts, place.start) - 1
        if index < 0:
            return None
        held = self._held[self._starts[index]]
        return held if held.place.stop >= place.stop else None

    def overlapping(self, place: Place) -> list[_Held]:
        """What holds any byte of a place."""
        first = max(bisect_right(self._starts, place.start) - 1, 0)
        last = bisect_left(self._starts, place.stop)
        found = (self._held[start] for start in self._starts[first:last])
        return [held for held in found if held.place.overlaps(place)]

    def direct(self) -> list[_Held]:
        """The tensors of this layer."""
        return [self._held[start] for start in self._starts]

    def all(self) -> Iterator[_Held]:
        """The tensors of this layer and of those above it."""
        for held in self.direct():
            yield held
            yield from held.above.all()

    def add(self, held: _Held) -> None:
        """Add a tensor that overlaps none."""
        self._held[held.place.start] = held
        insort(self._starts, held.place.start)

    def remove(self, held: _Held) -> None:
        """Remove a tensor and what lies on it."""
        del self._held[held.place.start]
        del self._starts[bisect_left(self._starts, held.place.start)]


class _Held:
    """A tensor, and what was laid on it since: tensors of its dtype, within it, that do not cover all of it.

    Without a tensor, bytes of a dead one.
    """

    __slots__ = ("above", "place", "tensor", "views")

    def __init__(self, place: Place, tensor: Any = None) -> None:
        self.place = place
        self.tensor = tensor
        self.above = _Layer()
        self.views: dict[tuple[int, TensorType], Any] = {}

    def has(self, dtype: str) -> bool:
        """Whether this is a tensor of a dtype."""
        return self.tensor is not None and self.place.kind.dtype == dtype

    def covers_only(self, place: Place) -> bool:
        """Whether it holds the bytes of a place and no others."""
        return self.place.start == place.start and self.place.stop == place.stop

    def may_lie_below(self, place: Place) -> bool:
        """Whether a tensor laid there, within this one, leaves anything of it."""
        return self.has(place.kind.dtype) and not self.covers_only(place)

    def survivors(self, place: Place) -> Iterator[_Held]:
        """What lies on it and lives on when a tensor is laid elsewhere that ends this one."""
        for one in self.above.direct():
            if not one.place.overlaps(place):
                yield one
            elif not place.contains(one.place):
                yield from one.survivors(place)


def _dead(place: Place) -> DeviceError:
    what = f"the program reads {place.kind} at byte {place.start} of a block after another tensor was written there"
    return DeviceError(what, remedy="rebuild the bundle")
