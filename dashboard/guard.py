"""Who may ask what of the dashboard, decided before anything else looks at a request.

1. The Host header names this machine or a name of the certificate: a page of another site that has its name
   point here (DNS rebinding) is refused.
2. A request that another site's page makes is refused: by Origin, and by Sec-Fetch-Site.
3. What changes something is a POST with the operator's token in the Authorization header, which a page of
   another site cannot send. Beyond loopback the facts need the token too; only the empty page does not.

Every answer forbids scripts, styles, frames and connections of anyone else (Content-Security-Policy).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedmpq.dashboard.operator_token import is_shown

FACTS = "/api/"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Rules:
    hosts: frozenset[str]
    """Names that the Host header may have."""
    token: str | None
    """The operator's; None: nothing can be changed here."""
    closed: bool
    """Whether the facts need the token too."""

    @classmethod
    def on_loopback(cls, token: str | None) -> Rules:
        return cls(frozenset(LOOPBACK_NAMES), token, closed=False)

    @classmethod
    def beyond(cls, names: Collection[str], token: str) -> Rules:
        return cls(frozenset({*LOOPBACK_NAMES, *(name.lower() for name in names)}), token, closed=True)

    def refusal(self, method: str, path: str, scheme: str, headers: Headers) -> tuple[int, str] | None:
        """The status and the reason a request is refused with; None: it goes through."""
        host = headers.get("host", "")
        if _name_of(host) not in self.hosts:
            return 421, f"this dashboard does not go by the name {_name_of(host)!r}"
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if origin is not None and origin != f"{scheme}://{host}":
            return 403, f"a page of {origin} may not ask this dashboard"
        if site not in ("same-origin", "none") and path.startswith(FACTS):
            return 403, "a page of another site may not ask this dashboard"
        if method not in ("GET", "HEAD", "POST"):
            return 405, f"{method} is not for this dashboard"
        if method == "POST" and self.token is None:
            return 403, "this dashboard only shows; fedmpq server --dashboard PORT has buttons"
        needs = method == "POST" or (self.closed and path.startswith(FACTS))
        if needs and not is_shown(headers.get("authorization", ""), self.token or ""):
            return 401, "this needs the operator's token"
        return None


def _name_of(host: str) -> str:
    """HOST of HOST:PORT, without brackets; empty for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Guard:
    """Around the application."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._rules.refusal(scope["method"], scope["path"], scope["scheme"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            status, reason = refusal
            await JSONResponse({"error": reason}, status)(scope, receive, send_with_headers)
