"""What a model recommends holds where a request leaves a field unset, and nowhere else."""

import json

import pytest

from headrace.client import HeadraceClient
from headrace.service.model_files import CATALOG, ModelFilesError
from headrace.types import ChatMessage, Sampling
from headrace.v1 import common_pb2
from router.rpc.model_defaults import DEFAULT_CHAT_MAX_TOKENS, ModelDefaults, read_defaults
from tests.router.fake_scheduler import MODEL, Script
from tests.router.stack import running_stack

RECOMMENDED = {
    "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
}  # fmt: skip


def write(folder, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_a_folders_recommendations_are_read(tmp_path):
    folder = write(
        tmp_path,
        RECOMMENDED | {"do_sample": True, "max_new_tokens": 300, "eos_token_id": [1], "x": None},
    )
    expected = common_pb2.SamplingParams(max_tokens=300, **RECOMMENDED)
    assert read_defaults(folder).sampling == expected


def test_a_folder_without_recommendations_has_none(tmp_path):
    assert read_defaults(tmp_path) == ModelDefaults()
    assert read_defaults(write(tmp_path, {"eos_token_id": 2, "top_p": None})) == ModelDefaults()


def test_a_model_that_does_not_want_sampling_is_greedy(tmp_path):
    folder = write(tmp_path, {"do_sample": False, "temperature": 0.7})
    assert read_defaults(folder).sampling == common_pb2.SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ({"temperature": "hot"}, "temperature: ", "must be a number, is 'hot'"),
        ({"temperature": -1}, "temperature: ", "must be a finite number of at least 0, is -1"),
        ('{"temperature": NaN}', "temperature: ", "must be a finite number"),
        ({"temperature": 1e39}, "temperature: ", "must be"),
        ({"temperature": 10**400}, "temperature: ", "must be"),
        ({"temperature": True}, "temperature: ", "must be a number, is True"),
        ({"top_p": 1.5}, "top_p: ", "must be above 0 and at most 1, is 1.5"),
        ({"top_p": [0.9]}, "top_p: ", "must be a number"),
        ({"top_k": -1}, "top_k: ", "must be in the range of its field, is -1"),
        ({"top_k": 2**40}, "top_k: ", "must be in the range of its field"),
        ({"top_k": 5.5}, "top_k: ", "must be a whole number, is 5.5"),
        ({"min_p": 2}, "min_p: ", "must be between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: ", "must be a finite number above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: ", "must be at least 1"),
        ({"do_sample": "no"}, "do_sample: ", "must be true or false, is 'no'"),
        ("[1]", "", "must be a JSON object"),
        ("{", "", "is not JSON"),
        ("[" * 100_000, "", "is not JSON"),
        (" " * 2_000_000, "", "at most 1048576 are read"),
    ],
)
def test_what_cannot_be_used_is_an_error_with_file_and_key(tmp_path, content, key, words):
    folder = write(tmp_path, content)
    with pytest.raises(ModelFilesError) as caught:
        read_defaults(folder)
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}")
    assert key in str(caught.value)
    assert words in str(caught.value)


def test_the_built_in_models_have_what_their_cards_recommend(tmp_path):
    for model in CATALOG.values():
        file = tmp_path / model.file_name
        with file.open("wb") as content:
            content.truncate(model.file_bytes)
        assert read_defaults(file).sampling.HasField("top_p")
    smollm2 = read_defaults(tmp_path / CATALOG["smollm2-135m-instruct"].file_name).sampling
    assert smollm2 == common_pb2.SamplingParams(temperature=0.2, top_p=0.9)


def test_another_gguf_file_has_no_recommendations(tmp_path):
    file = tmp_path / CATALOG["smollm2-135m-instruct"].file_name
    file.write_bytes(b"GGUF")
    assert read_defaults(file) == ModelDefaults()


def submitted(stack):
    sampling = stack.scheduler.submissions[-1].sampling
    return {name: getattr(sampling, name) for name in RECOMMENDED if sampling.HasField(name)}


async def test_fields_that_a_request_sets_win_also_with_zero():
    defaults = ModelDefaults(common_pb2.SamplingParams(**RECOMMENDED))
    async with running_stack(defaults={MODEL: defaults}) as stack:
        stack.scheduler.script = lambda _: Script([65])
        await stack.answer(sampling={})
        assert submitted(stack) == RECOMMENDED
        own = {
            "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1,
        }  # fmt: skip
        await stack.answer(sampling=own)
        assert submitted(stack) == own
        await stack.answer(sampling={"top_k": 0})
        assert submitted(stack) == RECOMMENDED | {"top_k": 0}
        async with HeadraceClient(stack.address) as client:
            await client.complete("hello", sampling=Sampling(temperature=0, min_p=0))
            assert submitted(stack) == RECOMMENDED | {"temperature": 0, "min_p": 0}
            await client.complete("hello")
            assert submitted(stack) == RECOMMENDED
            [model] = await client.models()
            assert model.default_sampling == RECOMMENDED
            assert model.default_chat_max_tokens == DEFAULT_CHAT_MAX_TOKENS


@pytest.mark.parametrize(
    ("recommended", "sampling", "is_chat", "expected"),
    [
        (None, {}, False, 4095),
        (None, {}, True, DEFAULT_CHAT_MAX_TOKENS),
        (None, {"max_tokens": 2000}, True, 2000),
        (None, {"min_tokens": 2000}, True, 2000),
        (300, {}, False, 300),
        (300, {}, True, 300),
        (300, {"min_tokens": 400}, False, 400),
        (9999, {}, False, 4095),
    ],
)
async def test_a_request_that_does_not_say_ends_at_a_sane_length(
    recommended, sampling, is_chat, expected
):
    defaults = ModelDefaults(common_pb2.SamplingParams(max_tokens=recommended))
    async with running_stack(defaults={MODEL: defaults}) as stack:
        stack.scheduler.script = lambda _: Script([65])
        async with HeadraceClient(stack.address) as client:
            prompt = [ChatMessage("user", "x")] if is_chat else [7]
            await client.complete(prompt, sampling=Sampling(**sampling))
        assert stack.scheduler.submissions[-1].sampling.max_tokens == expected
