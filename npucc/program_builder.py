"""From traced parts to programs: buffers, instructions, phases and their memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from npubundle.liveness import planned
from npubundle.program import Buffer, Call, Init, Instruction, Operand, Program, Repeat, Role, Source
from npubundle.tensor import TensorType
from npucc.parts import Traced
from npucc.training.layer import adapters, gradient_name

#: Scalars of the optimizer, in the order of the `adamw` part.
_ADAMW = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "correction1", "correction2")


def training_program(traced: Traced, saved_layers: int) -> Program:
    """The program `train`; the last `saved_layers` layers keep their activations, the others compute them again."""
    return _Builder(traced, saved_layers).training()


def reference_program(traced: Traced) -> Program:
    """The program `reference`: `micro_step` from unfused parts and a two-pass loss."""
    return _Builder(traced, 0).reference()


class _Builder:
    """Collects buffers as instructions ask for them; values take their types from the parts that produce them."""

    def __init__(self, traced: Traced, saved_layers: int) -> None:
        self.traced = traced
        self.config = traced.model.config
        self.architecture = traced.model.architecture
        self.layers = self.config.num_hidden_layers
        self.saved_from = self.layers - saved_layers
        self.buffers: dict[str, Buffer] = {}
        self.checkpoint: dict[str, tuple[int, ...]] = {}
        self._weights()
        self._state()
        self._inputs()

    # -- buffers -------------------------------------------------------------------------------------------------

    def _add(self, buffer: Buffer) -> None:
        self.buffers[buffer.name] = buffer

    def _weight(self, name: str, tensor: str, shape: tuple[int, ...]) -> None:
        self.checkpoint[tensor] = shape
        self._add(Buffer(name, TensorType("f32", shape), "weight", source=Source(tensor)))

    def _weights(self) -> None:
        config, names = self.config, self.architecture
        vocabulary = (config.vocab_size, config.hidden_size)
        self._weight("embed", names.embedding, vocabulary)
        for index in range(self.layers):
            for t in names.layer_tensors(config):
                self._weight(f"layers.{index}.{t.name}", names.layer_prefix.format(index) + t.tensor, t.shape)
        self._weight("norm", names.final_norm, (config.hidden_size,))
        if not config.tie_word_embeddings:
            self._weight("head", names.head, vocabulary)
        matrix = "embed" if config.tie_word_embeddings else "head"
        for number, (start, stop) in enumerate(self.traced.head.slices):
            kind = TensorType("f32", (stop - start, config.hidden_size))
            self._add(Buffer(f"head.{number}", kind, "weight", view_of=matrix, view_offset=start * config.hidden_size))
            self._add(Buffer(f"head.{number}.start", TensorType("i32", ()), "scalar", value=start))

    def _state(self) -> None:
        flat = TensorType("f32", (self.traced.trained,))
        roles: tuple[tuple[str, Role], ...] = (
            ("lora", "param"), ("grad", "grad"), ("grad_step", "grad"), ("moment1", "moment"), ("moment2", "moment")
        )  # fmt: skip
        for name, role in roles:
            self._add(Buffer(name, flat, role))
        offset = 0
        for index in range(self.layers):
            prefix = "base_model.model." + self.architecture.layer_prefix.format(index)
            for adapter in adapters(self.traced.model, self.traced.recipe):
                for name, tensor, kind in adapter.matrices:
                    starts_random = name.endswith("lora_A")
                    init = Init("kaiming_uniform", kind.shape[-1]) if starts_random else Init("zeros")
                    view = f"{index}.{name}"
                    self._add(Buffer(f"lora.{view}", kind, "param", "lora", offset, tensor=prefix + tensor, init=init))
                    self._add(Buffer(f"grad_step.{view}", kind, "grad", "grad_step", offset, tensor=prefix + tensor))
                    offset += kind.elements

    def _inputs(self) -> None:
        S, B, n = self.traced.recipe.seq_len, self.traced.head.blocks, self.traced.head.rows
        for name in ("tokens", "positions", "segments"):
            self._add(Buffer(name, TensorType("i32", (S,)), "input"))
        self._add(Buffer("rows", TensorType("i32", (B, n)), "input"))
        self._add(Buffer("labels", TensorType("i32", (B, n)), "input"))
        self._add(Buffer("weights", TensorType("f32", (B, n)), "input"))
        self._add(Buffer("blocks", TensorType("i32", ()), "scalar"))
        for name in ("accumulate", "token_count", "max_norm", *_ADAMW):
            self._add(Buffer(name, TensorType("f32", ()), "scalar"))

    def _output(self, name: str, kind: TensorType) -> None:
        self._add(Buffer(name, kind, "output"))

    # -- instructions --------------------------------------------------------------------------------------------

    def call(
        self,
        part: str,
        args: Sequence[str],
        results: Sequence[str],
        *,
        layer: int | None = None,
        blocks: int | None = None,
    ) -> Call:
        """A call; results that do not exist yet become activations, with an axis of `blocks` where they are `x[]`."""
        for text, kind in zip(results, self.traced.parts[part].graph.output_types, strict=True):
            operand = Operand.from_str(text)
            if operand.buffer not in self.buffers:
                shape = (blocks, *kind.shape) if operand.indexed and blocks else kind.shape
                self._add(Buffer(operand.buffer, TensorType(kind.dtype, shape), "activation"))
        return Call(part, tuple(map(Operand.from_str, args)), tuple(map(Operand.from_str, results)), layer=layer)

    def _layer_args(self, part: str, index: int, values: Mapping[str, str]) -> list[str]:
        """The arguments of a layer's part: what `values` says, else this layer's weights and LoRA matrices."""
        args = []
        for value in self.traced.parts[part].graph.inputs:
            if value.name in values:
                args.append(values[value.name])
            else:
                args.append(f"lora.{index}.{value.name}" if ".lora_" in value.name else f"layers.{index}.{value.name}")
        return args

    def _beginning(self, prefix: str) -> list[Instruction]:
        positions = [prefix + name for name in ("cos", "sin", "mask")]
        return [
            self.call("tables", ["positions", "segments"], positions),
            self.call("embed", ["tokens", "embed"], [f"{prefix}h.0"]),
        ]

    def _tables(self, prefix: str) -> dict[str, str]:
        return {name: prefix + name for name in ("cos", "sin", "mask")}

    def _saves(self, index: int) -> bool:
        return index >= self.saved_from

    def _forward(self, prefix: str, *, keep: bool) -> Iterable[Instruction]:
        for index in range(self.layers):
            part = "layer.forward.save" if self._saves(index) else "layer.forward"
            # Evaluation runs the same parts, so that they are loaded once; it has one place for what it does not keep.
            place = f"{index}." if keep else ""
            saved = [f"{prefix}{place}{name}" for name in self.traced.saved] if self._saves(index) else []
            args = self._layer_args(part, index, {"x": f"{prefix}h.{index}"} | self._tables(prefix))
            yield self.call(part, args, [f"{prefix}h.{index + 1}", *saved], layer=index)

    def _backward(self) -> Iterable[Instruction]:
        for index in reversed(range(self.layers)):
            part = "layer.backward.save" if self._saves(index) else "layer.backward"
            part += ".first" if index == 0 else ""
            values = {"x": f"h.{index}", "dy": f"dh.{index + 1}"} | self._tables("")
            values |= {name: f"{index}.{name}" for name in self.traced.saved}
            yield self.call(part, self._layer_args(part, index, values), self._gradients(part, index), layer=index)

    def _gradients(self, part: str, index: int) -> list[str]:
        """Result operands of a backward part: dx, and the views of `grad_step`."""
        names = {"dx": f"dh.{index}"}
        for adapter in adapters(self.traced.model, self.traced.recipe):
            names |= {gradient_name(name): f"grad_step.{index}.{name}" for name, _, _ in adapter.matrices}
        return [names[output] for output, _ in self.traced.parts[part].graph.outputs]

    def _repeat(self, body: Iterable[Call]) -> Repeat:
        return Repeat("blocks", self.traced.head.blocks, tuple(body))

    def _loss(self, last: str) -> list[Instruction]:
        names = ("top", "total", "mixed", "label_logit", "label_row")
        blocks = self.traced.head.blocks
        body = [self.call("head.begin", [last, "rows[]", "norm"], ["hx", *(f"{n}.0" for n in names)])]
        for number, (start, stop) in enumerate(self.traced.head.slices):
            args = ["hx", f"head.{number}", "labels[]", f"head.{number}.start", *(f"{n}.{number}" for n in names)]
            body.append(self.call(f"head.slice.{stop - start}", args, [f"{n}.{number + 1}" for n in names]))
        sums = [f"{n}.{len(self.traced.head.slices)}" for n in names]
        body.append(
            self.call(
                "head.finish", [last, "rows[]", "norm", "weights[]", *sums], ["losses[]", "d_rows[]"], blocks=blocks
            )
        )
        return [self._repeat(body), self._loss_end()]

    def _loss_end(self) -> Call:
        self._output("loss_sum", TensorType("f32", ()))
        return self.call("head.end", ["losses", "d_rows", "rows", "weights"], ["loss_sum", f"dh.{self.layers}"])

    def _update(self) -> list[Instruction]:
        self._output("grad_norm", TensorType("f32", ()))
        state = ["lora", "moment1", "moment2"]
        return [
            self.call("clip", ["grad", "token_count", "max_norm"], ["grad_norm", "scale"]),
            self.call("adamw", [*state, "grad", "scale", *_ADAMW], state),
        ]

    def _evaluate(self) -> list[Instruction]:
        names = ("top", "total", "label_logit", "best")
        shape = (self.traced.head.blocks, self.traced.head.rows)
        self._output("logprobs", TensorType("f32", shape))
        self._output("predictions", TensorType("i32", shape))
        last = f"eval.h.{self.layers}"
        body = [self.call("score.begin", [last, "rows[]", "norm"], ["eval.hx", *(f"eval.{n}.0" for n in names)])]
        for number, (start, stop) in enumerate(self.traced.head.slices):
            running = [f"eval.{n}.{number}" for n in names]
            args = ["eval.hx", f"head.{number}", "labels[]", f"head.{number}.start", *running]
            body.append(self.call(f"score.slice.{stop - start}", args, [f"eval.{n}.{number + 1}" for n in names]))
        sums = [f"eval.{n}.{len(self.traced.head.slices)}" for n in names]
        body.append(self.call("score.finish", sums, ["logprobs[]", "predictions[]"]))
        return [*self._beginning("eval."), *self._forward("eval.", keep=False), self._repeat(body)]

    def _logits(self) -> list[Instruction]:
        n = self.traced.head.rows
        self._output("logits", TensorType("f32", (self.config.vocab_size, n)))
        self._add(Buffer("one", TensorType("i32", ()), "scalar", value=1))
        scratch = [f"logits.{name}" for name in ("x", "top", "total", "label_logit", "best")]
        body = [self.call("score.begin", [f"logits.h.{self.layers}", "rows[]", "norm"], scratch)]
        for number, (start, stop) in enumerate(self.traced.head.slices):
            view = f"logits.{number}"
            self._add(Buffer(view, TensorType("f32", (stop - start, n)), "output", "logits", start * n))
            body.append(self.call(f"logits.slice.{stop - start}", ["logits.x", f"head.{number}"], [view]))
        return [*self._beginning("logits."), *self._forward("logits.", keep=False), Repeat("one", 1, tuple(body))]

    # -- programs ------------------------------------------------------------------------------------------------

    def training(self) -> Program:
        """All phases of `train`."""
        micro_step = [*self._beginning(""), *self._forward("", keep=True), *self._loss(f"h.{self.layers}")]
        micro_step += [*self._backward(), self._accumulate()]
        phases = {"micro_step": tuple(micro_step), "update": tuple(self._update()), "evaluate": tuple(self._evaluate())}
        prefixes = ["", "eval."]
        if self.traced.recipe.logits:
            phases["logits"] = tuple(self._logits())
            prefixes.append("logits.")
        return self._program(phases, prefixes)

    def _accumulate(self) -> Call:
        return self.call("accumulate", ["grad", "grad_step", "accumulate"], ["grad"])

    def reference(self) -> Program:
        """`micro_step` from the parts whose names begin with `reference`."""
        instructions = self._beginning("")
        for index in range(self.layers):
            part = "reference.layer.forward"
            args = self._layer_args(part, index, {"x": f"h.{index}"} | self._tables(""))
            instructions.append(self.call(part, args, [f"h.{index + 1}"], layer=index))
        instructions += self._reference_loss(f"h.{self.layers}")
        for index in reversed(range(self.layers)):
            part = "reference.layer.backward"
            values = {"x": f"h.{index}", "dy": f"dh.{index + 1}"} | self._tables("")
            instructions.append(
                self.call(part, self._layer_args(part, index, values), self._gradients(part, index), layer=index)
            )
        instructions.append(self._accumulate())
        return self._program({"micro_step": tuple(instructions)}, [""])

    def _reference_loss(self, last: str) -> list[Instruction]:
        slices = self.traced.head.slices
        start = ["hx", "lse.0", "label_logit.0", "dx.0"]
        # `head.begin` also makes the zeros and the lowest number that the two passes start from.
        begin = self.call(
            "head.begin", [last, "rows[]", "norm"], [start[0], start[1], start[2], start[3], "unused.0", "unused.1"]
        )
        body = [begin]
        for number, (low, high) in enumerate(slices):
            body.append(
                self.call(
                    f"reference.lse.{high - low}", ["hx", f"head.{number}", f"lse.{number}"], [f"lse.{number + 1}"]
                )
            )
        lse = f"lse.{len(slices)}"
        for number, (low, high) in enumerate(slices):
            running = [f"label_logit.{number}", f"dx.{number}"]
            args = ["hx", f"head.{number}", "labels[]", f"head.{number}.start", lse, *running]
            after = [f"label_logit.{number + 1}", f"dx.{number + 1}"]
            body.append(self.call(f"reference.slice.{high - low}", args, after))
        sums = [lse, f"label_logit.{len(slices)}", f"dx.{len(slices)}"]
        args = [last, "rows[]", "norm", "weights[]", *sums]
        body.append(self.call("reference.finish", args, ["losses[]", "d_rows[]"], blocks=self.traced.head.blocks))
        return [self._repeat(body), self._loss_end()]

    def _program(self, phases: dict[str, tuple[Instruction, ...]], prefixes: Sequence[str]) -> Program:
        boundaries = range(self.layers + 1)
        chains = [tuple(f"{prefix}h.{i}" for i in boundaries) for prefix in prefixes]
        # The first layer writes no dh.0; the name stands for its place all the same.
        chains.append(tuple(f"dh.{i}" for i in boundaries))
        return planned(Program(self.buffers, phases, tuple(chains), {}, self.checkpoint))
