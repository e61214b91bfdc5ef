"""A running server, as commands talk to it: JSON replies, and each failure in one sentence."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.plain import printable
from rekindle.cli.serve import load_settings
from rekindle.config.sources import api_keys
from rekindle.errors import StartupError
from rekindle.priming.stream import refusal_in

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

_CONNECT_SECONDS = 5.0
UNAUTHORIZED = 401
_READ_SECONDS = 30.0  # picked: the engine makes a list between two steps

Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Ask this running server instead.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Key to send to it.")]


class Stranger(StartupError):
    """Something answers, but not as a Rekindle server does."""


class Remote:
    """One server. Every method raises StartupError."""

    def __init__(self, http: "httpx.Client") -> None:
        self._http = http

    @property
    def url(self) -> str:
        return base_url(self._http)

    def get(self, path: str, **parameters: int) -> Any:
        return self.call("GET", path, **parameters)

    def call(self, method: str, path: str, **parameters: int | str) -> Any:
        return self._json(self._checked(self._send(method, path, parameters)))

    def call_if_there(self, method: str, path: str) -> Any | None:
        """Return None if the server has nothing at this path."""
        response = self._send(method, path, {})
        return None if response.status_code == 404 else self._json(self._checked(response))

    def get_text(self, path: str) -> str:
        return self._checked(self._send("GET", path, {})).text

    def stranger(self) -> Stranger:
        """Return the error for a reply that no Rekindle server sends."""
        return Stranger(f"{self.url} does not answer like a Rekindle server.")

    def _send(
        self, method: str, path: str, parameters: Mapping[str, int | str]
    ) -> "httpx.Response":
        import httpx

        try:
            return self._http.request(method, path, params=dict(parameters))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"{self.url} cannot be reached: {error}."
            raise StartupError(
                f"{why} Is the port right? `rekindle serve` starts a server."
            ) from error

    def _checked(self, response: "httpx.Response") -> "httpx.Response":
        if response.is_error:
            raise StartupError(f"{self.url} refused: {refusal_of(response)}")
        return response

    def _json(self, response: "httpx.Response") -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise self.stranger() from error


@contextmanager
def connected(
    url: str, api_key: str | None, *, read_seconds: float = _READ_SECONDS
) -> Iterator[Remote]:
    with client_of(url, api_key, read_seconds=read_seconds) as http:
        yield Remote(http)


def client_of(url: str, api_key: str | None, *, read_seconds: float | None) -> "httpx.Client":
    """Return a client for the server at `url`, with or without `/v1`. Raises StartupError.

    `read_seconds` is None for replies that may take any time.
    """
    import httpx

    try:
        return httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_CONNECT_SECONDS, read=read_seconds),
            trust_env="://127.0.0.1" not in url,  # no proxy in front of the loopback
        )
    except httpx.InvalidURL as error:
        raise StartupError(f"{url!r} is not the address of a server: {error}.") from error


def base_url(http: "httpx.Client") -> str:
    return str(http.base_url).rstrip("/")


def local_server() -> tuple[str, str | None]:
    """Return the address of `rekindle serve` with the settings of this shell, and one key."""
    settings = load_settings(None, {}).settings.server
    return f"http://127.0.0.1:{settings.port}", next(iter(api_keys(settings)), None)


def answers(url: str) -> bool:
    """Return True if a server is at `url`, ready or still loading its model."""
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=1.0, trust_env=False)
    except httpx.ReadTimeout:
        return True  # a server listens at once, but answers only after its model is loaded
    except httpx.HTTPError:
        return False
    return True


@contextmanager
def exit_1_on_error() -> Iterator[None]:
    """Print a StartupError and end the process with exit code 1 instead of 2."""
    try:
        yield
    except StartupError as error:
        sys.stderr.write(f"rekindle: {printable(error.message)}\n")
        raise typer.Exit(1) from error


def refusal_of(response: "httpx.Response") -> str:
    """Return the message of an error reply; its status line if there is none."""
    status = f"{response.status_code} {response.reason_phrase}"
    message = refusal_in(response.read(), f"{status}.")
    if response.status_code == UNAUTHORIZED:
        return f"{message} The flag --api-key sends one."
    return message
