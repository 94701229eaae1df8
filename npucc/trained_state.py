"""What a program trains and how: parameters, gradients and moments, and the instructions that update them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from npubundle.program import Buffer, Call, Init, Instruction, Queue, Repeat, Role, Source, Space
from npubundle.tensor import TensorType
from npucc.parts import Traced
from npucc.training.groups import Group
from npucc.training.layer import adapters, gradient_name

#: Scalars of the optimizer, in the order of the `adamw` part.
ADAMW = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "correction1", "correction2")
#: Scalars that an optimizer step sets, in any mode.
SCALARS = ("accumulate", "token_count", "max_norm", *ADAMW)


class MakesCalls(Protocol):
    """`_Builder.call`: results that are no buffers yet become activations, with an axis of `blocks` where indexed."""

    def __call__(
        self,
        part: str,
        args: Sequence[str],
        results: Sequence[str],
        *,
        blocks: int | None = None,
        queue: Queue = "compute",
    ) -> Call:
        """A call of the part."""


class TrainedState(Protocol):
    """What the builder of a program asks of either mode of training."""

    #: Phases of a micro-step: in the first of an optimizer step, gradients take the place of those before.
    micro_steps: tuple[str, ...]
    #: What these parameters fill from the checkpoint: tensors with their shapes.
    checkpoint: Mapping[str, tuple[int, ...]]
    #: Where the scalars of the optimizer and its results lie.
    scalars: Space
    #: Buffers outside the layers that are trained: of `norm`, `embed` and `head`.
    ends: frozenset[str]

    def buffers(self) -> Iterator[Buffer]:
        """All of them, views after what they are views of."""

    def argument(self, layer: int, name: str) -> str | None:
        """The parameter that a part of a layer knows as `name`; None if that is not trained."""

    def gradients(self, phase: str, layer: int) -> dict[str, str]:
        """Where the gradients of a layer go in this phase, by the name of the part's output."""

    def accumulate(self, phase: str, layer: int | None, call: MakesCalls) -> Iterator[Instruction]:
        """What adds the last gradients of a layer to those of the step; None: when all layers are done."""

    def updates(self, call: MakesCalls) -> dict[str, tuple[Instruction, ...]]:
        """The phases of the update."""


class LoraState:
    """All matrices in one flat buffer, so that an update is one call."""

    micro_steps: tuple[str, ...] = ("micro_step",)
    scalars: Space = "device"

    def __init__(self, traced: Traced, part_prefix: str = "") -> None:
        """`part_prefix` chooses the parts of the reference program."""
        self.traced = traced
        self.checkpoint: Mapping[str, tuple[int, ...]] = {}
        self.ends: frozenset[str] = frozenset()
        self._prefix = part_prefix

    def buffers(self) -> Iterator[Buffer]:
        """`lora`, its gradients and moments; views of the exported matrices."""
        flat = TensorType("f32", (self.traced.trained,))
        roles: tuple[tuple[str, Role], ...] = (
            ("lora", "param"), ("grad", "grad"), ("grad_step", "grad"), ("moment1", "moment"), ("moment2", "moment")
        )  # fmt: skip
        for name, role in roles:
            yield Buffer(name, flat, role)
        offset = 0
        for index in range(self.traced.model.config.num_hidden_layers):
            prefix = "base_model.model." + self.traced.model.architecture.layer_prefix.format(index)
            for adapter in adapters(self.traced.model, self.traced.recipe):
                for name, tensor, kind in adapter.matrices:
                    starts_random = name.endswith("lora_A")
                    init = Init("kaiming_uniform", kind.shape[-1]) if starts_random else Init("zeros")
                    view = f"{index}.{name}"
                    yield Buffer(f"lora.{view}", kind, "param", "lora", offset, tensor=prefix + tensor, init=init)
                    yield Buffer(f"grad_step.{view}", kind, "grad", "grad_step", offset, tensor=prefix + tensor)
                    offset += kind.elements

    def argument(self, layer: int, name: str) -> str | None:
        """As `TrainedState` says."""
        return f"lora.{layer}.{name}" if ".lora_" in name else None

    def gradients(self, phase: str, layer: int) -> dict[str, str]:
        """As `TrainedState` says."""
        del phase
        found = adapters(self.traced.model, self.traced.recipe)
        return {
            gradient_name(name): f"grad_step.{layer}.{name}" for adapter in found for name, _, _ in adapter.matrices
        }

    def accumulate(self, phase: str, layer: int | None, call: MakesCalls) -> Iterator[Instruction]:
        """Once, at the end: `accumulate` is 0 in the first micro-step."""
        del phase
        if layer is None:
            yield call(f"{self._prefix}accumulate", ["grad", "grad_step", "accumulate"], ["grad"])

    def updates(self, call: MakesCalls) -> dict[str, tuple[Instruction, ...]]:
        """Clip and AdamW."""
        state = ["lora", "moment1", "moment2"]
        clip = call("clip", ["grad", "token_count", "max_norm"], ["grad_norm", "scale"])
        return {"update": (clip, call("adamw", [*state, "grad", "scale", *ADAMW], state))}


