"""From traced parts to programs: buffers, instructions, phases and their memory plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from npubundle.liveness import planned
from npubundle.program import Buffer, Call, Instruction, Move, Operand, Program, Queue, Repeat, Source, Space
from npubundle.tensor import TensorType
from npucc.graph import Graph
from npucc.offloaded_state import OffloadedState
from npucc.parts import Traced
from npucc.trained_ends import TrainedEnds
from npucc.trained_state import SCALARS, FullState, LoraState, TrainedState


def training_program(traced: Traced, saved_layers: int) -> Program:
    """The program `train`; the last `saved_layers` layers keep their activations, the others compute them again."""
    return (_DeviceBuilder if traced.cut.own_memory else _Builder)(traced, saved_layers).training()


def reference_program(traced: Traced) -> Program:
    """The program `reference`: `micro_step` from unfused parts and a two-pass loss, in f32, for a CPU."""
    program = _Builder(traced, 0, reference=True).reference()
    return _on_host(program) if traced.cut.own_memory else program


def _on_host(program: Program) -> Program:
    """The same program with everything in the host's memory and on its processor."""

    def moved(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Repeat):
            body = tuple(dataclasses.replace(call, queue="host") for call in instruction.body)
            return dataclasses.replace(instruction, body=body)
        return dataclasses.replace(instruction, queue="host") if isinstance(instruction, Call) else instruction

    buffers = {name: dataclasses.replace(b, space="host", arena_offset=None) for name, b in program.buffers.items()}
    phases = {phase: tuple(map(moved, body)) for phase, body in program.phases.items()}
    return planned(dataclasses.replace(program, buffers=buffers, phases=phases, arena={}))


