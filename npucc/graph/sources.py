"""Which line of the source made a node: kept beside the graph for its reader, and no part of what it means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

_PACKAGE = Path(__file__).parent.parent
#: What lies between a model's code and its trace.
_PLUMBING = (str(_PACKAGE / "graph"), str(_PACKAGE / "training" / "differentiate.py"))
_KEY = "npucc_source"


def with_sources(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
    """The same function for `make_fx`, which notes for every node that it makes where in this package that was."""

    def watched(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with _Watch():  # type: ignore[no-untyped-call]
            return function(*inputs)

    return watched


def source_of(node: torch.fx.Node) -> str:
    """`models/layers.py:31`, of the package; empty if it is not known."""
    return str(node.meta.get(_KEY, ""))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator before the tracer does, and afterwards the nodes that the tracer has made of it."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mode = get_proxy_mode()
        nodes = mode.tracer.graph.nodes if mode is not None else None
        last = next(iter(reversed(nodes)), None) if nodes is not None else None
        found = func(*args, **(kwargs or {}))
        if nodes is not None:
            line = _line(sys._getframe(1))  # noqa: SLF001 -- there is no other way to a frame at this cost
            for node in reversed(nodes):
                if node is last:
                    break
                node.meta.setdefault(_KEY, line)
        return found


def _line(frame: FrameType | None) -> str:
    """The innermost line of this package's own mathematics."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(_PACKAGE)) and not file.startswith(_PLUMBING):
            return f"{Path(file).relative_to(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
