"""The HTTP side of a load test: one session, one request a job, a time for each chunk of its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from ostinato.cli.bench.serve_drive import Clock
from ostinato.cli.bench.serve_load import Job
from ostinato.cli.bench.serve_stats import Outcome
from ostinato.cli.bench.serve_stream import DONE, EventParser, StreamError, error_message, read_chunk, shorten
from ostinato.errors import ConfigError

_CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """`url` without a path of the API: `http://127.0.0.1:8000`."""

    url: str
    endpoint: str
    api_key: str | None
    timeout_s: float


class Client:
    """An asynchronous context manager. Connections are kept and reused, as many as there are requests at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        key = self._target.api_key
        self._session = aiohttp.ClientSession(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s, connect=_CHECK_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, job: Job, clock: Clock) -> Outcome:
        """Never raises for what a server or a network does: that is the outcome."""
        answer = _Answer()
        sent_s = clock.now()
        failure: str | None = None
        detail = ""
        try:
            await self._stream(job, clock, answer)
        except StreamError as error:
            failure, detail = error.reason, error.detail
        except TimeoutError:
            failure, detail = "timeout", f"no end of the answer within {self._target.timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            failure, detail = "no connection", shorten(str(error))
        except (aiohttp.ClientError, OSError) as error:
            failure, detail = "connection lost", shorten(str(error) or type(error).__name__)
        return Outcome(
            index=job.index,
            due_s=job.due_s,
            sent_s=sent_s,
            end_s=clock.now(),
            output_times=tuple(answer.times),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=len(answer.times) if answer.output_tokens is None else answer.output_tokens,
            counted=answer.output_tokens is not None,
            failure=failure,
            detail=detail,
        )

    async def _stream(self, job: Job, clock: Clock, answer: _Answer) -> None:
        events = EventParser()
        async with self._session.post(self._target.url + self._target.endpoint, json=job.body) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}", _message_of(await response.text()))
            if response.content_type != "text/event-stream":
                raise StreamError("not a stream", f"the answer is {response.content_type}")
            async for received in response.content.iter_any():
                now = clock.now()
                for data in events.feed(received):
                    answer.take(data, now)
        answer.require_end()

    async def find_model(self, wanted: str | None) -> str:
        """The model to ask for. Raises ConfigError if the server is not there, refuses the key, or lacks the model."""
        body = await self._get("/v1/models")
        if body is None:
            if wanted is None:
                raise ConfigError(f"{self._target.url} does not list its models: name one with --model")
            return wanted
        rows = body.get("data") if isinstance(body, dict) else None
        names = [row["id"] for row in rows or [] if isinstance(row, dict) and isinstance(row.get("id"), str)]
        if wanted is None and not names:
            raise ConfigError(f"{self._target.url} lists no model: name one with --model")
        if wanted is not None and names and wanted not in names:
            raise ConfigError(f"--model {wanted}: the server has {', '.join(names)}")
        return wanted or names[0]

    async def find_version(self) -> str | None:
        body = await self._get("/version")
        version = body.get("version") if isinstance(body, dict) else None
        return None if version is None else str(version)

    async def _get(self, path: str) -> Any:
        """The JSON body, or None where the server knows no such path."""
        url = self._target.url + path
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)) as response:
                text = await response.text()
                status = response.status
        except TimeoutError:
            raise ConfigError(f"{url}: no answer within {_CHECK_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConfigError(f"{url} cannot be reached: {shorten(str(error) or type(error).__name__)}") from None
        if status in (401, 403):
            hint = "give one with --api-key" if self._target.api_key is None else "it does not take this --api-key"
            raise ConfigError(f"{self._target.url} asks for a key (HTTP {status}): {hint}")
        if status in (404, 405):
            return None
        if status != 200:
            raise ConfigError(f"{url}: HTTP {status}: {_message_of(text)}")
        try:
            return json.loads(text)
        except ValueError:
            return None


class _Answer:
    """What one stream has brought so far."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self._ended = False

    def take(self, data: str, now: float) -> None:
        if data == DONE:
            self._ended = True
            return
        chunk = read_chunk(data)
        self._ended |= chunk.finished
        if chunk.has_output:
            self.times.append(now)
        if chunk.output_tokens is not None:
            self.prompt_tokens, self.output_tokens = chunk.prompt_tokens, chunk.output_tokens

    def require_end(self) -> None:
        """Raises StreamError for an answer that was cut off, or that said nothing."""
        if not self._ended:
            raise StreamError("stream cut short", f"after {len(self.times)} chunks")
        if not self.times:
            raise StreamError("empty answer")


def _message_of(text: str) -> str:
    try:
        return error_message(json.loads(text))
    except ValueError:
        return shorten(text)
