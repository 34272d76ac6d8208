"""Loading a model's text side from folders and GGUF files, against `transformers` as referee."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.service.gguf_header import GgufError, read_gguf_header
from router.text.errors import ChatTemplateError, UnsupportedTokenizerError
from router.text.gguf_tokenizer import build_gguf_tokenizer
from router.text.gguf_vocabulary import read_vocabulary
from router.text.tokenizer import faults_named, load_model_text
from tests.router.tiny_models import byte_level_tokenizer

MESSAGES = [
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "Thanks 🎉\n\n  and <|im_end|>?"},
]

TEXTS = [
    "Hello, world!", "  two  spaces\tand\ttabs \n\n new lines\r\n", "naïve café Ångström",
    "你好,世界", "👩‍👩‍👧‍👦 family 🎉🎉", "def f(x):\n    return x**2  # no", "I'm we'll they'd 's",
    "مرحبا بالعالم", "\u00a0nbsp\u2003em", "<|im_start|>user\nhi<|im_end|>", "é vs e\u0301",
    "a" * 300, "\x00\x01\x7f",
]  # fmt: skip


def write_folder(folder, tokenizer=None, **config):
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_gives_tokenizer_and_template(tmp_path):
    folder = write_folder(
        tmp_path,
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        bos_token={"content": "<b>"},
        eos_token="<|end|>",
    )
    model = load_model_text(folder)
    chat = model.chat_prompt([{"role": "user", "content": "x"}], add_generation_prompt=True)
    assert chat.text == "<b>x<|end|>"
    assert model.tokenizer.encode("hello", add_special_tokens=True).tolist() == [259]


def test_a_template_file_wins_and_a_named_default_is_found(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, chat_template=named)
    assert load_model_text(folder).chat_prompt([], add_generation_prompt=True).text == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert load_model_text(folder).chat_prompt([], add_generation_prompt=True).text == "F"


def test_without_a_template_chat_is_refused(tmp_path):
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_model_text(write_folder(tmp_path)).chat_prompt([], add_generation_prompt=True)


def test_a_saved_limit_on_length_does_not_cut_prompts(tmp_path):
    tokenizer = byte_level_tokenizer().from_str(byte_level_tokenizer().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    model = load_model_text(write_folder(tmp_path, tokenizer))
    assert len(model.tokenizer.encode("x" * 50, add_special_tokens=True)) == 50
    assert len(model.tokenizer.encode("x", add_special_tokens=True)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no tokenizer.json"), ("{", "cannot be read"), ('{"model": 1}', "cannot be read")],
)
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UnsupportedTokenizerError, match=message):
        load_model_text(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"}, "'odd' is not supported"),
        ({}, "None is not supported"),
    ],
)
def test_gguf_kinds_that_are_not_known_are_refused_by_name(metadata, message):
    with pytest.raises(UnsupportedTokenizerError, match=message):
        build_gguf_tokenizer(read_vocabulary(metadata))


def tiny_gguf(**changes):
    alphabet = sorted(chr(c) for c in (*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
    alphabet += [chr(c) for c in range(256, 324)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*alphabet, "ĠĠ", "11", "<s>", "<mine>"],
        "tokenizer.ggml.token_type": [1] * (len(alphabet) + 2) + [3, 4],
        "tokenizer.ggml.merges": ["Ġ Ġ", "1 1"],
        "tokenizer.ggml.bos_token_id": len(alphabet) + 2,
    } | changes


def test_smollm_splits_each_digit_from_what_is_around_it():
    tokenizer = build_gguf_tokenizer(read_vocabulary(tiny_gguf()))
    assert tokenizer.encode("x  11").tokens == ["x", "ĠĠ", "1", "1"]


def test_gguf_tokens_keep_their_kinds():
    tokenizer = build_gguf_tokenizer(
        read_vocabulary(tiny_gguf(**{"tokenizer.ggml.add_bos_token": True}))
    )
    token_ids = tokenizer.encode("a<mine>").ids
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "a<mine>"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>a<mine>"
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@given(text=st.text(max_size=60))
def test_every_pre_tokenizer_loses_no_text(pre, text):
    tokenizer = build_gguf_tokenizer(read_vocabulary(tiny_gguf(**{"tokenizer.ggml.pre": pre})))
    whole = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == whole


def gguf_file(file, *pairs):
    """pairs: key, value type, packed value."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, kind, value in pairs:
        data += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    file.write_bytes(data)
    return file


def test_gguf_headers_are_read_by_type(tmp_path):
    strings = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 2) + b"ab" + struct.pack("<Q", 0)
    file = gguf_file(
        tmp_path / "a.gguf",
        ("n", 4, struct.pack("<I", 7)),
        ("yes", 7, b"\x01"),
        ("s", 8, struct.pack("<Q", 2) + "é".encode()),
        ("ints", 9, struct.pack("<IQiii", 5, 3, -1, 0, 9)),
        ("strings", 9, strings),
        ("half", 6, struct.pack("<f", 0.5)),
    )
    assert read_gguf_header(file, with_strings=True).metadata == {
        "n": 7, "yes": True, "s": "é", "ints": [-1, 0, 9], "strings": ["ab", ""], "half": 0.5,
    }  # fmt: skip


