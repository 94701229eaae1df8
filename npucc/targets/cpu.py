"""The `cpu` target: a part is an ONNX model that onnxruntime runs.

It is also the form of host parts in bundles of other targets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from npucc.errors import InternalError
from npucc.graph import Graph
from npucc.targets.onnx_lowering import IR_VERSION, LOWERING_VERSION, OPSET, lower
from npucc.targets.target import CutPolicy

NAME = "cpu"
MEDIA_TYPE = "application/vnd.npucc.part.v1+onnx"

#: Whole layers, few and large parts; slices of the vocabulary small enough that a block of logits stays near the
#: caches.
CUT = CutPolicy(head_rows=512, head_slice=16384, query_rows=128, repeat_products_within=128)

#: Budget of the activation policy `auto` where the recipe has none: a training host with 16 GiB.
MEMORY = 16 << 30

#: Relative error in the Euclidean norm that f32 arithmetic may show against float64. Sums of some ten thousand products
#: stay below 1e-6; a wrong rewrite is off by far more than this.
BOUND = 2e-5

_PROVIDERS = ["CPUExecutionProvider"]


def toolchain() -> dict[str, str]:
    """Everything beside the graph that can change a part's bytes."""
    import onnx

    return {"onnx": onnx.__version__, "lowering": str(LOWERING_VERSION), "opset": str(OPSET), "ir": str(IR_VERSION)}


def requirements() -> Mapping[str, str]:
    """The least that a host needs to run a part: opset 18 came with onnxruntime 1.14. No instruction set is assumed."""
    return {"onnxruntime": "1.14", "opset": str(OPSET), "cpu": "any"}


def compile_part(graph: Graph) -> bytes:
    """The payload of a part."""
    return lower(graph)


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


def execute(payload: bytes, inputs: Mapping[str, npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
    """Run a part on this host, inputs by name. For checks at build time; training runs through npurt."""
    results = _session(payload).run(None, dict(inputs))
    if not all(isinstance(result, np.ndarray) for result in results):
        raise InternalError("onnxruntime returned something that is not a tensor")
    return results  # type: ignore[no-any-return]
