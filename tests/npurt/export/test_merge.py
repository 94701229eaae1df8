"""Merging adapters: the arithmetic, every form of adapter that is accepted, and the reasons why others are not."""

from __future__ import annotations

import json
import math
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import npurt
from npubundle.errors import FileError
from npurt import DivergedError, MismatchError, shards
from npurt.export.lora import read_lora
from npurt.export.peft import CONFIG_FILE, WEIGHTS_FILE
from npurt.weights import EMBEDDING, HEAD, SINGLE, Checkpoint
from tests.npurt.test_weights import folder_of

Array = NDArray[Any]
random = np.random.default_rng(9)
Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.o_proj"
RANK, ALPHA = 3, 12.0


def values(*shape: int) -> Array:
    return random.normal(size=shape).astype(np.float32)


BASE = {f"{Q}.weight": values(10, 6), f"{OUT}.weight": values(6, 10), f"{Q}.bias": values(10), EMBEDDING: values(7, 6)}
PAIRS = {Q: (values(RANK, 6), values(10, RANK)), OUT: (values(RANK, 10), values(6, RANK))}
PLAIN = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "o_proj"], "bias": "none"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "llama", BASE)


def tensors_of(pairs: dict[str, tuple[Array, Array]]) -> dict[str, Array]:
    return {
        f"base_model.model.{module}.lora_{matrix}.weight": np.ascontiguousarray(array)
        for module, both in pairs.items()
        for matrix, array in zip("AB", both, strict=True)
    }


def write_adapter(folder: Path, tensors: dict[str, Array] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors_of(PAIRS) if tensors is None else tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(PLAIN | config))
    return folder


def merged(base: Path, adapter: Path, **options: Any) -> dict[str, Array]:
    out = adapter.with_name("merged")
    npurt.merge(base, adapter, out, **options)
    return load_file(out / SINGLE)


def change(module: str, scaling: float) -> Array:
    a, b = PAIRS[module]
    return (b @ a) * np.float32(scaling)


def problems_of(base: Path, adapter: Path) -> dict[str, str]:
    with pytest.raises(MismatchError, match="cannot be merged") as caught:
        npurt.merge(base, adapter, adapter.with_name("merged"))
    assert not adapter.with_name("merged").exists()
    return {problem.where.removeprefix("adapter_config.json: "): problem.what for problem in caught.value.problems}


# -- the arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [shards.CHUNK, 48])
def test_adapted_weights_change_by_scaled_products_and_no_others(
    base: Path, tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK", chunk)
    found = merged(base, write_adapter(tmp_path / "adapter"))
    for module in (Q, OUT):
        wanted = BASE[f"{module}.weight"] + change(module, ALPHA / RANK)
        np.testing.assert_allclose(found[f"{module}.weight"], wanted, rtol=1e-6, atol=1e-6)
    for name in (f"{Q}.bias", EMBEDDING):
        assert np.array_equal(found[name], BASE[name])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kept", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_of_weights_and_adapters(tmp_path: Path, stored: Any, kept: Any) -> None:
    """Whole numbers, so that products are exact and the one rounding at the end is all there is."""
    weights = {f"{Q}.weight": (random.integers(-9, 9, (10, 6)) / 8).astype(stored)}
    pair = (random.integers(-3, 4, (RANK, 6)).astype(kept), random.integers(-3, 4, (10, RANK)).astype(kept))
    base = folder_of(tmp_path / "base", weights)
    found = merged(base, write_adapter(tmp_path / "adapter", tensors_of({Q: pair}), lora_alpha=RANK / 64))
    a, b = (array.astype(np.float32) for array in pair)
    wanted = (weights[f"{Q}.weight"].astype(np.float32) + b @ a / 64).astype(stored)
    assert found[f"{Q}.weight"].dtype == stored
    assert np.array_equal(found[f"{Q}.weight"], wanted)


@pytest.mark.parametrize(
    ("config", "scalings"),
    [
        ({"use_rslora": True}, (ALPHA / math.sqrt(RANK), ALPHA / math.sqrt(RANK))),
        ({"lora_alpha": 5, "alpha_pattern": {"q_proj": 1.5}}, (0.5, 5 / RANK)),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 0, "q_proj": 3}}, (0.0, ALPHA / RANK)),
        ({"alpha_pattern": {r"^model\.layers\.11\.self_attn\.o_proj": 3}}, (ALPHA / RANK, 1.0)),
        ({"alpha_pattern": {"1.self_attn.o_proj": 3, "proj": 3, "self_attn": 3}}, (ALPHA / RANK, ALPHA / RANK)),
        ({"r": 8, "rank_pattern": {"q_proj": RANK, "o_proj": RANK}, "alpha_pattern": None}, (4.0, 4.0)),
        ({"r": 8, "rank_pattern": {"q_proj": RANK, "o_proj": RANK}, "use_rslora": True}, (ALPHA / 3**0.5,) * 2),
    ],
)
def test_scaling(base: Path, tmp_path: Path, config: dict[str, Any], scalings: tuple[float, float]) -> None:
    lora = read_lora(write_adapter(tmp_path / "adapter", **config), Checkpoint.open(base))
    assert [lora.pairs[f"{module}.weight"].scaling for module in (Q, OUT)] == pytest.approx(scalings)
    found = merged(base, tmp_path / "adapter")
    for module, scaling in zip((Q, OUT), scalings, strict=True):
        wanted = BASE[f"{module}.weight"] + change(module, scaling)
        np.testing.assert_allclose(found[f"{module}.weight"], wanted, rtol=1e-5, atol=1e-6)


