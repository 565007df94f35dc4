"""`LLM`: the engine for Python callers. Blocking; one thread at a time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ostinato.config import EngineConfig
from ostinato.engine import control
from ostinato.engine.build import Built, Progress, build
from ostinato.engine.engine import Engine
from ostinato.engine.output import Delta, OutputState
from ostinato.engine.stats import EngineStats, recording_stats
from ostinato.errors import ConfigError, OstinatoError
from ostinato.request import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt_token_ids": [...]}` / `{"prompt": "..."}`."""

Message = Mapping[str, Any]


class LLM:
    """A model, its KV cache and its recordings, ready when the constructor returns.

    Options are those of `EngineConfig`, with vLLM's names; unknown ones raise ConfigError. `on_progress(what, done,
    total)` hears of the recording phase. Use it as a context manager, or call `close`.
    """

    def __init__(self, model: str, *, on_progress: Progress | None = None, **options: Any) -> None:
        self._built: Built | None = build(EngineConfig.from_options(str(model), options), on_progress)
        self._ids = itertools.count()

    # -- generating --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; results in the order given. A list of params has one entry per prompt.

        Raises ConfigError or CapacityError, before anything runs, for a prompt or params that cannot be served.
        """
        batch = _as_batch(prompts)
        params = _per_prompt(sampling_params, len(batch))
        if priority is not None and len(priority) != len(batch):
            raise ConfigError(f"{len(priority)} priorities for {len(batch)} prompts")
        groups: list[_Group] = []
        try:
            for index, prompt in enumerate(batch):
                groups.append(self._submit(prompt, params[index], priority[index] if priority else 0))
            self._run(groups, use_tqdm)
        except BaseException:
            for group in groups:
                group.abort(self._engine)
            raise
        return [group.output() for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` on conversations rendered with the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self.chat_prompt(conversation, chat_template_kwargs) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The rendered conversation and its token ids, as a prompt."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ConfigError("chat needs a tokenizer with a chat template; this model has none: pass token ids")
        text = tokenizer.apply_chat_template([dict(m) for m in messages], **dict(chat_template_kwargs or {}))
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Yields what each token adds, as it is collected. Several streams, and `generate`, may be interleaved."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ConfigError("stream gives one answer: use n=1")
        group = self._submit(prompt, params, 0)
        return Stream(self._engine, group.members[0])

    # -- the rest ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        built = self._require()
        built.engine.poll_connector()
        runner, kv = built.engine.runner, built.engine.scheduler.kv
        return EngineStats(
            steps=runner.counters.snapshot(),
            live_sizes=runner.counters.live_sizes(),
            num_recordings=runner.store.num_recordings,
            num_pending=runner.num_pending,
            recording_bytes=runner.store.bytes,
            capture_s=runner.store.seconds,
            num_blocks=built.pool.num_blocks,
            free_blocks=kv.num_free,
            cached_blocks=kv.num_cached,
            prefix_hit_tokens=kv.prefix_hit_tokens,
            preemptions=built.engine.scheduler.preemptions,
            resolved_mode=built.config.resolved_mode.value,
            capture_sizes=built.uniform_sizes,
            mixed_capture_sizes=built.mixed_sizes,
            backend=runner.backend.name,
            attention_backend=runner.attention_backend,
            device=str(built.device),
            dtype=str(built.dtype).removeprefix("torch."),
            kv_cache_dtype=built.pool.storage.name,
            block_size=built.config.block_size,
            max_model_len=built.max_model_len,
            max_num_seqs=built.config.max_num_seqs,
            max_num_batched_tokens=built.config.max_num_batched_tokens,
            memory=built.memory(),
            num_checked=runner.num_checked,
            recordings=recording_stats(runner.store.table()),
            startup_s=dict(built.seconds),
            asleep=built.engine.missing,
            connector=None if built.connector is None else built.connector.scheduler.stats(),
        )

    # -- between steps -----------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and KV cache back; open requests wait. Level 1 keeps the weights in host memory,
        level 2 reads them from the checkpoint again. Recordings stay as they are."""
        control.sleep(self._require(), level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes "weights", "kv_cache" or both (None) back. Nothing runs until both are there."""
        control.wake_up(self._require(), tags)

    def is_sleeping(self) -> bool:
        """Whether anything that a step needs is missing."""
        return bool(self._engine.missing)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Overwrites parameters in place, by their names in the checkpoint; returns how many. No graph is recorded
        again. Open requests are computed again with the new weights. See `control.update_weights` for errors."""
        return control.update_weights(self._require(), tensors)

    def reload_weights(self) -> None:
        """All parameters from the checkpoint again."""
        control.reload_weights(self._require())

    def reconfigure(self, *, on_progress: Progress | None = None, **options: Any) -> control.Reconfiguration:
        """Records again what these options change, and only that: `cudagraph_mode`, `cudagraph_capture_sizes`,
        `max_num_seqs`, `max_num_batched_tokens`, `kv_cache_dtype`. `cudagraph_capture_sizes="auto"` takes the sizes
        from the steps so far. Open requests go on. Says what it did and what it cost; on any error everything is as it
        was before."""
        return control.reconfigure(self._require(), options, on_progress)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self._engine.tokenizer

    @property
    def engine(self) -> Engine:
        """The parts underneath, for tests and tools."""
        return self._engine

    def close(self) -> None:
        """Ends every request, destroys the recordings as one set, then frees the memory. Safe to call twice."""
        built, self._built = self._built, None
        if built is not None:
            try:
                built.engine.settle()
            finally:
                built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _require(self) -> Built:
        if self._built is None:
            raise OstinatoError("this LLM is closed")
        return self._built

    @property
    def _engine(self) -> Engine:
        return self._require().engine

    def _submit(self, prompt: Prompt, params: SamplingParams, priority: int) -> _Group:
        text, token_ids = self._tokenize(prompt)
        group = _Group(f"request-{next(self._ids)}", text, token_ids, [])
        try:
            for index in range(params.n):
                name = group.request_id if params.n == 1 else f"{group.request_id}/{index}"
                one = params.for_answer(index)
                group.members.append(self._engine.add_request(name, token_ids, one, priority=priority))
        except BaseException:
            group.abort(self._engine)
            raise
        return group

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        if isinstance(prompt, Mapping):
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            if ids is None and text is None:
                raise ConfigError("a prompt mapping needs 'prompt_token_ids' or 'prompt'")
            if ids is not None:
                return text, list(ids)
        elif isinstance(prompt, str):
            text = prompt
        else:
            return None, list(prompt)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ConfigError("this model has no tokenizer: pass token ids instead of text")
        assert text is not None
        return text, tokenizer.encode(text)

    def _run(self, groups: list[_Group], show_progress: bool) -> None:
        members = [member for group in groups for member in group.members]
        if not show_progress:
            while any(not member.request.finished for member in members):
                self._engine.step()
            return
        from ostinato.progress import bar

        with bar("generating", len(members)) as update:
            done = num_tokens = 0
            while done < len(members):
                num_tokens += sum(len(delta.token_ids) for delta in self._engine.step())
                done = sum(member.request.finished for member in members)
                update(done, f"{num_tokens} tokens")


class Stream(Iterator[Delta]):
    """One request's deltas. Closing or dropping it before the end aborts the request."""

    def __init__(self, engine: Engine, output: OutputState) -> None:
        self._engine, self._output = engine, output
        self._pending: deque[Delta] = deque()
        output.pending = self._pending

    def __next__(self) -> Delta:
        while not self._pending:
            request = self._output.request
            if request.finished and (request.finish_reason is not FinishReason.ERROR or self._engine.failure is None):
                raise StopIteration
            self._engine.step()  # after a fault it says what that was
        return self._pending.popleft()

    def close(self) -> None:
        self._engine.abort(self._output.request.request_id)
        self._pending.clear()

    def __del__(self) -> None:
        self.close()


class _Group:
    """The requests that one prompt became: `n` of them."""

    def __init__(self, request_id: str, prompt: str | None, token_ids: list[int], members: list[OutputState]) -> None:
        self.request_id, self.prompt, self.token_ids, self.members = request_id, prompt, token_ids, members

    def abort(self, engine: Engine) -> None:
        for member in self.members:
            engine.abort(member.request.request_id)

    def output(self) -> RequestOutput:
        first = self.members[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.token_ids,
            outputs=[member.completion(index) for index, member in enumerate(self.members)],
            finished=all(member.request.finished for member in self.members),
            num_cached_tokens=first.request.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs,
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    batch: list[Any] = list(prompts)
    if batch and all(isinstance(entry, int) for entry in batch):
        return [batch]
    return batch


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling params for {count} prompts: give one for all, or one each")
    return list(params)
