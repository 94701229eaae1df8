"""The host CPU, by ONNX Runtime.

Settings that were measured and matter, for the sixty sessions of a small model with packed weights: they share one
pool of threads (a pool each means sixty threads that spin against each other, four times slower) and one arena for what
parts compute on the way (an arena each takes 0.3 GB; none at all costs a fifth of the time in page faults), and freed
memory goes back to the system while they load (otherwise 0.3 GB of holes remain).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npubundle.errors import FormatError
from npubundle.fields import Problems
from npubundle.part import Part, Port
from npubundle.tensor import TensorType
from npurt.arrays import Array, dtype_of
from npurt.devices.device import Form, Region
from npurt.devices.host_memory import HostMemory
from npurt.devices.onnx_wire import identity_model, with_constants
from npurt.errors import DeviceError, UsageError
from npurt.host import return_freed_blocks, usable_cpus, use_huge_pages

# The official builds of onnxruntime report every process to their maker, unless told not to before they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as _state
except ImportError as error:
    raise DeviceError(
        "the cpu device needs onnxruntime, which cannot be imported here",
        where=str(error),
        remedy="pip install 'npurt[cpu]'",
    ) from error

_FAULTS = (
    RuntimeError,
    ValueError,
    *(
        getattr(_state, name)
        for name in (
            "EPFail",
            "Fail",
            "InvalidArgument",
            "InvalidGraph",
            "InvalidProtobuf",
            "NoSuchFile",
            "NotImplemented",
            "RuntimeException",
        )
    ),
)
#: How ONNX Runtime spells our dtypes.
_SPELLING = {
    "tensor(float)": "f32",
    "tensor(float16)": "f16",
    "tensor(bfloat16)": "bf16",
    "tensor(int32)": "i32",
    "tensor(int64)": "i64",
    "tensor(bool)": "bool",
}
_ERRORS_ONLY = 3
_ONNX_BF16 = 16
#: Threads spin while they wait for work. A few more than cores are slow; thousands bring a host to a standstill.
_MAX_THREADS = 64
_PROVIDERS = ["CPUExecutionProvider"]


class CpuDevice(HostMemory):
    """Runs parts as ONNX models: those of a bundle for the CPU, and the ONNX forms of any other."""

    name = "cpu"
    targets: frozenset[str] | None = None
    form: Form = "onnx"
    prepacks = True
    concurrent = True

    def __init__(self, threads: int | None = None) -> None:
        """`threads` compute together; None takes every usable CPU. One process has one pool: the first device decides.

        Raises `UsageError` if another number is in force already.
        """
        self.threads = _Environment.start(threads)
        self._opsets: dict[str, bool] = {}

    def check(self, parts: Sequence[Part]) -> None:
        """Compare what the ONNX forms require (`onnxruntime`, `opset`) with what is installed."""
        problems = Problems()
        forms = {part.name: part.as_onnx() for part in parts}
        if bare := [name for name, form in forms.items() if form is None]:
            problems.add("parts", f"{len(bare)} have no ONNX form ({bare[0]} is one); rebuild the bundle")
        wanted = sorted({item for form in forms.values() if form is not None for item in form.requires.items()})
        for name, version in wanted:
            if name == "onnxruntime":
                if _numbers(onnxruntime.__version__) < _numbers(version):
                    problems.add(name, f"the bundle needs {version} or later, {onnxruntime.__version__} is installed")
            elif name == "cpu":
                if version != "any":
                    problems.add(name, f"the bundle needs a CPU of level {version}, which this release cannot check")
            elif name == "opset":
                if not self._knows_opset(version):
                    problems.add(name, f"onnxruntime {onnxruntime.__version__} does not support ONNX opset {version}")
            else:
                problems.add(name, f"the bundle needs {name} {version}, which this release of npurt cannot provide")
        problems.raise_any("this host cannot run the bundle", DeviceError)

    def load(self, part: Part, payload: bytes, constants: Mapping[int, Array]) -> CpuExecutable:
        """A session for the part. Constants are packed by ONNX Runtime, which then drops its references to them."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        if constants:
            kinds = {index: part.inputs[index].type for index in constants}
            payload, names = with_constants(payload, kinds)
            values = [_value(constants[index], part.inputs[index].type) for index in names]
            options.add_external_initializers(list(names.values()), values)
        try:
            session = onnxruntime.InferenceSession(payload, options, providers=_PROVIDERS)
        except _FAULTS as error:
            raise DeviceError(f"onnxruntime cannot load part {part.name}: {_first_line(error)}") from error
        inputs = [port for index, port in enumerate(part.inputs) if index not in constants]
        _check_ports(part, "input", inputs, session.get_inputs())
        _check_ports(part, "output", part.outputs, session.get_outputs())
        return CpuExecutable(part, session)

    def settle(self) -> None:
        """Huge pages for what ONNX Runtime allocated: packed weights, and what parts compute on the way."""
        use_huge_pages()

    def _knows_opset(self, version: str) -> bool:
        """Asked by loading a model of one operator, because no function of ONNX Runtime tells."""
        if version not in self._opsets:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = _ERRORS_ONLY + 1
            options.use_per_session_threads = False
            try:
                onnxruntime.InferenceSession(identity_model(int(version)), options, providers=_PROVIDERS)
            except _FAULTS:
                self._opsets[version] = False
            else:
                self._opsets[version] = True
        return self._opsets[version]


