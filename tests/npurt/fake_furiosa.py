"""A stand-in for furiosa-torch that holds its users to what it documents, and computes with ONNX Runtime.

Everything that is started waits in a queue until somebody waits for it, as on a card: who changes an input too early or
reads a result too soon gets wrong numbers. Fresh memory is full of rubbish. Messages are those of furiosa-torch
2026.4.0 where they could be seen on a host without a card.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from npubundle.part import Part
from npurt.devices import rngd
from npurt.devices.cpu import CpuDevice

Bytes = NDArray[np.uint8]

VERSION = "furiosa-torch 2026.4.0 (rev: 5800e2ba24, built_at: 2026-10-12T09:11:18Z)"
COMPILER = "fc43f6a779"
MAGIC = b"program\n"
RUBBISH = 0xA5
#: Operations that a stream holds before it takes the next.
IN_FLIGHT = 32
#: Bytes that a program takes on the card, besides its own: what `reserve_stacks` sets aside.
STACK = 256
_ELEMENT: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: 16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}


class PanicException(BaseException):
    """What a panic of Rust code looks like."""


@dataclasses.dataclass
class Card:
    """What the test decides about the host, and what it may look at."""

    cards: tuple[int, ...] = (0,)
    memory: int = 1 << 20
    version: str = VERSION
    compiler: str = COMPILER
    #: Raised when a device is opened.
    broken: BaseException | None = None
    #: Called with the program's name in place of computing.
    interfere: Callable[[str], None] | None = None

    fusion: int | None = None
    used: int = 0
    peak: int = 0
    started: int = 0
    calls: list[str] = dataclasses.field(default_factory=list)
    queue: deque[Callable[[], None]] = dataclasses.field(default_factory=deque)

    def device(self, name: Any) -> str:
        """The device of this name. It is there only once the fusion is set."""
        if self.fusion is None:
            raise AssertionError("set_fusion must be the first call of all")
        if self.broken is not None:
            raise self.broken
        if name not in self.devices():
            raise RuntimeError("device index out of range")
        return str(name)

    def devices(self) -> list[str]:
        if self.fusion is None:
            raise AssertionError("set_fusion must be the first call of all")
        return [f"furiosa:{index}" for index in range(len(self.cards) * 8 // self.fusion)]

    def set_fusion(self, fusion: int) -> None:
        self.calls.append(f"set_fusion({fusion})")
        if self.fusion not in {None, fusion}:
            raise RuntimeError(f"num_fusion is already set, Fusion {{ num_fusion: {self.fusion} }}")
        self.fusion = fusion

    def take(self, nbytes: int) -> None:
        if self.used + nbytes > self.memory:
            raise torch.OutOfMemoryError(f"failed to allocate {nbytes} bytes")
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes

    def start(self, operation: Callable[[], None]) -> None:
        self.started += 1
        self.queue.append(operation)
        while len(self.queue) > IN_FLIGHT:
            self.queue.popleft()()

    def wait(self) -> None:
        while self.queue:
            self.queue.popleft()()


class Storage:
    """Memory of a card, given back with the last tensor that uses it."""

    def __init__(self, card: Card, nbytes: int) -> None:
        card.take(nbytes)
        self.bytes: Bytes = np.full(nbytes, RUBBISH, np.uint8)
        weakref.finalize(self, card.give_back, nbytes)


@dataclasses.dataclass(frozen=True)
class FlatDramShape:
    host_sizes: list[int]
    dtype: torch.dtype
    contiguous: bool = True
    broadcast: bool = True

    @classmethod
    def new_as_broadcast(cls, host_sizes: list[int], dtype: torch.dtype) -> FlatDramShape:
        if not isinstance(host_sizes, list):
            raise TypeError("a sequence of sizes is wanted")
        return cls(host_sizes, dtype)

    @property
    def intra_chip_sizes(self) -> list[int]:
        return self.host_sizes

    def is_broadcast(self) -> bool:
        return self.broadcast

    def is_intra_chip_contiguous(self) -> bool:
        return self.contiguous


class Tensor:
    """A tensor of a card. Its content can be had by waiting only."""

    def __init__(self, card: Card, device: str, shape: FlatDramShape, storage: Storage, offset: int = 0) -> None:
        self.card = card
        self.device = device
        self.dtype = shape.dtype
        self.shape = tuple(shape.host_sizes)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * shape.dtype.itemsize
        self.storage = storage
        self.offset = offset

    @property
    def bytes(self) -> Bytes:
        return self.storage.bytes[self.offset : self.offset + self.nbytes]

    def copy_(self, source: Tensor | torch.Tensor, non_blocking: bool = False) -> Tensor:
        if tuple(source.shape) != self.shape or source.dtype != self.dtype:
            raise RuntimeError(f"copy dtype mismatch: {source.dtype}{list(source.shape)}, {self.dtype}{self.shape}")
        if isinstance(source, Tensor):
            if source.device != self.device:
                raise RuntimeError(f"Tensor device mismatch! Expected: {self.device}, Got: {source.device}")
            if source.storage is self.storage and abs(source.offset - self.offset) < self.nbytes:
                raise AssertionError("a copy onto itself")
            given = source  # a device tensor lives as long as what was started needs it

            def within() -> None:
                self.bytes[:] = given.bytes

            self.card.start(within)
        else:
            if not source.is_contiguous():
                raise AssertionError("a source in plain order is wanted")
            # A reference is not enough for a transfer: whoever starts it has to keep the source.
            kept = weakref.ref(source)

            def up() -> None:
                alive = kept()
                if alive is None:
                    raise AssertionError("the source of a transfer was given up before it was read")
                self.bytes[:] = alive.reshape(-1).view(torch.uint8).numpy()

            self.card.start(up)
        if not non_blocking:
            self.card.wait()
        return self

    def cpu(self) -> torch.Tensor:
        self.card.wait()
        return torch.from_numpy(self.bytes.copy()).view(self.dtype).reshape(self.shape)


def payload(part: Part, model: bytes, fusion: int = 8, **changes: Any) -> bytes:
    """A program of a part whose mathematics are an ONNX model; `changes` make it another than the part says."""
    document = {
        "name": part.name,
        "fusion": fusion,
        "inputs": [str(port.type) for port in part.inputs],
        "outputs": [str(port.type) for port in part.outputs],
        "contiguous": True,
        "broadcast": True,
    }
    return MAGIC + json.dumps(document | changes).encode() + b"\n" + model


class IrRunnable:
    """`furiosa.torch.ir.Runnable`."""

    def __init__(self, card: Card, raw: bytes) -> None:
        if not raw.startswith(MAGIC):
            raise ValueError("failed to deserialize: Hit the end of buffer, expected more data")
        header, _, self.model = raw.removeprefix(MAGIC).partition(b"\n")
        document = json.loads(header)
        self.name: str = document["name"]
        self.card = card
        self.expected_num_fusion: int = document["fusion"]
        self.input_dram_shapes, self.output_dram_shapes = (
            [_shape(text, document) for text in document[side]] for side in ("inputs", "outputs")
        )
        self.binary: Any = torch.zeros(len(self.model), dtype=torch.uint8)
        self.weight: Any = None
        self.stacks: list[Tensor] = []
        self.session: Any = None

    @property
    def is_loaded(self) -> bool:
        return isinstance(self.binary, Tensor)

    def load(self, device: str) -> None:
        self.card.calls.append(f"load {self.name}")
        binary = empty(self.card, FlatDramShape([len(self.model)], torch.uint8), device)
        self.binary = binary.copy_(self.binary)
        self.stacks = [empty(self.card, FlatDramShape([STACK], torch.uint8), device)]
        CpuDevice()  # sets up what all sessions of a process share
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.use_per_session_threads = False
        self.session = onnxruntime.InferenceSession(self.model, options, providers=["CPUExecutionProvider"])

    def execute(self, inputs: Sequence[Any]) -> list[Tensor]:
        if not self.is_loaded:
            raise ValueError("Runnable is not loaded. Please load the binary and weight tensors onto the device")
        if self.card.fusion != self.expected_num_fusion:
            raise AssertionError("a program for another fusion: nobody but the caller compares them")
        if len(inputs) != len(self.input_dram_shapes):
            raise ValueError(f"wrong number of inputs given(expected: {len(self.input_dram_shapes)})")
        for given, shape in zip(inputs, self.input_dram_shapes, strict=True):
            if not isinstance(given, Tensor) or given.device != self.binary.device:
                raise RuntimeError(f"Tensor device mismatch! Expected: {self.binary.device}, Got: {given.device}")
            if (given.shape, given.dtype) != (tuple(shape.host_sizes), shape.dtype):
                raise RuntimeError(f"Input tensor mismatch, expected: {shape}, got {given.dtype}{list(given.shape)}")
        results = [empty(self.card, shape, self.binary.device) for shape in self.output_dram_shapes]
        operands = list(inputs)
        self.card.start(lambda: self._compute(operands, results))
        return results

    def _compute(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        if self.card.interfere is not None:
            self.card.interfere(self.name)
        binding = self.session.io_binding()
        aligned = []
        for what, tensors in (("input", inputs), ("output", results)):
            ports = getattr(self.session, f"get_{what}s")()
            for port, tensor in zip(ports, tensors, strict=True):
                memory = np.empty(tensor.nbytes // 8 + 1, np.int64).view(np.uint8)[: tensor.nbytes]
                memory[:] = tensor.bytes
                aligned.append((memory, tensor))
                bind = getattr(binding, f"bind_{what}")
                bind(port.name, "cpu", 0, _ELEMENT[tensor.dtype], tensor.shape, memory.ctypes.data)
        self.session.run_with_iobinding(binding)
        for memory, tensor in aligned[len(inputs) :]:
            tensor.bytes[:] = memory


class Runnable:
    """`furiosa.torch.Runnable`: what moves a program to a device."""

    def __init__(self, inner: IrRunnable) -> None:
        if not isinstance(inner, IrRunnable):
            raise TypeError("runnable must be an instance of ir.Runnable")
        self.inner = inner

    def to(self, device: str) -> Runnable:
        self.inner.load(self.inner.card.device(device))
        return self


class Stream:
    def __init__(self, card: Card, device: str) -> None:
        self.card = card
        self.device = card.device(device)

    def synchronize(self) -> None:
        self.card.wait()


def empty(card: Card, shape: FlatDramShape, device: str) -> Tensor:
    name = card.device(device)
    nbytes = int(np.prod(shape.host_sizes, dtype=np.int64)) * shape.dtype.itemsize
    return Tensor(card, name, shape, Storage(card, nbytes))


def strided_view(source: Tensor, dram_shape: FlatDramShape, *, offset: int = 0) -> Tensor:
    if offset % dram_shape.dtype.itemsize:
        raise ValueError(f"view offset {offset} is not multiple of itemsize {dram_shape.dtype.itemsize}")
    view = Tensor(source.card, source.device, dram_shape, source.storage, source.offset + offset)
    if offset < 0 or view.offset + view.nbytes > len(source.storage.bytes):
        raise RuntimeError("setStorage: out of bounds")
    return view


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, **chosen: Any) -> Card:
    """Put the stand-in in furiosa-torch's place, in a process that never used it, on a host with these cards."""
    card = Card(**chosen)
    nodes = folder / "rngd"
    nodes.mkdir(parents=True, exist_ok=True)
    for number in card.cards:
        for name in ("mgmt", "pe0-3", "ch0", "dmar"):
            (nodes / f"npu{number}{name}").touch()
    monkeypatch.setattr(rngd, "NODES", nodes)
    monkeypatch.setattr(rngd._Process, "fusion", None)

    class Ir(IrRunnable):
        @staticmethod
        def deserialize(raw: bytes) -> IrRunnable:
            return IrRunnable(card, raw)

    modules: dict[str, dict[str, Any]] = {
        "furiosa": {},
        "furiosa.torch": {
            "set_fusion": card.set_fusion,
            "get_available_devices": card.devices,
            "default_stream": lambda device: Stream(card, device),
            "empty": lambda shape, device: empty(card, shape, device),
            "Runnable": Runnable,
            "version": lambda: card.version,
        },
        "furiosa.torch.compiler": {"version": lambda: card.compiler},
        "furiosa.torch.ir": {"Runnable": Ir, "FlatDramShape": FlatDramShape},
        "furiosa.torch._C": {},
        "furiosa.torch._C.tensor": {"strided_view": strided_view},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return card


def _shape(text: str, document: dict[str, Any]) -> FlatDramShape:
    dtype, _, sizes = text.rstrip("]").partition("[")
    numbers = [int(size) for size in sizes.split(",") if size]
    return FlatDramShape(numbers, _DTYPES[dtype], document["contiguous"], document["broadcast"])
