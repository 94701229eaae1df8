"""Random graphs in the spellings that tracing leaves behind, built from what operators really return.

Each step picks an operator and values that fit it, runs it, and takes the type of the node from the result, so that
every graph is well formed and has finite values on its own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from npubundle.tensor import TensorType
from npucc.graph import Arg, Graph, Node, Ref, Value

Draw = Callable[[st.SearchStrategy[Arg]], Arg]


@dataclass(frozen=True, slots=True)
class Sample:
    """A graph and inputs on which all of its values are finite."""

    graph: Graph
    inputs: dict[str, torch.Tensor]


class _Maker:
    """A graph in the making, with the value of everything in it."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.values: dict[str, torch.Tensor] = {}
        self.nodes: list[Node] = []

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> str:
        """Any value that fits; the first input always does in the end."""
        found = [name for name, value in self.values.items() if fits(value)]
        return self.draw(st.sampled_from(found or ["a"]))

    def add(self, op: str, *args: Arg, **kwargs: Arg) -> None:
        """Append a node, unless its result is too large to go on with."""

        def plain(arg: Arg) -> object:
            if isinstance(arg, Ref):
                return self.values[arg.name]
            return [plain(item) for item in arg] if isinstance(arg, tuple) else arg

        packet, overload = op.removeprefix("aten.").split(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload)
        result = operator(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
        if result.numel() == 0 or result.numel() > 64 or result.abs().max() > 100:
            return
        name = f"n{len(self.nodes)}"
        self.values[name] = result
        kind = TensorType("f32", tuple(result.shape))
        self.nodes.append(Node(name, op, args, tuple(sorted(kwargs.items())), kind))


def _axis(m: _Maker, name: str) -> int:
    rank = m.values[name].dim()
    return m.draw(st.integers(-rank, rank - 1))


def _pair(m: _Maker) -> tuple[str, str]:
    """Two values that broadcast."""
    first = m.pick()
    shape = m.values[first].shape

    def fits(other: torch.Tensor) -> bool:
        return all(a == b or 1 in (a, b) for a, b in zip(reversed(shape), reversed(other.shape), strict=False))

    return first, m.pick(fits)


def _copy(m: _Maker) -> None:
    op = m.draw(st.sampled_from(["clone", "detach", "alias"]))
    m.add(f"aten.{op}.default", Ref(m.pick()))


def _arithmetic(m: _Maker) -> None:
    first, second = _pair(m)
    op = m.draw(st.sampled_from(["add", "sub", "mul", "maximum"]))
    if op == "maximum":
        m.add("aten.maximum.default", Ref(first), Ref(second))
    elif op != "mul" and m.draw(st.booleans()):
        m.add(f"aten.{op}.Tensor", Ref(first), Ref(second), alpha=m.draw(st.sampled_from([1, 2, 0.5])))
    else:
        m.add(f"aten.{op}.Tensor", Ref(first), Ref(second))


def _scalar(m: _Maker) -> None:
    op = m.draw(st.sampled_from(["add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "mul.Tensor", "add.Tensor"]))
    m.add(f"aten.{op}", Ref(m.pick()), m.draw(st.sampled_from([2, 2.0, 0.5, 1])))


def _power(m: _Maker) -> None:
    m.add("aten.pow.Tensor_Scalar", Ref(m.pick()), m.draw(st.sampled_from([1, 2, 3, 2.0])))


def _unary(m: _Maker) -> None:
    op = m.draw(st.sampled_from(["sigmoid", "cos", "neg"]))
    m.add(f"aten.{op}.default", Ref(m.pick()))


def _swap(m: _Maker) -> None:
    name = m.pick(lambda value: value.dim() > 0)
    rank = m.values[name].dim()
    if rank <= 2 and m.draw(st.booleans()):
        m.add("aten.t.default", Ref(name))
    elif m.draw(st.booleans()):
        m.add("aten.transpose.int", Ref(name), _axis(m, name), _axis(m, name))
    else:
        axes = m.draw(st.permutations(range(rank)))
        m.add("aten.permute.default", Ref(name), tuple(axis - rank * (axis % 2) for axis in axes))


def _reshape(m: _Maker) -> None:
    name = m.pick(lambda value: value.dim() > 0)
    value = m.values[name]
    kind = m.draw(st.sampled_from(["reshape", "flat", "unsqueeze", "squeeze"]))
    if kind == "unsqueeze":
        m.add("aten.unsqueeze.default", Ref(name), m.draw(st.integers(-value.dim() - 1, value.dim())))
    elif kind == "squeeze":
        m.add("aten.squeeze.dim", Ref(name), _axis(m, name))
    elif kind == "flat":
        m.add("aten.reshape.default", Ref(name), (-1,))
    else:
        shape = m.draw(st.permutations(value.shape))
        m.add("aten.reshape.default", Ref(name), tuple(shape))


def _expand(m: _Maker) -> None:
    name = m.pick(lambda value: 1 in value.shape or value.dim() < 2)
    lead = (m.draw(st.integers(1, 2)),) if m.draw(st.booleans()) else ()
    shape = tuple(m.draw(st.integers(1, 3)) if size == 1 else size for size in m.values[name].shape)
    m.add("aten.expand.default", Ref(name), (*lead, *shape))


def _fill(m: _Maker) -> None:
    like = m.pick()
    op = m.draw(st.sampled_from(["zeros_like", "ones_like", "full_like", "new_zeros"]))
    if op == "full_like":
        m.add("aten.full_like.default", Ref(like), m.draw(st.sampled_from([2, 0.5, True])))
    elif op == "new_zeros":
        m.add("aten.new_zeros.default", Ref(like), (2, 1))
    else:
        m.add(f"aten.{op}.default", Ref(like))


def _reduce(m: _Maker) -> None:
    name = m.pick(lambda value: value.dim() > 0)
    kind = m.draw(st.sampled_from(["all", "sum", "mean", "select"]))
    if kind == "all":
        m.add("aten.sum.default", Ref(name))
    elif kind == "select":
        m.add("aten.select.int", Ref(name), _axis(m, name), 0)
    else:
        op = "sum.dim_IntList" if kind == "sum" else "mean.dim"
        m.add(f"aten.{op}", Ref(name), (_axis(m, name),), m.draw(st.booleans()))


def _product(m: _Maker) -> None:
    first = m.pick(lambda value: value.dim() == 2)
    inner = m.values[first].shape[-1]
    second = m.pick(lambda value: value.dim() == 2 and value.shape[0] == inner)
    if m.values[first].dim() == m.values[second].dim() == 2 and m.values[second].shape[0] == inner:
        m.add("aten.mm.default", Ref(first), Ref(second))


_STEPS: Sequence[Callable[[_Maker], None]] = (
    _copy, _arithmetic, _arithmetic, _scalar, _power, _unary, _swap, _swap, _reshape, _reshape, _expand, _expand, _fill,
    _reduce, _product,
)  # fmt: skip


@st.composite
def samples(draw: st.DrawFn, max_steps: int = 14) -> Sample:
    """A graph over three inputs with up to `max_steps` nodes, of which a few values are outputs."""
    maker = _Maker(draw)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    shapes = {"a": (2, 3), "b": (3, 1), "c": (1,)}
    for name, shape in shapes.items():
        maker.values[name] = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    for _ in range(draw(st.integers(1, max_steps))):
        draw(st.sampled_from(_STEPS))(maker)
    names = list(maker.values)
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    outputs = tuple((f"out{number}", value) for number, value in enumerate([*chosen, names[-1]]))
    inputs = tuple(Value(name, TensorType("f32", shape)) for name, shape in shapes.items())
    graph = Graph("random", inputs, tuple(maker.nodes), outputs)
    return Sample(graph, {name: maker.values[name] for name in shapes})
