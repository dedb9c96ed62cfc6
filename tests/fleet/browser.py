"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
WAIT_MS = 120_000
"""Tests run beside others on idle CPU: whatever comes is waited for."""


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser without a window; the test is skipped where there is none."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=WAIT_MS)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def tab(started: Browser, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[tuple[Page, list[str]]]:
    """A tab, and the list of what went wrong in it: errors of scripts, refusals by the policy, requests to elsewhere."""
    context: BrowserContext = started.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", timezone_id="UTC",
        reduced_motion="reduce", permissions=["clipboard-read", "clipboard-write"],
    )  # fmt: skip
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("request", lambda asked: wrong.append(f"elsewhere: {asked.url}") if "//127.0.0.1:" not in asked.url else None)
    try:
        yield page, wrong
    finally:
        context.close()
