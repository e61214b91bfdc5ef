"""A running server, as commands ask it: JSON in and out, failures in a sentence, exit code 1."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.serve import load_settings
from rekindle.config_sources import api_keys
from rekindle.errors import StartupError

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0  # picked: a list is made between two steps of the engine

Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Ask this running server instead.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Key to send to it.")]


class Unreachable(StartupError):
    """Nobody answers there now; somebody may later."""


class Remote:
    def __init__(self, http: "httpx.Client") -> None:
        self._http = http

    @property
    def url(self) -> str:
        return str(self._http.base_url).rstrip("/")

    def get(self, path: str, **parameters: int) -> Any:
        response = self._send("GET", path, parameters)
        self._check(response)
        return _json(self, response)

    def get_if_there(self, path: str) -> Any | None:
        """None: the server has no such endpoint."""
        response = self._send("GET", path, {})
        if response.status_code == 404:
            return None
        self._check(response)
        return _json(self, response)

    def get_text(self, path: str) -> str:
        response = self._send("GET", path, {})
        self._check(response)
        return response.text

    def delete(self, path: str) -> Any | None:
        """None: there is no such thing any more."""
        response = self._send("DELETE", path, {})
        if response.status_code == 404:
            return None
        self._check(response)
        return _json(self, response)

    def _send(self, method: str, path: str, parameters: dict[str, int]) -> "httpx.Response":
        import httpx

        try:
            return self._http.request(method, path, params=parameters)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self.url} cannot be reached: {error}.") from error

    def _check(self, response: "httpx.Response") -> None:
        if response.is_error:
            raise StartupError(f"{self.url} refused: {_refusal(response)}")


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[Remote]:
    with client_of(url, api_key) as http:
        yield Remote(http)


def client_of(url: str, api_key: str | None) -> "httpx.Client":
    import httpx

    try:
        return httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS),
            trust_env="://127.0.0.1" not in url,  # no proxy in front of the loopback
        )
    except httpx.InvalidURL as error:
        raise StartupError(f"{url!r} is not the address of a server: {error}.") from error


def local_server() -> tuple[str, str | None]:
    """Where `rekindle serve` listens with the settings of this shell, and a key that it takes."""
    settings = load_settings(None, {}).settings.server
    return f"http://127.0.0.1:{settings.port}", next(iter(api_keys(settings)), None)


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    try:
        yield
    except StartupError as error:
        sys.stderr.write(f"rekindle: {error.message}\n")
        raise typer.Exit(1) from error


def _json(remote: Remote, response: "httpx.Response") -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise StartupError(f"{remote.url} does not answer like a server of ours.") from error


def _refusal(response: "httpx.Response") -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code} {response.reason_phrase}."
