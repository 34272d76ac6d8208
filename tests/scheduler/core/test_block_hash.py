import numpy as np

from scheduler.core.block_hash import BlockHashes

TOKENS = np.arange(100, dtype=np.int32)


def digests(tokens: np.ndarray, num_blocks: int, salt: str = "") -> list[bytes]:
    hashes = BlockHashes(16, salt)
    hashes.extend(tokens, num_blocks)
    return hashes.digests


def test_equal_beginnings_have_equal_digests() -> None:
    other = TOKENS.copy()
    other[40] = 7
    first, second = digests(TOKENS, 6), digests(other, 6)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True] + [False] * 4


def test_a_digest_covers_what_comes_before_its_block() -> None:
    shifted = np.concatenate((TOKENS[16:32], TOKENS[16:32]))
    assert digests(shifted, 2)[1] != digests(TOKENS, 2)[1]


def test_the_salt_enters_the_whole_chain() -> None:
    assert not set(digests(TOKENS, 6)) & set(digests(TOKENS, 6, "salt"))


def test_hashing_in_slices_gives_the_same() -> None:
    hashes = BlockHashes(16)
    calls = 1
    while not hashes.advance(TOKENS, num_blocks=2):
        calls += 1
    assert calls == 3
    assert hashes.digests == digests(TOKENS, 6)


def test_a_prompt_shorter_than_a_block_is_done_at_once() -> None:
    hashes = BlockHashes(16)
    assert hashes.advance(TOKENS[:15])
    assert hashes.digests == []


def test_naming_the_next_block_equals_extending() -> None:
    hashes = BlockHashes(16)
    for index in range(3):
        hashes.named(index, TOKENS[index * 16 : (index + 1) * 16].tobytes())
    assert hashes.digests == digests(TOKENS, 3)
    assert hashes.named(1, b"known already") == hashes.digests[1]
    assert len(hashes.digests) == 3
