"""A client that puts a request's output together over several calls, and what it is told."""

from dataclasses import dataclass, field

import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from router.text.detokenizer import BYTE_BY_CHAR
from tests.router.fake_scheduler import Script
from tests.router.stack import Stack
from tests.router.tiny_models import byte_level_tokenizer

_ID_BY_BYTE = {
    BYTE_BY_CHAR[char]: token_id
    for char, token_id in byte_level_tokenizer().get_vocab().items()
    if char in BYTE_BY_CHAR
}
# Characters of one to four bytes, each byte a token, and beginnings of stop strings.
TEXT = "añb ENDE €uro EN 🙂🙂 EN\u00e9 ENDx ∑ fin "


def tokens_of(text):
    return [_ID_BY_BYTE[byte] for byte in text.encode()]


@dataclass
class Received:
    """What one completion's client has put together, and it sees each token once."""

    token_ids: list = field(default_factory=list)
    text: str = ""
    logprobs: list = field(default_factory=list)
    text_offsets: list = field(default_factory=list)
    end: tuple | None = None

    def add(self, output):
        assert self.end is None
        assert output.first_token_position == len(self.token_ids)
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        self.logprobs.extend(entry.SerializeToString() for entry in output.logprobs)
        self.text_offsets.extend(output.text_offsets)
        if output.finish_reason:
            self.end = (output.finish_reason, output.stop, output.stop_token_id)


@dataclass
class Client:
    """A caller that puts n completions together over several calls."""

    n: int
    completions: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    usage: tuple | None = None

    def __post_init__(self):
        self.completions = [Received() for _ in range(self.n)]

    @property
    def positions(self):
        return [len(received.token_ids) for received in self.completions]

    def add(self, message):
        self.prompt_logprobs.extend(p.SerializeToString() for p in message.prompt_logprobs)
        for output in message.outputs:
            received = self.completions[output.index]
            # What a client has to the end comes again with the others' rest.
            if received.end is None:
                received.add(output)
        if message.HasField("usage"):
            self.usage = (message.usage.prompt_tokens, message.usage.completion_tokens)

    async def read(self, call, num_messages=10**9, limit=10**9):
        """Read to the end, or some messages, as long as tokens before the limit are missing."""
        while num_messages and min(self.positions) < limit:
            message = await call.read()
            if message is grpc.aio.EOF:
                return
            self.add(message)
            num_messages -= 1


def script(submission):
    """Each completion says the same text from another place on."""
    index = int(submission.request_id.partition("#")[2] or 0)
    token_ids = tokens_of((TEXT[3 * index :] + TEXT) * 2)[: submission.sampling.max_tokens]
    return Script(token_ids)


def fields_of(case, chance):
    sampling = {"max_tokens": 60, "n": case.get("n", 1), "seed": 7} | case.get("sampling", {})
    fields = {key: value for key, value in case.items() if key not in {"n", "sampling"}}
    return fields | {"request_id": f"r-{chance}", "sampling": sampling}


CASES = [
    {},
    {"n": 3},
    {"sampling": {"stop": ["🙂 EN\u00e9 END"]}},
    {"sampling": {"stop": ["ENDx", "never"], "logprobs": 2}, "n": 3, "echo": True},
    {"sampling": {"stop": ["END"], "min_tokens": 20}, "include_stop_str_in_output": True},
    {"sampling": {"logprobs": 0, "prompt_logprobs": 1}, "n": 2},
    {"sampling": {"max_tokens": 7}, "echo": True, "text": "où"},
]


async def error_of(call):
    """The error that a call ends with; what it gives before is skipped."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Stack.rest(call)
    return from_rpc_error(caught.value)
