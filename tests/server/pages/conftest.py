"""Pages of a server with keys, as a browser sees them.

def test_x(open_browser): alice = open_browser("alice")     logged in by the login page, with a cookie
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.server.episodes.conftest import Api
from tests.server.model_api.conftest import Ephebe, revived

OpenBrowser = Callable[[str], httpx.Client]
RIGHTS = {"alice": "trainer", "bob": "trainer", "carol": "admin", "prometheus": "metrics", "a worker": "worker"}
_numbers = itertools.count()


@pytest.fixture(scope="session")
def keyed(shared_ephebe: Callable[..., Ephebe]) -> Ephebe:
    """The same as the episodes' tests have."""
    mask = r'episodes.mask=["555-\\d{4}"]'
    return shared_ephebe("episodes.hold_calls_s=5", mask, require_key="always", log_level="debug")


@pytest.fixture
def mortal_keyed(shared_ephebe: Callable[..., Ephebe]) -> Ephebe:
    """One that tests may stop, the same as the model API's tests have."""
    return revived(shared_ephebe(require_key="always"))


@pytest.fixture(scope="session")
def keys(keyed: Ephebe) -> dict[str, str]:
    return {
        name: keyed.make_key(f"{name} of pages {next(_numbers)}", owner=f"{name} of pages", right=right)
        for name, right in RIGHTS.items()
    }


@pytest.fixture
def open_browser(keyed: Ephebe, keys: dict[str, str]) -> Iterator[OpenBrowser]:
    opened: list[httpx.Client] = []

    def open_for(name: str) -> httpx.Client:
        browser = httpx.Client(base_url=f"{keyed.url}/ui", verify=False, trust_env=False, timeout=60)
        opened.append(browser)
        if name:
            answer = browser.post("/login", data={"key": keys[name]})
            assert answer.status_code == 303, answer.text
        return browser

    yield open_for
    for browser in opened:
        browser.close()


@pytest.fixture
def alice(keyed: Ephebe, keys: dict[str, str]) -> Api:
    api = Api(keyed, keys["alice"])
    api.put_run()
    return api
