"""Initial values of trained parameters, a function of seed and tensor name alone.

They come from the raw bits of Philox (Salmon et al. 2011), whose stream numpy never changes, and each tensor has a
stream of its own, so that neither the order of tensors nor the version of numpy matters.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from npubundle.program import Buffer
from npurt.arrays import Array, dtype_of


def initial(buffer: Buffer, seed: int) -> Array:
    """The initial value of a parameter, or of a view of one: zeros, or uniform in ±1/sqrt(fan_in)."""
    if buffer.init is None or buffer.init.kind == "zeros":
        return np.zeros(buffer.type.shape, dtype_of(buffer.type))
    bound = 1.0 / math.sqrt(max(1, buffer.init.fan_in))
    return uniform(buffer.tensor or buffer.name, buffer.type.shape, bound, seed).astype(dtype_of(buffer.type))


def uniform(name: str, shape: tuple[int, ...], bound: float, seed: int) -> Array:
    """Numbers uniform in [-bound, bound), with 24 random bits each, as float64."""
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4")
    bits = np.random.Philox(np.random.SeedSequence([seed, *map(int, words)])).random_raw(math.prod(shape))
    fractions = (np.asarray(bits, np.uint64) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return ((2.0 * fractions - 1.0) * bound).reshape(shape)
