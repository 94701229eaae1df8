from __future__ import annotations

import numpy as np
import pytest

from npubundle.tensor import TensorType
from npucc.errors import UsageError
from npucc.graph.capture import capture
from npucc.targets import cpu, find
from npucc.targets.onnx_lowering import IR_VERSION, LOWERING_VERSION, OPSET


def test_a_target_is_found_by_name() -> None:
    found = find("cpu")
    assert (found.NAME, found.MEDIA_TYPE) == ("cpu", "application/vnd.npucc.part.v1+onnx")


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown target 'tpu'") as caught:
        find("tpu")
    assert caught.value.remedy == "targets of this release: cpu, rngd"


def test_the_toolchain_names_what_can_change_the_bytes() -> None:
    found = cpu.toolchain()
    assert found | {"onnx": ""} == {
        "onnx": "", "lowering": str(LOWERING_VERSION), "opset": str(OPSET), "ir": str(IR_VERSION)
    }  # fmt: skip


def test_a_part_runs_by_the_names_of_its_inputs() -> None:
    kind = TensorType("f32", (2,))
    graph = capture("minus", lambda x, y: [x - y], {"x": kind, "y": kind}, ["z"])
    one, three = np.full(2, 1, np.float32), np.full(2, 3, np.float32)
    (difference,) = cpu.execute(cpu.compile_part(graph), graph, {"y": one, "x": three})
    assert difference.tolist() == [2.0, 2.0]
