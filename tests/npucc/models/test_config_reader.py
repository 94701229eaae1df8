from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig

from npubundle.errors import Error
from npubundle.model_config import Rope
from npucc.errors import UnsupportedModelError, UsageError
from npucc.models import ARCHITECTURES
from npucc.models.config_reader import Model, parse_model, read_model
from tests.npucc.tiny import config

DATA = Path(__file__).parent.parent / "data"
REAL = sorted(path.stem for path in DATA.glob("*.json"))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def problems(document: dict[str, Any], **options: Any) -> dict[str, str]:
    """What is wrong with a model, by key."""
    with pytest.raises(UnsupportedModelError) as caught:
        parse_model(document, **options)
    assert int(caught.value.exit_code) == 3
    return {problem.where: problem.what for problem in caught.value.problems}


@pytest.mark.parametrize("name", REAL)
def test_real_models_are_read_without_a_word(name: str) -> None:
    model = read_model(DATA / f"{name}.json")
    document = json.loads((DATA / f"{name}.json").read_text())
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
        assert getattr(model.config, key) == document[key]


def test_there_are_six_real_models() -> None:
    assert len(REAL) == 6


@pytest.mark.parametrize(
    ("name", "head_dim", "window", "rope"),
    [
        ("llama-2-7b", 128, None, Rope("default", 10000.0, {})),
        ("llama-3.1-8b", 128, None, Rope("llama3", 500000.0, LLAMA3)),
        ("llama-3.2-1b", 64, None, Rope("llama3", 500000.0, LLAMA3 | {"factor": 32.0})),
        ("smollm2-135m", 64, None, Rope("default", 100000.0, {})),
        ("mistral-7b-v0.1", 128, 4096, Rope("default", 10000.0, {})),
        ("mistral-7b-v0.3", 128, None, Rope("default", 1000000.0, {})),
    ],
)
def test_what_is_left_out_takes_the_default_of_its_family(
    name: str, head_dim: int, window: int | None, rope: Rope
) -> None:
    found = read_model(DATA / f"{name}.json").config
    assert (found.head_dim, found.sliding_window, found.rope_parameters) == (head_dim, window, rope)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
    ids=["default", "linear", "linear-old", "llama3"],
)
def test_what_transformers_writes_is_read(family: Any, rope: dict[str, Any]) -> None:
    sizes = {key: config()[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    written = family(num_key_value_heads=2, **sizes, **rope)
    for document in (written.to_dict(), written.to_diff_dict(), json.loads(written.to_json_string())):
        found = parse_model(document).config
        for key in (*sizes, "head_dim", "rms_norm_eps", "num_key_value_heads"):
            assert getattr(found, key) == getattr(written, key)
        assert found.sliding_window == getattr(written, "sliding_window", None)
        assert found.rope_parameters.to_dict() == {k: v for k, v in written.rope_parameters.items() if k != "type"}


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig])
def test_defaults_are_those_of_transformers(family: Any) -> None:
    written = family(hidden_size=64, num_attention_heads=8, num_hidden_layers=1, vocab_size=9, intermediate_size=7)
    needed = (
        "model_type",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "intermediate_size",
    )
    found = parse_model({key: getattr(written, key) for key in needed}).config
    for key, value in found.to_dict().items():
        if key not in {"rope_parameters", "attention_bias", "mlp_bias", "sliding_window"}:
            assert value == getattr(written, key), key
    assert found.sliding_window == getattr(written, "sliding_window", None)
    assert found.rope_parameters == Rope("default", 10000.0, {})


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_null_is_not_a_default(model_type: str) -> None:
    """transformers takes `num_key_value_heads: null` for one key/value head per head, in every family."""
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    document = config(model_type=model_type, architectures=[names[model_type]], num_key_value_heads=None)
    assert parse_model(document).config.num_key_value_heads == document["num_attention_heads"]


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("inside", [True, False])
def test_both_spellings_of_rope_mean_the_same(spelling: str, inside: bool) -> None:
    theta = {"rope_theta": 20000.0}
    rope = {"rope_type": "linear", "factor": 4} | (theta if inside else {})
    document = config() | {spelling: rope} | ({} if inside else theta)
    assert parse_model(document).config.rope_parameters == Rope("linear", 20000.0, {"factor": 4})


