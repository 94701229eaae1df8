"""Merged models and adapters as transformers and PEFT load them: equal logits, whatever the dtype and the files.

The models are small and random. Bounds are those of f32 sums in another order; where products are exact there is none.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import npurt
from npurt.export.model import save_model
from npurt.weights import EMBEDDING, HEAD, INDEX, SINGLE, Checkpoint

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
#: More rows than any tokenizer of the test has tokens: padded, as vocabularies are for the sake of hardware.
VOCABULARY = 331
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.arange(3, 27).reshape(2, 12) % VOCABULARY


@dataclass(frozen=True, slots=True)
class Case:
    """A base model (dtype, tied or not, in one file or several) and an adapter for it."""

    dtype: torch.dtype = torch.float32
    tied: bool = False
    sharded: bool = False
    lora: dict[str, Any] = field(default_factory=dict)


CASES = {
    "f32": Case(),
    "f32-sharded-tied": Case(tied=True, sharded=True),
    "f32-rslora": Case(lora={"use_rslora": True, "r": 5}),
    "f32-patterns": Case(
        lora={
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 9},
            "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 2},
        }
    ),
    "f32-head": Case(lora={"target_modules": ["q_proj", "lm_head"]}),
    "f16-sharded": Case(torch.float16, sharded=True),
    "bf16-tied": Case(torch.bfloat16, tied=True),
    "bf16-sharded": Case(torch.bfloat16, sharded=True),
}


def quiet(function: Callable[[], Any]) -> Any:
    """Libraries warn of their own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def load(folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return quiet(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def with_adapter(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return quiet(lambda: PeftModel.from_pretrained(load(base), str(adapter)).eval())


def write_base(folder: Path, case: Case) -> Path:
    """A random model that is far from uniform, with a tokenizer whose vocabulary is smaller than the model's."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1)
    config = LlamaConfig(**SMALL, vocab_size=VOCABULARY, tie_word_embeddings=case.tied)
    model = AutoModelForCausalLM.from_config(config).to(case.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.15
            parameter.copy_(torch.randn(parameter.shape) * scale + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, max_shard_size="100KB" if case.sharded else "1GB")
    assert (folder / INDEX).exists() == case.sharded
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(300)} | {"<unk>": 300}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path, *, exact: bool = False, **settings: Any) -> Path:
    """A random adapter as PEFT saves it. `exact`: of few small whole numbers, so that f32 products are exact."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": EVERYWHERE} | settings, task_type="CAUSAL_LM")
    model = quiet(lambda: get_peft_model(load(base), config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                new = torch.randint(-1, 2, parameter.shape) / 8 if exact else torch.randn(parameter.shape) * 0.1
                parameter.copy_(new)
    quiet(lambda: model.save_pretrained(folder))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_merged_model_is_the_base_with_its_adapter(case: Case, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", case)
    adapter = write_adapter(tmp_path / "adapter", base, **case.lora)
    npurt.merge(base, adapter, tmp_path / "f32", dtype="float32")
    wanted = logits(with_adapter(base, adapter))
    assert (wanted - logits(load(base))).abs().max() > 0.1, "the adapter changes nothing, which proves nothing"
    torch.testing.assert_close(logits(load(tmp_path / "f32", "auto")), wanted, rtol=1e-4, atol=1e-4)

    report = npurt.merge(base, adapter, tmp_path / "own")
    assert report.tensors == len(weights_of(base))
    exact = weights_of(tmp_path / "f32")
    for name, tensor in weights_of(tmp_path / "own").items():
        assert torch.equal(tensor, exact[name].to(case.dtype)), f"{name} is not the f32 result, rounded once"
    peft = quiet(lambda: with_adapter(base, adapter).merge_and_unload()).state_dict()
    for name, tensor in exact.items():
        torch.testing.assert_close(tensor, peft[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_where_products_are_exact_weights_and_logits_are_those_of_peft_to_the_last_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", Case(dtype))
    adapter = write_adapter(tmp_path / "adapter", base, exact=True)
    npurt.merge(base, adapter, tmp_path / "merged")
    # Through a file: `to` rounds the frequencies of RoPE as well.
    quiet(lambda: with_adapter(base, adapter).merge_and_unload()).to(dtype).save_pretrained(tmp_path / "peft")
    ours, theirs = load(tmp_path / "merged", "auto"), load(tmp_path / "peft", "auto")
    assert ours.dtype == theirs.dtype == dtype
    for name, tensor in weights_of(tmp_path / "merged").items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("largest", [None, 60_000])
def test_every_dtype_and_sharding_loads(dtype: str, largest: int | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = write_base(tmp_path / "base", Case(torch.bfloat16, sharded=largest is None))
    adapter = write_adapter(tmp_path / "adapter", base, r=2)
    npurt.merge(base, adapter, tmp_path / "out", dtype=dtype, max_shard_size=largest)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights_of(tmp_path / "out").values())
    model = load(tmp_path / "out", "auto")
    assert model.dtype == getattr(torch, dtype)
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY
    assert torch.equal(model.state_dict()[EMBEDDING].float(), weights_of(base)[EMBEDDING].float())
    bound = 1e-4 if dtype == "float32" else 0.2
    difference = (logits(model).float() - logits(with_adapter(base, adapter))).abs().max()
    assert float(difference) < bound
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) < VOCABULARY
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w3"}], tokenize=False) == "w3"


@pytest.mark.parametrize("stored", [False, True])
def test_a_new_embedding_stays_tied(stored: bool, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", Case(torch.bfloat16, tied=True))
    if stored:
        tensors = load_file(base / SINGLE)
        save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, base / SINGLE, metadata={"format": "pt"})
    new = torch.randn(VOCABULARY, SMALL["hidden_size"])
    save_model(tmp_path / "out", Checkpoint.open(base), {EMBEDDING: lambda: [new.numpy()]})
    assert (HEAD in weights_of(tmp_path / "out")) == stored
    model = load(tmp_path / "out", "auto")
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert torch.equal(layer.weight, new.bfloat16())
    model.save_pretrained(tmp_path / "again")
    assert HEAD not in weights_of(tmp_path / "again"), "transformers no longer takes it for tied"


def test_a_model_whose_every_tensor_is_new(tmp_path: Path) -> None:
    """What full fine-tuning exports: f32 masters in place of all tensors."""
    base = write_base(tmp_path / "base", Case(torch.bfloat16, sharded=True))
    torch.manual_seed(3)
    masters = {name: torch.randn(tensor.shape) * 0.1 for name, tensor in weights_of(base).items()}
    replaced = {name: (lambda tensor=tensor: [tensor.numpy()]) for name, tensor in masters.items()}
    report = save_model(tmp_path / "out", Checkpoint.open(base), replaced)
    assert report.replaced == report.tensors == len(masters)
    found = load(tmp_path / "out", "auto").state_dict()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in masters.items())


def test_smollm2_merged(smollm2_dir: Path, tmp_path: Path) -> None:
    """The real model, in bf16 and tied; the merged folder goes through npurt again as a base model."""
    base = tmp_path / "base"
    shutil.copytree(smollm2_dir, base)
    adapter = write_adapter(tmp_path / "adapter", base, r=16, target_modules=["q_proj", "v_proj"])
    npurt.merge(base, adapter, tmp_path / "f32", dtype="float32")
    torch.testing.assert_close(
        logits(load(tmp_path / "f32", "auto")), logits(with_adapter(base, adapter)), rtol=1e-3, atol=1e-3
    )
    report = npurt.merge(base, adapter, tmp_path / "own")
    assert (tmp_path / "own" / SINGLE).stat().st_size == (base / SINGLE).stat().st_size
    exact = weights_of(tmp_path / "f32")
    assert all(torch.equal(t, exact[name].bfloat16()) for name, t in weights_of(tmp_path / "own").items())
    assert set(report.files) == {path.name for path in smollm2_dir.iterdir()}
