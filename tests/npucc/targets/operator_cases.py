"""Every operator that ONNX lowering knows, as small functions: scalars, broadcasting, promotion, axes and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.graph.capture import capture
from npucc.passes import remove_dead_code
from npucc.passes.canonicalize import canonicalize

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A function, and the types of its inputs."""

    name: str
    function: Function
    inputs: tuple[str, ...]


@cache
def graph_of(case: Case) -> Graph:
    """The case's function in canonical operators; its inputs are `x0`, `x1`, …, its output is `y`."""
    inputs = {f"x{n}": TensorType.from_str(text) for n, text in enumerate(case.inputs)}
    return remove_dead_code(canonicalize(capture(case.name, lambda *args: [case.function(*args)], inputs, ["y"])))


M, COLUMN, ROW, SCALAR, CUBE = "f32[3,4]", "f32[3,1]", "f32[4]", "f32[]", "f32[2,3,4]"
INT, LONG, BOOL = "i32[3,4]", "i64[3,4]", "bool[3,4]"


def _binary(functions: dict[str, Function], pairs: list[tuple[str, str]]) -> list[Case]:
    return [Case(f"{name}-{a}-{b}", function, (a, b)) for name, function in functions.items() for a, b in pairs]


def _with_literals(functions: dict[str, Function], literals: list[tuple[str, float]]) -> list[Case]:
    return [
        Case(f"{name}-{kind}-{literal}", lambda x, f=function, n=literal: f(x, n), (kind,))
        for name, function in functions.items()
        for kind, literal in literals
    ]


def arithmetic() -> list[Case]:
    """Two operands of equal or different shapes and dtypes, and literals."""
    whole: dict[str, Function] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
    every = whole | {"div": torch.div}
    shapes = [(M, M), (M, ROW), (M, COLUMN), (M, SCALAR), (SCALAR, M), (COLUMN, CUBE), (M, INT), (INT, M)]
    return [
        *_binary(every, shapes),
        *_binary(whole, [(INT, INT), (INT, LONG), (LONG, "i64[]")]),
        *_with_literals(every, [(M, 2), (M, 2.5), (M, -1.0), (INT, 0.5)]),
        Case("div-of-integers", torch.div, (INT, "i32[4]")),
        Case("maximum", torch.maximum, (M, ROW)),
        Case("maximum-integers", torch.maximum, (INT, "i32[1,4]")),
        Case("and", lambda x, y: (x > 0) & (y > 0), (M, ROW)),
        Case("and-bits", lambda x, y: x & y, (INT, INT)),
    ]


def unary() -> list[Case]:
    """Functions of one value, inside their domain."""
    functions: dict[str, Function] = {
        "log": lambda x: torch.log(x * x + 1),
        "sqrt": lambda x: torch.sqrt(x * x),
        "rsqrt": lambda x: torch.rsqrt(x * x + 1),
        "exp": torch.exp,
        "sigmoid": torch.sigmoid,
        "neg": torch.neg,
        "cos": torch.cos,
        "sin": torch.sin,
    }
    return [Case(name, function, (CUBE,)) for name, function in functions.items()]


def comparisons() -> list[Case]:
    """Operands are compared in the wider dtype, and a literal counts by its category alone."""
    ordered: dict[str, Function] = {"ge": torch.ge, "gt": torch.gt, "lt": torch.lt}
    pairs = [(M, M), (M, ROW), (INT, INT), (INT, LONG), (M, INT), (INT, SCALAR), (INT, "i32[]")]
    literals = [(M, 0), (M, 0.25), (INT, 1), (INT, 0.5), (LONG, 1.5), (LONG, 1)]
    return [*_binary(ordered | {"eq": torch.eq}, pairs), *_with_literals(ordered, literals)]


def reductions() -> list[Case]:
    """One axis, several, all; kept or dropped; integers and booleans are summed as i64."""
    functions: dict[str, Function] = {
        "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "logsumexp": torch.logsumexp
    }  # fmt: skip
    return [
        *(
            Case(f"{name}-{axes}-{keep}", lambda x, f=function, a=axes, k=keep: f(x, a, keepdim=k), (CUBE,))
            for name, function in functions.items()
            for axes in [(0,), (-1,), (0, 2), (1, -1)]
            for keep in (False, True)
        ),
        Case("sum-all", torch.sum, (CUBE,)),
        Case("sum-scalar", torch.sum, (SCALAR,)),
        Case("sum-integers", lambda x: x.sum(0), (INT,)),
        Case("sum-booleans", lambda x: x.sum([1]), (BOOL,)),
        Case("amax-all", torch.amax, (CUBE,)),
        Case("argmax", lambda x: x.argmax(1), (CUBE,)),
        Case("argmax-keep", lambda x: x.argmax(-1, keepdim=True), (CUBE,)),
        Case("softmax", lambda x: torch.softmax(x, -1), (CUBE,)),
        Case("softmax-first", lambda x: torch.softmax(x, 0), (CUBE,)),
    ]