def test_spellings_that_contradict_each_other_are_refused() -> None:
    document = config(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"rope_type": "default"})
    assert "contradicts" in problems(document)["rope_scaling"]
    same = {"rope_type": "linear", "factor": 2}
    assert parse_model(config(rope_scaling=same, rope_parameters=same)).config.rope_parameters.type == "linear"


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({"model_type": "qwen2"}, "model_type", "'qwen2' is not a supported architecture; supported are"),
        ({"model_type": ...}, "model_type", "is not a supported architecture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures", "only ['LlamaForCausalLM']"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu' is not supported, only 'silu' or 'swish'"),
        ({"attention_bias": True}, "attention_bias", "True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias", "changes the mathematics"),
        ({"attention_dropout": 0.1}, "attention_dropout", "changes the mathematics"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "changes the mathematics"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "changes the mathematics"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", "changes the mathematics"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier", "changes the mathematics"),
        ({"rope_interleaved": True}, "rope_interleaved", "changes the mathematics"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling.rope_type", "'yarn' is not a supported"),
        ({"head_dim": ..., "hidden_size": 30}, "head_dim", "must be even for rotary embeddings, is 5"),
        ({"rope_parameters": {"rope_type": []}}, "rope_parameters.rope_type", "is not a supported RoPE kind"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "needs a positive number here, has None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor", "needs a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor", "needs a positive"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "rope_scaling.beta", "is not known for RoPE"),
        ({"rope_scaling": {"rope_theta": 10**400}}, "rope_scaling.rope_theta", "must be a positive number"),
        ({"rope_scaling": 3}, "rope_scaling", "must be an object or null"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "must divide num_attention_heads 6, is 4"),
        ({"head_dim": 5}, "head_dim", "must be even for rotary embeddings, is 5"),
        ({"head_dim": ..., "hidden_size": 35}, "hidden_size", "35 is not a multiple of num_attention_heads 6"),
        ({"head_dim": None, "hidden_size": 35}, "hidden_size", "35 is not a multiple of num_attention_heads 6"),
        ({"hidden_size": "36"}, "hidden_size", "must be an integer, is text"),
        ({"vocab_size": ...}, "vocab_size", "is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "must be at least 1, is 0"),
        ({"something_new": 1}, "something_new", "is not known, and might change the mathematics"),
        ({"rms_norm_epsilon": 1e-5}, "rms_norm_epsilon", "did you mean 'rms_norm_eps'?"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused_by_name(changes: dict[str, Any], where: str, said: str) -> None:
    found = problems(config(**changes))
    assert list(found) == [where]
    assert said in found[where]


def test_a_flag_is_not_a_number() -> None:
    """1 and True compare equal, but `attention_dropout: false` is not a rate."""
    assert list(problems(config(attention_dropout=False, use_sliding_window=0))) == [
        "attention_dropout",
        "use_sliding_window",
    ]


def test_everything_is_reported_at_once() -> None:
    found = problems(config(model_type="gpt2", hidden_act="relu", hidden_size=-1, rope_scaling={"type": "su"}, extra=2))
    assert set(found) == {"model_type", "hidden_act", "hidden_size", "rope_scaling.rope_type", "extra"}


def test_keys_known_to_change_nothing_are_passed_over_by_name() -> None:
    document = config(something_new=1, other=2)
    assert list(problems(document, ignore_keys=["something_new"])) == ["other"]
    assert parse_model(document, ignore_keys=["something_new", "other"]).config.hidden_size == 36


def test_a_long_value_is_shortened() -> None:
    assert len(problems(config(quantization_config={"modules": ["x"] * 1000}))["quantization_config"]) < 200


def test_a_family_knows_its_tensors() -> None:
    model = parse_model(config())
    assert isinstance(model, Model)
    assert model.architecture is ARCHITECTURES["llama"]
    shapes = {t.name: t.shape for t in model.architecture.layer_tensors(model.config)}
    assert shapes == {
        "input_norm": (36,), "q": (24, 36), "k": (8, 36), "v": (8, 36), "o": (36, 24), "gate": (44, 36), "up": (44, 36),
        "down": (36, 44), "post_norm": (36,),
    }  # fmt: skip


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == parse_model(config())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "is not a JSON object"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        read_model(file)
    assert caught.value.where == str(file)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no model configuration here") as caught:
        read_model(tmp_path / "model")
    assert isinstance(caught.value, Error)
    assert "--model takes" in str(caught.value.remedy)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        read_model(tmp_path)


def test_a_device_or_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="not a regular file"):
            read_model(path)


def test_an_overlong_name_is_a_wrong_path() -> None:
    with pytest.raises(UsageError, match="name too long"):
        read_model(Path("x" * 5000))


def test_a_configuration_that_is_too_large_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (5 << 20) + b"{}")
    with pytest.raises(UsageError, match="are allowed"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters.rope_theta",
        ),
        ({"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
    ],
)
def test_two_spellings_of_one_rope_value_must_agree(keys: dict[str, Any], where: str) -> None:
    assert "contradicts" in problems(config() | keys)[where]
