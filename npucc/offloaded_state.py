"""Full fine-tuning for a device with memory of its own: master weights, gradients and moments stay with the host.

    device   weights.G in the dtype that is multiplied with        gradients of a layer, in one of two places
                 ▲ h2d                                                 │ d2h, while earlier layers compute
    host     copy.G ◀── AdamW: params.G, moment1.G, moment2.G ◀── grad.G, added up in f32

A layer's gradients leave while the layer before it computes; its update and the way of its new weights to the device
overlap with other layers' updates and with the next forward pass, which needs the first layer first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from npubundle.program import Buffer, Instruction, Move, Repeat, Role, Source, Space
from npubundle.tensor import TensorType
from npucc.parts import Traced
from npucc.trained_state import ADAMW, MakesCalls
from npucc.training.groups import Group, Member
from npucc.training.layer import gradient_name

#: Places for the gradients of layers: one is filled while the other is copied.
SLOTS = 2


class OffloadedState:
    """As `TrainedState` says."""

    micro_steps: tuple[str, ...] = ("first_micro_step", "micro_step")
    scalars: Space = "host"
    ends: frozenset[str] = frozenset()

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.checkpoint: Mapping[str, tuple[int, ...]] = {
            m.tensor: m.shape for group in traced.groups for m in group.members
        }
        self._members = {(m.layer, m.name): (group, m) for group in traced.groups for m in group.members}
        # What every layer needs comes first, then layers in the order in which the next forward pass needs them.
        self._in_order = sorted(traced.groups, key=lambda group: (group.layer is not None, group.layer or 0))

    def buffers(self) -> Iterator[Buffer]:
        """Those of the picture, and views of them: masters and gradients by tensor, the device's by layer."""
        dtype = self.traced.cut.products
        for group in self.traced.groups:
            roles: tuple[tuple[str, Role], ...] = (
                ("params", "param"), ("grad", "grad"), ("moment1", "moment"), ("moment2", "moment")
            )  # fmt: skip
            for name, role in roles:
                yield Buffer(f"{name}.{group.name}", group.type, role, space="host")
            narrow = TensorType(dtype, group.type.shape)
            yield Buffer(f"copy.{group.name}", narrow, "copy", space="host")
            yield Buffer(f"weights.{group.name}", narrow, "copy")
            yield Buffer(group.count, TensorType("i32", ()), "scalar", value=group.blocks, space="host")
            for member, offset in group.offsets():
                yield Buffer(
                    f"params.{member.buffer}", member.kind, "param", f"params.{group.name}", offset,
                    source=Source(member.tensor), tensor=member.tensor, space="host",
                )  # fmt: skip
                yield Buffer(
                    f"grad.{member.buffer}", member.kind, "grad", f"grad.{group.name}", offset,
                    tensor=member.tensor, space="host",
                )  # fmt: skip
                kind = TensorType(dtype, member.shape)
                yield Buffer(member.buffer, kind, "copy", f"weights.{group.name}", offset)
        yield from self._places(dtype)
        yield Buffer("no_decay", TensorType("f32", ()), "scalar", value=0, space="host")

    def _places(self, dtype: str) -> Iterator[Buffer]:
        """Where a micro-step's gradients lie on the device, and where they arrive."""
        made: set[str] = set()
        for group in self.traced.groups:
            place = self._place(group)
            if place in made:
                continue
            made.add(place)
            narrow = TensorType(dtype, group.type.shape)
            yield Buffer(f"step.{place}", narrow, "grad")
            yield Buffer(f"arrived.{place}", narrow, "grad", space="host")
            for member, offset in group.offsets():
                kind = TensorType(dtype, member.shape)
                yield Buffer(self._step(group, member), kind, "grad", f"step.{place}", offset)

    def _place(self, group: Group) -> str:
        return group.scratch if group.layer is None else f"{group.scratch}.{group.layer % SLOTS}"

    def _step(self, group: Group, member: Member) -> str:
        own = member.name if group.layer is not None else f"{member.layer}.{member.name}"
        return f"step.{self._place(group)}.{own}"

    def argument(self, layer: int, name: str) -> str | None:
        """As `TrainedState` says."""
        known = self._members.get((layer, name))
        return None if known is None else known[1].buffer

    def gradients(self, phase: str, layer: int) -> dict[str, str]:
        """As `TrainedState` says: on the device, whatever the phase."""
        del phase
        mine = ((group, member) for (owner, _), (group, member) in self._members.items() if owner == layer)
        return {gradient_name(member.name): self._step(group, member) for group, member in mine}

    def accumulate(self, phase: str, layer: int | None, call: MakesCalls) -> Iterator[Instruction]:
        """Gradients leave the device, and take the place of those of the step before or are added up."""
        for group in self.traced.groups:
            if group.layer != layer:
                continue
            place, sums = self._place(group), f"grad.{group.name}[]"
            yield Move(f"step.{place}", f"arrived.{place}", "d2h", layer=layer)
            arrived = f"arrived.{place}[]"
            if phase == self.micro_steps[0]:
                body = call(f"widen.{group.block}", [arrived], [sums], queue="host")
            else:
                body = call(f"add.{group.block}", [sums, arrived], [sums], queue="host")
            yield Repeat(group.count, group.blocks, (body,), layer=layer)

    def updates(self, call: MakesCalls) -> dict[str, tuple[Instruction, ...]]:
        """`norm` and `update` as without offloading, and `upload`, which makes the device's weights of the masters."""
        norms: list[Instruction] = []
        steps: list[Instruction] = []
        upload: list[Instruction] = []
        for group in self._in_order:
            grad, copy = f"grad.{group.name}[]", f"copy.{group.name}"
            square = call(
                f"squares.{group.block}", [grad], [f"squares.{group.name}[]"], blocks=group.blocks, queue="host"
            )
            norms.append(Repeat(group.count, group.blocks, (square,), layer=group.layer))
            state = [f"{name}.{group.name}[]" for name in ("params", "moment1", "moment2")]
            scalars = ["no_decay" if name == "weight_decay" and not group.decays else name for name in ADAMW]
            results = [*state, f"{copy}[]"]
            step = call(f"adamw.{group.block}", [*state, grad, "scale", *scalars], results, queue="host")
            away = Move(copy, f"weights.{group.name}", "h2d", layer=group.layer)
            steps += [Repeat(group.count, group.blocks, (step,), layer=group.layer), away]
            made = call(f"narrow.{group.block}", [state[0]], [f"{copy}[]"], queue="host")
            upload += [Repeat(group.count, group.blocks, (made,), layer=group.layer), away]
        sums = [f"squares.{group.name}" for group in self.traced.groups]
        norms.append(call("norm", [*sums, "token_count", "max_norm"], ["grad_norm", "scale"], queue="host"))
        return {"norm": tuple(norms), "update": tuple(steps), "upload": tuple(upload)}
