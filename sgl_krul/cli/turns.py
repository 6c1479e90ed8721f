"""One turn of a chat through the OpenAI API, streamed and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

__all__ = ["Turn", "ask", "connect", "served_model"]


@dataclass(frozen=True)
class Turn:
    """An answer. `tokens` holds (text, log probability) of each token, where they were asked for.

    Of the `prompt_tokens`, `cached_tokens` had their KV already; `restored_tokens` of those came back from
    the session's stored KV.
    """

    text: str
    tokens: tuple[tuple[str, float], ...]
    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model had to compute."""
        return self.prompt_tokens - self.cached_tokens


def connect(base_url: str, api_key: str | None) -> OpenAI:
    """The OpenAI SDK's client for the server at `base_url` (without /v1)."""
    from openai import OpenAI

    # A retry would be timed with the rest, and hide what is wrong.
    return OpenAI(base_url=f"{base_url}/v1", api_key=api_key or "none", max_retries=0)


def served_model(client: OpenAI) -> str:
    """The name of the model the server has."""
    return next(iter(client.models.list())).id


def ask(
    client: OpenAI,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    extra: Mapping[str, Any],
    logprobs: bool = False,
    temperature: float | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Turn:
    """Ask and stream the answer; `extra` carries session_id and cache_salt.

    Raises openai.OpenAIError, as the SDK does. An interrupted stream is closed, which stops the server.
    """
    given: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    asked: list[ChatCompletionMessageParam] = list(messages)  # type: ignore[arg-type]
    text: list[str] = []
    tokens: list[tuple[str, float]] = []
    usage: Any = None
    details: Mapping[str, Any] = {}
    start = time.perf_counter()
    first = 0.0
    with client.chat.completions.create(
        model=model,
        messages=asked,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_cached_tokens_details": True, **extra},
        **given,
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            details = _cached_details(chunk) or details
            for choice in chunk.choices:
                if choice.logprobs is not None and choice.logprobs.content:
                    tokens += [(token.token, token.logprob) for token in choice.logprobs.content]
                piece = choice.delta.content
                if piece:
                    first = first or time.perf_counter() - start
                    text.append(piece)
                    on_text(piece)
    total_s = time.perf_counter() - start
    prompt = getattr(usage, "prompt_tokens_details", None)
    return Turn(
        text="".join(text),
        tokens=tuple(tokens),
        first_token_s=first or total_s,
        total_s=total_s,
        prompt_tokens=getattr(usage, "prompt_tokens", 0),
        cached_tokens=getattr(prompt, "cached_tokens", 0) or 0,
        restored_tokens=int(details.get("host") or 0),
    )


def _cached_details(chunk: Any) -> Mapping[str, Any]:
    """SGLang's {"device": n, "host": n}; "host" is what our linker brought back."""
    extension = (chunk.model_extra or {}).get("sglext")
    found = extension.get("cached_tokens_details") if isinstance(extension, dict) else None
    return found if isinstance(found, dict) else {}
