"""`bundle.json`: the config blob of a bundle. Small, and enough to decide whether a host can use the bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npubundle import canonical
from npubundle.container import Container
from npubundle.errors import FormatError
from npubundle.fields import Fields, dict_of, first_duplicate, integer, list_of, read, record, text
from npubundle.model_config import MODEL_CONFIG, ModelConfig
from npubundle.oci import name_field
from npubundle.part import DIGEST, PART, Part
from npubundle.recipe import RECIPE, Recipe
from npubundle.strictjson import parse_canonical
from npubundle.version import FORMAT_VERSION

MAX_BYTES = 16 << 20

_DIGEST = text(DIGEST, called="a sha256 digest")


@dataclass(frozen=True, slots=True)
class Target:
    """What the parts were compiled for, and the options that shaped them."""

    name: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes the training program needs, by purpose. `saved_layers` is how many layers keep their activations."""

    weights: int
    state: int
    activations: int
    io: int
    saved_layers: int

    @property
    def peak(self) -> int:
        """All of it: weights, trained parameters with gradients and moments, the larger arena, inputs and outputs."""
        return self.weights + self.state + self.activations + self.io


@dataclass(frozen=True, slots=True)
class BundleConfig:
    """The content of `bundle.json`.

    `programs` maps `train` and `reference` to the digests of their program blobs. `toolchain` is everything that can
    change the bytes of a part. `name` says for people and for trust rules what the bundle is.
    """

    name: str
    model: ModelConfig
    recipe: Recipe
    target: Target
    toolchain: Mapping[str, str]
    parts: tuple[Part, ...]
    programs: Mapping[str, str]
    memory: Memory

    @classmethod
    def of(cls, container: Container) -> BundleConfig:
        """The `bundle.json` of an opened bundle. Its name must be the manifest's, which is the one that was signed."""
        config = cls.decode(container.config_bytes)
        if config.name != container.name:
            raise FormatError(f"bundle.json has the name {config.name!r}, the manifest {container.name!r}")
        return config

    def part(self, name: str) -> Part:
        """The part of this name. Raises KeyError."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    def encode(self) -> bytes:
        """The canonical bytes of `bundle.json`."""
        return canonical.encode(
            {
                "format_version": FORMAT_VERSION,
                "name": self.name,
                "model": self.model.to_dict(),
                "recipe": self.recipe.to_dict(),
                "target": {"name": self.target.name, "options": dict(self.target.options)},
                "toolchain": dict(self.toolchain),
                "parts": [part.to_dict() for part in self.parts],
                "programs": dict(self.programs),
                "memory": {name: getattr(self.memory, name) for name in Memory.__slots__},
            }
        )

    @classmethod
    def decode(cls, raw: bytes, *, where: str | None = None) -> BundleConfig:
        """Read `bundle.json`; raises FormatError with all its problems, or because this format version is unknown."""
        document = parse_canonical(raw, what="bundle.json", max_bytes=MAX_BYTES)
        version = document.get("format_version") if isinstance(document, dict) else None
        if version != FORMAT_VERSION:
            raise FormatError(
                f"bundle has format_version {version!r}; this release reads {FORMAT_VERSION}",
                where=where,
                remedy="use the release of npurt that belongs to the npucc that built it, or rebuild the bundle",
            )
        return read(document, record(_config), what="bundle.json", where=where)


def _target(fields: Fields) -> Target:
    return Target(fields.need("name", text()), fields.need("options", dict_of(text(empty=True))))


def _memory(fields: Fields) -> Memory:
    return Memory(**{name: fields.need(name, integer(0)) for name in Memory.__slots__})


def _config(fields: Fields) -> BundleConfig:
    fields.need("format_version", integer(FORMAT_VERSION, FORMAT_VERSION))
    config = BundleConfig(
        name=fields.need("name", name_field()),
        model=fields.need("model", MODEL_CONFIG),
        recipe=fields.need("recipe", RECIPE),
        target=fields.need("target", record(_target)),
        toolchain=fields.need("toolchain", dict_of(text())),
        parts=fields.need("parts", list_of(PART, maximum=100_000)),
        programs=fields.need("programs", dict_of(_DIGEST)),
        memory=fields.need("memory", record(_memory)),
    )
    if twice := first_duplicate(part.name for part in config.parts):
        fields.wrong("parts", f"names {twice} twice")
    if "train" not in config.programs:
        fields.wrong("programs", "has no program 'train'")
    return config
