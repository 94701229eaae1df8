"""A model small enough to differentiate by hand, behind the interface of a real engine.

Every token predicts its successor from its own embedding h (and, a little, its position): logits = (W + s Σ B A) h,
with two LoRA pairs (A, B). It keeps the contract of `docs/reference/program.md`: names, shapes, dtypes and phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from npubundle.config import BundleConfig, Memory, Target
from npubundle.model_config import ModelConfig
from npubundle.program import Buffer, Init, Program
from npubundle.recipe import Recipe
from npubundle.tensor import TensorType
from npurt.data import Pack
from npurt.engine import Array

S, BLOCKS, ROWS = 16, 4, 4
VOCABULARY, HIDDEN, RANK, ALPHA = 48, 6, 2, 4.0
MODULES = ("q_proj", "v_proj")
DTYPES = {"f32": np.float32, "i32": np.int32}


def tensor_name(module: str, matrix: str) -> str:
    """The name PEFT gives to a LoRA matrix of layer 0."""
    return f"base_model.model.model.layers.0.self_attn.{module}.lora_{matrix}.weight"


def simulated_program() -> Program:
    """The program's buffers; the phases' instructions are not needed, the simulator knows what they do."""
    f32, i32 = "f32", "i32"
    buffers = [
        *(Buffer(name, TensorType(i32, (S,)), "input") for name in ("tokens", "positions", "segments")),
        *(Buffer(name, TensorType(i32, (BLOCKS, ROWS)), "input") for name in ("rows", "labels")),
        Buffer("weights", TensorType(f32, (BLOCKS, ROWS)), "input"),
        Buffer("blocks", TensorType(i32, ()), "input"),
        *(
            Buffer(name, TensorType(f32, ()), "scalar")
            for name in ("accumulate", "token_count", "max_norm", "learning_rate", "beta1", "beta2")
        ),
        *(
            Buffer(name, TensorType(f32, ()), "scalar")
            for name in ("epsilon", "weight_decay", "correction1", "correction2")
        ),
        *(Buffer(name, TensorType(f32, ()), "output") for name in ("loss_sum", "grad_norm")),
        Buffer("logprobs", TensorType(f32, (BLOCKS, ROWS)), "output"),
        Buffer("predictions", TensorType(i32, (BLOCKS, ROWS)), "output"),
    ]
    views, offset = [], 0
    for module in MODULES:
        for matrix, shape in (("A", (RANK, HIDDEN)), ("B", (VOCABULARY, RANK))):
            init = Init("kaiming_uniform", HIDDEN) if matrix == "A" else Init("zeros")
            kind = TensorType(f32, shape)
            name = f"lora.{module}.{matrix}"
            views.append(Buffer(name, kind, "param", "lora", offset, tensor=tensor_name(module, matrix), init=init))
            offset += kind.elements
    flat = TensorType(f32, (offset,))
    state = [Buffer("lora", flat, "param"), Buffer("grad", flat, "grad")]
    state += [Buffer(name, flat, "moment") for name in ("moment1", "moment2")]
    return Program({b.name: b for b in [*buffers, *state, *views]}, {"micro_step": (), "update": (), "evaluate": ()})


def simulated_config() -> BundleConfig:
    """`bundle.json` of the simulator's bundle."""
    model = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": HIDDEN,
        "vocab_size": VOCABULARY,
    }
    return BundleConfig(
        name="simulator",
        model=ModelConfig.from_dict(model),
        recipe=Recipe(rank=RANK, alpha=ALPHA, targets=("q", "v"), seq_len=S),
        target=Target("cpu", {}),
        toolchain={},
        parts=(),
        programs={"train": "sha256:" + "0" * 64},
        memory=Memory(0, 0, 0, 0, 0),
    )


