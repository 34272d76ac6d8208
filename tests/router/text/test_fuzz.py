"""Mutated tokenizers are read or refused, in bounded time and memory."""

import subprocess
import sys

import pytest

from tests.gpuworker.models.gguf_bytes import STRING, U32, GgufBytes, array
from tests.router.text.test_tokenizer import write_folder

NUM_FILES = 400
TOKENS = ["<s>", "</s>", *"abcdefgh", "ab", "abc"]


def write_gguf(folder):
    file = GgufBytes()
    file.add("tokenizer.ggml.model", "gpt2")
    file.add("tokenizer.ggml.pre", "smollm")
    file.pairs["tokenizer.ggml.tokens"] = array(STRING, TOKENS)
    file.pairs["tokenizer.ggml.token_type"] = array(U32, [3, 3, *[1] * 10])
    file.pairs["tokenizer.ggml.merges"] = array(STRING, ["a b", "ab c"])
    file.add("tokenizer.ggml.bos_token_id", 0)
    file.add("tokenizer.ggml.eos_token_id", 1)
    file.pairs["tokenizer.ggml.add_bos_token"] = b"\x07\0\0\0\x01"
    file.add("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    file.write(folder / "model.gguf")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["gguf", "tokenizer", "config"])
def test_mutated_tokenizers_are_read_or_refused(tmp_path, kind):
    if kind == "gguf":
        write_gguf(tmp_path)
    else:
        write_folder(
            tmp_path, chat_template="{{ messages[0].content }}", bos_token="<s>", eos_token="</s>"
        )
    command = [sys.executable, "-m", "tests.router.text.fuzz_tokenizers", kind, str(tmp_path)]
    done = subprocess.run(
        [*command, str(NUM_FILES)], capture_output=True, text=True, check=False, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_read, num_refused = (int(word) for word in done.stdout.split() if word.isdigit())
    assert min(num_read, num_refused) > 0, done.stdout
