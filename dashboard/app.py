"""The web application: one page, the facts behind it as JSON, what is new as server-sent events, buttons."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fedmpq.dashboard.guard import Guard, Rules
from fedmpq.dashboard.operator import Operator
from fedmpq.dashboard.places import NotThere, Place, place_of
from fedmpq.dashboard.watch import Watch
from fedmpq.server.administration_client import NotRunning

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
}
HEARTBEAT_SECONDS = 10.0
"""Without news, so often a page hears that it is still connected."""
MOST_REQUEST = 200_000
"""Bytes that a button may send."""


def make_app(places: Sequence[Place], rules: Rules, operator: Operator | None = None) -> Starlette:
    dashboard = Dashboard(places, rules, operator)
    page = [Route(path, dashboard.page) for path in PAGE]
    routes = [
        *page,
        Route("/api/state", dashboard.state),
        Route("/api/events", dashboard.events),
        Route("/api/runs/{place}/{run}", dashboard.told),
        Route("/api/runs/{place}/{run}/models/{folder}/{name}", dashboard.model),
        Route("/api/operator/{deed}", dashboard.deed, methods=["POST"]),
    ]
    middleware = [Middleware(Guard, rules=rules), Middleware(GZipMiddleware, minimum_size=1000)]
    return Starlette(routes=routes, middleware=middleware)


class Dashboard:
    """What answers requests that the guard has let through."""

    def __init__(self, places: Sequence[Place], rules: Rules, operator: Operator | None) -> None:
        self._places = places
        self._operator = operator
        self._watch = Watch(places)
        folder = files("fedmpq.dashboard") / "page"
        self._page = {path: (folder / name).read_bytes() for path, (name, _) in PAGE.items()}
        self._about = {
            "version": version("fedmpq"),
            "operates": operator is not None,
            "closed": rules.closed,
        }

    async def page(self, request: Request) -> Response:
        path = request.url.path
        return Response(self._page[path], media_type=PAGE[path][1])

    async def state(self, _: Request) -> Response:
        return Response(self._state(await self._watch.newest()), media_type="application/json")

    def _state(self, places: str) -> str:
        about = json.dumps({**self._about, "time": time.time()})
        return f"{about[:-1]}, {places[1:]}"

    async def events(self, request: Request) -> Response:
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[str]:
        """The state at once, and again whenever it has changed."""
        seen = -1
        while True:
            if await self._watch.changed(seen, HEARTBEAT_SECONDS):
                seen = self._watch.version
                yield f"event: state\ndata: {self._state(self._watch.text)}\n\n"
            else:
                yield ": still here\n\n"

    async def told(self, request: Request) -> Response:
        try:
            place, run_id = place_of(self._places, request.path_params["place"]), request.path_params["run"]
            after = max(0, int(request.query_params.get("after", "0")))
            return JSONResponse(await asyncio.to_thread(place.told, run_id, after))
        except NotThere as error:
            return _refused(404, error)
        except ValueError as error:
            return _refused(400, error)
        except (OSError, RuntimeError) as error:
            return _refused(503, error)

    async def model(self, request: Request) -> Response:
        wanted = request.path_params
        try:
            place = place_of(self._places, wanted["place"])
            path = await asyncio.to_thread(place.model_file, wanted["run"], wanted["folder"], wanted["name"])
        except NotThere as error:
            return _refused(404, error)
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    async def deed(self, request: Request) -> Response:
        assert self._operator is not None, "the guard lets no button through where nobody operates"
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_REQUEST:
                return JSONResponse({"error": f"more than {MOST_REQUEST} bytes"}, 413)
        address = request.client.host if request.client is not None else "unknown"
        try:
            asked = json.loads(body or b"{}")
            if not isinstance(asked, dict):
                raise ValueError("a button sends a JSON object")
            done = await asyncio.to_thread(self._operator.do, request.path_params["deed"], asked, address)
        except NotRunning as error:
            return _refused(503, error)
        except ValueError as error:
            return _refused(400, error)
        except (OSError, RuntimeError) as error:
            return _refused(500, error)
        self._watch.look_at_once()
        return JSONResponse({"done": done})


def _refused(status: int, error: Exception) -> Response:
    return JSONResponse({"error": " ".join(str(error).splitlines())}, status)
