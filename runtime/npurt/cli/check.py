"""`npurt check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npubundle.errors import ExitCode
from npurt.cli import common
from npurt.cli.options import Settings
from npurt.config import TrainConfig
from npurt.progress import Progress
from npurt.signals import Signals

if TYPE_CHECKING:
    from npurt.bundle import Bundle
    from npurt.data import Pack
    from npurt.gradient_check import GradientReport


def run(settings: Settings, signals: Signals) -> int:
    """Compare gradients; the exit code is 1 if one is out of bounds."""
    from npurt.gradient_check import check_gradients

    progress = common.make_progress(settings, signals)
    output = common.Output(as_json=settings["json"], progress=progress)
    with common.open_bundle(settings, progress) as bundle:
        layers = min(settings["layers"], bundle.config.model.num_hidden_layers)
        pack = _first_sequence(settings, progress, bundle) if settings["data"] else None
        with progress.phase("check", f"{layers} layers of {settings['weights']}") as advance:
            report = check_gradients(
                bundle,
                settings["weights"],
                device=settings["device"],
                layers=layers,
                seed=settings["seed"],
                pack=pack,
                progress=advance,
            )
    event = {
        "good": report.good,
        "layers": report.layers,
        "loss": report.loss,
        "reference_loss": report.reference_loss,
        "bounds": {"cosine": report.bounds.cosine, "norm_ratio": report.bounds.ratio},
        "tensors": [
            {"tensor": t.tensor, "cosine": t.cosine, "norm_ratio": t.norm_ratio, "good": t.good} for t in report.tensors
        ],
    }
    bounds = f"bounds: cosine at least {report.bounds.cosine}, norm ratio within {report.bounds.ratio:g} of 1"
    output.result(f"{_table(report)}\n{bounds}", event)
    return int(ExitCode.OK if report.good else ExitCode.FIXABLE)


def _first_sequence(settings: Settings, progress: Progress, bundle: Bundle) -> Pack:
    """Of the rows, in their order, with every token supervised."""
    options = TrainConfig(loss_on="all", shuffle=False).data_options()
    return common.load_data(settings["data"], settings, progress, bundle, options).next_pack()


def _table(report: GradientReport) -> str:
    """A line for each tensor, and the losses below."""
    width = max((len(tensor.tensor) for tensor in report.tensors), default=0)
    lines = [f"{'tensor':<{width}}  {'cosine':>10}  {'norm ratio':>10}"]
    for tensor in report.tensors:
        verdict = "" if tensor.good else "  OUT OF BOUNDS"
        lines.append(f"{tensor.tensor:<{width}}  {tensor.cosine:>10.7f}  {tensor.norm_ratio:>10.7f}{verdict}")
    lines.append(f"loss {report.loss:.6f}, reference {report.reference_loss:.6f}")
    lines.append("gradients agree" if report.good else "gradients do NOT agree")
    return "\n".join(lines)
