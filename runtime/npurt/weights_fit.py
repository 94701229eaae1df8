"""Do these weights belong to this bundle? Asked before anything is loaded, and answered with all that does not fit."""

from __future__ import annotations

import fnmatch

from npubundle.fields import Problems
from npubundle.model_config import ModelConfig
from npubundle.program import Program
from npurt.errors import MismatchError
from npurt.shards import FLOATS, WeightsError
from npurt.weights import EMBEDDING, HEAD, Checkpoint, same_content

#: Tables that old versions of transformers saved and every version computes anew.
_IGNORED = ("*.rotary_emb.inv_freq",)


def check_fit(checkpoint: Checkpoint, program: Program, model: ModelConfig) -> None:
    """Raise `MismatchError`, with every difference, unless the folder's configuration and tensors are the bundle's."""
    problems = Problems()
    _check_config(checkpoint, model, problems)
    for name, shape in program.checkpoint.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            problems.add(name, f"is missing; the bundle needs it with shape {list(shape)}")
        elif stored.shape != shape:
            problems.add(name, f"has shape {list(stored.shape)}; the bundle was built for {list(shape)}")
        elif stored.dtype not in FLOATS:
            problems.add(name, f"has dtype {stored.dtype}; npurt reads {', '.join(FLOATS)}")
    for name in sorted(set(checkpoint.tensors) - set(program.checkpoint)):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _IGNORED):
            _check_extra(checkpoint, name, model, problems)
    problems.raise_any("the weights do not fit the bundle", MismatchError, where=str(checkpoint.folder))


def _check_config(checkpoint: Checkpoint, model: ModelConfig, problems: Problems) -> None:
    where = str(checkpoint.folder / "config.json")
    theirs = ModelConfig.from_dict(checkpoint.config, where=where, error=WeightsError)
    for key, wanted, found in model.differences(theirs):
        problems.add(f"config.json: {key}", f"is {found}; the bundle was built for {wanted}")


def _check_extra(checkpoint: Checkpoint, name: str, model: ModelConfig, problems: Problems) -> None:
    tied = model.tie_word_embeddings and name == HEAD and EMBEDDING in checkpoint.tensors
    if not tied:
        problems.add(name, "is not used by the bundle: these are weights of another model")
    elif checkpoint.tensors[name].dtype not in FLOATS or not same_content(
        checkpoint.tensors[name], checkpoint.tensors[EMBEDDING]
    ):
        problems.add(name, f"differs from {EMBEDDING}, but the bundle was built for one matrix that serves as both")
