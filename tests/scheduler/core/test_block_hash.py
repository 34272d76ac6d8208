import numpy as np

from scheduler.core.block_hash import BlockHashes, block_digests

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


def test_digests_of_single_blocks_equal_those_of_the_chain() -> None:
    chains = [BlockHashes(16), BlockHashes(16, "salt"), BlockHashes(16)]
    chains[2].extend(TOKENS, 4)
    blocks = [TOKENS[:16], TOKENS[:16], TOKENS[:16]]
    data = b"".join(block.tobytes() for block in blocks)
    found = block_digests(chains, [0, 0, 1], data)
    expected = digests(TOKENS, 2)
    # The third has that block already: its data is not looked at.
    assert found == [expected[0], digests(TOKENS, 1, "salt")[0], expected[1]]
    assert [len(chain.digests) for chain in chains] == [1, 1, 4]
    second = block_digests(chains[:1], [1], TOKENS[16:32].tobytes())
    assert second == expected[1:2]
