"""Programs against transformers and autograd: every activation policy, tied and untied, with memory as planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.func import functional_call

from npubundle import program_check
from npubundle.liveness import truncated
from npubundle.part import Part
from npubundle.program import Program
from npubundle.recipe import Activations
from npucc.build import saved_layers
from npucc.parts import Traced, trace
from npucc.program_builder import reference_program, training_program
from npucc.targets import CutPolicy, cpu
from npucc.training.head import HeadShape
from npucc.training.layer import gradient_name
from tests.npubundle.programs import part
from tests.npucc.program_interpreter import ProgramInterpreter
from tests.npucc.tiny import CUT, SEQ_LEN, recipe
from tests.npucc.transformers_models import pair

LAYERS = 3
TARGETS = ("q", "v", "down")
#: Small parts, all rows of the head in one block, and what is picked by index on the host. Exact, in f32.
DEVICE = replace(CUT, head_rows=None, query_rows=SEQ_LEN, swap=True, products_per_part=3, own_memory=True)
Tensor = torch.Tensor


@dataclass(frozen=True)
class Setup:
    """A model in both forms, and LoRA matrices for all of its layers in one flat vector."""

    traced: Traced
    theirs: Any
    lora: Tensor

    def interpreter(self, program: Program) -> ProgramInterpreter:
        machine = ProgramInterpreter(program, self.traced)
        machine.load(self.theirs.state_dict())
        machine.set(lora=self.lora)
        if self.traced.cut.own_memory:  # its parts multiply by 0 what was there before
            machine.set(grad=0.0)
        return machine

    def logits(self, lora: Tensor, tokens: Tensor) -> Tensor:
        """transformers' logits (S, V) with W + s·B·A for every adapted W."""
        program = training_program(self.traced, 0)
        own, adapted = self.theirs.state_dict(), {}
        for index in range(LAYERS):
            for t in self.traced.model.architecture.layer_tensors(self.traced.model.config):
                if t.name in TARGETS:
                    a, b = (_view(program, lora, f"lora.{index}.{t.name}.lora_{side}") for side in "AB")
                    name = self.traced.model.architecture.layer_prefix.format(index) + t.tensor
                    adapted[name] = own[name] + self.traced.recipe.scaling * b @ a
        found: Tensor = functional_call(self.theirs, adapted, (tokens[None],)).logits[0]
        return found


def _view(program: Program, flat: Tensor, name: str) -> Tensor:
    buffer = program.buffers[name]
    return flat[buffer.view_offset : buffer.view_offset + buffer.type.elements].view(buffer.type.shape)


