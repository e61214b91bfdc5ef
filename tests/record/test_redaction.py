"""What is taken for a key in bodies and headers, and what stays."""

import pytest

from rekindle.record.redaction import REDACTED, Redaction

JSON = dict[str, object]


@pytest.mark.parametrize(
    "name",
    [
        *("authorization", "Authorization", "authorization_token", "token", "accessToken"),
        *("GITHUB_TOKEN", "auth-token", "client_secret", "clientSecret", "AWS_SECRET_ACCESS_KEY"),
        *("api_key", "apiKey", "APIKey", "x-goog-api-key", "private_key", "azure_credential"),
        *("db_password", "Set-Cookie", "cookies", "passphrase", "apikey"),
    ],
)
def test_a_member_with_the_name_of_a_key_is_replaced_at_any_depth(name: str) -> None:
    body: JSON = {"mcp_servers": [{name: "hush"}, {name: ["hush", ["hush"]]}]}
    redacted = {"mcp_servers": [{name: REDACTED}, {name: [REDACTED, [REDACTED]]}]}
    assert Redaction().value(body) == redacted


@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "max_completion_tokens", "prompt_cache_key", "eos_token", "page_token"),
        *("token_count", "tokens", "key", "author", "secretary", "content", "keyboard", "monkey"),
    ],
)
def test_other_members_stay(name: str) -> None:
    body: JSON = {name: "word", "more": [{name: 5}]}
    assert Redaction().value(body) == body


def test_a_key_that_a_tool_declares_leaves_the_tool_as_it_is() -> None:
    described = {"type": "object", "description": "Sent with the request."}
    names = ("headers", "token", "api_key")
    schema: JSON = {"type": "object", "properties": dict.fromkeys(names, described)}
    body: JSON = {"tools": [{"name": "fetch", "parameters": {**schema, "required": ["token"]}}]}
    assert Redaction().value(body) == body


def test_of_headers_in_a_body_only_those_that_name_the_client_stay() -> None:
    body = {
        "headers": {"X-Auth-Token": "hush", "x-own": ["hush"], "Content-Type": "text"},
        "extra_headers": {"Session-Id": "s1", "X-Retries": 3},
        "http_headers": ["X-Own: hush", "Accept"],
        "default-headers": [["x-own", "hush"], {"name": "x-own", "value": "hush"}],
    }
    assert Redaction().value(body) == {
        "headers": {
            "X-Auth-Token": REDACTED,
            "x-own": [REDACTED],
            "Content-Type": "text",
        },
        "extra_headers": {"Session-Id": "s1", "X-Retries": 3},
        "http_headers": [REDACTED, "Accept"],
        "default-headers": [[REDACTED, REDACTED], {"name": REDACTED, "value": REDACTED}],
    }


def test_a_bearer_token_is_replaced_wherever_it_stands() -> None:
    said = "curl -H 'Authorization: {}', with Bearer authentication-headers"
    sent = said.format("Bearer 0a1b2c3d4e5f6a7b8c9d")
    assert Redaction().text(sent) == said.format(REDACTED)


def test_words_in_the_place_of_keys_do_not_change_prompts() -> None:
    redaction = Redaction()
    redaction.learn({"authorization": "Bearer none", "cookie": "sessionid=abc; csrftoken=none"}, "")
    redaction.learn({"x-api-key": "placeholder"}, "key=no-key-needed")
    said = "There is none: the sessionid, the csrftoken and the placeholder say no-key-needed."
    assert redaction.text(said) == said


def test_the_value_of_a_cookie_is_not_repeated() -> None:
    redaction = Redaction()
    redaction.learn({"cookie": 'sessionid="a1b2c3d4=e5"; theme=dark'}, "")
    assert redaction.text("sessionid a1b2c3d4=e5 in dark") == f"sessionid {REDACTED} in dark"