class _Builder:
    """Collects buffers as instructions ask for them; values take their types from the parts that produce them."""

    #: Where token ids and row numbers lie.
    indices: Space = "device"

    def __init__(self, traced: Traced, saved_layers: int, *, reference: bool = False) -> None:
        """A program of the reference's parts has f32 weights, whatever the target."""
        self.traced = traced
        self.products = "f32" if reference else traced.cut.products
        self.config = traced.model.config
        self.architecture = traced.model.architecture
        self.layers = self.config.num_hidden_layers
        self.saved_from = self.layers - saved_layers
        self.buffers: dict[str, Buffer] = {}
        self.state = self._trained_state(reference=reference)
        self.checkpoint: dict[str, tuple[int, ...]] = dict(self.state.checkpoint)
        self._weights()
        self.ends = TrainedEnds(self.state.ends, traced.head, self.output_matrix, self.call)
        for buffer in self.state.buffers():
            self._add(buffer)
        self._inputs()

    def _trained_state(self, *, reference: bool) -> TrainedState:
        if self.traced.recipe.full:
            return FullState(self.traced)
        return LoraState(self.traced, "reference." if reference else "")

    # -- buffers -------------------------------------------------------------------------------------------------

    def _add(self, buffer: Buffer) -> None:
        self.buffers[buffer.name] = buffer

    def _weight(self, name: str, tensor: str, shape: tuple[int, ...], space: Space = "device") -> None:
        if name in self.state.ends:
            return
        self.checkpoint[tensor] = shape
        self._add(Buffer(name, TensorType(self.products, shape), "weight", source=Source(tensor), space=space))

    def _weights(self) -> None:
        config, names = self.config, self.architecture
        self._vocabulary_weights()
        for index in range(self.layers):
            for t in names.layer_tensors(config):
                if self.state.argument(index, t.name) is None:
                    self._weight(f"layers.{index}.{t.name}", names.layer_prefix.format(index) + t.tensor, t.shape)
        self._weight("norm", names.final_norm, (config.hidden_size,))
        matrix, trained = self.output_matrix, self.output_matrix in self.state.ends
        for number, (start, stop) in enumerate(self.traced.head.slices):
            kind, offset = TensorType(self.products, (stop - start, config.hidden_size)), start * config.hidden_size
            base = f"params.table.{matrix}" if trained else matrix
            self._add(Buffer(f"head.{number}", kind, "param" if trained else "weight", base, offset))
            self._add(Buffer(f"head.{number}.start", TensorType("i32", ()), "scalar", value=start))
            for name in self.state.ends & {"embed", "head"}:
                self._add(Buffer(f"grad.{name}.{number}", kind, "grad", f"grad.table.{name}", offset))

    def _vocabulary_weights(self) -> None:
        config, names = self.config, self.architecture
        vocabulary = (config.vocab_size, config.hidden_size)
        self._weight("embed", names.embedding, vocabulary)
        self.output_matrix = "embed" if config.tie_word_embeddings else "head"
        if not config.tie_word_embeddings:
            self._weight("head", names.head, vocabulary)

    def _inputs(self) -> None:
        S, B, n = self.traced.recipe.seq_len, self.traced.head.blocks, self.traced.head.rows
        for name in ("tokens", "positions", "segments"):
            self._add(Buffer(name, TensorType("i32", (S,)), "input", space=self.indices))
        self._add(Buffer("rows", TensorType("i32", (B, n)), "input", space=self.indices))
        self._add(Buffer("labels", TensorType("i32", (B, n)), "input", space=self.indices))
        self._add(Buffer("weights", TensorType("f32", (B, n)), "input", space=self.indices))
        self._add(Buffer("blocks", TensorType("i32", ()), "scalar", space=self.indices))
        for name in SCALARS:
            self._add(Buffer(name, TensorType("f32", ()), "scalar", space=self.state.scalars))

    def _output(self, name: str, kind: TensorType, space: Space = "device") -> None:
        self._add(Buffer(name, kind, "output", space=space))

    # -- instructions --------------------------------------------------------------------------------------------

    def call(
        self,
        part: str,
        args: Sequence[str],
        results: Sequence[str],
        *,
        layer: int | None = None,
        blocks: int | None = None,
        queue: Queue = "compute",
    ) -> Call:
        """A call; results that do not exist yet become activations, with an axis of `blocks` where they are `x[]`."""
        space: Space = "host" if queue == "host" else "device"
        for text, kind in zip(results, self._graph(part).output_types, strict=True):
            operand = Operand.from_str(text)
            if operand.buffer not in self.buffers:
                shape = (blocks, *kind.shape) if operand.indexed and blocks else kind.shape
                self._add(Buffer(operand.buffer, TensorType(kind.dtype, shape), "activation", space=space))
        operands = tuple(map(Operand.from_str, args)), tuple(map(Operand.from_str, results))
        return Call(part, *operands, queue=queue, layer=layer)

    def _layer_args(self, part: str, index: int, values: Mapping[str, str]) -> list[str]:
        """The arguments of a layer's part: what `values` says, else this layer's parameters and weights."""
        own = (v.name for v in self._graph(part).inputs)
        return [values.get(n) or self.state.argument(index, n) or f"layers.{index}.{n}" for n in own]

    def _beginning(self, prefix: str, *, labels: bool) -> list[Instruction]:
        """What is picked by index: position tables, token vectors, and the output matrix's rows of the labels."""
        begin: list[Instruction] = [
            self.call("tables", ["positions", "segments"], list(self._tables(prefix).values())),
            self.call("embed", ["tokens", "embed"], [f"{prefix}h.0"]),
        ]
        if labels:
            begin.append(self.call("head.labels", ["labels", self.output_matrix], [f"{prefix}label_rows"]))
        return begin

    def _tables(self, prefix: str) -> dict[str, str]:
        return {name: prefix + name for name, _ in self.traced.parts["tables"].graph.outputs}

    def _saves(self, index: int) -> bool:
        return index >= self.saved_from

    def _forward(self, prefix: str, *, keep: bool) -> Iterable[Instruction]:
        for index in range(self.layers):
            saves = self._saves(index)
            # Evaluation runs the same parts, so that they are loaded once; it has one place for what it does not keep.
            place = f"{index}." if keep and saves else "scratch." if keep else ""
            names = {"x": f"{prefix}h.{index}", "y": f"{prefix}h.{index + 1}"} | self._tables(prefix)
            yield from self._stages(self._pass("layer.forward", saves=saves), index, names, prefix + place)

    def _backward(self, phase: str) -> Iterable[Instruction]:
        for index in reversed(range(self.layers)):
            names = {"x": f"h.{index}", "dy": f"dh.{index + 1}", "dx": f"dh.{index}"} | self._tables("")
            if not self._saves(index) and "layer.backward" not in self.traced.stages:
                yield from self._stages(self._computed_again, index, names, f"{index}.")
            names |= self.state.gradients(phase, index)
            first = index == 0 and "embed" not in self.state.ends
            backward = self._pass("layer.backward", saves=self._saves(index), first=first)
            yield from self._stages(backward, index, names, f"{index}.")
            yield from self.state.accumulate(phase, index, self.call)
        yield from self.ends.of_embeddings("dh.0")
        yield from self.state.accumulate(phase, None, self.call)

    def _pass(self, name: str, *, saves: bool, first: bool = False) -> Sequence[str]:
        """Names of the parts. Targets with small parts have one set of them for every policy and layer."""
        stages = self.traced.stages
        saved = f"{name}.save" if saves or name not in stages else name
        return stages.get(f"{saved}.first", stages[saved]) if first else stages[saved]

    def _stages(self, parts: Iterable[str], index: int, names: Mapping[str, str], place: str) -> Iterable[Instruction]:
        """Calls of one layer's parts, in order. Values without a name of their own are activations at `place`."""
        for part in parts:
            graph = self._graph(part)
            made = {name: names.get(name, place + name) for name, _ in graph.outputs}
            values = dict(names)
            values |= {v.name: place + v.name for v in graph.inputs if v.name in self.passed and v.name not in names}
            yield self.call(part, self._layer_args(part, index, values), list(made.values()), layer=index)

    @cached_property
    def _computed_again(self) -> tuple[str, ...]:
        """The parts of a layer's forward pass that make what its backward pass reads, in order.

        The last one is left out where it only makes the layer's output, which is there already.
        """
        wanted = {v.name for part in self.traced.stages["layer.backward.save"] for v in self._graph(part).inputs}
        again: list[str] = []
        for part in reversed(self.traced.stages["layer.forward.save"]):
            graph = self._graph(part)
            if wanted & {name for name, _ in graph.outputs}:
                again.insert(0, part)
                wanted |= {v.name for v in graph.inputs}
        return tuple(again)

    def _graph(self, part: str) -> Graph:
        return self.traced.parts[part].graph

    @cached_property
    def passed(self) -> set[str]:
        """Values that one part of a layer hands to another."""
        stages = self.traced.stages.values()
        return {out for parts in stages for part in parts for out, _ in self._graph(part).outputs}

    def _repeat(self, body: Iterable[Call]) -> Repeat:
        return Repeat("blocks", self.traced.head.blocks, tuple(body))

    def _loss(self, last: str) -> list[Instruction]:
        names = ("top", "total", "mixed")
        rows = [last, f"{self._here('rows')}[]", "norm"]
        body = [self.call("head.begin", rows, ["hx", *(f"{n}.0" for n in names)])]
        for number, (start, stop) in enumerate(self.traced.head.slices):
            args = ["hx", f"head.{number}", *(f"{n}.{number}" for n in names)]
            body.append(self.call(f"head.slice.{stop - start}", args, [f"{n}.{number + 1}" for n in names]))
        sums = [f"{n}.{len(self.traced.head.slices)}" for n in names]
        args = [*rows, f"{self._here('weights')}[]", "hx", "label_rows[]", *sums]
        body.append(self.call("head.finish", args, ["losses[]", "d_rows[]"], blocks=self.traced.head.blocks))
        body += self.ends.of_block(rows, f"{self._here('weights')}[]", sums)
        return [self._repeat(body), self._loss_end()]

    def _loss_end(self) -> Call:
        self._output("loss_sum", TensorType("f32", ()))
        args = [self._here(v.name) for v in self.traced.parts["head.end"].graph.inputs]
        return self.call("head.end", args, ["loss_sum", f"dh.{self.layers}"])

    def _updates(self) -> dict[str, tuple[Instruction, ...]]:
        self._output("grad_norm", TensorType("f32", ()), self.state.scalars)
        if self.traced.groups:  # another phase finds it than uses it
            self._output("scale", TensorType("f32", ()), self.state.scalars)
        return self.state.updates(self.call)

    def _evaluate(self) -> list[Instruction]:
        names = ("top", "total", "best")
        shape = (self.traced.head.blocks, self.traced.head.rows)
        self._output("logprobs", TensorType("f32", shape))
        self._output("predictions", TensorType("i32", shape))
        last = f"eval.h.{self.layers}"
        rows = [last, f"{self._here('rows', 'eval.')}[]", "norm"]
        body = [self.call("score.begin", rows, ["eval.hx", *(f"eval.{n}.0" for n in names)])]
        for number, (start, stop) in enumerate(self.traced.head.slices):
            running = [f"eval.{n}.{number}" for n in names]
            args = ["eval.hx", f"head.{number}", f"head.{number}.start", *running]
            body.append(self.call(f"score.slice.{stop - start}", args, [f"eval.{n}.{number + 1}" for n in names]))
        sums = [f"eval.{n}.{len(self.traced.head.slices)}" for n in names]
        args = ["eval.hx", "eval.label_rows[]", *sums]
        body.append(self.call("score.finish", args, ["logprobs[]", "predictions[]"]))
        return [*self._beginning("eval.", labels=True), *self._forward("eval.", keep=False), self._repeat(body)]

    def _logits(self) -> list[Instruction]:
        n = self.traced.head.rows
        self._output("logits", TensorType("f32", (self.config.vocab_size, n)))
        self._add(Buffer("one", TensorType("i32", ()), "scalar", value=1))
        scratch = [f"logits.{name}" for name in ("x", "top", "total", "best")]
        rows = [f"logits.h.{self.layers}", f"{self._here('rows', 'logits.')}[]", "norm"]
        body = [self.call("score.begin", rows, scratch)]
        for number, (start, stop) in enumerate(self.traced.head.slices):
            view = f"logits.{number}"
            self._add(Buffer(view, TensorType("f32", (stop - start, n)), "output", "logits", start * n))
            body.append(self.call(f"logits.slice.{stop - start}", ["logits.x", f"head.{number}"], [view]))
        return [
            *self._beginning("logits.", labels=False),
            *self._forward("logits.", keep=False),
            Repeat("one", 1, tuple(body)),
        ]

    # -- programs ------------------------------------------------------------------------------------------------

    def training(self) -> Program:
        """All phases of `train`."""
        forward = [*self._beginning("", labels=True), *self._forward("", keep=True), *self._loss(f"h.{self.layers}")]
        phases = {phase: (*forward, *self._backward(phase)) for phase in self.state.micro_steps}
        first = self.state.micro_steps[0]
        phases[first] = (*self.ends.zeroed(), *phases[first])
        phases |= {**self._updates(), "evaluate": tuple(self._evaluate())}
        prefixes = ["", "eval."]
        if self.traced.recipe.logits:
            phases["logits"] = tuple(self._logits())
            prefixes.append("logits.")
        return self._program(phases, prefixes)

    def reference(self) -> Program:
        """The first micro-step of an optimizer step, from the parts whose names begin with `reference`."""
        phase = self.state.micro_steps[0]
        instructions: list[Instruction] = [
            *self.ends.zeroed(),
            self.call("reference.tables", ["positions", "segments"], ["cos", "sin", "mask"]),
            self.call("reference.embed", ["tokens", "embed"], ["h.0"]),
        ]
        tables = {name: name for name in ("cos", "sin", "mask")}
        for index in range(self.layers):
            part = "reference.layer.forward"
            args = self._layer_args(part, index, {"x": f"h.{index}"} | tables)
            instructions.append(self.call(part, args, [f"h.{index + 1}"], layer=index))
        instructions += self._reference_loss(f"h.{self.layers}")
        for index in reversed(range(self.layers)):
            part = "reference.layer.backward"
            values = {"x": f"h.{index}", "dy": f"dh.{index + 1}"} | tables
            names = {"dx": f"dh.{index}"} | self.state.gradients(phase, index)
            results = [names[output] for output, _ in self._graph(part).outputs]
            instructions.append(self.call(part, self._layer_args(part, index, values), results, layer=index))
        instructions += self.ends.of_embeddings("dh.0")
        instructions += self.state.accumulate(phase, None, self.call)
        return self._program({phase: tuple(instructions)}, [""])

    def _reference_loss(self, last: str) -> list[Instruction]:
        slices = self.traced.head.slices
        start = ["hx", "lse.0", "label_logit.0", "dx.0"]
        body = [self.call("reference.begin", [last, "rows[]", "norm"], start)]
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
        body += self.ends.of_reference_block([last, "rows[]", "norm"], lse, sums[2])
        self._output("loss_sum", TensorType("f32", ()))
        end = self.call("reference.end", ["losses", "d_rows", "rows", "weights"], ["loss_sum", f"dh.{self.layers}"])
        return [self._repeat(body), end]

    def _here(self, name: str, prefix: str = "") -> str:
        """The buffer in which the head's parts find an input, in the phase with this prefix."""
        del prefix
        return name

    def _program(self, phases: dict[str, tuple[Instruction, ...]], prefixes: Sequence[str]) -> Program:
        boundaries = range(self.layers + 1)
        chains = [tuple(f"{prefix}h.{i}" for i in boundaries) for prefix in prefixes]
        # The first layer writes no dh.0; the name stands for its place all the same.
        chains.append(tuple(f"dh.{i}" for i in boundaries))
        return planned(Program(self.buffers, phases, tuple(chains), {}, self.checkpoint))