def _setup(*, tied: bool, cut: CutPolicy = CUT) -> Setup:
    ours, theirs = pair(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    traced = trace(ours, recipe(targets=TARGETS, logits=True), cut)
    generator = torch.Generator().manual_seed(1)
    return Setup(traced, theirs, torch.randn(traced.trained, generator=generator) * 0.2)


@pytest.fixture(scope="module")
def tied() -> Setup:
    return _setup(tied=True)


@pytest.fixture(scope="module", params=["tied", "untied", "device", "untied-device"])
def setup(request: pytest.FixtureRequest, tied: Setup) -> Setup:
    cut = DEVICE if "device" in request.param else CUT
    return tied if request.param == "tied" else _setup(tied="untied" not in request.param, cut=cut)


@dataclass(frozen=True)
class Sequence:
    """One sequence, and which of its positions are supervised."""

    tokens: Tensor
    rows: Tensor

    @property
    def labels(self) -> Tensor:
        return (self.tokens[self.rows] * 3 + 1) % 61

    def inputs(self, head: HeadShape) -> dict[str, Tensor]:
        """What a runtime sets before a micro-step: rows in blocks, padded with zeros."""
        shape, used = (head.blocks, head.rows), len(self.rows)
        places = head.blocks * head.rows
        padded = {name: torch.zeros(places, dtype=torch.int32) for name in ("rows", "labels")}
        padded["rows"][:used], padded["labels"][:used] = self.rows, self.labels
        weights = (torch.arange(places) < used).float()
        return {
            "tokens": self.tokens, "positions": torch.arange(SEQ_LEN), "segments": torch.ones(SEQ_LEN),
            "rows": padded["rows"].view(shape), "labels": padded["labels"].view(shape), "weights": weights.view(shape),
            "blocks": torch.tensor(max(1, -(-used // head.rows))),
        }  # fmt: skip


FIRST = Sequence(torch.arange(SEQ_LEN) * 7 % 61, torch.tensor([0, 3, 4, 5, 8, 11, 12, 13]))
SECOND = Sequence(torch.arange(SEQ_LEN) * 5 % 61, torch.tensor([2, 9]))


def expected_gradient(setup: Setup, *sequences: Sequence) -> tuple[list[float], Tensor]:
    """Loss of each sequence (sums over tokens), and the gradient of their sum."""
    lora = setup.lora.clone().requires_grad_()
    losses = [
        torch.nn.functional.cross_entropy(setup.logits(lora, s.tokens)[s.rows], s.labels, reduction="sum")
        for s in sequences
    ]
    return [loss.item() for loss in losses], torch.autograd.grad(torch.stack(losses).sum(), lora)[0]


def step(machine: ProgramInterpreter, *sequences: Sequence) -> list[float]:
    losses = []
    for number, sequence in enumerate(sequences):
        machine.set(**sequence.inputs(machine.head), accumulate=float(number > 0))
        machine.run("micro_step")
        losses.append(machine["loss_sum"].item())
    return losses


def assert_near(actual: Tensor, expected: Tensor, limit: float = 2e-5) -> None:
    assert ((actual - expected).norm() / expected.norm()).item() < limit


@pytest.mark.parametrize("saved", [0, 1, 2, LAYERS])
def test_gradients_are_those_of_transformers_whatever_is_saved(setup: Setup, saved: int) -> None:
    machine = setup.interpreter(training_program(setup.traced, saved))
    losses, gradient = expected_gradient(setup, FIRST, SECOND)
    assert step(machine, FIRST, SECOND) == pytest.approx(losses, rel=1e-5)
    assert_near(machine["grad"], gradient)


def test_the_reference_program_has_the_same_gradients(setup: Setup) -> None:
    machine = setup.interpreter(reference_program(setup.traced))
    losses, gradient = expected_gradient(setup, FIRST, SECOND)
    assert step(machine, FIRST, SECOND) == pytest.approx(losses, rel=1e-5)
    assert_near(machine["grad"], gradient)


@pytest.mark.parametrize("saved", [0, 2])
def test_the_reference_shares_no_part_with_layers_and_loss(tied: Setup, saved: int) -> None:
    """What is compared with itself is always right."""
    reference = payloads(tied, reference_program(tied.traced), ("reference",))
    train = payloads(tied, training_program(tied.traced, saved), ("layer", "head.slice", "head.finish"))
    assert len(reference) >= 5
    assert reference.isdisjoint(train)


def payloads(setup: Setup, program: Program, prefixes: tuple[str, ...]) -> set[bytes]:
    """What the parts of a program with these names compile to."""
    return {cpu.compile_part(setup.traced.parts[p].graph).payload for p in program.parts() if p.startswith(prefixes)}


def test_an_update_is_a_clipped_step_of_adamw(tied: Setup) -> None:
    machine = tied.interpreter(training_program(tied.traced, 1))
    machine.set(moment1=0.0, moment2=0.0)
    theirs = tied.lora.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, foreach=False)
    tokens = len(FIRST.rows) + len(SECOND.rows)
    for number in (1, 2):
        step(machine, FIRST, SECOND)
        machine.set(token_count=tokens, max_norm=0.3, learning_rate=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8)
        machine.set(weight_decay=0.1, correction1=1 - 0.9**number, correction2=1 - 0.999**number)
        machine.run("update")
        now = Setup(tied.traced, tied.theirs, theirs.detach().clone())
        theirs.grad = expected_gradient(now, FIRST, SECOND)[1] / tokens
        norm = torch.nn.utils.clip_grad_norm_([theirs], 0.3)
        optimizer.step()
        assert machine["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
        assert_near(machine["lora"], theirs.detach(), 1e-4)


@pytest.mark.parametrize("saved", [0, LAYERS])
def test_evaluation_scores_the_labels(setup: Setup, saved: int) -> None:
    machine = setup.interpreter(training_program(setup.traced, saved))
    machine.set(**FIRST.inputs(machine.head))
    machine.run("evaluate")
    expected = torch.log_softmax(setup.logits(setup.lora, FIRST.tokens)[FIRST.rows], -1)
    used = len(FIRST.rows)
    picked = expected.gather(1, FIRST.labels[:, None])[:, 0]
    torch.testing.assert_close(machine["logprobs"].flatten()[:used], picked, rtol=1e-4, atol=1e-4)
    assert machine["predictions"].flatten()[:used].tolist() == expected.argmax(-1).tolist()


def test_logits_are_those_of_transformers(setup: Setup) -> None:
    machine = setup.interpreter(training_program(setup.traced, 1))
    machine.set(**FIRST.inputs(machine.head))
    machine.run("logits")
    rows = FIRST.inputs(machine.head)["rows"][0]
    expected = setup.logits(setup.lora, FIRST.tokens)[rows]
    torch.testing.assert_close(machine["logits"].t(), expected, rtol=1e-4, atol=1e-4)


# -- form -------------------------------------------------------------------------------------------------------------


def signatures(traced: Traced) -> dict[str, Part]:
    return {
        name: part(name, [v.type for v in spec.graph.inputs], list(spec.graph.output_types), *spec.inplace)
        for name, spec in traced.parts.items()
    }


def programs(traced: Traced) -> dict[str, Program]:
    found = {f"save {n}": training_program(traced, n) for n in range(LAYERS + 1)}
    return found | {"reference": reference_program(traced)}


def test_every_program_is_well_formed_and_so_is_its_beginning(setup: Setup) -> None:
    for program in programs(setup.traced).values():
        assert program.layers == LAYERS
        program_check.check(program, signatures(setup.traced))
        for layers in range(1, LAYERS + 1):
            program_check.check(truncated(program, layers), signatures(setup.traced))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_program_cut_short_trains_the_first_layers(tied: Setup, layers: int) -> None:
    whole = training_program(tied.traced, 1)
    machine = tied.interpreter(truncated(whole, layers))
    reference = tied.interpreter(truncated(reference_program(tied.traced), layers))
    assert step(machine, FIRST) == pytest.approx(step(reference, FIRST), rel=1e-5)
    for index in range(layers):
        for name in TARGETS:
            view = f"grad_step.{index}.{name}.lora_A"
            assert_near(machine[view], reference[view])


def test_trained_matrices_tile_the_flat_buffers_exactly(tied: Setup) -> None:
    program = training_program(tied.traced, 0)
    for base in ("lora", "grad_step"):
        views = [b for b in program.buffers.values() if b.view_of == base]
        ends = [b.view_offset + b.type.elements for b in views]
        assert [b.view_offset for b in views] == [0, *ends[:-1]]
        assert ends[-1] == program.buffers[base].type.elements == tied.traced.trained
    mirrored = {b.name.removeprefix("grad_step."): (b.type, b.view_offset, b.tensor) for b in program.with_role("grad")}
    for b in program.with_role("param"):
        if b.view_of:
            assert mirrored[b.name.removeprefix("lora.")] == (b.type, b.view_offset, b.tensor)


def test_trained_matrices_carry_their_names_in_peft_and_how_they_start(tied: Setup) -> None:
    program = training_program(tied.traced, 0)
    a = program.buffers["lora.2.down.lora_A"]
    b = program.buffers["lora.0.v.lora_B"]
    assert a.tensor == "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"
    assert b.tensor == "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    assert a.init is not None
    assert (a.init.kind, a.init.fan_in) == ("kaiming_uniform", 44)
    assert b.init is not None
    assert b.init.kind == "zeros"


def test_the_checkpoint_table_is_that_of_transformers(setup: Setup) -> None:
    program = training_program(setup.traced, 0)
    tensors = {name: tuple(t.shape) for name, t in setup.theirs.state_dict().items()}
    if setup.traced.model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]  # the same tensor as the embedding
    assert program.checkpoint == tensors
    assert {b.source.tensor for b in program.with_role("weight") if b.source} == set(tensors)


def test_saved_layers_save_and_the_others_compute_again(tied: Setup) -> None:
    program = training_program(tied.traced, 1)
    forward = [c.part for c in program.calls("micro_step") if c.part.startswith("layer.forward")]
    backward = [c.part for c in program.calls("micro_step") if c.part.startswith("layer.backward")]
    assert forward == ["layer.forward", "layer.forward", "layer.forward.save"]
    assert backward == ["layer.backward.save", "layer.backward", "layer.backward.first"]
    everything = training_program(tied.traced, LAYERS)
    assert "layer.backward.save.first" in everything.parts()
    assert "layer.forward" not in everything.parts()


def test_the_first_layer_has_no_gradient_of_its_input(tied: Setup) -> None:
    outputs = [name for name, _ in tied.traced.parts["layer.backward.first"].graph.outputs]
    assert outputs == [gradient_name(f"{t}.lora_{side}") for t in TARGETS for side in "AB"]


def test_saving_costs_memory(tied: Setup) -> None:
    arenas = [training_program(tied.traced, n).arena["micro_step"] for n in range(LAYERS + 1)]
    assert arenas == sorted(set(arenas))


def test_without_logits_there_is_no_such_phase(tied: Setup) -> None:
    plain = trace(tied.traced.model, recipe(targets=TARGETS), CUT)
    program = training_program(plain, 0)
    assert set(program.phases) == {"micro_step", "update", "evaluate"}
    assert not [name for name in program.buffers if name.startswith("logits")]


def test_a_listing_can_be_read(tied: Setup) -> None:
    lines = training_program(tied.traced, 1).listing().splitlines()
    assert "weight     embed: f32[61,36]" in lines
    assert "weight     head.1: f32[21,36] = embed+756" in lines
    assert any(line.startswith("micro_step: (arena ") for line in lines)
    assert any("[compute] h.0 = embed(tokens, embed)" in line for line in lines)
    assert any("repeat blocks (at most 3)" in line for line in lines)
    assert any("[compute] lora, moment1, moment2 = adamw(lora, moment1, moment2, grad, scale" in line for line in lines)


def test_recompute_and_save_are_all_or_nothing(tied: Setup) -> None:
    for policy, layers in ((Activations.RECOMPUTE, 0), (Activations.SAVE, LAYERS), (Activations.AUTO, LAYERS)):
        traced = replace(tied.traced, recipe=replace(tied.traced.recipe, activations=policy))
        assert saved_layers(traced, cpu) == layers
