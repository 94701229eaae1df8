"""Which graphs a training step is made of: the traced functions, cut into parts by activation policy and target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from npubundle.recipe import Recipe
from npucc.graph import Graph
from npucc.models.config_reader import Model
from npucc.numerics import Sampler, causal_mask, matrix, uniform
from npucc.passes import remove_dead_code, simplify
from npucc.passes.canonicalize import canonicalize
from npucc.passes.inplace import inplace_pairs
from npucc.passes.partition import partition
from npucc.passes.plain_products import plain_products
from npucc.targets import CutPolicy
from npucc.training import embedding, head, layer, optimizer
from npucc.training.head import HeadShape


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part before it is compiled: its name in the program, its graph, outputs that may overwrite inputs."""

    name: str
    graph: Graph
    inplace: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Traced:
    """The traced step: every graph that any activation policy needs, by part name.

    `head` and `trained` (elements of all LoRA matrices) are what the program needs beside them. `layer` is the joint
    graph of a decoder layer as it was traced, before any pass.
    """

    model: Model
    recipe: Recipe
    head: HeadShape
    parts: Mapping[str, PartSpec]
    trained: int
    layer: Graph

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of what a layer keeps for its backward pass under the policy `save`, in order."""
        outputs = self.parts["layer.forward.save"].graph.outputs
        return tuple(name for name, _ in outputs if name != "y")


def trace(model: Model, recipe: Recipe, cut: CutPolicy) -> Traced:
    """Trace everything. Costs seconds and no memory to speak of, whatever the model's size."""
    config = model.config
    shape = head.head_shape(config, recipe.seq_len, rows=cut.head_rows, slice_width=cut.head_slice)
    adapters = layer.adapters(model, recipe)
    trained = config.num_hidden_layers * sum(kind.elements for a in adapters for _, _, kind in a.matrices)
    graphs = [embedding.tables(config, recipe.seq_len), embedding.embed(config, recipe.seq_len)]
    raw = layer.joint(model, recipe, query_rows=cut.query_rows)
    graphs += _layer_graphs(raw, cut)
    graphs += _head_graphs(model, recipe, shape)
    parts = {graph.name: PartSpec(graph.name, graph) for graph in graphs}
    for graph, pairs in (
        (optimizer.accumulate(trained), {"new_grad": "grad"}),
        (optimizer.clip(trained), {}),
        (optimizer.adamw(trained), {"new_param": "param", "new_moment1": "moment1", "new_moment2": "moment2"}),
    ):
        parts[graph.name] = PartSpec(graph.name, graph, inplace_pairs(graph, pairs))
    return Traced(model, recipe, shape, parts, trained, raw)


def _layer_graphs(raw: Graph, cut: CutPolicy) -> list[Graph]:
    """All cuts of the joint graph. The first layer's backward needs no gradient of its input: embeddings are frozen."""
    joint = simplify(raw)
    gradients = {name for name, _ in joint.outputs if name not in {"y", "dx"}}
    halves = partition(joint, tangents={"dy"}, forward_outputs={"y"}, repeat_products_within=cut.repeat_products_within)
    plain = plain_products(remove_dead_code(canonicalize(raw))).renumbered()
    return [
        _named("layer.forward", joint, {"y"}),
        _named("layer.backward", joint, {"dx"} | gradients),
        _named("layer.backward.first", joint, gradients),
        _named("layer.forward.save", halves.forward, None),
        _named("layer.backward.save", halves.backward, None),
        _named("layer.backward.save.first", halves.backward, gradients),
        _named("reference.layer.forward", plain, {"y"}),
        _named("reference.layer.backward", plain, {"dx"} | gradients),
    ]


def _named(name: str, graph: Graph, keep: set[str] | None) -> Graph:
    cut = remove_dead_code(graph, keep, drop_inputs=True).renumbered()
    return dataclasses.replace(cut, name=name)


def _head_graphs(model: Model, recipe: Recipe, shape: HeadShape) -> list[Graph]:
    config = model.config
    widths = sorted({stop - start for start, stop in shape.slices})
    graphs = [head.begin(config, shape), head.finish(config, shape), head.end(config, shape)]
    graphs += [head.score_begin(config, shape), head.score_finish(shape), head.reference_finish(config, shape)]
    for width in widths:
        graphs += [head.slice_step(config, shape, width), head.score_slice(config, shape, width)]
        graphs += [head.reference_lse(config, shape, width), head.reference_slice(config, shape, width)]
        if recipe.logits:
            graphs.append(head.logits_slice(config, shape, width))
    return graphs


def samplers(traced: Traced) -> dict[str, Sampler]:
    """How the numerics check makes each input: in the range that the input has in training.

    Positions stay below 128: the angle of a rotation is rounded to f32 before its sine is taken, by transformers as
    well, so that far positions differ from float64 whatever the target does.
    """
    config = traced.model.config
    fractions = (
        "learning_rate",
        "beta1",
        "beta2",
        "epsilon",
        "weight_decay",
        "correction1",
        "correction2",
        "accumulate",
    )
    weights = [t.name for t in traced.model.architecture.layer_tensors(config) if len(t.shape) > 1]
    lora = [name for a in layer.adapters(traced.model, traced.recipe) for name, _, _ in a.matrices]
    return {
        "tokens": uniform(0, config.vocab_size),
        "labels": uniform(0, config.vocab_size),
        "rows": uniform(0, traced.recipe.seq_len),
        "positions": uniform(0, min(traced.recipe.seq_len, 128)),
        "segments": uniform(0, 3),
        "cos": uniform(-1, 1),
        "sin": uniform(-1, 1),
        "mask": causal_mask,
        "weights": uniform(0, 1),
        "total": uniform(1, 5),
        "moment2": uniform(0, 1),
        "token_count": uniform(1, 9),
        "max_norm": uniform(0.1, 1),
        **dict.fromkeys(fractions, uniform(0.1, 0.9)),
        **dict.fromkeys([*weights, *lora, "weight"], matrix),
    }
