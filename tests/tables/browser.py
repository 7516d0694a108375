"""A Chromium for tests that look at pages: `python tests/tables/browser.py` starts it."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = "no Chromium is installed; .ci/browser brings one"


class MissingError(Exception):
    """There is no browser, or it does not start."""


def executable(own: str) -> str | None:
    """The one that DFW_BROWSER names, .ci/browser brought, Playwright has, or the system has."""
    brought = Path(sys.prefix) / "browser" / "chromium"
    shells = Path(own).parents[2].glob("chromium_headless_shell-*/*/*headless*shell")
    known = [os.environ.get("DFW_BROWSER"), brought, own, *sorted(shells, reverse=True)]
    known += map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return next((str(path) for path in known if path and Path(path).exists()), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser without a window, of Playwright's synchronous kind."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise MissingError("playwright is not installed") from None
    with sync_playwright() as playwright:
        path = executable(playwright.chromium.executable_path)
        if path is None:
            raise MissingError(MISSING)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            raise MissingError(f"{path} does not start: {error.message.splitlines()[0]}") from None
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    try:
        with launched() as started:
            print(f"Chromium {started.version}")
    except MissingError as error:
        sys.exit(str(error))
