"""A bundle of a toy model, made by hand, with every feature of a program in it; and the same mathematics in numpy.

Two layers `y = x + (x @ w) * s` with frozen w and trained s, on top of an embedding. The loss of a chosen row is the
sum of squares of its logits, where the logits are products with two slices of the embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
from numpy.typing import NDArray
from safetensors.numpy import save_file

from npubundle import canonical, container, keys, program_json
from npubundle.config import BundleConfig, Memory, Target
from npubundle.content import NewLayer, build_container
from npubundle.digest import sha256_of
from npubundle.liveness import planned
from npubundle.model_config import ModelConfig
from npubundle.part import Numerics, Part, Port
from npubundle.program import Buffer, Call, Init, Instruction, Operand, Program, Repeat, Source
from npubundle.recipe import Recipe
from npubundle.tensor import TensorType

Array = NDArray[Any]

S, V, H, B, N, LAYERS = 6, 10, 4, 3, 2, 2  # tokens, vocabulary, width, blocks, rows of a block, layers
EMBEDDING = "model.embed_tokens.weight"
MEDIA_TYPE = "application/vnd.npucc.part.v1+onnx"

MODEL = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 8,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "vocab_size": V,
        "tie_word_embeddings": True,
    }
)

_HEAD = """
(float[6,4] h, int32[2] rows, float[2] weights, float[5,4] low, float[5,4] high, float[] loss, float[6,4] dh)
=> (float[] new_loss, float[6,4] new_dh, float[2] logprobs)
<int32[6] positions = {0, 1, 2, 3, 4, 5}, int64[1] last = {1}, float two = {2.0}, int64[2] column = {-1, 1}>
{
    picked = Gather <axis = 0> (h, rows)
    table = Concat <axis = 0> (low, high)
    flipped = Transpose <perm = [1, 0]> (table)
    logits = MatMul(picked, flipped)
    squares = Mul(logits, logits)
    logprobs = ReduceSum <keepdims = 0> (squares, last)
    weighted = Mul(logprobs, weights)
    sum = ReduceSum <keepdims = 0> (weighted)
    new_loss = Add(loss, sum)
    factor = Reshape(weights, column)
    doubled = Mul(logits, two)
    dlogits = Mul(doubled, factor)
    dpicked = MatMul(dlogits, table)
    tall = Reshape(rows, column)
    equal = Equal(tall, positions)
    onehot = Cast <to = 1> (equal)
    wide = Transpose <perm = [1, 0]> (onehot)
    scattered = MatMul(wide, dpicked)
    new_dh = Add(dh, scattered)
}
"""
_BACKWARD = """
(float[6,4] x, float[4,4] w, float[4] s, float[6,4] dy) => (float[6,4] dx, float[4] ds)
<int64[1] first = {{0}}>
{{
    z = MatMul(x, w)
    products = Mul(dy, z)
    {ds} = ReduceSum <keepdims = 0> (products, first)
    dz = Mul(dy, s)
    back = Transpose <perm = [1, 0]> (w)
    dzw = MatMul(dz, back)
    dx = Add(dy, dzw)
    {more}
}}
"""
GRAPHS = {
    "embed": "(int32[6] tokens, float[10,4] table) => (float[6,4] x) { x = Gather <axis = 0> (table, tokens) }",
    "forward": """(float[6,4] x, float[4,4] w, float[4] s) => (float[6,4] y)
        { z = MatMul(x, w) zs = Mul(z, s) y = Add(x, zs) }""",
    "head.begin": """(float[6,4] h) => (float[] loss, float[6,4] dh) <float zero = {0.0}>
        { dh = Mul(h, zero) sum = ReduceSum <keepdims = 0> (dh) loss = Mul(sum, zero) }""",
    "head": _HEAD,
    "head.end": "(float[] loss) => (float[] loss_sum) { loss_sum = Identity(loss) }",
    "backward": _BACKWARD.format(ds="ds", more=""),
    "wrong": _BACKWARD.format(ds="half", more="ds = Mul(half, s)"),
    "accumulate": """(float[8] grad, float[8] step, float[] accumulate) => (float[8] new_grad)
        { kept = Mul(grad, accumulate) new_grad = Add(kept, step) }""",
    "update": """(float[8] param, float[8] grad, float[] learning_rate, int32[] sign) => (float[8] new_param, float[] n)
        { f = Cast <to = 1> (sign) r = Mul(learning_rate, f) d = Mul(grad, r) new_param = Add(param, d)
          q = Mul(grad, grad) total = ReduceSum <keepdims = 0> (q) n = Sqrt(total) }""",
}
INPLACE = {"head": ((0, 5), (1, 6)), "accumulate": ((0, 0),), "update": ((0, 0),)}
_DTYPE = {1: "f32", 6: "i32", 16: "bf16"}


def payload(graph: str) -> bytes:
    """An ONNX model from its text."""
    text = f'<ir_version: 8, opset_import: ["" : 18]> part {graph}'
    raw: bytes = onnx.parser.parse_model(text).SerializeToString(deterministic=True)
    return raw


def part(name: str, raw: bytes, **changes: Any) -> Part:
    """What a bundle says of a payload."""

    def port(value: onnx.ValueInfoProto) -> Port:
        tensor = value.type.tensor_type
        return Port(value.name, TensorType(_DTYPE[tensor.elem_type], tuple(d.dim_value for d in tensor.shape.dim)))

    graph = onnx.load_from_string(raw).graph
    made = Part(
        name=name,
        key=sha256_of(name.encode()),
        inputs=tuple(map(port, graph.input)),
        outputs=tuple(map(port, graph.output)),
        inplace=INPLACE.get(name, ()),
        digest=sha256_of(raw),
        size=len(raw),
        media_type=MEDIA_TYPE,
        requires={"onnxruntime": "1.20", "opset": "18", "cpu": "any"},
        numerics=Numerics(1e-5, "pass"),
    )
    return dataclasses.replace(made, **changes)


def parts(graphs: Mapping[str, str] = GRAPHS) -> tuple[dict[str, Part], dict[str, bytes]]:
    """Parts and payloads by name."""
    payloads = {name: payload(graph) for name, graph in graphs.items()}
    return {name: part(name, raw) for name, raw in payloads.items()}, payloads


def _buffers() -> list[Buffer]:
    def f32(*shape: int) -> TensorType:
        return TensorType("f32", shape)

    counter = TensorType("i32", ())
    buffers = [
        Buffer("tokens", TensorType("i32", (S,)), "input"),
        Buffer("positions", TensorType("i32", (S,)), "input"),
        Buffer("segments", TensorType("i32", (S,)), "input"),
        Buffer("rows", TensorType("i32", (B, N)), "input"),
        Buffer("labels", TensorType("i32", (B, N)), "input"),
        Buffer("weights", f32(B, N), "input"),
        *(Buffer(name, f32(), "scalar") for name in ("accumulate", "learning_rate")),
        Buffer("blocks", counter, "scalar"),
        Buffer("sign", counter, "scalar", value=-1),
        Buffer("table", f32(V, H), "weight", source=Source(EMBEDDING)),
        Buffer("head.0", f32(V // 2, H), "weight", view_of="table"),
        Buffer("head.1", f32(V // 2, H), "weight", view_of="table", view_offset=V // 2 * H),
        *(Buffer(name, f32(LAYERS * H), role) for name, role in _STATE.items()),
        *(Buffer(name, f32(), "output") for name in ("loss_sum", "grad_norm")),
        Buffer("logprobs", f32(B, N), "output"),
        *(Buffer(name, f32(S, H), "activation") for name in ("h.0", "h.1", "h.2", "dh", "dh.0", "dh.1", "eval")),
        Buffer("loss", f32(), "activation"),
        Buffer("eval.out", f32(S, H), "activation"),
    ]
    for layer in range(LAYERS):
        init = Init("kaiming_uniform", H) if layer else Init("zeros")
        start = layer * H
        source = Source(f"layers.{layer}.w", (("transpose",),))
        buffers += [
            Buffer(f"w.{layer}", f32(H, H), "weight", source=source),
            Buffer(f"lora.{layer}", f32(H), "param", "lora", start, tensor=f"layers.{layer}.s", init=init),
            Buffer(f"grad_step.{layer}", f32(H), "grad", "grad_step", start, tensor=f"layers.{layer}.s"),
        ]
    return buffers


_STATE: dict[str, Any] = {"lora": "param", "grad": "grad", "grad_step": "grad", "moment1": "moment"}


def _call(part: str, args: str, results: str, layer: int | None = None) -> Call:
    def operands(text: str) -> tuple[Operand, ...]:
        return tuple(map(Operand.from_str, text.split()))

    return Call(part, operands(args), operands(results), layer=layer)


def program(backward: str = "backward") -> Program:
    """The training program; `backward` names the part that does the backward pass of a layer."""
    forward = tuple(_call("forward", f"h.{i} w.{i} lora.{i}", f"h.{i + 1}", i) for i in range(LAYERS))
    body = _call("head", "h.2 rows[] weights[] head.0 head.1 loss dh", "loss dh logprobs[]")
    back = (
        _call(backward, "h.1 w.1 lora.1 dh", "dh.1 grad_step.1", 1),
        _call(backward, "h.0 w.0 lora.0 dh.1", "dh.0 grad_step.0", 0),
    )
    micro_step: tuple[Instruction, ...] = (
        _call("embed", "tokens table", "h.0"),
        *forward,
        _call("head.begin", "h.2", "loss dh"),
        Repeat("blocks", B, (body,)),
        _call("head.end", "loss", "loss_sum"),
        *back,
        _call("accumulate", "grad grad_step accumulate", "grad"),
    )
    update = (_call("update", "lora grad learning_rate sign", "lora grad_norm"),)
    evaluate = (_call("embed", "tokens table", "eval"), _call("forward", "eval w.0 lora.0", "eval.out", 0))
    checkpoint = {EMBEDDING: (V, H), "layers.0.w": (H, H), "layers.1.w": (H, H)}
    phases = {"micro_step": micro_step, "update": update, "evaluate": evaluate}
    chains = (("h.0", "h.1", "h.2"), ("dh.0", "dh.1", "dh"))
    return planned(Program({b.name: b for b in _buffers()}, phases, chains, {}, checkpoint))


def config(all_parts: Mapping[str, Part], programs: Mapping[str, bytes], target: str = "cpu") -> BundleConfig:
    """`bundle.json`."""
    return BundleConfig(
        name="toy",
        model=MODEL,
        recipe=Recipe(seq_len=S),
        target=Target(target, {}),
        toolchain={"hand": "1"},
        parts=tuple(all_parts.values()),
        programs={name: sha256_of(raw) for name, raw in programs.items()},
        memory=Memory(1, 1, 1, 1, LAYERS),
    )


def write_bundle(
    folder: Path,
    *,
    backward: str = "backward",
    target: str = "cpu",
    changed: Mapping[str, Part] | None = None,
    payloads: Mapping[str, bytes] | None = None,
    programs: Mapping[str, Program] | None = None,
) -> tuple[Path, Path]:
    """A signed bundle, and the public key that it is trusted by.

    `changed`, `payloads` and `programs` stand in for those made here.
    """
    made, raw = parts()
    made |= changed or {}
    raw |= payloads or {}
    chosen = programs or {"train": program(backward), "reference": program()}
    encoded = {name: program_json.encode(made_program) for name, made_program in chosen.items()}
    layers = [NewLayer(program_json.MEDIA_TYPE, text) for text in dict.fromkeys(encoded.values())]
    layers += [NewLayer(MEDIA_TYPE, text) for text in dict.fromkeys(raw.values())]
    key = keys.generate()
    signed = build_container("toy", config(made, encoded, target).encode(), layers, signer=key)
    path = folder / "toy.npub"
    container.write(path, signed)
    _, public = keys.save(key, folder / "toy.key")
    return path, public


def weights(seed: int = 0) -> dict[str, Array]:
    """The tensors of a checkpoint; every value is exact in bfloat16."""
    generator = np.random.default_rng(seed)
    shapes = {EMBEDDING: (V, H), "layers.0.w": (H, H), "layers.1.w": (H, H)}
    return {
        name: generator.normal(0, 0.5, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_weights(folder: Path, tensors: Mapping[str, Array] | None = None, **config_changes: Any) -> Path:
    """A model folder."""
    folder.mkdir(exist_ok=True)
    save_file(dict(weights() if tensors is None else tensors), folder / "model.safetensors")
    (folder / "config.json").write_bytes(canonical.encode(MODEL.to_dict() | config_changes))
    return folder


def micro_step(tensors: Mapping[str, Array], scale: Array, tokens: Array, rows: Array, row_weights: Array) -> Any:
    """Loss and gradient of the trained vector, in float64."""
    table = tensors[EMBEDDING].astype(np.float64)
    w = [tensors[f"layers.{i}.w"].T.astype(np.float64) for i in range(LAYERS)]
    s = scale.reshape(LAYERS, H).astype(np.float64)
    h = [table[tokens]]
    for i in range(LAYERS):
        h.append(h[i] + (h[i] @ w[i]) * s[i])
    logits = h[-1][rows] @ table.T
    loss = float(((logits**2).sum(1) * row_weights).sum())
    dh = np.zeros_like(h[-1])
    np.add.at(dh, rows, (2 * logits * row_weights[:, None]) @ table)
    ds = np.zeros_like(s)
    for i in reversed(range(LAYERS)):
        ds[i] = (dh * (h[i] @ w[i])).sum(0)
        dh = dh + (dh * s[i]) @ w[i].T
    return loss, ds.reshape(-1)
