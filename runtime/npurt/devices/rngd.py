"""FuriosaAI's RNGD: a card runs the programs of a bundle, by furiosa-torch.

No card was at hand. Whole programs have only met a stand-in for furiosa-torch that enforces what is listed here; what a
card makes of them is not known. This file rests on these facts of furiosa-torch 2026.4.0, which were read in its files
or seen on a host without a card:

* Every `/dev/rngd/npu<n>mgmt` is a card. Its devices are counted over all cards in the order of n; a card of eight
  processing elements is 8 / fusion devices. Without any such file it pretends to have eight cards.
* `set_fusion` comes before anything but imports and versions; another value later is refused.
* `ir.Runnable.deserialize` reads a program, `furiosa.torch.Runnable(it).to(device)` loads it, `execute` takes tensors
  of the device and gives new ones. It does not compare the program's fusion with the device's. Bytes have no checksum.
* `empty` makes a tensor of the device, and `strided_view` one that shares its memory, at an offset in bytes.
* Work is done in the order in which it was given to a stream. Each device has a default stream, which every thread
  uses unless it chose another. Several streams may not run at once, and memory is not shared between them unless it is
  of a special kind, so this file uses the default stream alone.
* `copy_(…, non_blocking=True)` only adds to the stream: a step's inputs wait there while the host prepares the next.
* Memory that cannot be had, for whatever reason, is a `torch.OutOfMemoryError`. Nothing tells how much there is.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from npubundle.errors import Error, FormatError
from npubundle.fields import Problems
from npubundle.part import Part
from npubundle.tensor import TensorType
from npurt.arrays import Array, bfloat16
from npurt.devices.device import Form, Region
from npurt.devices.furiosa_torch import PACKAGE, check_operands, is_vendors, not_here, tensor_of
from npurt.devices.tensor_memory import Place, TensorMemory
from npurt.errors import DeviceError

#: Media type of the programs that this device runs.
MEDIA_TYPE = "application/vnd.npucc.part.v1+furiosa-rngd"
#: Where the driver puts the files of its cards. A container sees those of the cards that it was given.
NODES = Path("/dev/rngd")
#: HBM of a card, of which each of its devices has an equal share.
CARD_MEMORY = 48 << 30
#: Processing elements of a card, which is also the greatest fusion on one card.
ELEMENTS = 8

_COMPILER = "furiosa-compiler"
_FUSION = "fusion"
#: Arrays up to this size are copied, so that their transfer need not be waited for.
_STAGED = 16 << 20
#: Host memory that transfers under way may take.
_UNDER_WAY = 128 << 20
_TORCH_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}
_MORE_MEMORY = "end what else uses the card, or rebuild the bundle with a smaller --memory-budget or --seq-len"
_CANNOT_OPEN = (
    "see whether another process holds the card, and whether this one may read and write /dev/rngd/* and use io_uring "
    "(in Kubernetes, seccompProfile: Unconfined)"
)


class RngdDevice:
    """Runs parts that were compiled for RNGD on a card, or on some of a card's processing elements."""

    targets = frozenset({"rngd"})
    form: Form = "payload"
    prepacks = False
    #: Nobody has tried what the SDK does with several threads.
    concurrent = False

    def __init__(self, index: int | None = None) -> None:
        """Import furiosa-torch, which takes seconds; `index` is its number of the device, None that of the only card.

        Raises `DeviceError` where no card is visible, where several are and none was chosen, or where furiosa-torch is
        not installed.
        """
        self._cards = _visible_cards()
        if index is None:
            index = _only(self._cards)
        self._index = index
        self.name = f"furiosa:{index}"
        self._kit = _Kit(self.name)
        self._fusion = ELEMENTS
        self._stream: Any = None
        self._taken = 0
        self._blocks: list[TensorMemory] = []
        self._staged: list[Any] = []
        # Nothing says that furiosa-torch may be called by several threads at once, and weights are loaded by several.
        self._lock = threading.RLock()

    # -- before anything is loaded -----------------------------------------------------------------------------------

    def check(self, parts: Sequence[Part]) -> None:
        """Compare what the parts require with what is here; if all of it fits, set the fusion and open the card."""
        problems = Problems()
        for media_type in sorted({part.media_type for part in parts} - {MEDIA_TYPE}):
            problems.add("parts", f"{media_type} is no form of part that this device runs; rebuild with --target rngd")
        installed = {PACKAGE: self._kit.version, _COMPILER: self._kit.compiler}
        for name, version in sorted({item for part in parts for item in part.requires.items()}):
            if name in installed:
                if not _same(version, installed[name]):
                    what = f"the bundle needs {version}, {installed[name]} is installed; install that one or rebuild"
                    problems.add(name, what)
            elif name != _FUSION:
                problems.add(name, f"the bundle needs {name} {version}, which this release of npurt cannot provide")
        for name in (*installed, _FUSION):
            silent = [part.name for part in parts if name not in part.requires]
            if silent:
                what = f"{len(silent)} of {len(parts)} parts do not say what they need ({silent[0]}); rebuild them"
                problems.add(name, what)
        fusion = self._wanted_fusion(parts, problems)
        problems.raise_any("this host cannot run the bundle", DeviceError, where=self.name)
        self._open(fusion)

    def _wanted_fusion(self, parts: Sequence[Part], problems: Problems) -> int:
        wanted = sorted({part.requires[_FUSION] for part in parts if _FUSION in part.requires})
        fusion = int(wanted[0]) if wanted and wanted[0] in {"1", "2", "4", "8"} else ELEMENTS
        if wanted not in ([], [str(fusion)]):
            problems.add(_FUSION, f"the bundle has parts for {' and '.join(wanted)}: a device runs one of 1, 2, 4 or 8")
            return fusion
        if _Process.fusion not in {None, fusion}:
            what = f"the bundle needs {fusion}, this process is set to {_Process.fusion} for good; start a new one"
            problems.add(_FUSION, what)
        count = len(self._cards) * ELEMENTS // fusion
        if self._index >= count:
            last = f" to furiosa:{count - 1}" if count > 1 else ""
            what = f"with a fusion of {fusion}, {_listed(self._cards)} make furiosa:0{last}; name one of those"
            problems.add(self.name, what)
        return fusion

    def _open(self, fusion: int) -> None:
        """Set the process's fusion and get the device's stream, which tells why a card cannot be used."""
        with self._lock, self._faults(f"cannot set the fusion to {fusion}", "start a new process"):
            self._kit.furiosa.set_fusion(fusion)
            _Process.fusion = fusion
        with self._lock, self._faults(f"cannot open {self.name}", _CANNOT_OPEN):
            known = self._kit.furiosa.get_available_devices()
            if self.name not in known:
                what = f"{PACKAGE} knows no {self.name}, only {', '.join(known) or 'none'}"
                raise DeviceError(what, remedy="name one of those")
            self._stream = self._kit.furiosa.default_stream(self.name)
        self._fusion = fusion

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> int:
        return CARD_MEMORY * self._fusion // ELEMENTS

    def available_memory(self) -> int:
        """The device's share of a card's memory, less what was given out and what programs take."""
        return max(self._memory - self._taken, 0)

    def allocate(self, nbytes: int) -> TensorMemory:
        """Memory that is counted as taken from now on, and taken from the card when it is first written or read."""
        self._ready()
        with self._lock:
            if nbytes > self.available_memory():
                free = f"{self.available_memory() / 1e9:.2f} of {self._memory / 1e9:.2f} GB are free"
                raise DeviceError(f"cannot allocate {nbytes / 1e9:.2f} GB on {self.name}: {free}", remedy=_MORE_MEMORY)
            self._taken += nbytes
            self._blocks.append(TensorMemory(self._kit, nbytes))
            return self._blocks[-1]

    def host(self, region: Region) -> None:
        """Nothing: the card's memory is out of the host's reach."""

    def upload(self, array: Array, region: Region) -> None:
        """Start copying an array, which may change again at once. A large one is copied before this returns."""
        self._ready()
        place: Place = region.handle
        with self._lock, self._faults(f"cannot copy {region.kind} to {self.name}"):
            staged = array.nbytes <= _STAGED
            plain = np.array(array, order="C") if staged else np.require(array, requirements=["C", "W"])
            source = tensor_of(self._kit.torch, plain, region.kind)
            place.memory.room(place).copy_(source, non_blocking=staged)
            if staged:
                self._staged.append(source)
                if sum(tensor.nbytes for tensor in self._staged) > _UNDER_WAY:
                    self.synchronize()

    def download(self, region: Region) -> Array:
        """A copy of a region, once all that was started before has been done."""
        self._ready()
        place: Place = region.handle
        with self._lock, self._faults(f"cannot copy {region.kind} from {self.name}"):
            return self._kit.array_of(place.memory.read(place).cpu(), region.kind)

    # -- programs ----------------------------------------------------------------------------------------------------

    def load(self, part: Part, payload: bytes, constants: Mapping[int, Array]) -> RngdExecutable:
        """A program in the card's memory. It has no constants: `prepacks` is false."""
        if constants:
            raise ValueError(f"the device {self.name} takes no constants")
        self._ready()
        with self._lock, self._faults(f"cannot load part {part.name}"):
            program = self._kit.furiosa.ir.Runnable.deserialize(payload)
            self._check_program(part, program)
            self._kit.furiosa.Runnable(program).to(self.name)
            held = (program.binary, program.weight, *program.stacks)
            self._taken += sum(tensor.nbytes for tensor in held if tensor is not None)
        return RngdExecutable(self, part, program)

    def _check_program(self, part: Part, program: Any) -> None:
        """A program for another fusion, or with other tensors than the bundle says, must never run."""
        found = [f"a fusion of {program.expected_num_fusion}"]
        said = [f"a fusion of {self._fusion}"]
        for what, ports, shapes in (
            ("inputs", part.inputs, program.input_dram_shapes),
            ("outputs", part.outputs, program.output_dram_shapes),
        ):
            found.append(f"the {what} {', '.join(map(self._kit.spelled, shapes)) or 'none'}")
            said.append(f"the {what} {', '.join(str(port.type) for port in ports) or 'none'}")
        if found != said:
            raise FormatError(
                f"the payload of part {part.name} has {'; '.join(found)}; the bundle says {'; '.join(said)}",
                remedy="rebuild the bundle",
            )

    def settle(self) -> None:
        """Nothing to do: the card's memory is taken by then."""

    def synchronize(self) -> None:
        """Wait for the stream. Raises `DeviceError` if something in it failed."""
        self._ready()
        with self._lock, self._faults(f"{self.name} failed"):
            self._stream.synchronize()
            self._staged.clear()

    def close(self) -> None:
        """Give the card's memory back. The process keeps its fusion."""
        self._stream = None
        self._staged.clear()
        for block in self._blocks:
            block.clear()
        self._blocks.clear()

    def execute(self, part: Part, program: Any, args: Sequence[Region], results: Sequence[Region]) -> None:
        """Start a program. Its results are new tensors, which take the places of those that were there."""
        self._ready()
        with self._faults(f"part {part.name} failed"):
            found = program.execute([region.handle.memory.read(region.handle) for region in args])
            if len(found) != len(results):
                what = f"the payload of part {part.name} gives {len(found)} tensors, the bundle says {len(results)}"
                raise FormatError(what, remedy="rebuild the bundle")
            for region, tensor in zip(results, found, strict=True):
                region.handle.memory.put(region.handle, tensor)

    def _ready(self) -> None:
        if self._stream is None:
            raise DeviceError(f"{self.name} is not open: it was closed, or no parts were checked before it was used")

    @contextmanager
    def _faults(self, what: str, remedy: str | None = None) -> Iterator[None]:
        """Whatever furiosa-torch raises, as a `DeviceError`."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Error) or not is_vendors(error):
                raise
            text = f"{what}: {str(error).strip().partition(chr(10))[0]}"
            if isinstance(error, self._kit.torch.OutOfMemoryError):
                text += f"; npurt takes {self._taken / 1e9:.2f} of {self._memory / 1e9:.2f} GB"
                remedy = _MORE_MEMORY
            raise DeviceError(text, where=f"{self.name}, {PACKAGE} {self._kit.version}", remedy=remedy) from error


class RngdExecutable:
    """A program in the card's memory."""

    def __init__(self, device: RngdDevice, part: Part, program: Any) -> None:
        self._device = device
        self._part = part
        self._program = program

    def bind(self, args: Sequence[Region], results: Sequence[Region]) -> RngdBound:
        """Remember the places: which tensors lie there is known when it runs."""
        check_operands(self._part, args, results)
        return RngdBound(self._device, self._part, self._program, tuple(args), tuple(results))


