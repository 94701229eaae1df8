"""Options that several commands share, and what they are read into."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npubundle.blob import read_small
from npubundle.errors import FileError
from npubundle.fields import NO_NUL, Fields, anything, list_of, read, record, text
from npubundle.oci import name_field
from npubundle.recipe import FULL_FLAGS, RECIPE, Activations, Mode, Recipe
from npubundle.trust import TrustPolicy
from npucc.errors import UsageError

if TYPE_CHECKING:  # it brings NumPy, which `--help` does not need
    from npucc.cache import Cache

#: `npucc.cache` reads it as well.
CACHE_VARIABLE = "NPUCC_CACHE"
TUNING_VARIABLE = "NPUCC_TUNING"

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH|ID", help="Model folder, config.json, or hub id. Only config.json is read."),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="TOML file with the options of a build; flags win over it."),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", metavar="NAME", help="What to compile for.  [default: cpu]")
]
ModeOption = Annotated[
    Mode | None,
    typer.Option("--mode", help="What is trained: adapters, or the weights of all decoder layers.  [default: lora]"),
]
TrainNormOption = Annotated[bool, typer.Option("--train-norm", help="full: train the final norm as well.")]
TrainEmbeddingsOption = Annotated[bool, typer.Option("--train-embeddings", help="full: train the embeddings as well.")]
TrainHeadOption = Annotated[
    bool,
    typer.Option("--train-head", help="full: train the output matrix as well; where it is tied, the embeddings."),
]
RankOption = Annotated[int | None, typer.Option("--rank", metavar="N", min=1, help="LoRA rank.  [default: 16]")]
AlphaOption = Annotated[
    float | None,
    typer.Option("--alpha", metavar="X", help="LoRA alpha; the branch is scaled by alpha / rank.  [default: 32]"),
]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        "--lora-targets",
        "--targets",
        metavar="LIST",
        help="Layers with a LoRA branch, from q,k,v,o,gate,up,down.  [default: q,v]",
    ),
]
SeqLenOption = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", min=2, help="Tokens per sequence, fixed here.  [default: 512]")
]
ActivationsOption = Annotated[
    Activations | None,
    typer.Option(
        "--activations",
        help="What forward keeps for backward: layer inputs (recompute), all (save), or by memory.  [default: auto]",
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        metavar="SIZE",
        help="Memory that 'auto' may plan with, such as 6GiB.  [default: the target's]",
    ),
]
LogitsOption = Annotated[bool, typer.Option("--logits", help="Add a phase that returns logits.")]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-config-key", metavar="KEY", help="Key of config.json known to change nothing; may be given again."
    ),
]
FusionOption = Annotated[
    int | None,
    typer.Option("--fusion", metavar="N", help="rngd: processing elements per program, 1, 2, 4 or 8.  [default: 8]"),
]
JobsOption = Annotated[int, typer.Option("-j", "--jobs", metavar="N", min=1, help="rngd: parts compiled at once.")]
MaxProductsOption = Annotated[
    int | None,
    typer.Option(
        "--max-mm", metavar="N", min=1, help="rngd: products with weights per part at most.  [default: tuned, or 3]"
    ),
]
TacticOption = Annotated[
    str | None,
    typer.Option(
        "--tactic", metavar="HINT", help="rngd: tactic hint of all parts.  [default: tuned, or ForLlmModelComputeBound]"
    ),
]
MaxShapesOption = Annotated[
    int | None,
    typer.Option("--max-shapes", metavar="N", min=1, help="rngd: tensor layouts tried; few compile sooner."),
]
TuningOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--tuning",
        envvar=TUNING_VARIABLE,
        metavar="FILE",
        help="rngd: tuning table beside the one that comes with npucc; may be given again, a later one wins.",
    ),
]
NoTuningOption = Annotated[bool, typer.Option("--no-tuning", help="rngd: use no tuning table at all.")]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", envvar=CACHE_VARIABLE, metavar="DIR", help="Compiled parts.  [default: ~/.cache/npucc]"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TrustOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust",
        metavar="FILE",
        help="Public key (may be given again) or trust policy.  [default: the default policy]",
    ),
]


class Style(Enum):
    """How progress is shown."""

    AUTO = "auto"
    TTY = "tty"
    PLAIN = "plain"
    JSON = "json"
    QUIET = "quiet"


ProgressOption = Annotated[Style, typer.Option("--progress", help="How progress is shown on standard error.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"npucc {version('npucc')}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compile a model and a training recipe into a signed bundle that npurt trains with."""
    del version  # its callback has run by now


