"""What a client has got of one request, checked against what it must get, message by message."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.v1 import common_pb2, inference_pb2
from tests.chaos import stub_model
from tests.chaos.wanted import Answer, Wanted

ABORTED, DEADLINE = common_pb2.FINISH_REASON_ABORTED, common_pb2.FINISH_REASON_DEADLINE


@dataclass(slots=True)
class _Part:
    """One completion."""

    num_tokens: int = 0
    text: str = ""
    finish_reason: int = 0


@dataclass(slots=True)
class Received:
    """Tokens and text of a request over all calls that read it.

    faults: one sentence for each rule that a message breaks. A token that comes twice or is left
    out breaks the order; another token or text than that of the undisturbed run is wrong.
    """

    wanted: Wanted
    is_exact: bool = True  # log probabilities are those of the stub
    was_aborted: bool = False  # somebody has asked for the end
    faults: list[str] = field(default_factory=list)
    has_prompt_logprobs: bool = False
    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None  # when the first message came: the request was admitted by then
    _parts: list[_Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = [_Part() for _ in self.wanted.answers]

    @property
    def positions(self) -> list[int]:
        """The next token of each completion."""
        return [part.num_tokens for part in self._parts]

    @property
    def is_begun(self) -> bool:
        return any(part.num_tokens or part.finish_reason for part in self._parts)

    @property
    def is_finished(self) -> bool:
        return all(part.finish_reason for part in self._parts)

    @property
    def finish_reasons(self) -> list[int]:
        return [part.finish_reason for part in self._parts]

    def end(self, reason: int) -> None:
        """A status has ended what had not ended."""
        for part in self._parts:
            part.finish_reason = part.finish_reason or reason

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """One message, in order."""
        self.first_s = self.first_s or time.monotonic()
        if response.request_id != self.wanted.request.request_id:
            self.faults.append(f"a message of {response.request_id!r}")
        self.has_prompt_logprobs |= bool(response.prompt_logprobs)
        for output in response.outputs:
            self._take(output)

    def _take(self, output: inference_pb2.OutputDelta) -> None:
        part, answer = self._parts[output.index], self.wanted.answers[output.index]
        where = f"completion {output.index} at token {part.num_tokens}"
        if part.finish_reason:
            # A call that resumes several completions repeats how those ended that are over.
            if output.token_ids:
                self.faults.append(f"{where}: more after its end")
            return
        if output.token_ids and output.first_token_position != part.num_tokens:
            self.faults.append(f"{where}: got token {output.first_token_position} instead")
        end = part.num_tokens + len(output.token_ids)
        if list(output.token_ids) != answer.token_ids[part.num_tokens : end]:
            self.faults.append(f"{where}: other tokens than undisturbed")
        self._check_logprobs(where, output)
        part.num_tokens = end
        part.text += output.text
        if not answer.text.startswith(part.text):
            self.faults.append(f"{where}: other text than undisturbed")
        if output.finish_reason:
            part.finish_reason = output.finish_reason
            self._check_end(where, part, answer, output)

    def _check_logprobs(self, where: str, output: inference_pb2.OutputDelta) -> None:
        sampling = self.wanted.request.sampling
        if not sampling.HasField("logprobs"):
            return
        if len(output.logprobs) != len(output.token_ids):
            self.faults.append(f"{where}: {len(output.logprobs)} log probabilities")
        elif self.is_exact:
            ids = np.array(output.token_ids, dtype=np.int32)
            values, ranks, top_ids, _ = stub_model.logprobs(ids, sampling.logprobs)
            expected = zip(ids.tolist(), values.tolist(), ranks.tolist(), top_ids, strict=True)
            for i, (one, wanted) in enumerate(zip(output.logprobs, expected, strict=True)):
                if not _is_equal(one, wanted):
                    got = [found.token_id for found in output.logprobs[:8]]
                    self.faults.append(
                        f"{where}: wrong log probabilities at the message's token {i} of"
                        f" {len(ids)}: {ids[:8].tolist()}, got {got}"
                    )
                    break

    def _check_end(
        self, where: str, part: _Part, answer: Answer, output: inference_pb2.OutputDelta
    ) -> None:
        reason = output.finish_reason
        if reason == ABORTED and self.was_aborted:
            return
        if reason == DEADLINE and self.wanted.request.HasField("deadline"):
            return
        if reason != answer.finish_reason:
            name = common_pb2.FinishReason.Name(reason)
            self.faults.append(f"{where}: ended as {name}, {part.num_tokens} tokens")
        elif part.num_tokens != len(answer.token_ids) or part.text != answer.text:
            self.faults.append(f"{where}: ended with {part.num_tokens} tokens, {part.text[-20:]!r}")
        elif output.stop != answer.stop:
            self.faults.append(f"{where}: ended by {output.stop!r}, not {answer.stop!r}")


def _is_equal(one: common_pb2.TokenLogprobs, wanted: Any) -> bool:
    token_id, logprob, rank, top_ids = wanted
    if one.token_id != token_id or list(one.top_token_ids) != top_ids.tolist():
        return False
    return bool(one.logprob == logprob and one.rank == rank)
