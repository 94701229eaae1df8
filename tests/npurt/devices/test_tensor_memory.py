"""Blocks as sets of tensors, against plain bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npubundle.liveness import planned
from npubundle.program import Buffer, Call, Operand, Program
from npubundle.tensor import TensorType
from npurt.arrays import dtype_of
from npurt.devices.device import Region
from npurt.devices.tensor_memory import Place, TensorMemory, _Layer
from npurt.errors import DeviceError

Array = NDArray[Any]


@dataclass
class Arrays:
    """Tensors that are numpy arrays. It counts copies."""

    copies: int = 0

    def empty(self, kind: TensorType) -> Array:
        return np.full(kind.shape, 77, dtype_of(kind))

    def zeros(self, kind: TensorType) -> Array:
        return np.zeros(kind.shape, dtype_of(kind))

    def view(self, tensor: Array, offset: int, kind: TensorType) -> Array:
        flat = tensor.reshape(-1).view(np.uint8)
        return flat[offset : offset + kind.nbytes].view(dtype_of(kind)).reshape(kind.shape)

    def copy(self, source: Array, target: Array) -> None:
        self.copies += 1
        np.copyto(target, source)


def f32(*shape: int) -> TensorType:
    return TensorType("f32", shape)


def numbers(kind: TensorType, first: float) -> Array:
    return (first + np.arange(kind.elements)).astype(dtype_of(kind)).reshape(kind.shape)


def put(region: Region, value: Array) -> None:
    region.handle.memory.put(region.handle, value)


def read(region: Region) -> Array:
    found: Array = region.handle.memory.read(region.handle)
    return found


def test_nothing_written_is_zero() -> None:
    memory = TensorMemory(Arrays(), 64)
    np.testing.assert_array_equal(read(memory.region(16, f32(2, 3))), np.zeros((2, 3), np.float32))


def test_a_result_takes_the_place_of_what_was_there() -> None:
    arrays = Arrays()
    memory = TensorMemory(arrays, 64)
    region = memory.region(0, f32(4))
    for value in (numbers(f32(4), 1), numbers(f32(4), 9)):
        put(region, value)
        assert read(region) is value
    np.testing.assert_array_equal(read(memory.region(0, f32(2, 2))), [[9, 10], [11, 12]])
    assert arrays.copies == 0


def test_a_view_is_copied_when_its_buffer_is_read_and_no_sooner() -> None:
    arrays = Arrays()
    memory = TensorMemory(arrays, 64)
    flat, view = memory.region(0, f32(6)), memory.region(8, f32(2))
    put(flat, numbers(f32(6), 0))
    for first in (50, 60):
        put(view, numbers(f32(2), first))
    np.testing.assert_array_equal(read(view), [60, 61])
    assert arrays.copies == 0
    np.testing.assert_array_equal(read(flat), [0, 1, 60, 61, 4, 5])
    assert arrays.copies == 1
    np.testing.assert_array_equal(read(view), [60, 61])
    np.testing.assert_array_equal(read(flat), [0, 1, 60, 61, 4, 5])
    assert arrays.copies == 1
    assert np.shares_memory(read(flat), read(view))


def test_parts_written_one_by_one_are_read_as_one() -> None:
    memory = TensorMemory(Arrays(), 64)
    for index in (2, 0):
        put(memory.region(8 * index, f32(2)), numbers(f32(2), 10 * index + 1))
    np.testing.assert_array_equal(read(memory.region(0, f32(3, 2))), [[1, 2], [0, 0], [21, 22]])


def test_what_is_overwritten_whole_is_written_where_it_lies() -> None:
    memory = TensorMemory(Arrays(), 64)
    region = memory.region(0, f32(4))
    put(region, numbers(f32(4), 1))
    put(memory.region(4, f32(2)), numbers(f32(2), 7))
    before = memory._ground.direct()[0].tensor
    room = memory.room(region.handle)
    assert room is before
    room[:] = 5
    np.testing.assert_array_equal(read(region), [5, 5, 5, 5])


def test_the_living_outlast_a_dead_tensor_below_them() -> None:
    arrays = Arrays()
    memory = TensorMemory(arrays, 64)
    old, living, other = memory.region(0, f32(8)), memory.region(16, f32(2)), memory.region(0, TensorType("i32", (2,)))
    put(old, numbers(f32(8), 0))
    put(living, numbers(f32(2), 10))
    assert memory.held_bytes() == 32 + 8
    put(other, numbers(other.kind, 3))
    assert memory.held_bytes() == 8 + 8, "the memory of the dead goes"
    np.testing.assert_array_equal(read(living), [10, 11])
    np.testing.assert_array_equal(read(other), [3, 4])
    assert arrays.copies == 0


def test_the_living_outlast_the_dead_at_any_depth() -> None:
    memory = TensorMemory(Arrays(), 64)
    living = memory.region(16, f32(2))
    for start, size in ((0, 10), (8, 6)):
        put(memory.region(start, f32(size)), numbers(f32(size), 0))
    put(living, numbers(f32(2), 10))
    put(memory.region(24, f32(8)), numbers(f32(8), 20))
    assert memory.held_bytes() == 8 + 32
    np.testing.assert_array_equal(read(living), [10, 11])


def test_views_of_a_buffer_that_was_laid_may_cut_across_one_another() -> None:
    memory = TensorMemory(Arrays(), 64)
    buffer = memory.region(0, f32(8))
    put(buffer, numbers(f32(8), 0))
    put(memory.region(0, f32(4)), numbers(f32(4), 10))
    put(memory.region(8, f32(4)), numbers(f32(4), 20))
    np.testing.assert_array_equal(read(memory.region(0, f32(4))), [10, 11, 20, 21])
    np.testing.assert_array_equal(read(buffer), [10, 11, 20, 21, 22, 23, 6, 7])


def test_reading_what_was_cut_is_refused() -> None:
    memory = TensorMemory(Arrays(), 64)
    old, crossing, other = memory.region(0, f32(4)), memory.region(8, f32(4)), memory.region(8, TensorType("i32", (2,)))
    put(old, numbers(f32(4), 0))
    put(crossing, numbers(f32(4), 10))
    put(other, numbers(other.kind, 20))
    for dead in (old, crossing, memory.region(0, f32(1)), memory.region(20, f32(1)), memory.region(0, f32(12))):
        with pytest.raises(DeviceError, match=r"reads f32\[\d+\] at byte \d+ of a block after another tensor"):
            read(dead)
    put(memory.region(4, f32(1)), numbers(f32(1), 30))
    np.testing.assert_array_equal(read(memory.region(4, f32(1))), [30])
    with pytest.raises(DeviceError):
        read(memory.region(0, f32(1)))
    memory.clear()
    np.testing.assert_array_equal(read(crossing), [0, 0, 0, 0])


@pytest.mark.parametrize(("offset", "kind"), [(60, f32(2)), (-4, f32(1)), (0, f32(0)), (64, f32(1))])
def test_regions_lie_in_their_block(offset: int, kind: TensorType) -> None:
    with pytest.raises(ValueError, match="of a block of 64"):
        TensorMemory(Arrays(), 64).region(offset, kind)


Span = tuple[int, int]
#: Buffers of an arena: dtype, words, and views as first word and number of words.
BUFFERS: list[tuple[str, int, list[Span]]] = [
    ("f32", 40, [(0, 8), (8, 32), (16, 16), (16, 4)]),
    ("f32", 24, [(0, 12), (12, 12)]),
    ("f32", 16, []),
    ("f32", 16, [(0, 1)]),
    ("f32", 33, [(1, 32), (2, 16)]),
    ("i32", 20, [(0, 10), (10, 10)]),
    ("i32", 48, []),
    ("f32", 3, []),
]
#: Which buffer, which of its views (the buffer itself if it has fewer), and whether it is written, and how.
TOUCHES = st.lists(
    st.tuples(st.integers(0, len(BUFFERS) - 1), st.integers(0, 6), st.sampled_from(["read", "put", "room"])),
    min_size=1, max_size=60,
)  # fmt: skip


@dataclass
class Model:
    """A program as TOUCHES says, in an arena that liveness planned, and what its buffers hold."""

    touches: list[tuple[int, int, str]]

    def __post_init__(self) -> None:
        """Bytes that were not written yet in this life cannot be read: such a read becomes a write."""
        written = [np.zeros(words, np.bool_) for _, words, _ in BUFFERS]
        self.steps: list[tuple[int, Span, str]] = []
        for chosen, view, act in self.touches:
            _, words, views = BUFFERS[chosen]
            start, size = views[view] if view < len(views) else (0, words)
            readable = written[chosen][start : start + size].all()
            written[chosen][start : start + size] = True
            self.steps.append((chosen, (start, size), act if readable or act != "read" else "put"))
        names = [f"b{index}" for index in range(len(BUFFERS))]
        buffers = {
            name: Buffer(name, TensorType(dtype, (words,)), "activation")
            for name, (dtype, words, _) in zip(names, BUFFERS, strict=True)
        }
        calls = tuple(Call("p", (), (Operand(names[chosen]),)) for chosen, _, _ in self.steps)
        program = planned(Program(buffers, {"phase": calls}))
        self.offsets = [program.buffers[name].arena_offset for name in names]
        self.size = program.arenas("device")["phase"]


@given(TOUCHES, st.integers(1, 3))
def test_programs_read_what_they_wrote(touches: list[tuple[int, int, str]], rounds: int) -> None:
    """Whatever shares bytes in a planned arena, with views and views across views: every living value is right."""
    model = Model(touches)
    memory = TensorMemory(Arrays(), model.size)
    values = [np.zeros(words, dtype_of(TensorType(dtype, ()))) for dtype, words, _ in BUFFERS]
    for count, (chosen, (start, size), act) in enumerate(model.steps * rounds):
        kind = TensorType(BUFFERS[chosen][0], (size,))
        region = memory.region((model.offsets[chosen] or 0) + 4 * start, kind)
        span = values[chosen][start : start + size]
        if act == "read":
            np.testing.assert_array_equal(read(region), span)
            continue
        span[:] = numbers(kind, 100 * count)
        if act == "put":
            put(region, span.copy())
        else:
            memory.room(region.handle)[:] = span
        check_layer(memory._ground)


def check_layer(layer: _Layer) -> None:
    held = layer.direct()
    assert sorted(layer._held) == layer._starts
    assert all(one.place.stop <= two.place.start for one, two in itertools.pairwise(held))
    for one in held:
        for above in one.above.direct():
            assert one.place.contains(above.place)
            assert one.place.kind.dtype == above.place.kind.dtype
            assert not one.covers_only(above.place)
        check_layer(one.above)


@given(st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=40))
def test_buffers_that_stay_and_their_views_are_plain_memory(steps: list[tuple[int, bool]]) -> None:
    """Two buffers of eight words, with halves, quarters and others for views, zero at first: what is no activation."""
    spans = [(0, 8), (8, 8), *((4 * n, 4) for n in range(4)), *((2 * n, 2) for n in range(8)), (15, 1), (3, 4)]
    memory = TensorMemory(Arrays(), 64)
    plain = np.zeros(16, np.float32)
    for chosen in (0, 1):
        start, size = spans[chosen]
        assert not read(memory.region(4 * start, f32(size))).any()
    for count, (chosen, write) in enumerate(steps):
        start, size = spans[chosen]
        region = memory.region(4 * start, f32(size))
        if write:
            plain[start : start + size] = numbers(f32(size), 100 * count)
            put(region, plain[start : start + size].copy())
        else:
            np.testing.assert_array_equal(read(region), plain[start : start + size])


def test_a_place_knows_its_bytes() -> None:
    place = Place(TensorMemory(Arrays(), 64), 8, f32(2, 2))
    assert (place.start, place.stop) == (8, 24)
