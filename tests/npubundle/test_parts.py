"""Types, parts, recipes, model dimensions and `bundle.json`: what is written is read back, and faults are named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npubundle import canonical
from npubundle.config import BundleConfig, Memory, Target
from npubundle.errors import FormatError
from npubundle.fields import Kind, read
from npubundle.model_config import MODEL_CONFIG, ModelConfig
from npubundle.part import ONNX_MEDIA_TYPE, PART, Estimate, OnnxForm, PartGraph, tensor_type
from npubundle.recipe import LORA_TARGETS, RECIPE, Activations, Mode, Recipe
from npubundle.tensor import ITEM_SIZE, TensorType
from tests.npubundle.programs import DIGEST, part

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}  # fmt: skip
F32 = TensorType("f32", (2, 3))
types = st.builds(
    TensorType, st.sampled_from(sorted(ITEM_SIZE)), st.lists(st.integers(0, 10**9), max_size=5).map(tuple)
)


def faults(document: object, kind: Kind[Any]) -> list[str]:
    with pytest.raises(FormatError) as caught:
        read(document, kind, what="it")
    return [str(problem) for problem in caught.value.problems]


# -- tensor types -----------------------------------------------------------------------------------------------------


@given(kind=types)
def test_a_type_has_one_spelling(kind: TensorType) -> None:
    assert TensorType.from_str(str(kind)) == kind
    assert read(str(kind), tensor_type(), what="it") == kind


@pytest.mark.parametrize(
    "text", ["", "f32", "f32[", "f32[]x", "f64[2]", "f32[2,]", "f32[02]", "f32[-1]", "f32[ 2]", "f32[²]"]
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        TensorType.from_str(text)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(FormatError, match="negative size"):
        TensorType("f32", (2, -1))


def test_sizes_of_types() -> None:
    assert (F32.elements, F32.nbytes, TensorType("bf16", ()).nbytes, TensorType("i64", (0,)).nbytes) == (6, 24, 2, 0)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_part_is_read_back() -> None:
    made = part("layer.forward", [F32, TensorType("i32", ())], [F32], (0, 0))
    document = json.loads(canonical.encode(made.to_dict()))
    assert read(document, PART, what="it") == made


@pytest.mark.parametrize("graph", [None, PartGraph(DIGEST, 7, "application/graph")])
@pytest.mark.parametrize("estimate", [None, Estimate(5), Estimate(10**12, 41.5, 1 << 30)])
@pytest.mark.parametrize("onnx", [None, OnnxForm(DIGEST, 9, {"onnxruntime": "1.14"})])
def test_a_part_keeps_what_it_may_lack(
    graph: PartGraph | None, estimate: Estimate | None, onnx: OnnxForm | None
) -> None:
    made = dataclasses.replace(part("a", [F32], [F32]), graph=graph, estimate=estimate, onnx=onnx)
    document = json.loads(canonical.encode(made.to_dict()))
    kept = {"graph": graph, "estimate": estimate, "onnx": onnx}
    assert {name: name in document for name in kept} == {name: value is not None for name, value in kept.items()}
    assert read(document, PART, what="it") == made


def test_a_part_as_onnx_is_its_payload_or_the_form_beside_it() -> None:
    form = OnnxForm("sha256:" + "5" * 64, 9, {"onnxruntime": "1.14"})
    made = dataclasses.replace(part("a", [F32], [F32]), media_type="application/other", onnx=form)
    assert made.as_onnx() == form
    assert dataclasses.replace(made, onnx=None).as_onnx() is None
    payload = dataclasses.replace(made, media_type=ONNX_MEDIA_TYPE, onnx=None)
    assert payload.as_onnx() == OnnxForm(made.digest, made.size, made.requires)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"graph": {"digest": "x", "size": 1, "media_type": "y"}}, "graph.digest: must be a sha256 digest"),
        ({"graph": None}, "graph: must be an object"),
        ({"onnx": {"digest": DIGEST, "size": 1, "requires": 3}}, "onnx.requires: must be an object"),
        ({"estimate": {"cycles": -1, "peak_power": None, "memory": None}}, "estimate.cycles: must be at least 0"),
        ({"estimate": {"cycles": 1}}, "estimate.peak_power: is missing"),
        ({"name": "Layer"}, "name: must be a part name, is 'Layer'"),
        ({"key": "sha256:00"}, "key: must be a sha256 digest"),
        ({"digest": DIGEST.upper()}, "digest: must be a sha256 digest"),
        ({"inputs": [{"name": "x", "type": "f32[x]"}]}, "inputs[0].type: must be a tensor type"),
        ({"inplace": [[0]]}, "inplace[0]: must have at least 2 items"),
        ({"inplace": [[1, 0]]}, "inplace: [1, 0] is beyond the part's outputs or inputs"),
        ({"inplace": [[0, 1]]}, "inplace: [0, 1] joins f32[2,3] and i32[]"),
        ({"size": -1}, "size: must be at least 0"),
        ({"numerics": {"bound": 1e-5, "verdict": "fail"}}, "numerics.verdict: must be text of the form"),
        ({"more": 1}, "more: is not a known key"),
    ],
)
def test_a_fault_of_a_part_is_named(change: dict[str, Any], said: str) -> None:
    made = part("layer.forward", [F32, TensorType("i32", ())], [F32], (0, 0))
    assert any(fault.startswith(said) for fault in faults(made.to_dict() | change, PART))


# -- recipes ----------------------------------------------------------------------------------------------------------

recipes = st.builds(
    Recipe,
    rank=st.integers(1, 4096),
    alpha=st.floats(1e-6, 1e6),
    targets=st.sets(st.sampled_from(LORA_TARGETS), min_size=1).map(lambda s: tuple(t for t in LORA_TARGETS if t in s)),
    seq_len=st.integers(2, 1 << 20),
    activations=st.sampled_from(Activations),
    memory_budget=st.none() | st.integers(1, 1 << 50),
    logits=st.booleans(),
)


full_recipes = st.builds(
    Recipe,
    mode=st.just(Mode.FULL),
    targets=st.just(()),
    seq_len=st.integers(2, 1 << 20),
    train_norm=st.booleans(),
    train_embeddings=st.booleans(),
    train_head=st.booleans(),
)


@given(recipe=recipes | full_recipes)
def test_a_recipe_is_read_back(recipe: Recipe) -> None:
    assert read(json.loads(canonical.encode(recipe.to_dict())), RECIPE, what="it") == recipe


def test_an_empty_recipe_is_the_default_one() -> None:
    assert read({}, RECIPE, what="it") == Recipe()


def test_targets_are_put_in_the_order_of_the_block() -> None:
    assert read({"targets": ["down", "v", "q"]}, RECIPE, what="it").targets == ("q", "v", "down")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"targets": ["q", "x"]}, "targets: 'x' is not a LoRA target; targets are q, k, v, o, gate, up, down"),
        ({"targets": ["q", "q"]}, "targets: names a target twice"),
        ({"targets": []}, "targets: must have at least 1 items, has 0"),
        ({"rank": 0}, "rank: must be at least 1, is 0"),
        ({"alpha": 0}, "alpha: must be at least 1e-06, is 0.0"),
        ({"mode": "half"}, "mode: must be one of 'lora', 'full', is 'half'"),
        ({"mode": "full", "rank": 8}, "rank: has no meaning in mode full"),
        ({"mode": "full", "targets": ["q"]}, "targets: has no meaning in mode full"),
        ({"train_head": True}, "train_head: has no meaning in mode lora"),
        ({"activations": "none"}, "activations: must be one of 'recompute', 'save', 'auto', is 'none'"),
        ({"seqlen": 128}, "seqlen: is not a known key; did you mean 'seq_len'?"),
    ],
)
def test_a_fault_of_a_recipe_is_named(document: dict[str, Any], said: str) -> None:
    assert said in faults(document, RECIPE)


# -- models -----------------------------------------------------------------------------------------------------------


@given(
    heads=st.sampled_from([2, 6]),
    shared=st.sampled_from([1, 2]),
    rope=st.sampled_from([{}, {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 7.0}}]),
    window=st.none() | st.integers(1, 10**6),
    family=st.sampled_from(["llama", "mistral"]),
)
def test_dimensions_are_read_back(
    heads: int, shared: int, rope: dict[str, Any], window: int | None, family: str
) -> None:
    sizes = {"model_type": family, "num_attention_heads": heads, "num_key_value_heads": shared, "hidden_size": 48}
    found = ModelConfig.from_dict(MODEL | sizes | rope | {"sliding_window": window})
    assert ModelConfig.from_dict(json.loads(canonical.encode(found.to_dict()))) == found
    assert found.sliding_window == (window if family == "mistral" else None)


def test_a_difference_is_named_with_both_values() -> None:
    mine = ModelConfig.from_dict(MODEL)
    theirs = ModelConfig.from_dict(MODEL | {"rope_theta": 5e5, "vocab_size": 100})
    assert mine.differences(mine) == []
    assert [(key, a, b) for key, a, b in mine.differences(theirs) if key != "rope_parameters"] == [
        ("vocab_size", 99, 100)
    ]
    assert [key for key, _, _ in mine.differences(theirs)] == ["vocab_size", "rope_parameters"]


def test_missing_dimensions_are_all_named() -> None:
    found = faults({"model_type": "llama"}, MODEL_CONFIG)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert f"{key}: is missing" in found


# -- bundle.json ------------------------------------------------------------------------------------------------------


def bundle_config() -> BundleConfig:
    return BundleConfig(
        name="tiny/llama",
        model=ModelConfig.from_dict(MODEL),
        recipe=Recipe(),
        target=Target("cpu", {}),
        toolchain={"torch": "2.13.0"},
        parts=(part("a", [F32], [F32]), part("b", [], [F32])),
        programs={"train": DIGEST, "reference": DIGEST},
        memory=Memory(weights=1, state=2, activations=3, io=4, saved_layers=1),
    )


def test_bundle_json_is_read_back() -> None:
    made = bundle_config()
    assert BundleConfig.decode(made.encode()) == made
    assert made.memory.peak == 10
    assert made.part("b").name == "b"
    with pytest.raises(KeyError):
        made.part("c")


def changed(**changes: Any) -> bytes:
    return canonical.encode(json.loads(bundle_config().encode()) | changes)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_with_a_remedy(version: object) -> None:
    with pytest.raises(FormatError, match=f"format_version {version!r}; this release reads 1") as caught:
        BundleConfig.decode(changed(format_version=version))
    assert "rebuild" in str(caught.value.remedy)


def test_faults_of_bundle_json_are_named() -> None:
    twice = [part("a", [], []).to_dict()] * 2
    with pytest.raises(FormatError) as caught:
        BundleConfig.decode(changed(parts=twice, programs={"reference": DIGEST}, memory={"weights": 1}))
    found = [str(problem) for problem in caught.value.problems]
    assert "parts: names a twice" in found
    assert "programs: has no program 'train'" in found
    assert "memory.state: is missing" in found


def test_values_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        bundle_config().name = "other"  # type: ignore[misc]
