"""What an engine without work answers: ready-made bytes in the shapes of vLLM's chat endpoint."""

from functools import lru_cache

import msgspec

MODEL = "idle"
PROMPT_TOKENS = 200
"""Whatever the prompt is."""

_ID = "chatcmpl-0f4c0ffee5b54d2d9d5f5a0a6f2d7c11"
_ENVELOPE = f'"id":"{_ID}","object":"chat.completion.chunk","created":1760000000,"model":"{MODEL}"'

MODELS = msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]})
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
PREFILLED = msgspec.json.encode(
    {
        "id": _ID,
        "object": "chat.completion",
        "created": 1760000000,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "w"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1, "total_tokens": PROMPT_TOKENS + 1},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(PROMPT_TOKENS // 16))],
            "remote_engine_id": "0f4c0ffe-e5b5-4d2d-9d5f-5a0a6f2d7c11",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
    }
)
"""A prefill leg's answer, with its handle."""


def n_events(n_tokens: int) -> int:
    """Events of a stream whose usage was not asked for: the role, the tokens, [DONE]."""
    return n_tokens + 2


@lru_cache(maxsize=64)
def stream_writes(n_tokens: int, with_usage: bool, events_a_write: int) -> list[bytes]:
    """A stream, each event in a chunk of HTTP's own, cut into so many events a write."""
    events = [_event('{"role":"assistant","content":""}', "null")]
    for i in range(n_tokens):
        events.append(_event(f'{{"content":" w{i % 1000}"}}', '"length"' if i == n_tokens - 1 else "null"))
    if with_usage:
        counts = f'"prompt_tokens":{PROMPT_TOKENS},"total_tokens":{PROMPT_TOKENS + n_tokens}'
        events.append(f'data: {{{_ENVELOPE},"choices":[],"usage":{{{counts},"completion_tokens":{n_tokens}}}}}\n\n')
    events.append("data: [DONE]\n\n")
    chunks = [f"{len(event):x}\r\n{event}\r\n".encode() for event in events]
    return [b"".join(chunks[i : i + events_a_write]) for i in range(0, len(chunks), events_a_write)]


def _event(delta: str, finish_reason: str) -> str:
    choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish_reason},"token_ids":null}}'
    return f'data: {{{_ENVELOPE},"choices":[{choice}]}}\n\n'
