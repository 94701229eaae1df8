"""Programs of full fine-tuning against transformers, autograd and PyTorch's AdamW."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.func import functional_call

from npubundle import program_check
from npubundle.liveness import truncated
from npubundle.program import Program
from npubundle.recipe import Mode, Recipe
from npucc.parts import Traced, trace
from npucc.program_builder import reference_program, training_program
from npucc.targets import CutPolicy
from tests.npucc.program_interpreter import ProgramInterpreter
from tests.npucc.test_program_builder import FIRST, SECOND, Sequence, assert_near, signatures
from tests.npucc.tiny import CUT, SEQ_LEN
from tests.npucc.transformers_models import pair

LAYERS = 3
#: Several blocks for the matrices of a layer, the last with room to spare.
BLOCKS = replace(CUT, update_block=3001)
#: Small parts for a layer's passes.
SMALL = replace(BLOCKS, query_rows=SEQ_LEN, products_per_part=3)
Tensor = torch.Tensor


@dataclass(frozen=True)
class Setup:
    """A model in both forms."""

    traced: Traced
    theirs: Any

    def interpreter(self, program: Program) -> ProgramInterpreter:
        machine = ProgramInterpreter(program, self.traced)
        state = self.theirs.state_dict()
        machine.load(state)
        for buffer in program.buffers.values():
            if buffer.role in {"param", "grad", "moment"} and buffer.view_of is None:
                machine.set(**{buffer.name: 0.0})  # as a runtime does, for what lies between and after the tensors
        for buffer in program.with_role("param"):
            if buffer.source is not None:
                machine[buffer.name].copy_(state[buffer.source.tensor])
        if "upload" in program.phases:
            machine.run("upload")
        return machine

    def losses(self, weights: dict[str, Tensor], *sequences: Sequence) -> Tensor:
        """The sum of the losses of each sequence, with these tensors in place of the model's."""
        found = []
        for s in sequences:
            logits = functional_call(self.theirs, weights, (s.tokens[None],)).logits[0]
            found.append(torch.nn.functional.cross_entropy(logits[s.rows], s.labels, reduction="sum"))
        return torch.stack(found)


