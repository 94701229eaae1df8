"""Accumulation, clipping and AdamW against PyTorch's, step by step in float64."""

from __future__ import annotations

import pytest
import torch

from npucc.training.optimizer import accumulate, adamw, clip
from tests.npucc.tiny import evaluate


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_norm", [1e30, 0.5])
def test_twenty_steps_are_those_of_torch(weight_decay: float, max_norm: float) -> None:
    size, betas, epsilon = 23, (0.9, 0.98), 1e-6
    clipping, update = clip(size), adamw(size)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1.0, betas=betas, eps=epsilon, weight_decay=weight_decay, foreach=False)
    state = {"param": start, "moment1": torch.zeros_like(start), "moment2": torch.zeros_like(start)}
    for step in range(1, 21):
        tokens = float(step + 3)
        summed = torch.randn(size, generator=generator, dtype=torch.float64) * 10
        rate = 0.05 / step

        theirs.grad = summed / tokens
        norm = torch.nn.utils.clip_grad_norm_([theirs], max_norm)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

        clipped = evaluate(clipping, {"grad": summed, "token_count": scalar(tokens), "max_norm": scalar(max_norm)})
        torch.testing.assert_close(clipped["grad_norm"], norm.detach(), rtol=1e-12, atol=0)
        settings = {
            "learning_rate": rate, "beta1": betas[0], "beta2": betas[1], "epsilon": epsilon,
            "weight_decay": weight_decay, "correction1": 1 - betas[0] ** step,
            "correction2": 1 - betas[1] ** step,
        }  # fmt: skip
        inputs = state | {"grad": summed, "scale": clipped["scale"]} | {k: scalar(v) for k, v in settings.items()}
        state = {name.removeprefix("new_"): value for name, value in evaluate(update, inputs).items()}
        torch.testing.assert_close(state["param"], theirs.detach(), rtol=1e-11, atol=1e-13)
    kept = optimizer.state[theirs]
    torch.testing.assert_close(state["moment1"], kept["exp_avg"], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(state["moment2"], kept["exp_avg_sq"], rtol=1e-11, atol=1e-14)


def test_the_first_micro_step_overwrites_whatever_was_there() -> None:
    new = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    for old in (float("nan"), float("inf"), 7.0):
        inputs = {"grad": torch.full_like(new, old), "step": new, "accumulate": scalar(0.0)}
        assert torch.equal(evaluate(accumulate(3), inputs)["new_grad"], new)


def test_without_a_choice_finite_sums_are_the_same() -> None:
    step = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    for old in (0.0, 7.0, -1e30):
        for accumulated in (0.0, 1.0):
            inputs = {"grad": torch.full_like(step, old), "step": step, "accumulate": scalar(accumulated)}
            chosen = evaluate(accumulate(3), inputs)["new_grad"]
            assert torch.equal(evaluate(accumulate(3, select=False), inputs)["new_grad"], chosen)
    assert all(node.op != "aten.where.self" for node in accumulate(3, select=False).nodes)


def test_later_micro_steps_add() -> None:
    old, new = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([10.0, 20.0], dtype=torch.float64)
    added = evaluate(accumulate(2), {"grad": old, "step": new, "accumulate": scalar(1.0)})["new_grad"]
    assert torch.equal(added, old + new)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_norms_of_any_number_of_elements(size: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    found = evaluate(clip(size), {"grad": grad, "token_count": scalar(2.0), "max_norm": scalar(1e30)})
    torch.testing.assert_close(found["grad_norm"], grad.norm() / 2, rtol=1e-12, atol=0)
    assert found["scale"].item() == 0.5


def test_a_gradient_within_the_limit_is_not_scaled() -> None:
    grad = torch.tensor([0.3, 0.4], dtype=torch.float64)
    found = evaluate(clip(2), {"grad": grad, "token_count": scalar(1.0), "max_norm": scalar(1.0)})
    assert found["scale"].item() == 1.0
