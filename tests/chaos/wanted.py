"""Requests of the load, drawn from a seed, with what each must give."""

import time
from dataclasses import dataclass, field
from random import Random

from headrace.v1 import common_pb2, inference_pb2
from tests.chaos import stub_model

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
_PREFIXES = [b"Once upon a time there was a river. ", b"It is " * 20, b""]
_LETTERS = b"abcdefghijklmnopqrstuvwxyz ,."
# What the client does beside reading, and how often.
WEIGHTS = {
    "read": 6,
    "library": 6,  # reads by HeadraceClient, which resumes by itself
    "leave": 3,  # closes its call in the middle and resumes later
    "rival": 2,  # a second call resumes while the first still reads
    "reread": 2,  # reads the finished request once more
    "repeat": 2,  # sends the same Generate once more, in the middle
    "clash": 1,  # sends another Generate with the same id
    "abort": 3,
    "deadline": 2,
    "slow": 2,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one completion gives when nothing disturbs it."""

    token_ids: list[int]
    text: str
    finish_reason: int
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, what its client does, and its answers by index."""

    request: inference_pb2.GenerateRequest
    does: str
    answers: list[Answer] = field(default_factory=list)

    @property
    def may_end_early(self) -> bool:
        return self.does in {"abort", "deadline"}


def draw(rng: Random, request_id: str, behaviours: frozenset[str] = frozenset(WEIGHTS)) -> Wanted:
    """The next request of a client that does one of `behaviours`."""
    names = sorted(behaviours)
    (does,) = rng.choices(names, [WEIGHTS[name] for name in names])
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        priority=rng.randint(-1, 1),
        tenant=rng.choice(("", "acme")),
        keep_on_disconnect=True,
    )
    letters = bytes(rng.choices(_LETTERS, k=rng.randint(1, 40)))
    prompt = rng.choice(_PREFIXES) + letters
    if rng.random() < 0.5:
        request.text = prompt.decode()
    else:
        request.token_ids.ids.extend(prompt)
    _draw_sampling(rng, request.sampling)
    if does == "slow":
        request.sampling.max_tokens, request.sampling.logprobs = 500, 20
        request.sampling.ignore_eos = True
        del request.sampling.stop[:]
    if does == "deadline":
        request.sampling.max_tokens, request.sampling.ignore_eos = 600, True
        request.deadline.FromNanoseconds(int((time.time() + rng.uniform(1, 5)) * 1e9))
    if does == "clash":
        # Long enough to live when the other request comes: an id is free again at its end.
        request.sampling.max_tokens, request.sampling.ignore_eos = 600, True
        del request.sampling.stop[:]
    request.include_stop_str_in_output = rng.random() < 0.3
    request.sampling.n = rng.choice((2, 3)) if does != "slow" and rng.random() < 0.2 else 1
    answers = [answer(request, prompt, index) for index in range(request.sampling.n)]
    return Wanted(request, does, answers)


def _draw_sampling(rng: Random, sampling: common_pb2.SamplingParams) -> None:
    sampling.max_tokens = rng.choice((1, 20, 60, 120, 250, 400))
    sampling.ignore_eos = rng.random() < 0.5
    sampling.temperature = rng.choice((0.0, 0.8, 1.0))
    sampling.seed = rng.getrandbits(40)
    if rng.random() < 0.35:
        pair = "".join(chr(letter) for letter in rng.choices(_LETTERS, k=2))
        sampling.stop.extend([pair, "zzzz"])
    if rng.random() < 0.25:
        sampling.logprobs = rng.choice((0, 2))
    if rng.random() < 0.1:
        sampling.prompt_logprobs = 1


def answer(request: inference_pb2.GenerateRequest, prompt: bytes, index: int) -> Answer:
    """What the stub model gives; the stop strings as the API defines them."""
    sampling = request.sampling
    is_drawn = sampling.temperature >= 1e-5
    seed = stub_model.seed_of(sampling.seed, index) if is_drawn else 0
    ids = stub_model.generated(
        list(prompt), sampling.max_tokens, seed=seed, ignore_eos=sampling.ignore_eos
    )
    if sampling.stop:
        for count in range(1, len(ids) + 1):
            text = stub_model.text_of(ids[:count])
            ends = [stop for stop in sampling.stop if text.endswith(stop)]
            if ends and ids[count - 1] != stub_model.EOS_TOKEN_ID:
                stop = max(ends, key=len)
                if not request.include_stop_str_in_output:
                    text = text.removesuffix(stop)
                return Answer(ids[:count], text, STOP, stop)
    is_ended = ids[-1] == stub_model.EOS_TOKEN_ID and not sampling.ignore_eos
    return Answer(ids, stub_model.text_of(ids), STOP if is_ended else LENGTH)