class RngdBound:
    """A program and the places of its operands."""

    __slots__ = ("_args", "_device", "_part", "_program", "_results")

    def __init__(
        self, device: RngdDevice, part: Part, program: Any, args: Sequence[Region], results: Sequence[Region]
    ) -> None:
        self._device = device
        self._part = part
        self._program = program
        self._args = args
        self._results = results

    def run(self) -> None:
        """Add the program to the device's stream."""
        self._device.execute(self._part, self._program, self._args, self._results)


class _Process:
    """What furiosa-torch lets a process decide once."""

    fusion: int | None = None


class _Kit:
    """furiosa-torch, and tensors in its terms."""

    def __init__(self, device: str) -> None:
        try:
            import furiosa.torch
            import torch
            from furiosa.torch._C.tensor import strided_view
        except ImportError as error:
            raise not_here(device, error) from error
        self.device = device
        self.torch: Any = torch
        self.furiosa: Any = furiosa.torch
        self.version = str(furiosa.torch.version())
        self.compiler = str(furiosa.torch.compiler.version())
        self._view = strided_view
        self._dtypes = {name: getattr(torch, spelling) for name, spelling in _TORCH_DTYPES.items()}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        self._shapes: dict[TensorType, Any] = {}

    def empty(self, kind: TensorType) -> Any:
        """A tensor of the device."""
        return self.furiosa.empty(self._shape(kind), self.device)

    def zeros(self, kind: TensorType) -> Any:
        """A tensor of the device, filled from the host: to compute zeros would need a compiler."""
        tensor = self.empty(kind)
        tensor.copy_(self.torch.zeros(kind.shape, dtype=self._dtypes[kind.dtype]))
        return tensor

    def view(self, tensor: Any, offset: int, kind: TensorType) -> Any:
        """A part of a tensor, at an offset in bytes."""
        return self._view(tensor, self._shape(kind), offset=offset)

    def copy(self, source: Any, target: Any) -> None:
        """Copy within the device."""
        target.copy_(source, non_blocking=True)

    def array_of(self, tensor: Any, kind: TensorType) -> Array:
        """The inverse of `tensor_of`."""
        if kind.dtype == "bf16":
            bits: Array = tensor.view(self.torch.uint16).numpy()
            return bits.view(bfloat16())
        array: Array = tensor.numpy()
        return array

    def spelled(self, shape: Any) -> str:
        """The type of a program's tensor in our spelling, marked if it does not lie in memory in its plain order."""
        sizes = list(shape.host_sizes)
        plain = shape.is_broadcast() and shape.is_intra_chip_contiguous() and list(shape.intra_chip_sizes) == sizes
        text = f"{self._names.get(shape.dtype, shape.dtype)}[{','.join(map(str, sizes))}]"
        return text if plain else f"{text} in an order of its own"

    def _shape(self, kind: TensorType) -> Any:
        if kind not in self._shapes:
            make = self.furiosa.ir.FlatDramShape.new_as_broadcast
            self._shapes[kind] = make(list(kind.shape), self._dtypes[kind.dtype])
        return self._shapes[kind]


