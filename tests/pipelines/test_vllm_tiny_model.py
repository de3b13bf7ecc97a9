"""The tiny model's files."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pipelines.prompts import FIRST_TOKEN, LAST_TOKEN
from pipelines.vllm_cpu import tiny_model as model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return model.tiny_model()


def test_one_byte_is_one_token_and_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Grüße, 東京!\n\t the end"
    ids = tokenizer.encode(text).ids
    assert ids == [model.byte_id(byte) for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == model.VOCABULARY_TOKENS
    assert tokenizer.decode([72, 400, 105]) == "H<400>i"
    assert tokenizer.encode("</s><400>").ids == [model.END_ID, *b"<400>"]


def test_every_id_that_the_load_generator_draws_is_whole_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert all(
        "\ufffd" not in tokenizer.decode([i], skip_special_tokens=False) for i in range(FIRST_TOKEN, LAST_TOKEN + 1)
    )


def test_the_weights_fit_the_configuration_and_are_the_same_each_time(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (
        config["num_key_value_heads"] * config["head_dim"],
        config["hidden_size"],
    )
    assert len(tensors) == 3 + 9 * config["num_hidden_layers"]
    again = model.weights()
    assert all(np.array_equal(tensors[name], again[name]) for name in tensors)


def test_only_printable_bytes_can_win(folder: Path) -> None:
    output = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert {int(i) for i in np.flatnonzero(np.any(output != 0, axis=1))} == set(range(32, 127))


def test_the_folder_is_made_once_and_named_after_its_content(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (folder / "config.json").stat().st_mtime_ns
    assert model.tiny_model() == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    monkeypatch.setattr(model, "SEED", 1)
    assert model.tiny_model() != folder


def test_a_model_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = model.save_file
    monkeypatch.setattr(model, "save_file", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.tiny_model()
    monkeypatch.setattr(model, "save_file", real)
    assert (model.tiny_model() / "model.safetensors").is_file()
