"""What parts are compiled for: one module per target, found by name with `find`."""

from npucc.targets.target import CompiledPart, CutPolicy, Target, TargetOptions, find

__all__ = ["CompiledPart", "CutPolicy", "Target", "TargetOptions", "find"]
