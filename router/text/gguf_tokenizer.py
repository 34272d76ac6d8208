"""A `tokenizers` pipeline built from the vocabulary that a GGUF file carries.

GGUF keeps the vocabulary and names the pre-tokenizer; what the name stands for is known here. A
name that is not in the table is an error, because a wrong split gives wrong tokens silently.
Byte-level BPE ("gpt2" in GGUF's words) is built here, sentencepiece ("llama") in its own module.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from router.text.errors import UnsupportedTokenizerError
from router.text.gguf_sentencepiece import SPACE_MARK, build_sentencepiece

# Kinds in tokenizer.ggml.token_type.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Split patterns that take a time in proportion to the text, whatever the text is.
KNOWN_PATTERNS = frozenset({_LLAMA3, _QWEN2})


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3),
    "qwen2": lambda: _split_then_bytes(_QWEN2),
}


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The pipeline of a GGUF header; raises UnsupportedTokenizerError naming what is unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(metadata, tokens)
        _add_tokens(tokenizer, tokens, kinds, is_normalized=False)
    elif kind == "llama":
        tokenizer = build_sentencepiece(metadata, tokens, kinds)
        # Spaces in user-defined tokens are marks by the time that text is searched for them.
        spelled = [token.replace(" ", SPACE_MARK) for token in tokens]
        has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        _add_tokens(tokenizer, spelled, kinds, is_normalized=not has_prefix)
    else:
        raise UnsupportedTokenizerError(
            f"GGUF tokenizer model {kind!r} is not supported; supported: 'gpt2' (byte-level BPE) "
            "and 'llama' (sentencepiece BPE). Use the model's Hugging Face folder with its "
            "tokenizer.json instead"
        )
    _add_begin_of_sequence(tokenizer, tokens, metadata)
    return tokenizer


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedTokenizerError(
            f"GGUF pre-tokenizer {pre!r} is not supported; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(
    tokenizer: Tokenizer, tokens: list[str], kinds: list[int], *, is_normalized: bool
) -> None:
    """Control tokens are special (left out of text); user-defined ones are only never split."""
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    added = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=is_normalized) for t in added])


def _add_begin_of_sequence(
    tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]
) -> None:
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = tokens[bos_id]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What chat templates call bos_token, eos_token, ...: name -> the token's text."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found
