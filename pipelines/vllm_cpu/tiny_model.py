"""A tiny Llama and its byte-level tokenizer, made on the spot: what the engines on CPUs serve.

One layer drawn at random; its text means nothing, but is decided by the whole prompt, greedy text without ties, so
that a wrong KV block shows as another text. One token is one byte, as in the emulated engines.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from pipelines.cache_folder import cache_folder, digest_of, only_builder

VOCABULARY_TOKENS = 640
FIRST_HIGH_BYTE_ID = 500
"""Id of byte 128; the ASCII bytes are their own ids. So prompts of random ids, which the load generator draws below it,
hold no half characters, after which vLLM's detokenizer would give the prompt's text again with the answer."""
BEGIN_ID, END_ID = 628, 629
PRINTABLE = range(32, 127)
"""Ids of the bytes that greedy answers are made of."""

SEED = 0
WEIGHT_SCALE = 0.2
"""Standard deviation of the weights: ten times the usual one, so that attention is sharp and logits lie apart."""
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 1, 1, 1, 32
"""One layer with one head: attention over a long context is what a step costs here."""
MAX_POSITIONS = 65_536

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

Weights = npt.NDArray[np.float32]


def tiny_model() -> Path:
    """The model's folder, made where it is not there yet; named after what it is made of."""
    made_of = [model_config(), tokenizer_config(), SEED, WEIGHT_SCALE]
    folder = cache_folder() / f"tiny-llama-{digest_of(made_of)}"
    if folder.is_dir():
        return folder
    with only_builder(folder):
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write_model(part)
        part.replace(folder)
    return folder


def write_model(folder: Path) -> None:
    """Write weights, configuration and tokenizer as `transformers` lays them out."""
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": model_config(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def model_config() -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
    }


def weights() -> dict[str, Weights]:
    """The tensors by name, float32.

    Only printable bytes have rows in the output matrix: every other logit is 0, below the largest of the rest, so
    that each token of a greedy answer is one character and none ends it early.
    """
    generator = np.random.default_rng(SEED)

    def drawn(*shape: int) -> Weights:
        return (generator.standard_normal(shape) * WEIGHT_SCALE).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {"model.embed_tokens.weight": drawn(VOCABULARY_TOKENS, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ones
    output = np.zeros((VOCABULARY_TOKENS, HIDDEN), np.float32)
    output[PRINTABLE.start : PRINTABLE.stop] = drawn(len(PRINTABLE), HIDDEN)
    return {**tensors, "lm_head.weight": output}


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges; ids that stand for no byte have names."""
    special = {BEGIN_ID: "<s>", END_ID: "</s>"}
    bytes_ = {byte_id(byte): symbol for byte, symbol in enumerate(_byte_symbols())}
    # Every id is in the vocabulary, since `tokenizers` numbers added tokens anew.
    vocabulary = {bytes_.get(i) or special.get(i) or f"<{i}>": i for i in range(VOCABULARY_TOKENS)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": name, **flags} for i, name in special.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def byte_id(byte: int) -> int:
    """The token of a byte."""
    return byte if byte < 128 else byte - 128 + FIRST_HIGH_BYTE_ID


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where it prints, else one from 256 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
