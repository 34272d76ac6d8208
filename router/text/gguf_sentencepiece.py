"""A sentencepiece model built from a GGUF vocabulary with scores ("llama" in GGUF's terms).

Sentencepiece repeatedly merges the neighbours whose merged piece has the best score. That is BPE
with merges ranked by the score of the merged piece, so the merges are derived from the scores.
Characters that are not in the vocabulary fall back to bytes.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

from router.text.errors import UnsupportedTokenizerError
from router.text.gguf_vocabulary import NORMAL, GgufVocabulary

SPACE_MARK = "\u2581"


def build_sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """The pipeline, without added tokens."""
    tokens = vocabulary.tokens
    if vocabulary.scores is None:
        raise UnsupportedTokenizerError("there is no tokenizer.ggml.scores")
    id_by_piece = {piece.replace(" ", SPACE_MARK): i for i, piece in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=id_by_piece,
            merges=_merges(tokens, vocabulary.kinds, vocabulary.scores),
            unk_token=vocabulary.token(vocabulary.unknown_token_id),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark_spaces = normalizers.Replace(" ", SPACE_MARK)
    unmark = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark_spaces])
        unmark.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = mark_spaces
    tokenizer.decoder = decoders.Sequence(unmark)
    return tokenizer


def _merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best piece first."""
    id_by_piece = {piece: i for i, piece in enumerate(tokens) if kinds[i] == NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in id_by_piece.items():
        for at in range(1, len(piece)):
            left, right = id_by_piece.get(piece[:at]), id_by_piece.get(piece[at:])
            if left is not None and right is not None:
                found.append((-scores[token_id], left, right, piece[:at], piece[at:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]
