"""Which graphs a training step is made of: the traced functions, cut into parts by activation policy and target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from npubundle.model_config import ModelConfig
from npubundle.recipe import Recipe
from npucc.graph import Graph
from npucc.models.config_reader import Model
from npucc.numerics import Sampler, causal_mask, matrix, uniform
from npucc.passes import remove_dead_code, simplify
from npucc.passes.canonicalize import canonicalize
from npucc.passes.inplace import inplace_pairs
from npucc.passes.intervals import cut_into_parts
from npucc.passes.partition import Halves, partition
from npucc.passes.plain_products import plain_products
from npucc.targets import CutPolicy
from npucc.training import embedding, head, head_gradients, head_reference, layer, optimizer
from npucc.training.groups import Group, parameter_groups
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

    `head`, `trained` (elements of all LoRA matrices) and `groups` (of trained weights) are what the program needs
    beside them. `layer` is the joint graph of a decoder layer as it was traced, before any pass. `stages` names the
    parts that a pass through a layer consists of, in order: one for whole layers, several where the target wants
    smaller ones.
    """

    model: Model
    recipe: Recipe
    head: HeadShape
    parts: Mapping[str, PartSpec]
    trained: int
    layer: Graph
    cut: CutPolicy
    stages: Mapping[str, tuple[str, ...]]
    groups: tuple[Group, ...] = ()

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of what a layer keeps for its backward pass under the policy `save`, in order."""
        read = {v.name for part in self.stages["layer.backward.save"] for v in self.parts[part].graph.inputs}
        outputs = [name for part in self.stages["layer.forward.save"] for name, _ in self.parts[part].graph.outputs]
        return tuple(name for name in outputs if name != "y" and name in read)


def trace(model: Model, recipe: Recipe, cut: CutPolicy) -> Traced:
    """Trace everything. Costs seconds and no memory to speak of, whatever the model's size."""
    config = model.config
    shape = head.head_shape(config, recipe.seq_len, rows=cut.head_rows, slice_width=cut.head_slice)
    adapters = layer.adapters(model, recipe)
    trained = config.num_hidden_layers * sum(kind.elements for a in adapters for _, _, kind in a.matrices)
    graphs = [embedding.tables(config, recipe.seq_len, cut), embedding.embed(config, recipe.seq_len, cut)]
    raw = layer.joint(model, recipe, cut)
    if cut.tuned_products is not None and (products := cut.tuned_products(raw)) is not None:
        cut = dataclasses.replace(cut, products_per_part=products)
    layers = _layer_graphs(raw, cut) if cut.products_per_part is None else _small_layer_graphs(model, raw, cut)
    layers["reference.layer"] = _reference_layer(model, recipe, raw, cut)
    graphs += _reference_ends(config, recipe.seq_len, cut)
    graphs += [graph for group in layers.values() for graph in group]
    graphs += _head_graphs(model, recipe, shape, cut)
    groups = parameter_groups(model, recipe, cut.update_block)
    parts = {graph.name: PartSpec(graph.name, graph) for graph in graphs}
    full = (*_full_updates(groups, cut), *_ends(model, shape, cut, groups)) if groups else ()
    for graph, pairs in full or _lora_updates(trained, cut):
        parts[graph.name] = PartSpec(graph.name, graph, inplace_pairs(graph, pairs))
    stages = {name: tuple(graph.name for graph in group) for name, group in layers.items()}
    return Traced(model, recipe, shape, parts, trained, raw, cut, stages, groups)


_SUM = {"new_grad": "grad"}
_STEP = {"new_param": "param", "new_moment1": "moment1", "new_moment2": "moment2"}


def _lora_updates(trained: int, cut: CutPolicy) -> Iterator[tuple[Graph, dict[str, str]]]:
    """Graphs of the update, each with the outputs that overwrite inputs."""
    yield optimizer.accumulate(trained, select=not cut.own_memory), _SUM
    yield _named("reference.accumulate", optimizer.accumulate(trained), None), _SUM
    yield optimizer.clip(trained), {}
    yield optimizer.adamw(trained), _STEP


def _full_updates(groups: Sequence[Group], cut: CutPolicy) -> Iterator[tuple[Graph, dict[str, str]]]:
    """The same for blocks of weights. From memory of a device's own, gradients come and weights go there."""
    away = cut.products if cut.own_memory else None
    yield optimizer.norm([group.blocks for group in groups]), {}
    for size in sorted({group.block for group in groups}):
        yield optimizer.add(size, away or "f32"), _SUM
        yield optimizer.squares(size), {}
        yield optimizer.adamw(size, f"adamw.{size}", away), _STEP
        if away:
            yield optimizer.widen(size, away), {}
            yield optimizer.narrow(size, away), {}


