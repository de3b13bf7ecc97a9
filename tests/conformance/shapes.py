"""What vLLM 0.32's documents look like: their fields in order, with types or exact values.

A shape is a type, an exact value, a tuple of alternatives, a list with the shape of every element, or a dictionary
of shapes, whose fields must be all there, in this order.
"""

from typing import Any

Shape = Any

TEXT_OR_NONE = (str, None)

USAGE: Shape = {"prompt_tokens": int, "total_tokens": int, "completion_tokens": int}
WHOLE_USAGE: Shape = {
    **USAGE,
    "prompt_tokens_details": {"cached_tokens": int, "created_cache_tokens": (int, None), "multimodal_tokens": None},
    "completion_tokens_details": None,
}
HANDLE: Shape = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[int]],
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": int,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": int,
}
COMPLETION: Shape = {
    "id": str,
    "object": "text_completion",
    "created": int,
    "model": str,
    "choices": [
        {
            "index": 0,
            "text": str,
            "logprobs": None,
            "finish_reason": ("length", "stop"),
            "stop_reason": (int, None),
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": TEXT_OR_NONE,
    "usage": WHOLE_USAGE,
    "kv_transfer_params": (HANDLE, None),
    "ec_transfer_params": None,
    "metrics": None,
}
CHAT: Shape = {
    "id": str,
    "object": "chat.completion",
    "created": int,
    "model": str,
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": str,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": ("length", "stop"),
            "stop_reason": (int, None),
            "token_ids": None,
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": TEXT_OR_NONE,
    "usage": WHOLE_USAGE,
    "prompt_logprobs": None,
    "prompt_token_ids": None,
    "prompt_text": None,
    "kv_transfer_params": (HANDLE, None),
    "ec_transfer_params": None,
    "metrics": None,
}

_STREAMED: Shape = {"id": str, "object": "text_completion", "created": int, "model": str}
_CHOICE: Shape = {"index": 0, "text": str, "logprobs": None}
_IDS: Shape = {"prompt_token_ids": None, "token_ids": None}
COMPLETION_CHUNK: Shape = {
    **_STREAMED,
    "choices": [{**_CHOICE, "finish_reason": None, "stop_reason": None, **_IDS}],
}
COMPLETION_END: Shape = {
    **_STREAMED,
    "choices": [{**_CHOICE, "finish_reason": ("length", "stop"), "stop_reason": (int, None), **_IDS}],
}
FINGERPRINT: Shape = {"system_fingerprint": str}
COMPLETION_USAGE: Shape = {
    **_STREAMED,
    "choices": [],
    "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": int}},
    **FINGERPRINT,
}

_CHAT_STREAMED: Shape = {**_STREAMED, "object": "chat.completion.chunk"}
CHAT_ROLE: Shape = {
    **_CHAT_STREAMED,
    "choices": [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
    ],
    "prompt_token_ids": None,
    "prompt_text": None,
}
CHAT_CHUNK: Shape = {
    **_CHAT_STREAMED,
    "choices": [{"index": 0, "delta": {"content": str}, "logprobs": None, "finish_reason": None, "token_ids": None}],
}
CHAT_END: Shape = {
    **_CHAT_STREAMED,
    "choices": [
        {
            "index": 0,
            "delta": {"content": str},
            "logprobs": None,
            "finish_reason": ("length", "stop"),
            "stop_reason": (int, None),
            "token_ids": None,
        }
    ],
}
CHAT_USAGE: Shape = {
    **_CHAT_STREAMED,
    "choices": [],
    "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": int, "created_cache_tokens": int}},
    **FINGERPRINT,
}

ERROR: Shape = {"error": {"message": str, "type": str, "param": TEXT_OR_NONE, "code": int}}
MODELS: Shape = {
    "object": "list",
    "data": [
        {
            "id": str,
            "object": "model",
            "created": int,
            "owned_by": "vllm",
            "root": str,
            "parent": None,
            "max_model_len": int,
            "permission": [
                {
                    "id": str,
                    "object": "model_permission",
                    "created": int,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }
    ],
}
TOKENIZED: Shape = {"count": int, "max_model_len": int, "tokens": [int], "token_strs": None}


def mismatches(document: Any, shape: Shape, place: str = "$") -> list[str]:
    """Where a document is not of a shape, in words."""
    if isinstance(shape, tuple):
        found = [mismatches(document, alternative, place) for alternative in shape]
        return [] if any(not problems for problems in found) else max(found, key=lambda problems: "[" in problems[0])
    if isinstance(shape, dict):
        if not isinstance(document, dict):
            return [f"{place} is {document!r}, no object"]
        if list(document) != list(shape):
            return [f"{place} has the fields {list(document)}, not {list(shape)}"]
        return [problem for name in shape for problem in mismatches(document[name], shape[name], f"{place}.{name}")]
    if isinstance(shape, list) and shape:
        if not isinstance(document, list):
            return [f"{place} is {document!r}, no list"]
        return [p for k, item in enumerate(document) for p in mismatches(item, shape[0], f"{place}[{k}]")]
    if isinstance(shape, type):
        good = isinstance(document, shape) and not (shape is int and isinstance(document, bool))
        return [] if good else [f"{place} is {document!r}, no {shape.__name__}"]
    return [] if document == shape and type(document) is type(shape) else [f"{place} is {document!r}, not {shape!r}"]


def assert_shape(document: Any, shape: Shape) -> None:
    """Fail with every mismatch."""
    problems = mismatches(document, shape)
    assert not problems, "\n".join(problems)
