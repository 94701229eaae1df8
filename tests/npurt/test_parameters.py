"""Initial parameters: pinned, so that the same seed gives the same adapter in every release and with every numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from npubundle.program import Buffer, Init
from npubundle.tensor import TensorType
from npurt.parameters import initial, uniform


def buffer(tensor: str, fan_in: int, size: int = 1000) -> Buffer:
    kind = TensorType("f32", (size,))
    return Buffer("lora." + tensor, kind, "param", tensor=tensor, init=Init("kaiming_uniform", fan_in))


def test_values_are_pinned() -> None:
    pinned = [0.6516950130462646, 0.6916934251785278, -0.6987168788909912]
    np.testing.assert_array_equal(uniform("a.lora_A.weight", (3,), 1.0, 7), pinned)


@given(st.integers(0, 2**63), st.integers(1, 10000))
def test_values_are_spread_over_the_whole_range(seed: int, fan_in: int) -> None:
    values = initial(buffer("a", fan_in), seed)
    bound = np.float32(fan_in**-0.5)
    assert np.abs(values).max() <= bound
    assert values.max() > 0.9 * bound
    assert values.min() < -0.9 * bound


def test_each_tensor_and_seed_has_its_own_values() -> None:
    values = [initial(buffer(name, 4), seed) for name in ("a", "b") for seed in (0, 1)]
    assert len({array.tobytes() for array in values}) == 4


def test_other_inits_are_zeros() -> None:
    kind = TensorType("f32", (2, 2))
    for init in (None, Init("zeros")):
        assert not initial(Buffer("lora", kind, "param", init=init), 3).any()
