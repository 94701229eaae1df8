"""Trained weights in groups: what one optimizer call updates lies end to end in one flat buffer of equal blocks.

Matrices of a layer are one group, so that a layer's update can begin when its gradients are there. Vectors (norms,
biases) of all layers are another: they are few elements, and by convention weights do not decay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npubundle.recipe import Recipe
from npubundle.tensor import TensorType
from npucc.models import LayerTensor
from npucc.models.config_reader import Model

#: Elements to which blocks are rounded: a cache line of f32.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Member:
    """A trained tensor: the name of its buffer, its name in the checkpoint, its shape, and its layer if it has one.

    `name` is its name within the layer (`q`), or within the group.
    """

    buffer: str
    tensor: str
    name: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def kind(self) -> TensorType:
        """Master weights, gradients and moments are f32."""
        return TensorType("f32", self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """Members in order, the elements of a block, and whether weight decay applies.

    Groups of the same `scratch` have members of the same shapes, and take turns with one place for the gradients of a
    micro-step.
    """

    name: str
    scratch: str
    members: tuple[Member, ...]
    block: int
    decays: bool

    @property
    def blocks(self) -> int:
        """How many blocks hold all members; the last one may have room to spare, which stays zero."""
        return -(-_elements(self.members) // self.block)

    @property
    def layer(self) -> int | None:
        """The layer that all members belong to, if there is one."""
        layers = {member.layer for member in self.members}
        return layers.pop() if len(layers) == 1 else None

    @property
    def count(self) -> str:
        """Name of the scalar that says how many blocks there are."""
        return f"blocks.{self.name}"

    @property
    def type(self) -> TensorType:
        """Of the flat buffers: a row for each block."""
        return TensorType("f32", (self.blocks, self.block))

    def offsets(self) -> Iterator[tuple[Member, int]]:
        """Members, each with the number of elements before it."""
        offset = 0
        for member in self.members:
            yield member, offset
            offset += member.kind.elements


def parameter_groups(model: Model, recipe: Recipe, block: int) -> tuple[Group, ...]:
    """The groups of a full fine-tuning, in the order of the model; blocks have at most about `block` elements."""
    if not recipe.full:
        return ()
    architecture, layers = model.architecture, range(model.config.num_hidden_layers)
    tensors = architecture.layer_tensors(model.config)

    def members(layer: int, chosen: list[LayerTensor]) -> tuple[Member, ...]:
        prefix = architecture.layer_prefix.format(layer)
        return tuple(Member(f"layers.{layer}.{t.name}", prefix + t.tensor, t.name, t.shape, layer) for t in chosen)

    matrices = [t for t in tensors if len(t.shape) > 1]
    vectors = [t for t in tensors if len(t.shape) == 1]
    groups = [_group(f"layers.{i}", "layers", members(i, matrices), block, decays=True) for i in layers]
    small = [member for i in layers for member in members(i, vectors)]
    config = model.config
    vocabulary = (config.vocab_size, config.hidden_size)
    if recipe.train_norm:
        small.append(Member("norm", architecture.final_norm, "norm", (config.hidden_size,)))
    # One matrix where they are tied, and then either flag trains it.
    embed, head = recipe.train_embeddings, recipe.train_head
    if config.tie_word_embeddings:
        embed, head = embed or head, False
    for name, tensor, wanted in (("embed", architecture.embedding, embed), ("head", architecture.head, head)):
        if wanted:
            groups.append(_group(f"table.{name}", name, (Member(name, tensor, name, vocabulary),), block, decays=True))
    return (*groups, _group("vectors", "vectors", tuple(small), block, decays=False))


def _group(name: str, scratch: str, members: tuple[Member, ...], block: int, *, decays: bool) -> Group:
    """With blocks of equal size, so that the last one is nearly full."""
    elements = _elements(members)
    count = -(-elements // block)
    size = -(-elements // count)
    return Group(name, scratch, members, -(-size // _ALIGNMENT) * _ALIGNMENT, decays)


def _elements(members: tuple[Member, ...]) -> int:
    return sum(member.kind.elements for member in members)
