"""What training and evaluation report: plain values, the same for Python, the log and the screen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Quality on held-out data. loss -- mean over supervised tokens, in nats; accuracy -- share predicted exactly."""

    loss: float
    accuracy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e to the power of the loss; infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, which knows no infinity."""
        perplexity = self.perplexity
        return asdict(self) | {"perplexity": perplexity if math.isfinite(perplexity) else None}

    def __str__(self) -> str:
        """One line for a person."""
        return (
            f"held-out loss {self.loss:.4f}, perplexity {self.perplexity:.3f}, "
            f"accuracy {100 * self.accuracy:.2f} %, {self.tokens:,} tokens"
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step.

    step -- counted from 1.
    loss -- sum of losses over sum of supervised tokens, of all micro-batches of the step, before its update; in nats.
    grad_norm -- global L2 norm of the gradient of that loss, before clipping.
    lr -- learning rate of the update.
    tokens_per_s -- `tokens` over `seconds`.
    supervised_tokens, tokens -- tokens that counted in the loss; all tokens without padding.
    seconds -- wall time of the step, evaluation and saving not included.
    evaluation -- held-out quality after the update, in the steps after which it was measured.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    supervised_tokens: int
    tokens: int
    seconds: float
    evaluation: EvalReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The values by name; `evaluation` only where there is one."""
        values = asdict(self)
        del values["evaluation"]
        return values | ({"evaluation": self.evaluation.to_dict()} if self.evaluation else {})

    def __str__(self) -> str:
        """One line for a person."""
        line = (
            f"step {self.step}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3g}  lr {self.lr:.3g}  "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )
        return f"{line}  {self.evaluation}" if self.evaluation else line