def _visible_cards() -> list[int]:
    """Numbers of the cards whose files are here, in furiosa-torch's order. Raises `DeviceError` if there are none."""
    names = [node.name for node in NODES.iterdir()] if NODES.is_dir() else []
    cards = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"npu(\d+)mgmt", name)))
    if not cards:
        raise DeviceError(
            "no RNGD card is visible here",
            where=str(NODES),
            remedy="run on a node with a card, in Kubernetes with the resource furiosa.ai/rngd; "
            "--device rngd-sim runs a bundle's graphs without one",
        )
    return cards


def _only(cards: Sequence[int]) -> int:
    """The first device of the only card. Raises `DeviceError` if there are several."""
    if len(cards) > 1:
        raise DeviceError(
            f"{len(cards)} RNGD cards are visible here, and none was chosen",
            where=_listed(cards),
            remedy="name one: in this order they are furiosa:0, furiosa:1 and so on, for bundles with a fusion of 8",
        )
    return 0


def _listed(cards: Sequence[int]) -> str:
    """The driver's names of the cards. A container may see any of them; furiosa-torch counts its devices from 0."""
    return ", ".join(f"npu{card}" for card in cards)


def _same(wanted: str, installed: str) -> bool:
    """Whether two versions are of the same source: `… 2026.4.0 (rev: 5800e2ba24, built_at: …)`, or a bare revision."""
    return _revision(wanted) == _revision(installed)


def _revision(version: str) -> tuple[str, ...]:
    found = re.search(r"(\d+(?:\.\d+)+).*?\brev: *(\w+)", version)
    return found.groups() if found else (version.strip(),)