def test_settings_that_change_nothing_are_accepted(base: Path, tmp_path: Path) -> None:
    harmless: dict[str, Any] = {
        "target_modules": "all-linear",
        "lora_dropout": 0.1,
        "layers_to_transform": [0],
        "exclude_modules": ["x"],
        "init_lora_weights": "gaussian",
        "use_dora": False,
        "use_bdlora": None,
        "loftq_config": {"loftq_bits": 4},
        "qalora_group_size": 16,
        "megatron_core": "megatron.core",
        "modules_to_save": [],
        "something_new": 1,
    }
    assert len(read_lora(write_adapter(tmp_path / "adapter", **harmless), Checkpoint.open(base)).pairs) == 2


def test_a_merged_value_that_is_too_large_is_never_written(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", {f"{Q}.weight": np.ones((2, 2), np.float16)})
    pair = (np.full((RANK, 2), 300, np.float32), np.full((2, RANK), 300, np.float32))
    adapter = write_adapter(tmp_path / "adapter", tensors_of({Q: pair}))
    with pytest.raises(DivergedError, match="not finite in F16") as caught:
        npurt.merge(base, adapter, tmp_path / "merged")
    assert "--dtype bfloat16" in str(caught.value.remedy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    npurt.merge(base, adapter, tmp_path / "merged", dtype="bfloat16")


# -- notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("named", "noted"), [("org/llama", False), (None, False), ("", False), ("org/mistral", True)])
def test_another_base_model_is_only_a_note(base: Path, tmp_path: Path, named: str | None, noted: bool) -> None:
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=named)
    notes = npurt.merge(base, adapter, tmp_path / "merged").notes
    assert any("names org/mistral as its base model" in note for note in notes) == noted


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "LOHA"},
        {"bias": "lora_only"},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"kasa_config": {"beta": 1}},
        {"lora_bias": True},
        {"layer_replication": [[0, 4]]},
        {"target_parameters": ["w"]},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [1]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "loftq"},
        {"rank_pattern": {"(a+)+b": 3}},
        {"alpha_pattern": ["q_proj"]},
    ],
    ids=str,
)
def test_methods_that_are_not_merged(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    assert problems_of(base, write_adapter(tmp_path / "adapter", **config)).keys() == config.keys()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 4}, "matrices of rank 3; adapter_config.json says 4"),
        ({"r": None}, "says None"),
        ({"r": 4, "rank_pattern": {"o_proj": 3, "q_proj": True}}, "says True"),
        ({"lora_alpha": "16"}, "no number"),
        ({"lora_alpha": True}, "no number"),
        ({"alpha_pattern": {"q_proj": None}}, "no number"),
    ],
    ids=str,
)
def test_ranks_and_alphas_that_cannot_be(base: Path, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in problems_of(base, write_adapter(tmp_path / "adapter", **config))[Q]


def test_everything_that_is_wrong_is_reported_at_once(base: Path, tmp_path: Path) -> None:
    a, b = PAIRS[Q]
    wrong = {Q: (a, b[:9]), "model.layers.7.mlp": (a, b), f"model.{Q}": (a, b)}
    tensors = tensors_of(wrong) | {
        f"base_model.model.{OUT}.lora_A.weight": np.full((RANK, 10), np.nan, np.float32),
        f"base_model.model.{OUT}.lora_B.weight": PAIRS[OUT][1],
        f"base_model.model.{OUT}.lora_magnitude_vector": np.ones(6, np.float32),
        "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((RANK, 7), np.float32),
        "base_model.model.model.norm.lora_A.weight": a,
        "base_model.model.lm_head.weight": np.ones((7, 6), np.float32),
        f"base_model.model.{Q}.lora_A.default.weight": a,
        f"{Q}.lora_A.weight": a,
    }
    found = problems_of(base, write_adapter(tmp_path / "adapter", tensors, bias="all", use_dora=True))
    assert found[Q] == f"A is [3, 6] and B [9, 3]; {Q}.weight is [10, 6]"
    assert found["model.layers.7.mlp"] == "the weights have no tensor model.layers.7.mlp.weight"
    assert "no tensor" in found[f"model.{Q}"]
    assert "not finite" in found[f"{OUT}.lora_A"]
    assert "DoRA" in found[f"base_model.model.{OUT}.lora_magnitude_vector"]
    assert "embedding" in found["base_model.model.model.embed_tokens.lora_embedding_A"]
    assert found["model.norm"] == "lora_B is missing"
    assert "not a matrix of LoRA" in found["base_model.model.lm_head.weight"]
    assert "save_pretrained" in found[f"base_model.model.{Q}.lora_A.default.weight"]
    assert "base_model.model." in found[f"{Q}.lora_A.weight"]
    assert {"bias", "use_dora"} <= found.keys()
    with pytest.raises(MismatchError) as caught:
        npurt.merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert "merge_and_unload" in str(caught.value.remedy)


def test_weights_that_are_quantized(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", {f"{Q}.weight": np.ones((10, 6), np.int8)})
    found = problems_of(base, write_adapter(tmp_path / "adapter", tensors_of({Q: PAIRS[Q]})))
    assert "dtype I8" in found[Q]
    a, b = PAIRS[Q]
    adapter = write_adapter(tmp_path / "adapter", tensors_of({Q: (a.astype(np.float64), b)}))
    assert "dtype" in problems_of(base, adapter)[Q]


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_is_not_merged(tmp_path: Path, config: dict[str, Any], stored: bool) -> None:
    matrix = values(10, 6)
    base = folder_of(tmp_path / "base", {EMBEDDING: matrix} | ({HEAD: matrix} if stored else {}))
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(tmp_path / "adapter", tensors_of({"lm_head": PAIRS[Q]}))
    (said,) = problems_of(base, adapter).values()
    assert ("tied" if stored or config else "no tensor") in said


def test_a_head_of_its_own_is_merged(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", {EMBEDDING: values(10, 6), HEAD: BASE[f"{Q}.weight"]})
    found = merged(base, write_adapter(tmp_path / "adapter", tensors_of({"lm_head": PAIRS[Q]})))
    np.testing.assert_allclose(found[HEAD], BASE[f"{Q}.weight"] + change(Q, ALPHA / RANK), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["base_layer.weight", "weight"])
def test_a_copy_of_what_is_adapted_is_no_tensor_of_its_own(base: Path, tmp_path: Path, name: str) -> None:
    """PEFT saves one beside an adapter of a head, in the dtype that it trained with."""
    weights = {f"{Q}.weight": BASE[f"{Q}.weight"].astype(ml_dtypes.bfloat16)}
    half = folder_of(tmp_path / "half", weights)
    copy = {f"base_model.model.{Q}.{name}": weights[f"{Q}.weight"].astype(np.float32)}
    adapter = write_adapter(tmp_path / "adapter", tensors_of({Q: PAIRS[Q]}) | copy)
    assert list(read_lora(adapter, Checkpoint.open(half)).pairs) == [f"{Q}.weight"]
    (said,) = problems_of(base, adapter).values()
    assert "differs from that of the weights" in said
    resized = {next(iter(copy)): np.ones((12, 6), np.float32)}
    write_adapter(tmp_path / "adapter", tensors_of({Q: PAIRS[Q]}) | resized)
    assert "differs" in problems_of(half, adapter)[next(iter(copy))]


def test_a_weight_without_rows_and_a_rank_of_zero(tmp_path: Path) -> None:
    none = np.zeros((0, 6), np.float32)
    base = folder_of(tmp_path / "base", {f"{Q}.weight": none})
    adapter = write_adapter(tmp_path / "adapter", tensors_of({Q: (PAIRS[Q][0], np.zeros((0, RANK), np.float32))}))
    assert merged(base, adapter)[f"{Q}.weight"].shape == (0, 6)
    shutil.rmtree(tmp_path / "merged")
    write_adapter(tmp_path / "adapter", tensors_of({Q: (none, np.zeros((0, 0), np.float32))}), r=0)
    assert "rank 0" in problems_of(base, adapter)[Q]


def test_an_adapter_without_tensors(base: Path, tmp_path: Path) -> None:
    assert problems_of(base, write_adapter(tmp_path / "adapter", {})) == {WEIGHTS_FILE: "has no tensors"}


def test_an_adapter_that_was_pickled(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    assert "pickle" in problems_of(base, adapter)["adapter_model.bin"]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_adapter_files_missing_damaged_or_no_files(base: Path, tmp_path: Path, name: str) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / name).write_bytes(b"\x00{broken")
    with pytest.raises(MismatchError, match="cannot be read"):
        npurt.merge(base, adapter, tmp_path / "merged")
    (adapter / name).unlink()
    with pytest.raises(MismatchError, match="No such file"):
        npurt.merge(base, adapter, tmp_path / "merged")
    os.mkfifo(adapter / name)
    with pytest.raises(MismatchError, match="not a regular file"):
        npurt.merge(base, adapter, tmp_path / "merged")


def test_the_target_is_looked_at_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "x").touch()
    with pytest.raises(FileError, match="not empty"):
        npurt.merge(tmp_path / "nowhere", tmp_path / "nowhere", tmp_path / "merged")


def test_memory_holds_a_few_rows(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", {f"{Q}.weight": np.ones((4096, 1024), np.float32)})
    pair = (np.ones((RANK, 1024), np.float32), np.ones((4096, RANK), np.float32))
    adapter = write_adapter(tmp_path / "adapter", tensors_of({Q: pair}))
    npurt.merge(base, adapter, tmp_path / "first")  # what is imported stays
    tracemalloc.start()
    try:
        npurt.merge(base, adapter, tmp_path / "merged")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, f"{peak:,} bytes for a tensor of 16 MiB"