def test_a_file_that_is_not_whole_gguf_is_refused(tmp_path):
    whole = gguf_file(tmp_path / "a.gguf", ("s", 8, struct.pack("<Q", 9) + b"short"))
    for data in (whole.read_bytes(), whole.read_bytes()[:30], b"GGUF\x09\0\0\0", b"PK"):
        file = tmp_path / "b.gguf"
        file.write_bytes(data)
        with pytest.raises(GgufError):
            read_gguf_header(file, with_strings=True)
        with pytest.raises(UnsupportedTokenizerError):
            load_model_text(file)


@pytest.fixture(scope="session")
def real_model(model_path):
    return load_model_text(model_path)


@pytest.fixture(scope="session")
def referee(model_path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name
    )


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_those_of_transformers(real_model, referee, text):
    ours = real_model.tokenizer.encode(text, add_special_tokens=True).tolist()
    assert ours == referee(text)["input_ids"]
    assert real_model.tokenizer.decode(ours) == referee.decode(ours, skip_special_tokens=True)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(blacklist_categories=("Cs", "N")), max_size=60))
def test_any_text_without_digits_has_the_tokens_of_transformers(real_model, referee, text):
    # With digits the referee errs: reading a GGUF file it does not split them one by one.
    ours = real_model.tokenizer.encode(text, add_special_tokens=True).tolist()
    assert ours == referee(text)["input_ids"]


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_chat_prompts_equal_those_of_transformers(real_model, referee):
    for asks in (True, False):
        theirs = referee.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=asks)
        assert real_model.chat_prompt(MESSAGES, add_generation_prompt=asks).text == theirs


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_streamed_text_of_the_real_model_equals_decoding_at_once(real_model, token_ids):
    stream = real_model.tokenizer.detokenizer(())
    ours = "".join(stream.push([token_id]) for token_id in token_ids) + stream.finish()
    whole = real_model.tokenizer._tokenizer.decode(token_ids)
    assert whole.startswith(ours)
    assert set(whole[len(ours) :]) <= {"\ufffd"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", ["x" * 1_001], r"length <= 1000.*ggml.tokens"),
        ("tokens", ["x" * 1_000] * 17_000, "ggml.tokens has 17000000 characters"),
        ("tokens", 7, r"Expected `array`, got `int`.*ggml.tokens"),
        ("token_type", [1], "ggml.token_type has 1 values for 260 tokens"),
        ("token_type", ["a"], "ggml.token_type"),
        ("scores", [float("nan")] * 260, "ggml.scores has a value that is no finite number"),
        ("merges", ["ab"], "ggml.merges"),
        ("merges", ["x yz"], "cannot be read.*yz"),
        ("bos_token_id", 2**32 - 1, "ggml.bos_token_id is 4294967295; there are 260 tokens"),
        ("unknown_token_id", -1, "ggml.unknown_token_id"),
        ("add_bos_token", "yes", "ggml.add_bos_token"),
        ("pre", 3, "ggml.pre"),
    ],
)
def test_a_damaged_gguf_vocabulary_is_refused_by_key_and_value(key, value, message):
    with (
        pytest.raises(UnsupportedTokenizerError, match=f"m.gguf: .*{message}"),
        faults_named(Path("m.gguf")),
    ):
        build_gguf_tokenizer(read_vocabulary(tiny_gguf(**{f"tokenizer.ggml.{key}": value})))


def test_an_id_far_beyond_the_vocabulary_is_refused_before_it_costs_memory(tmp_path):
    settings = json.loads(byte_level_tokenizer().to_str())
    settings["model"]["vocab"]["far"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedTokenizerError, match="'far' has the id 4294967295"):
        load_model_text(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON"),
        ("special_tokens_map.json", "{", "special_tokens_map.json is not JSON"),
        ("tokenizer.json", '{"a":' * 100_000, "tokenizer.json cannot be read"),
        ("chat_template.jinja", b"\xff", "cannot be read: UnicodeDecodeError"),
    ],
)
def test_damaged_files_of_a_folder_are_named(tmp_path, name, content, message):
    folder = write_folder(tmp_path)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UnsupportedTokenizerError, match=message) as caught:
        load_model_text(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("value", [3, [3], [{"name": "default"}], {"a": "b"}, [{"template": "x"}]])
def test_a_template_that_is_no_text_is_none(tmp_path, value):
    assert load_model_text(write_folder(tmp_path, chat_template=value)).chat_template is None


def test_a_file_too_large_is_refused_unread(tmp_path):
    with (write_folder(tmp_path) / "tokenizer.json").open("ab") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(UnsupportedTokenizerError, match="has 268435457 bytes"):
        load_model_text(tmp_path)