class _DeviceBuilder(_Builder):
    """For a device with memory of its own. What is picked by index is picked on the host, and moves."""

    indices = "host"

    def _trained_state(self, *, reference: bool) -> TrainedState:
        if self.traced.recipe.full and not reference:
            return OffloadedState(self.traced)
        return super()._trained_state(reference=reference)

    def _vocabulary_weights(self) -> None:
        config, names = self.config, self.architecture
        vocabulary = (config.vocab_size, config.hidden_size)
        matrix = names.embedding if config.tie_word_embeddings else names.head
        self._weight("embed", names.embedding, vocabulary, "host")
        if not config.tie_word_embeddings:
            self._weight("labels.table", matrix, vocabulary, "host")
        self.output_matrix = "head"
        self._weight("head", matrix, vocabulary)

    def _beginning(self, prefix: str, *, labels: bool) -> list[Instruction]:
        table = "embed" if self.config.tie_word_embeddings else "labels.table"
        calls = [
            ("tables", ["positions", "segments"], list(self._tables(prefix).values())),
            ("embed", ["tokens", "embed"], [f"{prefix}h.0"]),
        ]
        moved = ["rows"]
        if labels:
            calls.append(("head.labels", ["labels", table], [f"{prefix}label_rows"]))
        if not prefix:  # only training puts gradients back
            calls.append(("head.places", ["rows", "weights"], ["slots", "used"]))
            moved.append("weights")
        begin: list[Instruction] = []
        for part, args, results in calls:
            on_host = [f"host.{name}" for name in results]
            for host, name, kind in zip(on_host, results, self._graph(part).output_types, strict=True):
                self._add(Buffer(host, kind, "activation", space="host"))
                self._add(Buffer(name, kind, "activation"))
            operands = tuple(map(Operand.from_str, args)), tuple(map(Operand.from_str, on_host))
            begin.append(Call(part, *operands, queue="host"))
            begin += [Move(host, name, "h2d") for host, name in zip(on_host, results, strict=True)]
        for name in moved:
            self._add(Buffer(self._here(name, prefix), self.buffers[name].type, "activation"))
            begin.append(Move(name, self._here(name, prefix), "h2d"))
        return begin

    def _here(self, name: str, prefix: str = "") -> str:
        return f"{prefix}device.{name}" if name in {"rows", "weights"} else name
