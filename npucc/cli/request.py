"""What is to be compiled: the options that `build`, `plan`, `diagnose` and `tune` have in common."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from npucc.cli import options as o

if TYPE_CHECKING:  # they bring torch, which `--help` does not need
    from npucc.models.config_reader import Model
    from npucc.targets import Target, TargetOptions

Form = Literal["imported", "lowered"]


@dataclass(frozen=True)
class Request:
    """The model's place, the recipe, and what the target is told."""

    what: o.BuildOptions
    options: TargetOptions

    def model(self) -> Model:
        """Read its `config.json`."""
        from npucc.hub import config_path
        from npucc.models.config_reader import read_model

        return read_model(config_path(self.what.model), ignore_keys=self.what.ignore_keys)

    def target(self, jobs: int = 1) -> Target:
        """The target, to be closed after use."""
        from npucc.targets import find

        return find(self.what.target, dataclasses.replace(self.options, jobs=jobs))


def asks_for_a_step(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first argument, a `Request`, is made from these options, which it has before its own."""
    shared, own = inspect.signature(_read), inspect.signature(command)
    hints = get_type_hints(_read, include_extras=True) | get_type_hints(command, include_extras=True)

    def run(**given: Any) -> None:
        request = _read(**{name: given.pop(name) for name in shared.parameters})
        command(request, **given)

    run.__doc__ = command.__doc__
    parameters = [*shared.parameters.values(), *list(own.parameters.values())[1:]]
    plain = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: hints[p.name] for p in plain}
    return run


def _read(
    model: o.ModelOption = None,
    recipe: o.RecipeOption = None,
    target: o.TargetOption = None,
    mode: o.ModeOption = None,
    rank: o.RankOption = None,
    alpha: o.AlphaOption = None,
    targets: o.TargetsOption = None,
    train_norm: o.TrainNormOption = False,
    train_embeddings: o.TrainEmbeddingsOption = False,
    train_head: o.TrainHeadOption = False,
    seq_len: o.SeqLenOption = None,
    activations: o.ActivationsOption = None,
    memory_budget: o.BudgetOption = None,
    logits: o.LogitsOption = False,
    ignore_config_key: o.IgnoreOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The bundle's name.  [default: made from the recipe]")
    ] = None,
    fusion: o.FusionOption = None,
    max_mm: o.MaxProductsOption = None,
    tactic: o.TacticOption = None,
    max_shapes: o.MaxShapesOption = None,
    tuning: o.TuningOption = None,
    no_tuning: o.NoTuningOption = False,
    verify: Annotated[
        Form, typer.Option("--verify", help="rngd: form of the graphs that are checked and kept; lowered is slow.")
    ] = "imported",
) -> Request:
    flags = {
        "model": model, "target": target, "mode": mode, "rank": rank, "alpha": alpha, "targets": targets,
        "train_norm": train_norm, "train_embeddings": train_embeddings, "train_head": train_head, "seq_len": seq_len,
        "activations": activations, "memory_budget": memory_budget, "logits": logits, "name": name,
    }  # fmt: skip
    what = o.build_options(recipe, flags, ignore_config_key)
    from npucc.targets import TargetOptions

    told = TargetOptions(
        fusion=fusion,
        max_products=max_mm,
        tactic=tactic,
        max_shapes=max_shapes,
        verify=verify,
        tables=None if no_tuning else tuple(tuning or ()),
    )
    return Request(what, told)
