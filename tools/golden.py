"""Writes the golden bundle of the current format version: what every later release must still read and train with.

    tests/golden/v1/   golden.npub  golden.pub  model/  train.jsonl  expected.json

The model is tiny and random, the key is thrown away, and an existing golden is never replaced: a format version is
released once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from npubundle import container, keys
from npubundle.recipe import Recipe
from npubundle.version import FORMAT_VERSION
from npucc.build import build
from npucc.cache import Cache
from npucc.models.config_reader import read_model
from npucc.progress import Progress
from npucc.targets import find

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
SEQ_LEN = 16
STEPS = 2
TEXTS = (
    "A bundle is a compiled training step.",
    "Weights are inputs, so one part serves all layers.",
    "The backward pass is only a graph.",
    "What is signed can be trusted; what is not signed is refused.",
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(folder: Path) -> None:
    """A Llama of two layers with random f32 weights, and a byte-level tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    random = np.random.Generator(np.random.PCG64(1))
    H, inner, q, kv = 32, 48, 32, 16
    shapes = {"model.embed_tokens.weight": (300, H), "model.norm.weight": (H,)}
    for index in range(2):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (H,),
            f"{prefix}post_attention_layernorm.weight": (H,),
            f"{prefix}self_attn.q_proj.weight": (q, H),
            f"{prefix}self_attn.k_proj.weight": (kv, H),
            f"{prefix}self_attn.v_proj.weight": (kv, H),
            f"{prefix}self_attn.o_proj.weight": (H, q),
            f"{prefix}mlp.gate_proj.weight": (inner, H),
            f"{prefix}mlp.up_proj.weight": (inner, H),
            f"{prefix}mlp.down_proj.weight": (H, inner),
        }
    tensors = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape, dtype=np.float32)
        tensors[name] = 1 + drawn / 10 if len(shape) == 1 else drawn / np.float32(np.sqrt(shape[-1]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def losses(folder: Path) -> list[float]:
    """The losses of the first optimizer steps, trained with npurt."""
    from npurt import Bundle, TrainConfig, Trainer

    config = TrainConfig(steps=STEPS, lr=1e-2, schedule="constant", seed=7)
    with (
        Bundle.open(folder / "golden.npub", trust=folder / "golden.pub") as bundle,
        Trainer(bundle, weights=folder / "model", config=config) as trainer,
    ):
        return [report.loss for report in trainer.fit(folder / "train.jsonl")]


def main() -> int:
    """Write the golden of this format version if there is none."""
    folder = GOLDEN / f"v{FORMAT_VERSION}"
    if folder.exists():
        place = folder.relative_to(GOLDEN.parent.parent)
        print(f"{place} exists; a released version is never written again", file=sys.stderr)
        return 1
    write_model(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    key = keys.generate()
    (folder / "golden.pub").write_bytes(key.public.pem)
    recipe = Recipe(rank=4, alpha=8.0, targets=("q", "v", "down"), seq_len=SEQ_LEN)
    cache = Cache(Path("build/golden-cache"))
    model, name = read_model(folder / "model"), f"golden-v{FORMAT_VERSION}"
    result = build(model, recipe, find("cpu"), cache, Progress("quiet"), name=name, signer=key)
    container.write(folder / "golden.npub", result.content)
    expected = {"manifest_digest": result.content.manifest_digest, "losses": losses(folder)}
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
