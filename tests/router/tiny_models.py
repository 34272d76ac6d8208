"""Small tokenizers of each kind, made on the spot."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.text.chat import ChatTemplate
from router.text.tokenizer import ModelText, TextTokenizer

CHAT = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPACE = "\u2581"


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Bytes 0-255 are ids 0-255 in the order of their stand-ins, then some merges, then <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: token_id for token_id, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


def byte_level_model() -> ModelText:
    tokenizer = TextTokenizer(byte_level_tokenizer())
    return ModelText(tokenizer, ChatTemplate(CHAT, {"eos_token": "<|end|>"}))


@cache
def byte_fallback_tokenizer() -> Tokenizer:
    """As sentencepiece BPE models are written: bytes for what is unknown, a mark for spaces."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    letters = [SPACE, *"abcdehlmorwxyz.,!"]
    for letter in letters:
        vocab[letter] = len(vocab)
    merges = [(SPACE, "h"), ("e", "l"), (SPACE, "w"), ("o", "r"), (SPACE + "w", "or")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def metaspace_tokenizer() -> Tokenizer:
    """A unigram model whose spaces are marked by Metaspace."""
    pieces = [("<unk>", 0.0), (SPACE, -2.0), (SPACE + "the", -3.0), ("s", -3.5)]
    pieces += [(letter, -4.0) for letter in "abcdefghijklmnopqrtuvwxyz.,"]
    pieces += [(SPACE + "hello", -3.0), ("ing", -3.0), ("é", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer
