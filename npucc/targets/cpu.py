"""The `cpu` target: a part is an ONNX model that onnxruntime runs.

In bundles of other targets it is the form of host parts, and one that every part has beside its program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from npubundle.part import ONNX_MEDIA_TYPE
from npucc.errors import InternalError
from npucc.graph import Graph
from npucc.targets.onnx_lowering import IR_VERSION, LOWERING_VERSION, OPSET, lower
from npucc.targets.target import CompiledPart, CutPolicy

NAME = "cpu"
#: Compiling takes less time here than starting a process.
jobs = 1
MEDIA_TYPE = ONNX_MEDIA_TYPE
GRAPH_MEDIA_TYPE: str | None = None

#: Whole layers, few and large parts; slices of the vocabulary small enough that a block of logits stays near the
#: caches.
CUT = CutPolicy(head_rows=512, head_slice=16384, query_rows=128, repeat_products_within=128)

#: Budget of the activation policy `auto` where the recipe has none: a training host with 16 GiB.
MEMORY = 16 << 30

#: Relative error in the Euclidean norm that f32 arithmetic may show against float64. Sums of some ten thousand products
#: stay below 1e-6; a wrong rewrite is off by far more than this.
BOUND = 2e-5
#: Integers are exact.
TIES = 0.0

_PROVIDERS = ["CPUExecutionProvider"]


def toolchain() -> dict[str, str]:
    """Everything beside the graph that can change a part's bytes."""
    import onnx

    return {"onnx": onnx.__version__, "lowering": str(LOWERING_VERSION), "opset": str(OPSET), "ir": str(IR_VERSION)}


def requirements() -> Mapping[str, str]:
    """The least that a host needs to run a part: opset 18 came with onnxruntime 1.14. No instruction set is assumed."""
    return {"onnxruntime": "1.14", "opset": str(OPSET), "cpu": "any"}


def options(graph: Graph) -> dict[str, str]:
    """Nothing else decides the bytes."""
    del graph
    return {}


def bundle_options() -> dict[str, str]:
    """Nothing to know of the whole bundle."""
    return {}


def compile_part(graph: Graph) -> CompiledPart:
    """The payload of a part."""
    return CompiledPart(lower(graph))


def imported(graph: Graph) -> CompiledPart:
    """The same: what runs is what was compiled."""
    return compile_part(graph)


def close() -> None:
    """Nothing was started."""


@cache
def _onnxruntime() -> Any:
    """The library onnxruntime. Its official builds report every process to their maker, unless told not to in time."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def _session(payload: bytes) -> Any:
    """A session with threads of its own, or with those of the process where it has a common pool (npurt makes one)."""
    library = _onnxruntime()
    try:
        return library.InferenceSession(payload, _options(own_threads=True), providers=_PROVIDERS, enable_fallback=0)
    except RuntimeError:
        return library.InferenceSession(payload, _options(own_threads=False), providers=_PROVIDERS, enable_fallback=0)


def _options(*, own_threads: bool) -> Any:
    options = _onnxruntime().SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = own_threads
    return options


def execute(part: CompiledPart, graph: Graph, inputs: Mapping[str, npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
    """Run a part on this host, inputs by name. For checks at build time; training runs through npurt."""
    session = _session(part.payload)
    kinds = [*(value.type for value in graph.inputs), *graph.output_types]
    if any(kind.dtype == "bf16" for kind in kinds):
        return _execute_bound(session, graph, inputs)
    results = session.run(None, dict(inputs))
    if not all(isinstance(result, np.ndarray) for result in results):
        raise InternalError("onnxruntime returned something that is not a tensor")
    return results  # type: ignore[no-any-return]


#: ONNX's number of bf16, which NumPy does not know.
_BF16 = 16


def _execute_bound(session: Any, graph: Graph, inputs: Mapping[str, npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
    """As `execute`, through addresses: bf16 crosses as the upper halves of f32."""
    binding = session.io_binding()
    kept = []
    for source, value in zip(session.get_inputs(), graph.inputs, strict=True):
        array = np.ascontiguousarray(inputs[value.name])
        narrow = value.type.dtype == "bf16"
        kept.append(array := (array.view(np.uint32) >> 16).astype(np.uint16) if narrow else array)
        binding.bind_input(source.name, "cpu", 0, _BF16 if narrow else array.dtype, value.type.shape, array.ctypes.data)
    outputs: list[npt.NDArray[Any]] = []
    for result, kind in zip(session.get_outputs(), graph.output_types, strict=True):
        narrow = kind.dtype == "bf16"
        outputs.append(np.empty(kind.shape, np.uint16 if narrow else _NUMPY[kind.dtype]))
        address = outputs[-1].ctypes.data
        binding.bind_output(result.name, "cpu", 0, _BF16 if narrow else outputs[-1].dtype, kind.shape, address)
    session.run_with_iobinding(binding)
    return [(out.astype(np.uint32) << 16).view(np.float32) if out.dtype == np.uint16 else out for out in outputs]


_NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "bool": np.bool_}
