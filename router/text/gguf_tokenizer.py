"""A `tokenizers` pipeline built from the vocabulary that a GGUF file carries.

GGUF stores the vocabulary and only the name of the pre-tokenizer; a table here holds the split
patterns by name. An unknown name is an error, because a wrong split gives wrong tokens silently.
Byte-level BPE ("gpt2" in GGUF's terms) is built here, sentencepiece ("llama") in its own module.
"""

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from router.text.errors import UnsupportedTokenizerError
from router.text.gguf_sentencepiece import SPACE_MARK, build_sentencepiece
from router.text.gguf_vocabulary import CONTROL, USER_DEFINED, GgufVocabulary

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Split patterns whose matching time is linear in the text's length for any text.
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


def build_gguf_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """The pipeline of a vocabulary; UnsupportedTokenizerError names an unknown part."""
    tokens = vocabulary.tokens
    if vocabulary.model == "gpt2":
        tokenizer = _byte_level_bpe(vocabulary)
        _add_tokens(tokenizer, tokens, vocabulary.kinds, is_normalized=False)
    elif vocabulary.model == "llama":
        tokenizer = build_sentencepiece(vocabulary)
        # The normalizer has turned spaces into marks before the text is searched for these tokens.
        spelled = [token.replace(" ", SPACE_MARK) for token in tokens]
        has_prefix = vocabulary.add_space_prefix
        _add_tokens(tokenizer, spelled, vocabulary.kinds, is_normalized=not has_prefix)
    else:
        raise UnsupportedTokenizerError(
            f"GGUF tokenizer model {vocabulary.model!r} is not supported; supported: 'gpt2' "
            "(byte-level BPE) and 'llama' (sentencepiece BPE). Use the model's Hugging Face folder "
            "with its tokenizer.json instead"
        )
    if vocabulary.add_bos_token:
        _add_begin_of_sequence(tokenizer, vocabulary)
    return tokenizer


def _byte_level_bpe(vocabulary: GgufVocabulary) -> Tokenizer:
    pre = vocabulary.pre
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedTokenizerError(
            f"GGUF pre-tokenizer {pre!r} is not supported; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pairs = (merge.partition(" ") for merge in vocabulary.merges)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
            merges=[(left, right) for left, _, right in pairs],
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int], *, is_normalized: bool
) -> None:
    """Adds control tokens as special (left out of text), user-defined tokens as never split."""
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    added = [token for token, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=is_normalized) for t in added])


def _add_begin_of_sequence(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    bos, bos_id = vocabulary.token(vocabulary.bos_token_id), vocabulary.bos_token_id
    if bos is None:
        raise UnsupportedTokenizerError(
            "tokenizer.ggml.add_bos_token is true, and there is no tokenizer.ggml.bos_token_id"
        )
    tokenizer.post_processor = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
