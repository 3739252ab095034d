"""Whatever JSON a client sends: a request, or an error that names a field in bounded, printable words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import InvalidRequestError
from moonpool.inference.generation import ChatPrompt, TextPrompt, TokenPrompt
from moonpool.wire.openai_fields import (
    MAX_JSON_DEPTH,
    check_fields,
    parse_object,
    unknown_warning,
)
from moonpool.wire.openai_request import (
    ChatFields,
    CompletionFields,
    HttpContext,
    chat_request,
    completion_request,
)
from moonpool.wire.openai_response import error_body

_NAMES = st.sampled_from(
    sorted(
        {*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__}
        | {"n", "logprobs", "tools", "logit_bias", "kv_transfer_params", "store", "echo"}
    )
)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_PARTS = st.fixed_dictionaries(
    {}, optional={"type": st.just("text") | _JSON, "text": st.text() | _JSON, "x": _JSON}
)
_MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool"]) | _JSON,
        "content": st.text() | st.lists(_PARTS, max_size=3) | _JSON,
        "tool_calls": _JSON,
        "y": _JSON,
    },
)
_BODIES = st.builds(
    lambda fields, own: {**fields, **own},
    st.dictionaries(_NAMES | st.text(), _JSON, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.lists(_MESSAGES, max_size=3) | _JSON,
            "prompt": st.text() | st.lists(st.integers() | _JSON, max_size=4) | _JSON,
            "stream": st.booleans(),
            "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
        },
    ),
)


T = TypeVar("T")


def outcome(attempt: Callable[[], T]) -> T | InvalidRequestError:
    try:
        return attempt()
    except InvalidRequestError as error:
        return error


@given(body=_BODIES, is_strict=st.booleans(), is_chat=st.booleans())
def test_a_body_is_a_request_or_an_error_that_names_its_field(
    body: dict[str, Any], is_strict: bool, is_chat: bool
) -> None:
    try:
        data = msgspec.json.encode(body)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError):
        return
    read = chat_request if is_chat else completion_request
    request = outcome(lambda: read(parse_object(data), HttpContext(is_strict=is_strict)))
    if isinstance(request, InvalidRequestError):
        assert len(request.message) < 1_000
        assert request.param is None or request.param.isprintable()
        assert msgspec.json.decode(error_body(request))["error"]["code"] == request.code
        return
    prompt = request.generation.prompt
    assert isinstance(prompt, ChatPrompt if is_chat else TextPrompt | TokenPrompt)
    assert not (is_strict and request.unknown)
    if request.unknown:
        assert unknown_warning(request.unknown).isprintable()
        assert unknown_warning(request.unknown).isascii()


@given(data=st.binary(max_size=64))
def test_bytes_are_an_object_or_refused(data: bytes) -> None:
    parsed = outcome(lambda: parse_object(data))
    if isinstance(parsed, InvalidRequestError):
        assert parsed.code in ("invalid_json", "invalid_type", "json_too_deep")
    else:
        assert isinstance(parsed, dict)


@pytest.mark.parametrize("extra", [-1, 0])
def test_the_depth_is_exact(extra: int) -> None:
    depth = MAX_JSON_DEPTH + extra
    body = b'{"a":' * depth + b"1" + b"}" * depth
    assert isinstance(parse_object(body), dict)
    with pytest.raises(InvalidRequestError, match="nested"):
        parse_object(b'{"a":' * (MAX_JSON_DEPTH + 1) + b"1" + b"}" * (MAX_JSON_DEPTH + 1))


def test_a_neutral_value_is_accepted_whatever_its_number_type() -> None:
    neutral = {"n": 1.0, "min_p": 0, "presence_penalty": 0.0, "tools": None, "echo": False}
    assert check_fields(neutral, implemented=frozenset(), is_strict=True) == ()
    for name, value in (("n", True), ("echo", 0), ("min_p", "0"), ("logit_bias", [])):
        with pytest.raises(InvalidRequestError) as refused:
            check_fields({name: value}, implemented=frozenset(), is_strict=False)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


def test_of_many_unknown_fields_a_few_are_kept() -> None:
    message = {"role": "user", "content": "", **{f"x{number}": 1 for number in range(12)}}
    unknown = {f"y{number}": 1 for number in range(100)}
    for body, last in (
        ({"messages": [message] * 3}, "messages[1].x3"),
        ({"messages": [{"role": "user", "content": ""}], **unknown}, "y15"),
    ):
        request = chat_request(body, HttpContext())
        assert len(request.unknown) == 17
        assert unknown_warning(request.unknown).endswith(f", {last} and more")
    assert unknown_warning(("a", "b")) == "ignored unknown parameters: a, b"
