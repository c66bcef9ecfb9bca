"""A character tokenizer: one id per printable ASCII character, then ``<pad>`` and ``<eos>``."""

from __future__ import annotations

from pathlib import Path

import orjson

CHARACTERS = [chr(code) for code in range(32, 127)]
PAD_ID = len(CHARACTERS)
EOS_ID = PAD_ID + 1
VOCAB_SIZE = 104  # 97 used, padded to a multiple of 8


def encodable(text: str) -> bool:
    return all(32 <= ord(c) < 127 for c in text)


def encode(text: str) -> list[int]:
    """The ids that the saved tokenizer gives, without reading it. Raises ValueError on other characters."""
    if not encodable(text):
        raise ValueError(f"{text!r} has characters outside printable ASCII")
    return [ord(c) - 32 for c in text]


def save_tokenizer(folder: str | Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as Hugging Face models have them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate([*CHARACTERS, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<pad>", "<eos>")])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (Path(folder) / "tokenizer_config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