class CpuExecutable:
    """A session of ONNX Runtime."""

    def __init__(self, part: Part, session: Any) -> None:
        self._part = part
        self._session = session
        self._inputs = [port.name for port in session.get_inputs()]
        self._outputs = [port.name for port in session.get_outputs()]

    def bind(self, args: Sequence[Region], results: Sequence[Region]) -> CpuBound:
        """Hand the addresses of all operands to ONNX Runtime, once."""
        binding = self._session.io_binding()
        for names, operands, bind in (
            (self._inputs, args, binding.bind_input),
            (self._outputs, results, binding.bind_output),
        ):
            for name, operand in zip(names, operands, strict=True):
                array = operand.handle
                bind(name, "cpu", 0, _element(operand.kind), operand.kind.shape, array.ctypes.data)
        return CpuBound(self._part, self._session, binding, (tuple(args), tuple(results)))


class CpuBound:
    """A session and the addresses of its operands. Keeps the operands' memory alive."""

    __slots__ = ("_binding", "_operands", "_part", "_session")

    def __init__(self, part: Part, session: Any, binding: Any, operands: object) -> None:
        self._part = part
        self._session = session
        self._binding = binding
        self._operands = operands

    def run(self) -> None:
        """Run the session."""
        try:
            self._session.run_with_iobinding(self._binding)
        except _FAULTS as error:
            raise DeviceError(f"part {self._part.name} failed: {_first_line(error)}") from error


class _Environment:
    """What all sessions of the process share: a pool of threads, and an arena."""

    _lock = threading.Lock()
    _threads: int | None = None

    @classmethod
    def start(cls, threads: int | None) -> int:
        """The number of threads in force, after setting up the environment if that has not been done."""
        wanted = threads or usable_cpus()
        if wanted > (most := max(usable_cpus(), _MAX_THREADS)):
            what = f"{wanted} threads are too many for this host: at most {most}"
            raise UsageError(what, remedy="leave the number out: one for each usable core is the default")
        with cls._lock:
            if cls._threads is None:
                return_freed_blocks()
                onnxruntime.set_default_logger_severity(_ERRORS_ONLY)
                try:
                    onnxruntime.set_global_thread_pool_sizes(wanted, 1)
                except _FAULTS as error:
                    what = "another part of this program has set up ONNX Runtime's threads already"
                    raise DeviceError(what, remedy="open npurt's device first") from error
                arena = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
                memory = onnxruntime.OrtMemoryInfo("Cpu", arena, 0, onnxruntime.OrtMemType.DEFAULT)
                defaults = onnxruntime.OrtArenaCfg(0, -1, -1, -1)
                onnxruntime.create_and_register_allocator(memory, defaults)
                cls._threads = wanted
            elif threads is not None and threads != cls._threads:
                what = f"this process computes with {cls._threads} threads already and cannot change to {threads}"
                raise UsageError(what, remedy="start a new process to use another number of threads")
            return cls._threads


def _element(kind: TensorType) -> Any:
    """An element type in ONNX Runtime's words: numpy has no bf16 of its own, so that one goes by ONNX's number."""
    return _ONNX_BF16 if kind.dtype == "bf16" else dtype_of(kind)


def _value(array: Array, kind: TensorType) -> Any:
    make = onnxruntime.OrtValue
    if kind.dtype == "bf16":
        return make.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BF16)
    return make.ortvalue_from_numpy(array)


def _check_ports(part: Part, what: str, ports: Sequence[Port], actual: Sequence[Any]) -> None:
    """Results are written through bare addresses: a payload with other types than the bundle says must never run."""
    said = [str(port.type) for port in ports]
    found = [f"{_SPELLING.get(node.type, node.type)}[{','.join(map(str, node.shape))}]" for node in actual]
    if said != found:
        raise FormatError(
            f"the payload of part {part.name} has the {what}s {', '.join(found) or 'none'}; "
            f"the bundle says {', '.join(said) or 'none'}",
            remedy="rebuild the bundle",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