class FullState:
    """Weights in groups. The gradients of the first micro-step are written where those of the step belong."""

    micro_steps: tuple[str, ...] = ("first_micro_step", "micro_step")
    scalars: Space = "device"

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.checkpoint: Mapping[str, tuple[int, ...]] = {
            m.tensor: m.shape for group in traced.groups for m in group.members
        }
        self.ends = frozenset(m.buffer for group in traced.groups for m in group.members if m.layer is None)
        self._members = {(m.layer, m.name): (group, m) for group in traced.groups for m in group.members}

    def buffers(self) -> Iterator[Buffer]:
        """For each group `params`, `grad`, `moment1` and `moment2`; views of the exported tensors."""
        scratch: set[str] = set()
        for group in self.traced.groups:
            roles: tuple[tuple[str, Role], ...] = (
                ("params", "param"), ("grad", "grad"), ("moment1", "moment"), ("moment2", "moment")
            )  # fmt: skip
            for name, role in roles:
                yield Buffer(f"{name}.{group.name}", group.type, role)
            yield Buffer(group.count, TensorType("i32", ()), "scalar", value=group.blocks)
            mine = group.scratch not in scratch and not _in_place(group)
            if mine:
                scratch.add(group.scratch)
                yield Buffer(f"grad_step.{group.scratch}", group.type, "grad")
            for member, offset in group.offsets():
                of, kind = f"params.{group.name}", member.kind
                source = Source(member.tensor)
                yield Buffer(member.buffer, kind, "param", of, offset, source=source, tensor=member.tensor)
                of = f"grad.{group.name}"
                yield Buffer(f"grad.{member.buffer}", kind, "grad", of, offset, tensor=member.tensor)
                if mine:
                    step = f"grad_step.{group.scratch}"
                    yield Buffer(_scratch(group, member.layer, member.name), kind, "grad", step, offset)
        yield Buffer("no_decay", TensorType("f32", ()), "scalar", value=0)

    def argument(self, layer: int, name: str) -> str | None:
        """As `TrainedState` says."""
        known = self._members.get((layer, name))
        return None if known is None else known[1].buffer

    def gradients(self, phase: str, layer: int) -> dict[str, str]:
        """As `TrainedState` says."""
        mine = ((group, member) for (owner, _), (group, member) in self._members.items() if owner == layer)
        first = phase == self.micro_steps[0]
        return {
            gradient_name(m.name): f"grad.{m.buffer}" if first else _scratch(group, layer, m.name) for group, m in mine
        }

    def accumulate(self, phase: str, layer: int | None, call: MakesCalls) -> Iterator[Instruction]:
        """A layer's own group after its backward pass, what layers share at the end."""
        if phase == self.micro_steps[0]:
            return
        for group in self.traced.groups:
            if group.layer == layer and not _in_place(group):
                sums = f"grad.{group.name}[]"
                body = call(f"add.{group.block}", [sums, f"grad_step.{group.scratch}[]"], [sums])
                yield Repeat(group.count, group.blocks, (body,), layer=layer)

    def updates(self, call: MakesCalls) -> dict[str, tuple[Instruction, ...]]:
        """`norm` finds the norm and the scale of all gradients; `update` is AdamW, group by group."""
        norms: list[Instruction] = []
        steps: list[Instruction] = []
        for group in self.traced.groups:
            square = call(
                f"squares.{group.block}", [f"grad.{group.name}[]"], [f"squares.{group.name}[]"], blocks=group.blocks
            )
            norms.append(Repeat(group.count, group.blocks, (square,), layer=group.layer))
            state = [f"{name}.{group.name}[]" for name in ("params", "moment1", "moment2")]
            scalars = ["no_decay" if name == "weight_decay" and not group.decays else name for name in ADAMW]
            step = call(f"adamw.{group.block}", [*state, f"grad.{group.name}[]", "scale", *scalars], state)
            steps.append(Repeat(group.count, group.blocks, (step,), layer=group.layer))
        sums = [f"squares.{group.name}" for group in self.traced.groups]
        norms.append(call("norm", [*sums, "token_count", "max_norm"], ["grad_norm", "scale"]))
        return {"norm": tuple(norms), "update": tuple(steps)}


def _scratch(group: Group, layer: int | None, name: str) -> str:
    """Where a micro-step writes a gradient that is then added to those before: layers' matrices share the place."""
    place = name if group.layer is not None or layer is None else f"{layer}.{name}"
    return f"grad_step.{group.scratch}.{place}"


def _in_place(group: Group) -> bool:
    """Whether parts add to the gradients of the step themselves: those of all that stands outside the layers do."""
    return all(member.layer is None for member in group.members)
