"""`rekindle cache forget`: deletes what clients sent, on a server or in a directory."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rekindle.cli.cache.keys import directory_of
from rekindle.cli.cache.options import Dir, Json, Yes, check_no_directory, confirm
from rekindle.cli.plain import plain_console, print_json, progress_bar
from rekindle.cli.remote import ApiKey, Url, connected, exit_1_on_error
from rekindle.errors import StartupError
from rekindle.generation.request import session_name

_DELETE_SECONDS = 120.0  # longer than a server waits for its engines and its store; picked


def forget(
    *,
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Delete one session of the namespace.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Delete one namespace, as the server's log names it; '' is the common one.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Delete every namespace.")] = False,
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete what clients sent, of all models: prompts, replies, names, stored responses.

    With --url a server deletes, also in its memory and in the shared store. The namespace is that
    of the API key. Without --url the directory is changed. Servers that use it follow within
    seconds, or when they start, and only they delete in a shared store. Trace files, archives and
    backups are not touched.

    \b
    Examples:
      rekindle cache forget --session ann
      rekindle cache forget --all --yes --dir /srv/cache
      rekindle cache forget --session ann --url http://127.0.0.1:8080
    """
    _check_scope(session, namespace, every=every, has_url=url is not None)
    if url is not None:
        check_no_directory(directory)
        if not yes:
            confirm(lambda: f"Delete {_named(session, namespace, every=every)} at {url}?")
        _report(_forget_at(url, api_key, session, every=every), as_json=as_json)
        return

    from rekindle.cache.tools.directory import check_is_cache

    home = directory_of(directory)
    check_is_cache(home)
    if not yes:
        confirm(lambda: f"Delete {_named(session, namespace, every=every)} in {home}?")
    _report(_forget_in(home, session, namespace, every=every), as_json=as_json)
    if not as_json:
        plain_console().print("A running server follows within seconds.")


def _check_scope(session: str | None, namespace: str | None, *, every: bool, has_url: bool) -> None:
    if every and not session is namespace is None:
        raise StartupError("--all deletes everything: leave --session and --namespace out.")
    if has_url and namespace is not None:
        raise StartupError(
            "With --url the namespace is that of the API key: leave --namespace out."
        )
    if not has_url and not every and session is namespace is None:
        raise StartupError("forget requires --session NAME, --namespace ID or --all.")
    if session is not None and not session_name(session):
        raise StartupError("--session must not be empty.")


def _named(session: str | None, namespace: str | None, *, every: bool) -> str:
    if every:
        return "everything of every namespace"
    place = f"namespace {namespace!r}" if namespace else "the namespace"
    return f"everything of {place}" if session is None else f"session {session!r} of {place}"


def _forget_at(url: str, api_key: str | None, session: str | None, *, every: bool) -> Any:
    parameters = {"scope": "all"} if every else {"session": session} if session else {}
    with exit_1_on_error(), connected(url, api_key, read_seconds=_DELETE_SECONDS) as remote:
        with _working():
            reply = remote.call("DELETE", "/v1/cache", **parameters)
        if not isinstance(reply, dict) or reply.get("object") != "cache.deleted":
            raise remote.stranger()
        return reply


def _forget_in(
    home: Path, session: str | None, namespace: str | None, *, every: bool
) -> dict[str, Any]:
    from rekindle.cache.tools.forgetting import forget_everything
    from rekindle.generation.forgetting import Scope, Tombstone

    name = None if session is None else session_name(session)
    scope = Scope() if every else Scope(namespace=namespace or "", session=name)
    with _working():
        [deleted] = forget_everything(home, [[Tombstone(scope=scope, at=time.time())]])
    return {
        "places": {place.value: n for place, n in deleted.counts.items()},
        "unreached": [*deleted.unreached],
    }


def _working() -> Any:
    bar = progress_bar(Console(stderr=True))
    bar.add_task("Deleting", total=None)
    return bar


def _report(reply: dict[str, Any], *, as_json: bool) -> None:
    """Print what was deleted where. The exit code is 1 if something could not be reached."""
    places, unreached = reply["places"], reply["unreached"]
    if as_json:
        print_json({"deleted": sum(places.values()), "places": places, "unreached": unreached})
    else:
        parts = ", ".join(f"{n} in {place}" for place, n in places.items())
        console = plain_console()
        console.print(
            f"Deleted {parts}" if parts else "There was nothing to delete", soft_wrap=True
        )
        for line in unreached:
            console.print(f"Not reached: {line}", soft_wrap=True)
    if unreached:
        raise typer.Exit(1)
