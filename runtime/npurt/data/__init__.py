"""From JSON Lines to packed sequences of tokens, as the reference stack renders and tokenizes them.

`load` reads the rows, renders and tokenizes them, fits them to the sequence length and packs them; `PackedDataset`
hands out the packs, in a new order each epoch, and can be resumed at any pack.
"""

from __future__ import annotations

from npurt.data.corpus import IGNORED
from npurt.data.dataset import PackedDataset, load
from npurt.data.options import Counts, DataOptions
from npurt.data.packing import Pack

__all__ = ["IGNORED", "Counts", "DataOptions", "Pack", "PackedDataset", "load"]
