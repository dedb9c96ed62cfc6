"""Who is let in, and what keeps other sites out: over real HTTP, on a real server."""

from __future__ import annotations

import http.client
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.serve.access import HEADERS, MAX_FAILURES, Rules, parse_proxies, read_token
from ncclwatch.serve.server import Certificate
from unit.serve.served import PushedFeed, Served, served
from unit.views import view

TOKEN = secrets.token_urlsafe(16)


@pytest.fixture(scope="module")
def opened() -> Iterator[Served]:
    with served([PushedFeed("one", view())], Rules(hosts=("page.example",))) as found:
        yield found


@pytest.fixture
def guarded() -> Iterator[Served]:
    with served([PushedFeed("one", view())], Rules(token=TOKEN)) as found:
        yield found


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST:80", "[::1]:8711", "page.example", socket.gethostname()])
def test_names_of_our_own_are_taken(opened: Served, host: str) -> None:
    assert opened.ask("/api/jobs", Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "page.example.evil", "[::1", "", "user@evil.example"])
def test_a_name_that_was_rebound_reads_nothing(opened: Served, host: str) -> None:
    for path in ("/", "/api/jobs", "/healthz", "/page.js"):
        answer = opened.ask(path, Host=host)
        # A header that is no host at all is refused by the server itself.
        assert answer.status in (400, 421)
        assert b"one" not in answer.body.replace(b"none", b"")


@pytest.mark.parametrize("mode, dest", [("cors", "empty"), ("no-cors", "script"), ("no-cors", "image"), ("navigate", "iframe")])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_read_nothing_and_frame_nothing(opened: Served, site: str, mode: str, dest: str) -> None:
    headers = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": dest}
    assert opened.ask("/api/jobs", **headers).status == 403
    assert opened.ask("/", **headers).status == 403


def test_a_link_on_another_site_opens_the_page(opened: Served) -> None:
    assert (
        opened.ask("/?job=one", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document").status == 200
    )


@pytest.mark.parametrize("path", ["/", "/api/jobs", "/nothing", "/healthz", "/page.js"])
def test_every_answer_says_what_browsers_are_to_forbid(opened: Served, path: str) -> None:
    answer = opened.ask(path, Origin="https://evil.example")
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_everything_can_only_be_read(opened: Served, method: str) -> None:
    for path in ("/", "/api/jobs", "/api/moment"):
        assert opened.ask(path, method=method, body="").status == 405


def test_without_the_token_nothing_is_told(guarded: Served) -> None:
    for path in (
        "/api/jobs",
        "/api/events?job=one",
        "/api/timeline?job=one",
        "/api/moment?job=one&t=1",
        "/api/rank?job=one&rank=1",
    ):
        assert guarded.ask(path).status == 401
        assert guarded.ask(path, Authorization="Bearer wrong").status == 401
        assert guarded.ask(path, Cookie=f"ncclwatch={int(time.time()) + 60}.{'0' * 64}").status == 401
    assert guarded.ask("/page.js").status == 401
    assert guarded.ask("/healthz").status == 200


def test_the_token_lets_in(guarded: Served) -> None:
    assert guarded.ask("/api/jobs", Authorization=f"Bearer {TOKEN}").status == 200


def test_signing_in_leads_back_to_the_link_and_gives_a_cookie_no_script_can_read(guarded: Served) -> None:
    there = guarded.ask("/?job=one&rank=3")
    assert (there.status, there.headers["location"]) == (303, "/login?next=%2F%3Fjob%3Done%26rank%3D3")
    form = guarded.ask(there.headers["location"])
    assert b'value="/?job=one&amp;rank=3"' in form.body
    assert b'id="wrong"' not in form.body
    done = guarded.ask("/login", method="POST", body=f"token={TOKEN}&next=%2F%3Fjob%3Done%26rank%3D3")
    assert (done.status, done.headers["location"]) == (303, "/?job=one&rank=3")
    [cookie] = done.cookies
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert TOKEN not in cookie
    assert guarded.ask("/api/jobs", Cookie=cookie.split(";")[0]).status == 200
    until, _, mac = cookie.split(";")[0].removeprefix("ncclwatch=").partition(".")
    assert guarded.ask("/api/jobs", Cookie=f"ncclwatch={int(until) + 1}.{mac}").status == 401


@pytest.mark.parametrize(
    "following", ["https://evil.example/", "//evil.example", "/\\evil.example", "/x", "javascript:alert(1)", "/?a b"]
)
def test_nobody_is_led_to_another_site(guarded: Served, following: str) -> None:
    done = guarded.ask("/login", method="POST", body=f"token={TOKEN}&next={following}")
    assert (done.status, done.headers["location"]) == (303, "/")


def test_what_a_link_says_is_text_in_the_form(guarded: Served) -> None:
    form = guarded.ask("/login?wrong=1&next=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert b"<script" not in form.body
    assert b'id="wrong"' in form.body


def test_another_site_signs_nobody_in(guarded: Served) -> None:
    body = f"token={TOKEN}"
    assert guarded.ask("/login", method="POST", body=body, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 403
    assert guarded.ask("/login", method="POST", body=body, Origin="https://evil.example").status == 403
    assert guarded.ask("/login", method="POST", body="x" * 5000).status == 413


def test_tokens_cannot_be_tried_out(guarded: Served) -> None:
    for _ in range(MAX_FAILURES):
        assert "wrong=1" in guarded.ask("/login", method="POST", body="token=guess").headers["location"]
    assert guarded.ask("/login", method="POST", body=f"token={TOKEN}").status == 429
    assert guarded.ask("/api/jobs", Authorization=f"Bearer {TOKEN}").status == 401


def test_a_header_is_believed_from_the_proxy_alone() -> None:
    rules = Rules(user_header="X-Forwarded-User", proxies=parse_proxies(["127.0.0.0/8"]))
    with served([PushedFeed("one", view())], rules) as page:
        assert page.ask("/api/jobs", X_Forwarded_User="ada").status == 200
        assert page.ask("/api/jobs", X_Forwarded_User="").status == 401
        assert page.ask("/api/jobs").status == 401
    rules = Rules(user_header="X-Forwarded-User", proxies=parse_proxies(["10.9.8.7"]))
    with served([PushedFeed("one", view())], rules) as page:
        assert page.ask("/api/jobs", X_Forwarded_User="ada").status == 401
        assert page.ask("/api/jobs", X_Forwarded_User="ada", X_Forwarded_For="10.9.8.7").status == 401


def test_tokens_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN
    for wrong in ("short", "", "a token with blanks in it", "\u00e4" * 20):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="holds no token"):
            read_token(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none")
    with pytest.raises(UsageError, match="no address of a proxy"):
        parse_proxies(["example.org"])


def test_tls_is_served_and_cookies_are_for_it_alone(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    files = (tmp_path / "page.pem", tmp_path / "page.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    certificate = Certificate(*files)
    certificate.check()
    with served([PushedFeed("one", view())], Rules(token=TOKEN, secure=True), certificate) as page:
        trusting = ssl.create_default_context(cafile=str(files[0]))
        connection = http.client.HTTPSConnection("localhost", page.port, timeout=60, context=trusting)
        connection.request("POST", "/login", f"token={TOKEN}")
        answer = connection.getresponse()
        assert "; Secure" in (answer.getheader("set-cookie") or "")
        assert answer.getheader("strict-transport-security") is not None
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            page.ask("/healthz")
    files[1].write_text("no key")
    with pytest.raises(UsageError, match="TLS cannot be served"):
        certificate.check()
