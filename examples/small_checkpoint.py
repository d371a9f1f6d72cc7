# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint as MiniOneRec publishes one, but small and with random weights: something to convert and serve.

    python examples/small_checkpoint.py models/small

The folder has what a Hugging Face folder of a Qwen3 has (config.json, model.safetensors, tokenizer.json), and beside it
the items: `Toys.index.json` with their semantic ids, `Toys.item.json` with their titles. Weights that nobody trained
recommend at random; all else is as with a real one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

LEVELS, CODES, ITEMS = 3, 8, 200  # an item's id is three tokens of eight possible ones each
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP = 32, 2, 4, 2, 8, 64


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and return the size of its vocabulary."""
    # Text is split into bytes, the simplest tokenizer that reads everything.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The tokens of the semantic ids are added behind it: <a_0> .. <a_7> for the first level, <b_...>, <c_...>.
    tokenizer.add_special_tokens(
        [f"<{'abc'[level]}_{code}>" for level in range(LEVELS) for code in range(CODES)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def write_weights(folder: Path, vocabulary: int) -> None:
    """Write config.json and model.safetensors, by the names that Hugging Face gives a Qwen3."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return draw.normal(scale=columns**-0.5, size=(rows, columns)).astype(np.float32)

    ones = np.ones
    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        own = {
            "input_layernorm.weight": ones(HIDDEN, np.float32),
            "self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            "self_attn.q_norm.weight": ones(HEAD, np.float32),
            "self_attn.k_norm.weight": ones(HEAD, np.float32),
            "post_attention_layernorm.weight": ones(HIDDEN, np.float32),
            "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            "mlp.up_proj.weight": matrix(MLP, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
        weights |= {f"model.layers.{layer}.{name}": value for name, value in own.items()}
    save_file(weights, folder / "model.safetensors")


def write_items(folder: Path) -> Path:
    """Write the two files of the items, and return the one that `jgr convert --items` takes."""
    # Different numbers below 8 * 8 * 8; the digits of a number in base 8 are an item's semantic id.
    numbers = np.random.default_rng(1).choice(CODES**LEVELS, size=ITEMS, replace=False)
    index = {
        str(item): [f"<{'abc'[level]}_{number // CODES**level % CODES}>" for level in range(LEVELS)]
        for item, number in enumerate(numbers.tolist())
    }
    (folder / "Toys.index.json").write_text(json.dumps(index))
    (folder / "Toys.item.json").write_text(
        json.dumps({item: {"title": f"Toy number {item}"} for item in index})
    )
    return folder / "Toys.index.json"


def write(folder: Path) -> Path:
    """Write checkpoint and items into `folder`, and return the file of the items."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, write_tokenizer(folder))
    return write_items(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a small checkpoint, to try jgr convert with.")
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args().folder))
