"""The page's endpoints: its static files (chat and dashboard), and the event feed."""

import asyncio
import logging
from importlib.resources import files

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from rekindle.api.dashboard.bodies import Hour, RequestSeen, Snapshot
from rekindle.api.dashboard.feed import Feed, FeedReader
from rekindle.api.errors import NotFound
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import ClientGone, unless_client_leaves
from rekindle.api.openapi import Routes
from rekindle.api.sse import MEDIA_TYPE, STREAM_HEADERS

logger = logging.getLogger(__name__)

PAGE = "index.html"
SCRIPTS = ("app", "dom", "server", "confirm", "now", "hour", "forest", "branch", "lists")
CHAT = "chat/"
CHAT_SCRIPTS = (
    *("archive", "chat", "completion", "copy", "facts", "inline", "list"),
    *("markdown", "message", "settings", "store", "title", "tree"),
)
MEDIA_TYPES = {
    PAGE: "text/html",
    "style.css": "text/css",
    f"{CHAT}chat.css": "text/css",
    "icon.svg": "image/svg+xml",
    **{f"{name}.js": "text/javascript" for name in SCRIPTS},
    **{f"{CHAT}{name}.js": "text/javascript" for name in CHAT_SCRIPTS},
}
FILE_TYPES = sorted({*MEDIA_TYPES.values()} - {"text/html"})
PAGE_HEADERS = {
    # The page shows text of clients, so only its own files may run or be fetched.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # file names carry no version
}


class DashboardApi:
    def __init__(self, context: RequestContext, feed: Feed) -> None:
        self._context = context
        self._feed = feed
        folder = files("rekindle") / "dashboard"
        self._files = {name: (folder / name).read_bytes() for name in MEDIA_TYPES}

    def add_routes(self, routes: Routes) -> None:
        if self._context.settings.serves_dashboard:
            routes.add("GET", "/", self.page, media={"text/html": {}})
            media: dict[str, dict[str, str]] = {name: {} for name in FILE_TYPES}
            routes.add("GET", "/dashboard/{name}", self.file, media=media)
            routes.add("GET", "/dashboard/chat/{name}", self.chat_file, media=media)
        routes.add("GET", "/v1/events", self.events, streams=[Hour, RequestSeen, Snapshot])

    async def page(self) -> Response:
        return self._file(PAGE)

    async def file(self, name: str) -> Response:
        if name == PAGE or name not in self._files:
            raise NotFound(f"There is no file '{name}'.")
        return self._file(name)

    async def chat_file(self, name: str) -> Response:
        return await self.file(f"{CHAT}{name}")

    async def events(self, request: Request) -> Response:
        return FeedStream(self._feed, self._context.visible_namespace(request))

    def _file(self, name: str) -> Response:
        return Response(self._files[name], media_type=MEDIA_TYPES[name], headers=PAGE_HEADERS)


class FeedStream(Response):
    media_type = MEDIA_TYPE

    def __init__(self, feed: Feed, namespace: str | None) -> None:
        self._feed = feed
        self._namespace = namespace
        self.status_code = 200
        self.background = None
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._feed.join(self._namespace)
        try:
            await unless_client_leaves(receive, self._write_all(reader, send))
        except ClientGone:
            pass
        finally:
            self._feed.leave(reader)

    async def _write_all(self, reader: FeedReader, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for frame in reader.frames():
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except asyncio.CancelledError:
            if not reader.is_cut:
                raise
            logger.info("dashboard: slow reader disconnected")
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
