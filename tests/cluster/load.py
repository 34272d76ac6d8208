"""Clients that generate without a pause, and check each answer whole."""

import asyncio
from typing import Self

from headrace.client import HeadraceClient, ServiceError
from headrace.service.channels import ChannelConfig
from headrace.types import Completion, Sampling
from tests.chaos import stub_model


class Load:
    """So many clients at one address; leaving waits for the answers under way.

    A client does what the API says: it sends a request again that was refused with a RetryInfo. Any
    other refusal, a lost stream or a wrong token fails the `async with`.
    """

    def __init__(
        self, address: str, config: ChannelConfig, num_clients: int = 4, num_tokens: int = 40
    ) -> None:
        self._address = address
        self._config = config
        self._num_clients = num_clients
        self._num_tokens = num_tokens
        self._is_over = False
        self._tasks = asyncio.TaskGroup()
        self._answered = asyncio.Event()
        self.num_answers = 0
        self.num_resumes = 0
        self.num_refused = 0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for i in range(self._num_clients):
            self._tasks.create_task(self._ask_again_and_again(i))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await self._tasks.__aexit__(*error)  # type: ignore[arg-type]

    async def until_answered(self, num_answers: int = 4) -> None:
        """Wait for so many more answers."""
        wanted = self.num_answers + num_answers
        while self.num_answers < wanted:
            self._answered.clear()
            await self._answered.wait()

    async def _ask_again_and_again(self, client_id: int) -> None:
        num_asked = 0
        async with HeadraceClient(self._address, self._config) as client:
            while not self._is_over:
                num_asked += 1
                await self._ask(client, f"client {client_id}, prompt {num_asked}: ", num_asked)

    async def _ask(self, client: HeadraceClient, prompt: str, seed: int) -> None:
        sampling = Sampling(
            max_tokens=self._num_tokens, temperature=1.0, seed=seed, ignore_eos=True
        )
        async with asyncio.timeout(90):
            while (answer := await self._once(client, prompt, sampling)) is None:
                self.num_refused += 1
        wanted = stub_model.generated(list(prompt.encode()), self._num_tokens, seed=seed)
        assert answer.text == stub_model.text_of(wanted), f"{prompt}: {answer.text}"
        self.num_answers += 1
        self._answered.set()
        self.num_resumes += answer.num_resumes

    @staticmethod
    async def _once(client: HeadraceClient, prompt: str, sampling: Sampling) -> Completion | None:
        """The answer; None if the request was refused, and may be sent again now."""
        try:
            return await client.complete(prompt, sampling=sampling)
        except ServiceError as error:
            if error.retry_after_s is None:
                raise
            await asyncio.sleep(error.retry_after_s)
            return None
