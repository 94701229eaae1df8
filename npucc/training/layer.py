"""A decoder layer: forward and backward in one joint graph, from which all others are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from npubundle.recipe import Recipe
from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import DTYPES, capture
from npucc.models import Architecture, LayerTensor, Tables
from npucc.models.config_reader import Model
from npucc.models.products import linear
from npucc.targets import CutPolicy
from npucc.training.differentiate import vjp


@dataclass(frozen=True, slots=True)
class Adapter:
    """The pair of LoRA matrices of one module: A is (rank, in), B is (out, rank)."""

    target: str
    module: str
    a: TensorType
    b: TensorType

    @property
    def matrices(self) -> tuple[tuple[str, str, TensorType], ...]:
        """(name in graphs, name in PEFT, type) of A and B."""
        return (
            (f"{self.target}.lora_A", f"{self.module}.lora_A.weight", self.a),
            (f"{self.target}.lora_B", f"{self.module}.lora_B.weight", self.b),
        )


def adapters(model: Model, recipe: Recipe) -> tuple[Adapter, ...]:
    """The LoRA branches of one layer, in the order of the block; none where the weights themselves are trained."""
    modules = {t.name: t for t in model.architecture.layer_tensors(model.config) if t.module}
    found = []
    for target in recipe.targets:
        out, width = modules[target].shape
        found.append(
            Adapter(
                target,
                str(modules[target].module),
                TensorType("f32", (recipe.rank, width)),
                TensorType("f32", (out, recipe.rank)),
            )
        )
    return tuple(found)


def gradient_name(tensor: str) -> str:
    """Name of the joint graph's output that is the gradient of a LoRA matrix or a weight."""
    return f"d_{tensor}"


def joint(model: Model, recipe: Recipe, cut: CutPolicy) -> Graph:
    """`x`, weights, LoRA matrices, `cos`, `sin`, `mask`, `dy` -> `y`, `dx`, and the gradient of all that is trained.

    Differentiates with respect to x and either the LoRA matrices or the weights: what is frozen causes no gradient
    work. Weights and their gradients have the dtype in which the target multiplies; x, LoRA matrices and their
    gradients are f32 everywhere.
    """
    config, architecture = model.config, model.architecture
    tensors = architecture.layer_tensors(config)
    matrices = [(name, kind) for adapter in adapters(model, recipe) for name, _, kind in adapter.matrices]
    names = [t.name for t in tensors] if recipe.full else [name for name, _ in matrices]
    S, H, D = recipe.seq_len, config.hidden_size, config.head_dim
    inputs = {
        "x": TensorType("f32", (S, H)),
        **{t.name: TensorType(cut.products, t.shape) for t in tensors},
        **dict(matrices),
        "cos": TensorType("f32", (S, D)),
        "sin": TensorType("f32", (S, D)),
        "mask": TensorType("f32", (S, S)),
        **({"swap": TensorType(cut.products, (D, D))} if cut.swap else {}),
        "dy": TensorType("f32", (S, H)),
    }

    def function(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        named = dict(zip(inputs, values, strict=True))
        trained = ["x", *names]

        def forward(*chosen: torch.Tensor) -> torch.Tensor:
            values = named | dict(zip(trained, chosen, strict=True))
            return run_layer(architecture, model, recipe, values, tensors, cut)

        y, pull_back = vjp(forward, *(named[name] for name in trained))
        return [y, *pull_back(named["dy"])]

    outputs = ["y", "dx", *map(gradient_name, names)]
    return capture("layer", function, inputs, outputs)


def run_layer(
    architecture: Architecture,
    model: Model,
    recipe: Recipe,
    values: dict[str, torch.Tensor],
    tensors: tuple[LayerTensor, ...],
    cut: CutPolicy,
) -> torch.Tensor:
    """The layer of the architecture, with `x @ Wᵀ + scaling · (x @ Aᵀ) @ Bᵀ` as its linear modules."""
    dtype = DTYPES[cut.products]

    def projection(target: str, x: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        y = linear(x, values[target], dtype, whole=whole)
        if f"{target}.lora_A" not in values:
            return y
        down, up = (values[f"{target}.lora_{half}"] for half in "AB")
        # Scaling the narrow product costs S·rank multiplications, scaling the wide one S·out, forward and backward.
        narrow = linear(x, down, dtype) * recipe.scaling  # (S, rank)
        return y + linear(narrow, up, dtype)

    weights = {t.name: values[t.name] for t in tensors if t.module is None}
    tables = Tables(values["cos"], values["sin"], values["mask"], cut.query_rows, values.get("swap"), dtype)
    return architecture.layer(model.config, values["x"], weights, projection, tables)