def _ends(
    model: Model, shape: HeadShape, cut: CutPolicy, groups: Sequence[Group]
) -> Iterator[tuple[Graph, dict[str, str]]]:
    """Gradients of what is trained outside the layers: they are added up in place, block by block."""
    config, trained = model.config, {member.buffer for group in groups for member in group.members}
    if "norm" in trained:
        yield optimizer.zeros("zeros.norm", (config.hidden_size,)), {}
        yield head_gradients.norm_gradient(config, shape, cut), _SUM
        yield head_reference.reference_norm_gradient(config, shape), _SUM
    for width in sorted({stop - start for start, stop in shape.slices}) if trained & {"embed", "head"} else ():
        yield optimizer.zeros(f"zeros.{width}", (width, config.hidden_size)), {}
        if "embed" in trained:
            yield embedding.embed_gradient(config, shape.seq_len, width), _SUM
        if "head" in trained or config.tie_word_embeddings:
            yield head_gradients.matrix_gradient(config, shape, cut, width), _SUM
            yield head_reference.reference_matrix_gradient(config, shape, width), _SUM


def _halves(joint: Graph, cut: CutPolicy) -> Halves:
    return partition(
        joint,
        tangents={"dy"},
        forward_outputs={"y"},
        repeat_products_within=cut.repeat_products_within,
        repeat_after_softmax=cut.repeat_after_softmax,
    )


def _layer_graphs(raw: Graph, cut: CutPolicy) -> dict[str, list[Graph]]:
    """Whole passes. The first layer's backward needs no gradient of its input: embeddings are frozen."""
    joint = simplify(raw)
    gradients = {name for name, _ in joint.outputs if name not in {"y", "dx"}}
    halves = _halves(joint, cut)
    graphs = [
        _named("layer.forward", joint, {"y"}),
        _named("layer.backward", joint, {"dx"} | gradients),
        _named("layer.backward.first", joint, gradients),
        _named("layer.forward.save", halves.forward, None),
        _named("layer.backward.save", halves.backward, None),
        _named("layer.backward.save.first", halves.backward, gradients),
    ]
    return {graph.name: [graph] for graph in graphs}


def _small_layer_graphs(model: Model, raw: Graph, cut: CutPolicy) -> dict[str, list[Graph]]:
    """Passes in several parts, which all layers and both activation policies share, for every part takes minutes."""
    joint = simplify(raw)
    halves = _halves(joint, cut)
    weights = {t.name for t in model.architecture.layer_tensors(model.config) if t.module}
    products = cut.products_per_part or 1
    forward = dataclasses.replace(halves.forward, name="layer.forward.save")
    backward = dataclasses.replace(halves.backward, name="layer.backward.save")
    return {
        forward.name: cut_into_parts(forward, weights, products, prefix="f"),
        backward.name: cut_into_parts(backward, weights, products, prefix="b", late={"dy"}),
    }


def _reference_layer(model: Model, recipe: Recipe, raw: Graph, cut: CutPolicy) -> list[Graph]:
    """The layer in f32 as traced, without the passes that rewrite and cut what is compared with it."""
    if cut.products != "f32" or cut.swap:
        raw = layer.joint(model, recipe, dataclasses.replace(cut, products="f32", swap=False))
    plain = plain_products(remove_dead_code(canonicalize(raw))).renumbered()
    gradients = {name for name, _ in plain.outputs if name not in {"y", "dx"}}
    return [
        _named("reference.layer.forward", plain, {"y"}),
        _named("reference.layer.backward", plain, {"dx"} | gradients),
    ]


def _reference_ends(config: ModelConfig, seq_len: int, cut: CutPolicy) -> list[Graph]:
    """The parts before and after the layers that the reference needs in f32 and for a CPU, whatever the target."""
    plain = dataclasses.replace(cut, products="f32", swap=False, own_memory=False)
    shape = head.head_shape(config, seq_len, rows=cut.head_rows, slice_width=cut.head_slice)
    graphs = [
        embedding.tables(config, seq_len, plain),
        embedding.embed(config, seq_len, plain),
        head.end(config, shape, plain),
    ]
    return [dataclasses.replace(graph, name=f"reference.{graph.name.removeprefix('head.')}") for graph in graphs]


def _named(name: str, graph: Graph, keep: set[str] | None) -> Graph:
    cut = remove_dead_code(graph, keep, drop_inputs=True).renumbered()
    return dataclasses.replace(cut, name=name)


def _head_graphs(model: Model, recipe: Recipe, shape: HeadShape, cut: CutPolicy) -> list[Graph]:
    config = model.config
    widths = sorted({stop - start for start, stop in shape.slices})
    graphs = [head.label_rows(config, shape, cut.products), head.places(shape)]
    graphs += [head.begin(config, shape, cut), head.finish(config, shape, cut), head.end(config, shape, cut)]
    graphs += [head.score_begin(config, shape, cut), head.score_finish(config, shape, cut)]
    graphs += [head_reference.reference_begin(config, shape), head_reference.reference_finish(config, shape)]
    for width in widths:
        graphs += [head.slice_step(config, shape, cut, width), head.score_slice(config, shape, cut, width)]
        graphs += [
            head_reference.reference_lse(config, shape, width),
            head_reference.reference_slice(config, shape, width),
        ]
        if recipe.logits:
            graphs.append(head.logits_slice(config, shape, cut, width))
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
        **{f"squares{number}": uniform(0, 1) for number in range(len(traced.groups))},
        **dict.fromkeys([*weights, *lora, "weight"], matrix),
    }
