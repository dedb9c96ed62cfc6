"""Who may see the page: by a token, or by a header that a trusted proxy sets; and what keeps other sites out.

- A name in ``Host`` that is not ours is refused: another site's name that resolves to this machine (DNS rebinding) reads nothing.
- Requests of another site's page are refused (Fetch Metadata), nothing is said to allow them (no CORS), and nobody frames us.
- Scripts and styles come from this server alone (Content-Security-Policy): what a target calls itself can be no code.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ncclwatch.errors import UsageError
from ncclwatch.text import clean

COOKIE = "ncclwatch"
SESSION_S = 12 * 3600
SHORTEST_TOKEN = 16
MAX_TOKEN_FILE = 4096
MAX_FORM = 4096
MAX_FAILURES, FAILURES_S = 10, 60.0
"""So many wrong tokens in so many seconds, then nobody can sign in until some time has passed."""

OPEN = frozenset({"/healthz", "/icon.svg", "/login", "/login.css"})
"""What is told to everybody: nothing of any job."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_MAKE_ONE = "write one with 'ncclwatch keys token'"
_NEXT = re.compile(r"/(\?[\x21-\x7e]*)?")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Rules:
    """Who is let in. Without ``token`` and ``user_header`` everybody is, which the command allows on loopback only.

    ``user_header`` is believed from ``proxies`` alone; ``hosts`` are names, besides addresses and localhost, that the page is
    reached by; ``secure``: it is served by TLS.
    """

    token: str = ""
    user_header: str = ""
    proxies: Sequence[Network] = ()
    hosts: Collection[str] = ()
    secure: bool = False

    @property
    def asks(self) -> bool:
        """Whether one has to be somebody."""
        return bool(self.token or self.user_header)


def read_token(path: Path) -> str:
    """A token from a file. Raises ``UsageError``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKEN_FILE)
    except OSError as error:
        raise UsageError(f"the token file {path} cannot be read: {error.strerror}", _MAKE_ONE) from error
    token = data.decode("utf-8", "replace").strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{path} holds no token of {SHORTEST_TOKEN} characters or more", _MAKE_ONE)
    return token


def parse_proxies(texts: Sequence[str]) -> list[Network]:
    """Addresses or networks of proxies. Raises ``UsageError``."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise UsageError(f"'{clean(text, 60)}' is no address of a proxy", "write 10.0.0.7, or 10.0.0.0/24") from None
    return found


class Gate:
    """Wraps the application: what is not let through never reaches it."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._hosts = {name.lower() for name in (*rules.hosts, "localhost", socket.gethostname())}
        self._key = hashlib.sha256(b"ncclwatch session " + rules.token.encode()).digest()
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if self._rules.secure:
                    headers["strict-transport-security"] = "max-age=31536000"
            await send(message)

        request = Request(scope, receive)
        answer = self._refuse(request)
        if answer is None and request.url.path == "/login" and request.method == "POST":
            answer = await self._sign_in(request)
        await (answer or self._app)(scope, receive, guarded)

    def _refuse(self, request: Request) -> Response | None:
        """Why a request gets no further, if so."""
        headers = request.headers
        if len(headers.getlist("host")) != 1 or not self._is_ours(headers["host"]):
            return PlainTextResponse("this page is not known by that name: start it with --host NAME\n", 421)
        if request.method not in ("GET", "HEAD") and not (request.method == "POST" and request.url.path == "/login"):
            return PlainTextResponse("everything here can only be read\n", 405)
        if _is_foreign(headers, request.method):
            return PlainTextResponse("this page cannot be used from another site\n", 403)
        if request.url.path in OPEN or self._is_known(request):
            return None
        if self._rules.token and headers.get("sec-fetch-dest", "document") == "document" and request.url.path == "/":
            here = "/" + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"/login?next={quote(here, safe='')}", 303)
        hint = "sign in, or send the token as 'Authorization: Bearer TOKEN'" if self._rules.token else "come through the proxy"
        return JSONResponse({"error": f"not signed in: {hint}"}, 401, {"www-authenticate": "Bearer"})

    def _is_ours(self, host: str) -> bool:
        """An address cannot be rebound, a name can: only names that are known are taken."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return _is_address(name) or name.rstrip(".") in self._hosts

    # --- who it is -----------------------------------------------------------------------------------------------------

    def _is_known(self, request: Request) -> bool:
        rules, headers = self._rules, request.headers
        if not rules.asks:
            return True
        if rules.user_header and headers.get(rules.user_header) and self._from_proxy(request):
            return True
        if not rules.token:
            return False
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and not self._is_throttled():
            return self._is_token(given.strip())
        return self._is_session(request.cookies.get(COOKIE, ""))

    def _from_proxy(self, request: Request) -> bool:
        try:
            peer = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        return any(peer in network for network in self._rules.proxies)

    def _is_throttled(self) -> bool:
        return len(self._failures) == MAX_FAILURES and time.monotonic() - self._failures[0] < FAILURES_S

    def _is_token(self, given: str) -> bool:
        right = hmac.compare_digest(given.encode(), self._rules.token.encode())
        if not right:
            self._failures.append(time.monotonic())
        return right

    def _session(self, until: int) -> str:
        """The cookie of a session: made of the token, so that it outlives this process, and ends when the token is changed."""
        return f"{until}.{hmac.new(self._key, str(until).encode(), hashlib.sha256).hexdigest()}"

    def _is_session(self, cookie: str) -> bool:
        until, _, _ = cookie.partition(".")
        if not (until.isascii() and until.isdigit() and len(until) <= 12 and int(until) > time.time()):
            return False
        return hmac.compare_digest(cookie.encode(), self._session(int(until)).encode())

    async def _sign_in(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM:
                return PlainTextResponse("too much\n", 413)
        form = parse_qs(body.decode("utf-8", "replace"))
        following = form.get("next", ["/"])[0]
        following = following if _NEXT.fullmatch(following) else "/"
        if not self._rules.token:
            return RedirectResponse(following, 303)
        if self._is_throttled():
            return PlainTextResponse("too many wrong tokens: wait a minute\n", 429)
        if not self._is_token(form.get("token", [""])[0].strip()):
            return RedirectResponse(f"/login?wrong=1&next={quote(following, safe='')}", 303)
        answer = RedirectResponse(following, 303)
        # Lax, not strict: a link in a ticket is to open the page, and everything here can only be read.
        answer.set_cookie(
            COOKIE, self._session(int(time.time()) + SESSION_S), max_age=SESSION_S, httponly=True, secure=self._rules.secure,
            samesite="lax",
        )  # fmt: skip
        return answer


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_foreign(headers: Headers, method: str) -> bool:
    """Whether another site's page makes the request; to follow a link here is no such thing."""
    site = headers.get("sec-fetch-site", "")
    if site in ("cross-site", "same-site"):
        return not (method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
                    and headers.get("sec-fetch-dest") == "document")  # fmt: skip
    origin = headers.get("origin")
    # Browsers that tell no site tell an origin with what may change something.
    return method == "POST" and not site and origin is not None and urlsplit(origin).netloc != headers["host"]
