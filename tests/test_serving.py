"""What a server says at its start about who finds whose prompts."""

import pytest

from rekindle.server.serving import describe_sharing
from tests.api.fakes import api_settings


@pytest.mark.parametrize(
    ("keys", "separates_keys", "text"),
    [
        (("a", "b"), True, "2 API keys, each with a namespace of its own"),
        (("a", "b"), False, "2 API keys share one namespace"),
        ((), True, "names a namespace, and protects nothing"),
    ],
)
def test_the_log_says_whether_namespaces_protect(
    keys: tuple[str, ...], text: str, *, separates_keys: bool
) -> None:
    line = describe_sharing(api_settings(api_keys=keys, separates_keys=separates_keys))
    assert line is not None
    assert text in line


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_there_is_nothing_to_say_about_one_key(keys: tuple[str, ...]) -> None:
    assert describe_sharing(api_settings(api_keys=keys)) is None
