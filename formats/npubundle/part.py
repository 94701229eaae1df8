"""What a bundle says about a part: its signature, its key, where its bytes are and what it needs to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npubundle.fields import Fields, Kind, Place, dict_of, integer, list_of, nullable, number, record, text
from npubundle.tensor import ITEM_SIZE, TensorType

DIGEST = r"sha256:[0-9a-f]{64}"
#: Of parts as ONNX models.
ONNX_MEDIA_TYPE = "application/vnd.npucc.part.v1+onnx"


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a part."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Numerics:
    """Outcome of the check at build time: the bound on the relative error of every output, and the verdict.

    `bound` limits ‖x − r‖ / ‖r‖ of every floating-point output x against its float64 reference r. Measured errors
    differ between hosts, so they are in a signed statement beside the bundle and not here.
    """

    bound: float
    verdict: str


@dataclass(frozen=True, slots=True)
class PartGraph:
    """Where the graph is that the vendor's compiler took in: its kit can execute that on a CPU, without a device."""

    digest: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class OnnxForm:
    """A part as an ONNX model, which a CPU runs; `requires` names the minimum versions of what does."""

    digest: str
    size: int
    requires: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the vendor's cost model says of a part: cycles of one run, peak power in watts, memory in bytes.

    Power and memory are None where the model says nothing of them.
    """

    cycles: int
    peak_power: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A compiled graph of the bundle.

    `inplace` pairs (output, input) indices that may share memory: the graph reads nothing of that input once it writes
    that output. `requires` names minimum versions, such as `onnxruntime` and `opset`. `digest` and `size` are the
    payload's. `graph` and `estimate` are there where the target's toolchain gives them and the build kept them, `onnx`
    where the payload is a program of a device.
    """

    name: str
    key: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    inplace: tuple[tuple[int, int], ...]
    digest: str
    size: int
    media_type: str
    requires: Mapping[str, str]
    numerics: Numerics
    graph: PartGraph | None = None
    estimate: Estimate | None = None
    onnx: OnnxForm | None = None

    def as_onnx(self) -> OnnxForm | None:
        """The part as an ONNX model: the payload, where that is one, or the form beside it. None if there is none."""
        if self.media_type == ONNX_MEDIA_TYPE:
            return OnnxForm(self.digest, self.size, self.requires)
        return self.onnx

    def to_dict(self) -> dict[str, Any]:
        """The part as it stands in `bundle.json`. What is absent is not written."""
        optional = {"graph": self.graph, "estimate": self.estimate, "onnx": self.onnx}
        return {
            "name": self.name,
            "key": self.key,
            "inputs": [{"name": p.name, "type": str(p.type)} for p in self.inputs],
            "outputs": [{"name": p.name, "type": str(p.type)} for p in self.outputs],
            "inplace": [list(pair) for pair in self.inplace],
            "digest": self.digest,
            "size": self.size,
            "media_type": self.media_type,
            "requires": dict(self.requires),
            "numerics": dataclasses.asdict(self.numerics),
            **{name: dataclasses.asdict(value) for name, value in optional.items() if value is not None},
        }


def tensor_type() -> Kind[TensorType]:
    """A tensor type as text, `f32[128,576]`."""
    form = text(rf"({'|'.join(ITEM_SIZE)})\[(\d{{1,12}}(,\d{{1,12}})*)?\]", called="a tensor type such as f32[128,576]")
    blank = TensorType("f32", ())

    def read_type(place: Place) -> TensorType:
        before = form.read(place)
        dtype, _, rest = before.partition("[")
        if dtype not in ITEM_SIZE or not rest.endswith("]"):
            return blank
        sizes = rest[:-1].split(",") if rest[:-1] else []
        return TensorType(dtype, tuple(map(int, sizes))) if all(s.isdigit() for s in sizes) else blank

    return Kind(read_type, lambda: blank)


def _port(fields: Fields) -> Port:
    return Port(fields.need("name", text()), fields.need("type", tensor_type()))


def _numerics(fields: Fields) -> Numerics:
    return Numerics(fields.need("bound", number(0.0)), fields.need("verdict", text("pass|unchecked")))


def _graph(fields: Fields) -> PartGraph:
    return PartGraph(
        digest=fields.need("digest", text(DIGEST, called="a sha256 digest")),
        size=fields.need("size", integer(0)),
        media_type=fields.need("media_type", text()),
    )


def _onnx(fields: Fields) -> OnnxForm:
    return OnnxForm(
        digest=fields.need("digest", text(DIGEST, called="a sha256 digest")),
        size=fields.need("size", integer(0)),
        requires=fields.need("requires", dict_of(text())),
    )


def _estimate(fields: Fields) -> Estimate:
    return Estimate(
        cycles=fields.need("cycles", integer(0)),
        peak_power=fields.need("peak_power", nullable(number(0.0))),
        memory=fields.need("memory", nullable(integer(0))),
    )


def _pair(place: Place) -> tuple[int, int]:
    pair = list_of(integer(0), minimum=2, maximum=2).read(place)
    return (pair[0], pair[1]) if len(pair) == 2 else (0, 0)


def _part(fields: Fields) -> Part:
    part = Part(
        name=fields.need("name", text(r"[a-z0-9][a-z0-9._-]{0,99}", called="a part name")),
        key=fields.need("key", text(DIGEST, called="a sha256 digest")),
        inputs=fields.need("inputs", list_of(record(_port), maximum=4096)),
        outputs=fields.need("outputs", list_of(record(_port), maximum=4096)),
        inplace=fields.need("inplace", list_of(Kind(_pair, lambda: (0, 0)))),
        digest=fields.need("digest", text(DIGEST, called="a sha256 digest")),
        size=fields.need("size", integer(0)),
        media_type=fields.need("media_type", text()),
        requires=fields.need("requires", dict_of(text())),
        numerics=fields.need("numerics", record(_numerics)),
        graph=fields.take("graph", record(_graph), None),
        estimate=fields.take("estimate", record(_estimate), None),
        onnx=fields.take("onnx", record(_onnx), None),
    )
    for output, source in part.inplace:
        if output >= len(part.outputs) or source >= len(part.inputs):
            fields.wrong("inplace", f"[{output}, {source}] is beyond the part's outputs or inputs")
        elif part.outputs[output].type != part.inputs[source].type:
            fields.wrong(
                "inplace", f"[{output}, {source}] joins {part.outputs[output].type} and {part.inputs[source].type}"
            )
    return part


#: Reads a part from `bundle.json`.
PART: Kind[Part] = record(_part)
