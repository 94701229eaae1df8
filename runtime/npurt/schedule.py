"""Learning-rate schedules: warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every optimizer step, a function of the step alone.

    Over `warmup` steps the rate grows by equal amounts and reaches `peak` in the step after them; no step has rate
    zero, as it would teach nothing. From there to step `total` + 1 it stays (`constant`), falls in a straight line
    (`linear`) or along half a cosine (`cosine`; Loshchilov and Hutter 2017) to `floor` times the peak, and it stays
    there. This equals PyTorch's `SequentialLR` of `LinearLR(start_factor=1/(warmup + 1), total_iters=warmup)` and
    `ConstantLR`, `LinearLR` or `CosineAnnealingLR` over `total - warmup` steps.
    """

    kind: ScheduleKind
    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""
        done = step - 1
        if done < self.warmup:
            return self.peak * (done + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (done - self.warmup) / max(1, self.total - self.warmup))
        falling = 1.0 - progress if self.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.peak * (self.floor + (1.0 - self.floor) * falling)
