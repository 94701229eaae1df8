"""What parts are compiled for: one module per target, found by name with `find`."""

from npucc.targets.target import CutPolicy, Target, find

__all__ = ["CutPolicy", "Target", "find"]
