"""One optimizer step: micro-steps that add up gradients, then the update; every number is looked at before it is used.

Gradients are those of the *sum* of losses. The update divides by the number of supervised tokens of all micro-steps, so
that a step over several packs is exactly the step over one large batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numpy as np

from npurt.batches import Layout, program_inputs
from npurt.config import TrainConfig
from npurt.data import Pack
from npurt.engine import Engine, first_micro_step
from npurt.errors import DataError, DivergedError
from npurt.reports import StepReport
from npurt.stop import Stop

_NO_CLIPPING = 1e30  # what the program takes for "no limit"


def optimizer_step(
    engine: Engine,
    layout: Layout,
    packs: Iterable[Pack],
    config: TrainConfig,
    *,
    step: int,
    rate: float,
    stop: Stop,
) -> StepReport:
    """Run step number `step` (from 1) at learning rate `rate` on these packs, which are taken one at a time.

    Leaves parameters and moments untouched when it raises: `StoppedError` if a stop was requested before or after a
    micro-step, `DivergedError` if a loss or the gradient is not finite, `DataError` if no pack has a supervised token.
    """
    started = time.perf_counter()
    loss, supervised, tokens = 0.0, 0, 0
    for index, pack in enumerate(packs):
        stop.check()
        for name, value in program_inputs(pack, layout).items():
            engine.write(name, value)
        _write_scalar(engine, "accumulate", 0.0 if index == 0 else 1.0)
        engine.run("micro_step" if index else first_micro_step(engine.program))
        loss += _finite_scalar(engine, "loss_sum", "loss", step, f"micro-step {index + 1}")
        supervised += pack.supervised
        tokens += int(np.count_nonzero(pack.segments))
    stop.check()
    if not supervised:
        raise DataError(f"step {step} has no supervised token: its loss would be 0/0")
    norm = _update(engine, config, step=step, rate=rate, token_count=supervised)
    seconds = time.perf_counter() - started
    return StepReport(
        step=step,
        loss=loss / supervised,
        grad_norm=norm,
        lr=rate,
        tokens_per_s=tokens / seconds,
        supervised_tokens=supervised,
        tokens=tokens,
        seconds=seconds,
    )


def _update(engine: Engine, config: TrainConfig, *, step: int, rate: float, token_count: int) -> float:
    """The norm of the gradient, once parameters and moments are updated."""
    scalars = {
        "token_count": token_count,
        "max_norm": config.max_norm or _NO_CLIPPING,
        "learning_rate": rate,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "epsilon": config.eps,
        "weight_decay": config.weight_decay,
        "correction1": 1.0 - config.beta1**step,
        "correction2": 1.0 - config.beta2**step,
    }
    for name, value in scalars.items():
        _write_scalar(engine, name, value)
    if "norm" in engine.program.phases:
        engine.run("norm")
        norm = _finite_scalar(engine, "grad_norm", "gradient norm", step, "the gradient, before the update")
        engine.run("update")
        return norm
    _require_finite_gradient(engine, step)
    engine.run("update")
    return _finite_scalar(engine, "grad_norm", "gradient norm", step, "the update")


def _write_scalar(engine: Engine, name: str, value: float) -> None:
    engine.write(name, np.array(value, dtype=np.float32))


def _finite_scalar(engine: Engine, buffer: str, what: str, step: int, where: str) -> float:
    value = float(engine.view(buffer))
    if not math.isfinite(value):
        raise _diverged(f"{what} is {value}", step, where)
    return value


def _require_finite_gradient(engine: Engine, step: int) -> None:
    """The sum of squares is what the update takes the root of; it also overflows where single values do not yet."""
    gradient = engine.view("grad").astype(np.float32, copy=False)
    if not math.isfinite(float(np.einsum("i,i->", gradient, gradient))):
        raise _diverged("gradient is not finite", step, "the gradient, before the update")


def _diverged(what: str, step: int, where: str) -> DivergedError:
    return DivergedError(
        f"training diverged in step {step}: the {what}",
        where=f"step {step}, {where}",
        remedy="train with a lower --lr, more --warmup or a smaller --grad-clip; in step 1, check the weights",
    )
