"""The dashboard's pages: routes, headers, and what is told of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from msd_client.contract.errors import AvailabilityError, MsdError, NotFoundError, UsageError
from msd_daemon.dashboard.daemon_link import DaemonLink
from msd_daemon.dashboard.gate import COOKIE, Gate
from msd_daemon.dashboard.searches import Searches
from msd_daemon.observe.history import KEPT_S as HISTORY_S_MAX

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/pictures.js": ("pictures.js", "text/javascript"),
    "/tables.js": ("tables.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
OPEN_PATHS = ("/healthz",)
BAD_SHOWN = 200


def make_app(link: DaemonLink, gate: Gate, searches: Searches) -> Starlette:
    """Return the application.

    Args:
        link: To the daemon.
        gate: Decides who may look.
        searches: Over journals.
    """

    async def snapshot(request: Request) -> Response:
        history_s = min(max(float(request.query_params.get("history_s", "0")), 0.0), HISTORY_S_MAX)
        return JSONResponse(await link.ask("snapshot", history_s=history_s))

    async def bad(request: Request) -> Response:
        job = request.query_params["job"]
        return JSONResponse(await link.ask("bad", job=job, limit=BAD_SHOWN))

    async def lineage(request: Request) -> Response:
        asked = request.query_params
        return JSONResponse(
            await searches.lineage(asked["job"], asked["step"], asked.get("rank", ""))
        )

    async def find(request: Request) -> Response:
        asked = request.query_params
        return JSONResponse(await searches.find(asked["job"], asked["source"], asked["key"]))

    async def metrics(_request: Request) -> Response:
        from msd_daemon.observe.metrics import CONTENT_TYPE, render

        return Response(render(await link.ask("snapshot")), media_type=CONTENT_TYPE)

    async def healthz(_request: Request) -> Response:
        await link.ask("ping")
        return PlainTextResponse("ok\n")

    routes = [Route(path, _file(*entry)) for path, entry in FILES.items()]
    routes += [
        Route("/api/snapshot", told(snapshot)),
        Route("/api/bad", told(bad)),
        Route("/api/lineage", told(lineage)),
        Route("/api/find", told(find)),
        Route("/metrics", told(metrics)),
        Route("/healthz", told(healthz)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Doorkeeper, gate=gate)])


Endpoint = Callable[[Request], Awaitable[Response]]


def told(endpoint: Endpoint) -> Endpoint:
    """Turn errors of msd into answers that say what to do."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except MsdError as error:
            return JSONResponse(
                {"error": error.message, "code": error.code}, status_code=_status_of(error)
            )
        except (KeyError, ValueError) as error:
            return JSONResponse(
                {"error": f"malformed question: {error}", "code": "usage"}, status_code=400
            )

    return answer


def _status_of(error: MsdError) -> int:
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, UsageError):
        return 400
    return 503 if isinstance(error, AvailabilityError) else 502


def _file(name: str, media_type: str) -> Endpoint:
    content = resources.files("msd_daemon.dashboard").joinpath("page", name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


class Doorkeeper:
    """Sends away who may not look, before anything else, and sets the headers of all answers.

    Args:
        app: What is behind.
        gate: Decides.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        refusal = self._refusal(HTTPConnection(scope))
        app: Any = self._app if refusal is None else refusal
        await app(scope, receive, send_with_headers)

    def _refusal(self, asked: HTTPConnection) -> Response | None:
        if not self._gate.knows_host(asked.headers.get("host", "")):
            return PlainTextResponse(
                "this page is reached under its own address alone (dashboard.listen)\n", 421
            )
        given = asked.query_params.get("token")
        if given is not None and self._gate.is_token(given):
            # Out of the address at once: it stands in histories and logs.
            response = RedirectResponse(asked.url.path, 303)
            response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return response
        if asked.url.path in OPEN_PATHS or self._gate.admits(
            asked.headers.get("authorization", ""), asked.cookies
        ):
            return None
        return PlainTextResponse(
            "a token is needed: open the address that msdctl dashboard prints, add ?token=..., or send "
            "Authorization: Bearer ...\n",
            401,
            {"www-authenticate": "Bearer"},
        )
