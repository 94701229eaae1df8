"""Every node knows the line it comes from, and graphs mean the same without."""

from __future__ import annotations

import dataclasses
import re

import torch

from npubundle.tensor import TensorType
from npucc.graph.capture import capture
from npucc.models.layers import rms_norm
from npucc.passes import simplify
from npucc.training import layer
from tests.npucc.tiny import CUT, model, recipe

KIND = TensorType("f32", (4, 6))


def test_nodes_name_the_line_of_the_package_that_made_them() -> None:
    graph = capture("norm", lambda x: [rms_norm(x, torch.ones(6), 1e-5) + 1], {"x": KIND}, ["y"])
    *inside, last = graph.nodes
    assert all(re.fullmatch(r"models/layers\.py:\d+", node.source) for node in inside if node.op != "aten.ones.default")
    assert (last.op, last.source) == ("aten.add.Tensor", "")  # of this file


def test_all_nodes_of_a_layer_know_theirs_after_all_passes() -> None:
    graph = simplify(layer.joint(model(), recipe(), CUT))
    assert {node.op for node in graph.nodes if not node.source} <= {"constant"}
    files = {node.source.partition(":")[0] for node in graph.nodes}
    assert {"models/llama.py", "models/layers.py", "training/layer.py"} <= files


def test_gradients_written_by_hand_name_their_own_lines() -> None:
    graph = simplify(layer.joint(model(), recipe(), CUT))
    forward = {node.source for node in graph.nodes if node.op == "aten.rsqrt.default"}
    backward = {node.source for node in graph.nodes if node.op == "aten.sum.dim_IntList"}
    assert backward
    assert not forward & backward


def test_sources_are_no_part_of_a_graph() -> None:
    graph = simplify(layer.joint(model(), recipe(), CUT))
    bare = dataclasses.replace(graph, nodes=tuple(dataclasses.replace(n, source="") for n in graph.nodes))
    assert bare == graph
    assert bare.encode() == graph.encode()
    assert "  # models/llama.py:" in graph.as_text()
    assert "#" not in bare.as_text()