@dataclass
class Simulator:
    """The engine. `poison` makes a micro-step (counted from 1) report a loss or gradient that is not finite."""

    poison: dict[int, str] = field(default_factory=dict)
    manifest_digest: str = "sha256:" + "5" * 64
    micro_steps: int = 0
    updates: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.program = simulated_program()
        self.config = simulated_config()
        self._memory = {
            name: np.zeros(buffer.type.shape, DTYPES[buffer.type.dtype])
            for name, buffer in self.program.buffers.items()
            if buffer.view_of is None
        }
        random = np.random.default_rng(7)
        self._embedding = random.normal(size=(VOCABULARY, HIDDEN))
        self._places = 0.1 * random.normal(size=(S, HIDDEN))
        self._head = random.normal(size=(VOCABULARY, HIDDEN))

    def view(self, name: str) -> Array:
        """The buffer's own memory."""
        assert not self.closed
        buffer = self.program.buffers[name]
        if buffer.view_of is None:
            return self._memory[name]
        start = buffer.view_offset
        return self._memory[buffer.view_of][start : start + buffer.type.elements].reshape(buffer.type.shape)

    def read(self, name: str) -> Array:
        """A copy."""
        return self.view(name).copy()

    def write(self, name: str, value: Array) -> None:
        """Fill a buffer; strict about type and shape, as a device is."""
        target = self.view(name)
        assert value.shape == target.shape, name
        assert value.dtype == target.dtype, name
        target[...] = value

    def init_parameters(self, seed: int) -> None:
        """As the program's `init` entries say."""
        random = np.random.default_rng(seed)
        for name, buffer in self.program.buffers.items():
            if buffer.init is not None:
                bound = 0.0 if buffer.init.kind == "zeros" else 1 / math.sqrt(buffer.init.fan_in)
                self.write(name, random.uniform(-bound, bound, buffer.type.shape).astype(np.float32))
        for name in ("moment1", "moment2"):
            self.view(name)[...] = 0

    def run(self, phase: str) -> None:
        """Execute a phase."""
        {"micro_step": self._micro_step, "update": self._update, "evaluate": self._evaluate}[phase]()

    def close(self) -> None:
        """Nothing may be called afterwards."""
        self.closed = True

    def _forward(self) -> tuple[Array, Array, Array, Array]:
        """Hidden states, log-probabilities over the vocabulary, labels and weights of all rows of used blocks."""
        used = int(self.view("blocks"))
        assert 1 <= used <= BLOCKS
        rows = self.view("rows")[:used].ravel()
        hidden = self._embedding[self.view("tokens")[rows]] + self._places[self.view("positions")[rows]]
        matrix = self._head.copy()
        for module in MODULES:
            a, b = (self.view(f"lora.{module}.{m}").astype(np.float64) for m in "AB")
            matrix += ALPHA / RANK * b @ a
        logits = hidden @ matrix.T  # (rows, V)
        top = logits.max(axis=1, keepdims=True)
        logprobs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        return hidden, logprobs, self.view("labels")[:used].ravel(), self.view("weights")[:used].ravel()

    def _micro_step(self) -> None:
        self.micro_steps += 1
        hidden, logprobs, labels, weights = self._forward()
        chosen = np.arange(len(labels))
        self.view("loss_sum")[...] = -(logprobs[chosen, labels] * weights).sum()
        by_logits = np.exp(logprobs)
        by_logits[chosen, labels] -= 1
        by_matrix = (by_logits * weights[:, None]).T @ hidden * (ALPHA / RANK)  # (V, H)
        gradient = []
        for module in MODULES:
            a, b = (self.view(f"lora.{module}.{m}").astype(np.float64) for m in "AB")
            gradient += [(b.T @ by_matrix).ravel(), (by_matrix @ a.T).ravel()]
        grad = self.view("grad")
        if self.view("accumulate") == 0:
            grad[...] = 0
        grad += np.concatenate(gradient).astype(np.float32)
        match self.poison.get(self.micro_steps):
            case "loss":
                self.view("loss_sum")[...] = np.nan
            case "gradient":
                grad[3] = np.inf

    def _update(self) -> None:
        self.updates += 1
        scalar = {b.name: self.view(b.name) for b in self.program.with_role("scalar")}
        gradient = self.view("grad") / scalar["token_count"]
        norm = np.sqrt((gradient * gradient).sum())
        self.view("grad_norm")[...] = norm
        gradient = gradient * np.minimum(np.float32(1), scalar["max_norm"] / (norm + np.float32(1e-6)))
        one = np.float32(1)
        m, v, lora = self.view("moment1"), self.view("moment2"), self.view("lora")
        m[...] = scalar["beta1"] * m + (one - scalar["beta1"]) * gradient
        v[...] = scalar["beta2"] * v + (one - scalar["beta2"]) * gradient * gradient
        lora *= one - scalar["learning_rate"] * scalar["weight_decay"]
        denominator = np.sqrt(v / scalar["correction2"]) + scalar["epsilon"]
        lora -= scalar["learning_rate"] * (m / scalar["correction1"]) / denominator

    def _evaluate(self) -> None:
        _, logprobs, labels, _ = self._forward()
        count = len(labels)
        self.view("logprobs").ravel()[:count] = logprobs[np.arange(count), labels]
        self.view("predictions").ravel()[:count] = logprobs.argmax(axis=1)


def random_pack(seed: int, *, supervised: int | None = None, length: int = S) -> Pack:
    """A pack with one document of random tokens, of whose labels the first `supervised` are kept."""
    random = np.random.default_rng(seed)
    tokens, positions, segments = (np.zeros(S, np.int32) for _ in range(3))
    tokens[:length] = random.integers(0, VOCABULARY, length)
    positions[:length] = np.arange(length)
    segments[:length] = 1
    labels = np.full(S, -100, np.int32)
    count = length - 1 if supervised is None else supervised
    labels[:count] = tokens[1 : count + 1]
    return Pack(tokens, positions, segments, labels)