_MAX_RECIPE = 1 << 20


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to compile: the model's place, the recipe, the target, and the bundle's name if it has one."""

    model: str
    recipe: Recipe
    target: str
    name: str | None
    ignore_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _File:
    """Content of a recipe file."""

    model: str | None = None
    target: str | None = None
    name: str | None = None
    ignore_keys: tuple[str, ...] = ()
    recipe: dict[str, Any] | None = None


def build_options(file: Path | None, flags: dict[str, Any], ignore_keys: list[str] | None) -> BuildOptions:
    """Join flags (None where absent) with the recipe file. Raises UsageError with all problems of either."""
    given = _read_file(file) if file else _File()
    table: dict[str, Any] = dict(given.recipe or {})
    table |= {key: flags[key] for key in ("rank", "alpha", "seq_len") if flags[key] is not None}
    table |= {key: flags[key].value for key in ("mode", "activations") if flags[key] is not None}
    if flags["targets"] is not None:
        table["targets"] = [word.strip() for word in flags["targets"].split(",") if word.strip()]
    if flags["memory_budget"] is not None:
        table["memory_budget"] = flags["memory_budget"]
    if isinstance(table.get("memory_budget"), str):
        table["memory_budget"] = parse_size(table["memory_budget"])
    table |= {key: True for key in ("logits", *FULL_FLAGS) if flags[key]}
    recipe = read(table, RECIPE, what="the recipe", error=UsageError, where=str(file) if file else None)
    model = flags["model"] or given.model
    if model is None:
        raise UsageError(
            "no model is given", remedy="add --model DIR, --model config.json, or `model` to the recipe file"
        )
    name = flags.get("name") or given.name
    if name is not None:
        read(name, name_field(), what="the bundle's name", error=UsageError)
    return BuildOptions(
        model, recipe, flags["target"] or given.target or "cpu", name, (*given.ignore_keys, *(ignore_keys or ()))
    )


def _read_file(path: Path) -> _File:
    try:
        document = tomllib.loads(read_small(path, _MAX_RECIPE, UsageError).decode())
    except FileError as failure:
        raise UsageError(f"cannot read the recipe: {failure.what}", where=str(path)) from failure
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise UsageError(f"the recipe is not TOML: {failure}", where=str(path)) from failure

    def build(fields: Fields) -> _File:
        optional = {
            name: fields.take(name, text(NO_NUL, called="text without NUL"), None)
            for name in ("model", "target", "name")
        }
        table: Any = fields.take("recipe", anything(), {})
        if not isinstance(table, dict):
            fields.wrong("recipe", "must be a table")
        ignore_keys = fields.take("ignore_config_keys", list_of(text()), ())
        return _File(**optional, ignore_keys=ignore_keys, recipe=table if isinstance(table, dict) else {})

    given = read(document, record(build), what="the recipe file", error=UsageError, where=str(path))
    beside = path.parent / given.model if given.model else None
    if beside is not None and os.path.lexists(beside):  # a path in a file is relative to the file
        return replace(given, model=str(beside))
    return given


_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "t": 10**12,
}


def parse_size(size: str) -> int:
    """Bytes of a size such as `6GiB`, `500MB` or `1073741824`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?i?)b?\s*", size.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(
            f"{size[:100]!r} is not a size", remedy="write a number of bytes, or one with a unit, such as 6GiB or 500MB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def show_size(size: int) -> str:
    """A size for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def estimate_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What a vendor's cost model says of a step, for people; nothing where it says nothing."""
    if found is None:
        return []
    cycles = ", ".join(f"{name} {phase['cycles']:,}" for name, phase in found["phases"].items())
    launches = found["phases"]["micro_step"]["launches"]
    energy = found["energy_upper_bound_j"]
    return [
        (
            f"estimate   {1000 * found['seconds']:.2f} ms per step, {found['tokens_per_s']:,.0f} tokens/s, "
            f"{launches} launches per micro-step" + ("" if energy is None else f", at most {energy:.3g} J")
        ),
        f"           cycles at {found['clock_mhz']:g} MHz: {cycles}",
        f"           device memory {show_size(found['device_memory'])}",
        f"           ({found['label']})",
    ]


def cache(folder: Path | None) -> Cache:
    """The part cache to use."""
    from npucc.cache import Cache

    return Cache(folder) if folder else Cache.default()


def policy(files: list[Path] | None) -> TrustPolicy:
    """The trust policy: of the files given, else the default one."""
    return TrustPolicy.from_paths(files) if files else TrustPolicy.default()