def products() -> list[Case]:
    """Matrix products, with operands that are transposed in front of them."""
    return [
        Case("mm", torch.mm, ("f32[3,4]", "f32[4,5]")),
        Case("mm-left-transposed", lambda x, y: x.t() @ y, ("f32[4,3]", "f32[4,5]")),
        Case("mm-right-transposed", lambda x, y: x @ y.t(), ("f32[3,4]", "f32[5,4]")),
        Case("mm-both-transposed", lambda x, y: x.t() @ y.t(), ("f32[4,3]", "f32[5,4]")),
        Case("mm-of-one-transposed", lambda x: x @ x.t(), (M,)),
        Case("mm-and-the-transpose-itself", lambda x, y: (x @ y.t()).sum() * y.t(), ("f32[3,4]", "f32[5,4]")),
        Case("bmm", torch.bmm, ("f32[2,3,4]", "f32[2,4,5]")),
        Case("bmm-transposed", lambda x, y: torch.bmm(x, y.transpose(1, 2)), ("f32[2,3,4]", "f32[2,5,4]")),
    ]


def layouts() -> list[Case]:
    """The same elements elsewhere."""
    rolls = [(shift, axis) for shift in (1, -1, 2, 0, 5, -7) for axis in (-1, 0, 1)]
    return [
        Case("permute", lambda x: x.permute(2, 0, 1), (CUBE,)),
        Case("permute-negative", lambda x: x.permute(-1, 0, -2), (CUBE,)),
        Case("transpose", torch.t, (M,)),
        Case("view", lambda x: x.view(6, 4), (CUBE,)),
        Case("view-flat", lambda x: x.view(-1), (CUBE,)),
        Case("view-scalar", lambda x: x.view(1, 1), (SCALAR,)),
        Case("expand", lambda x: x.expand(5, 3, 4), (COLUMN,)),
        Case("expand-scalar", lambda x: x.expand(2, 3), (SCALAR,)),
        Case("cat", lambda x, y: torch.cat([x, y, x], 0), ("f32[1,4]", "f32[2,4]")),
        Case("slice", lambda x: x[1:2], (CUBE,)),
        Case("slice-last", lambda x: x[..., -2:], (CUBE,)),
        Case("slice-beyond", lambda x: x[:, 1:99], (CUBE,)),
        *(Case(f"split-{n}", lambda x, n=n: torch.split(x, 2, 1)[n], (CUBE,)) for n in (0, 1)),
        Case("cat-last", lambda x, y: torch.cat([x, y], -1), ("f32[3,1]", "f32[3,2]")),
        Case("an-input-as-it-is", lambda x: x, (M,)),
        *(Case(f"roll-{s}-{a}", lambda x, s=s, a=a: torch.roll(x, s, a), (CUBE,)) for s, a in rolls),
    ]


def indexing() -> list[Case]:
    """Values picked and placed by index or condition."""
    return [
        Case("index-select", lambda x, i: x.index_select(0, i), (M, "i32[5]")),
        Case("index-select-columns", lambda x, i: x.index_select(1, i), (CUBE, "i64[2]")),
        Case("gather", lambda x, i: x.gather(1, i), (M, "i64[3,2]")),
        Case("where", torch.where, (BOOL, M, M)),
        Case("where-broadcast", torch.where, ("bool[3,1]", M, SCALAR)),
        Case("where-promotes", torch.where, (BOOL, M, INT)),
        Case("where-literal", lambda c, x: torch.where(c, x, -1.5), (BOOL, M)),
    ]


def limits_and_casts() -> list[Case]:
    """Clamps with one bound or two, and every dtype from every other."""
    dtypes = (torch.float16, torch.float32, torch.int32, torch.int64, torch.bool)
    return [
        Case("clamp", lambda x: x.clamp(-0.5, 0.5), (M,)),
        Case("clamp-below", lambda x: x.clamp(min=0.1), (M,)),
        Case("clamp-above", lambda x: x.clamp(max=0.1), (M,)),
        Case("clamp-integers", lambda x: x.clamp(0, 1), (INT,)),
        Case("clamp-integers-by-floats", lambda x: x.clamp(min=0.5), (INT,)),
        *(Case(f"{kind}-to-{d}", lambda x, d=d: x.to(d), (kind,)) for d in dtypes for kind in (M, INT, BOOL)),
    ]


def fills() -> list[Case]:
    """Tensors made from nothing."""
    return [
        Case("full", lambda x: x + torch.full((3, 4), 2.5), (M,)),
        Case("full-integers", lambda x: x + torch.full((3, 4), 7, dtype=torch.int32), (INT,)),
        Case("full-booleans", lambda x: torch.full((3, 4), fill_value=True) & (x > 0), (M,)),
        Case("full-scalar", lambda x: x * torch.full((), 3.0), (M,)),
        Case("full-alone", lambda _: torch.zeros(2, 3), (M,)),
        Case("arange", lambda x: x * torch.arange(4), (M,)),
    ]


CASES = [
    *arithmetic(), *unary(), *comparisons(), *reductions(), *products(), *layouts(), *indexing(), *limits_and_casts(),
    *fills(),
]  # fmt: skip