def _setup(cut: CutPolicy = BLOCKS, *, tied: bool = True, **flags: Any) -> Setup:
    ours, theirs = pair(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    return Setup(trace(ours, Recipe(Mode.FULL, targets=(), seq_len=SEQ_LEN, **flags), cut), theirs)


#: A device with memory of its own.
DEVICE = replace(SMALL, head_rows=None, swap=True, own_memory=True)
ALL = {"train_norm": True, "train_embeddings": True, "train_head": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "small parts": {"cut": SMALL},
    "device": {"cut": DEVICE},
    "untied device": {"cut": DEVICE, "tied": False},
    "norm": {"train_norm": True},
    "tied matrix": {"train_head": True},
    "embeddings": {"tied": False, "train_embeddings": True},
    "head": {"tied": False, "train_head": True},
    "all": {"tied": False, **ALL},
    "all tied": ALL,
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def setup(request: pytest.FixtureRequest) -> Setup:
    return _setup(**VARIANTS[request.param])


def trained(program: Program) -> dict[str, str]:
    """Views of the trained tensors, by the tensor's name."""
    return {b.tensor: b.name for b in program.with_role("param") if b.tensor}


def gradients(program: Program) -> dict[str, str]:
    """Views of what a step has added up for them."""
    return {b.tensor: b.name for b in program.with_role("grad") if b.tensor}


def leaves(setup: Setup, program: Program) -> dict[str, Tensor]:
    state = setup.theirs.state_dict()
    return {name: state[name].clone().requires_grad_() for name in trained(program)}


def step(machine: ProgramInterpreter, *sequences: Sequence) -> list[float]:
    losses = []
    for number, sequence in enumerate(sequences):
        machine.set(**sequence.inputs(machine.head))
        machine.run("micro_step" if number else "first_micro_step")
        losses.append(machine["loss_sum"].item())
    return losses


@pytest.mark.parametrize("saved", [0, 2, LAYERS])
def test_gradients_of_all_weights_are_those_of_transformers(setup: Setup, saved: int) -> None:
    program = training_program(setup.traced, saved)
    machine = setup.interpreter(program)
    weights = leaves(setup, program)
    losses = setup.losses(weights, FIRST, SECOND)
    expected = dict(zip(weights, torch.autograd.grad(losses.sum(), list(weights.values())), strict=True))
    for _ in range(2):  # the second time, what was there before has to go
        assert step(machine, FIRST, SECOND) == pytest.approx(losses.tolist(), rel=1e-5)
        for tensor, view in gradients(program).items():
            assert_near(machine[view], expected[tensor])


def test_the_reference_program_has_the_same_gradients(setup: Setup) -> None:
    program = reference_program(setup.traced)
    machine = setup.interpreter(program)
    weights = leaves(setup, program)
    losses = setup.losses(weights, FIRST)
    expected = dict(zip(weights, torch.autograd.grad(losses.sum(), list(weights.values())), strict=True))
    assert step(machine, FIRST) == pytest.approx(losses.tolist(), rel=1e-5)
    assert gradients(program).keys() == expected.keys()
    for tensor, view in gradients(program).items():
        assert_near(machine[view], expected[tensor])


def test_every_weight_of_every_layer_is_trained_and_what_the_recipe_adds(setup: Setup) -> None:
    program = training_program(setup.traced, 0)
    recipe, tied = setup.traced.recipe, setup.traced.model.config.tie_word_embeddings
    wanted = {name for name in setup.theirs.state_dict() if name.startswith("model.layers.")}
    wanted |= {"model.norm.weight"} if recipe.train_norm else set()
    if recipe.train_embeddings or (tied and recipe.train_head):
        wanted |= {"model.embed_tokens.weight"}
    wanted |= {"lm_head.weight"} if recipe.train_head and not tied else set()
    assert set(trained(program)) == wanted
    assert {b.source.tensor for b in program.with_role("weight") if b.source}.isdisjoint(wanted)
    expected = {name: tuple(t.shape) for name, t in setup.theirs.state_dict().items()}
    if setup.traced.model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert program.checkpoint == expected


@pytest.mark.parametrize("max_norm", [0.3, 1e30])
def test_an_update_is_a_clipped_step_of_adamw_without_decay_of_vectors(setup: Setup, max_norm: float) -> None:
    program = training_program(setup.traced, LAYERS)
    machine = setup.interpreter(program)
    weights = leaves(setup, program)
    matrices = [w for w in weights.values() if w.dim() > 1]
    vectors = [w for w in weights.values() if w.dim() == 1]
    decays = {"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(decays, lr=0.01, foreach=False)
    tokens = len(FIRST.rows) + len(SECOND.rows)
    for number in (1, 2):
        step(machine, FIRST, SECOND)
        machine.set(token_count=tokens, max_norm=max_norm, learning_rate=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8)
        machine.set(weight_decay=0.1, correction1=1 - 0.9**number, correction2=1 - 0.999**number)
        machine.run("norm")
        machine.run("update")
        optimizer.zero_grad()
        (setup.losses(weights, FIRST, SECOND).sum() / tokens).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), max_norm)
        optimizer.step()
        assert machine["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
        for tensor, view in trained(program).items():
            assert_near(machine[view], weights[tensor].detach(), 1e-4)


def test_room_to_spare_in_the_last_block_stays_zero(setup: Setup) -> None:
    program = training_program(setup.traced, LAYERS)
    machine = setup.interpreter(program)
    step(machine, FIRST, SECOND)
    values = dict.fromkeys(("token_count", "max_norm", "learning_rate", "epsilon", "correction1", "correction2"), 0.5)
    machine.set(**values, beta1=0.9, beta2=0.9, weight_decay=0.1)
    machine.run("norm")
    machine.run("update")
    for group in setup.traced.groups:
        used = sum(member.kind.elements for member in group.members)
        assert group.type.elements - used < group.block + group.blocks * 16
        for kind in ("params", "grad", "moment1", "moment2"):
            assert not machine[f"{kind}.{group.name}"].flatten()[used:].any()


def test_every_program_is_well_formed_and_so_is_its_beginning(setup: Setup) -> None:
    for program in (training_program(setup.traced, 1), reference_program(setup.traced)):
        program_check.check(program, signatures(setup.traced))
        for layers in range(1, LAYERS):
            short = truncated(program, layers)
            steps = {phase: body for phase, body in short.phases.items() if "micro_step" in phase}
            program_check.check(replace(short, phases=steps), signatures(setup.traced))


def test_both_micro_steps_have_their_activations_at_the_same_places(setup: Setup) -> None:
    program = training_program(setup.traced, 1)
    assert program.arena["first_micro_step"] == program.arena["micro_step"] > 0
    expected = {"first_micro_step", "micro_step", "norm", "update", "evaluate"}
    assert set(program.phases) - {"upload"} == expected
    assert ("upload" in program.phases) == setup.traced.cut.own_memory
