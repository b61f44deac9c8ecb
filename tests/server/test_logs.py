"""The log: readable, one line per request, and never a key in it, whatever way it came."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.redaction import redact
from palestra.net.serving import HttpServer
from palestra.server.http.logs import RequestLog, set_up_logs

KEY = "tml-Zm9vYmFy_0123-456789abcdefABCDEF"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"
PLAIN = "swordfish"  # looks like nothing; only the header's name gives it away


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    uvicorn = logging.getLogger("uvicorn")  # another test may have let it keep its lines to itself
    monkeypatch.setattr(uvicorn, "handlers", [])
    monkeypatch.setattr(uvicorn, "propagate", True)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("palestra").setLevel(logging.NOTSET)
    for name in ("uvicorn.access", "httpx2"):
        logging.getLogger(name).disabled = False
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=["text", "colours", "json"])
def stream(request: pytest.FixtureRequest) -> io.StringIO:
    stream = Terminal() if request.param == "colours" else io.StringIO()
    set_up_logs("debug", as_json=request.param == "json", stream=stream)
    return stream


def raise_with(text: str) -> None:
    raise ValueError(f"could not use {text}")


@pytest.mark.parametrize("secret", [KEY, TOKEN])
def test_a_key_never_reaches_the_log_whatever_field_it_is_in(stream, secret):
    log = structlog.get_logger("palestra.test")
    log.info(f"in the event {secret}")
    log.info("field", key=secret, nested={"deep": [{"er": (secret,)}]}, raw=secret.encode(), obj=Exception(secret))
    log.info("as a name", **{secret: 1})
    log.info("after a line break", body=f"first\n{secret}\tlast")
    log.bind(bound=secret).warning("bound")
    logging.getLogger("uvicorn.error").error("from a library: %s", secret, extra={"more": secret})
    try:
        raise_with(secret)
    except ValueError:
        log.exception("failed")
        logging.getLogger("asyncio").exception("failed there")
    shown = stream.getvalue()
    assert "could not use" in shown
    assert shown.count("[redacted]") >= 12
    assert secret not in shown
    for part in secret.removeprefix("tml-").split("."):
        assert part not in shown


@pytest.mark.parametrize(
    "fields",
    [
        {"headers": {"X-API-Key": PLAIN}},
        {"headers": {"x-api-key": PLAIN, "host": "h"}},
        {"headers": [(b"x-api-key", PLAIN.encode())]},
        {"headers": f"x-api-key: {PLAIN}\r\nhost: h"},
        {"headers": json.dumps({"X-Api-Key": PLAIN})},
        {"x_api_key": PLAIN},
        {"api_key": PLAIN},
        {"headers": {"Authorization": f"Bearer {PLAIN}"}},
        {"url": f"postgresql+psycopg://palestra:{PLAIN}@db/palestra"},
        {"url": f"http://h/archive?expires=1&sig={PLAIN}&x=2"},
    ],
)
def test_a_header_or_url_with_a_secret_is_blacked_out(stream, fields):
    structlog.get_logger("palestra.test").info("seen", **fields)
    assert PLAIN not in stream.getvalue()
    assert "[redacted]" in stream.getvalue()


@given(st.text(alphabet="abcXYZ019-_", min_size=1, max_size=60), st.text(max_size=20), st.text(max_size=20))
def test_no_surroundings_save_a_key(body, before, after):
    assert f"tml-{body}" not in redact(f"{before}tml-{body}{after}")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_a_redacted_json_line_is_still_json(value):
    for name in ("api_key", "password", "x-api-key", "other"):
        json.loads(redact(json.dumps({name: value, "then": value})))


@pytest.mark.parametrize("text", ["password" + " " * 200_000, "api_key=" * 30_000, "://a:" * 50_000])
@pytest.mark.timeout(5)
def test_redaction_takes_linear_time(text):
    redact(text)


def test_what_is_no_secret_stays():
    for text in ("require_key=auto", "http://127.0.0.1:8000/api/v1", "key_id=3", "tokens=12", "monkey: 1"):
        assert redact(text) == text


def test_json_lines_carry_facts_and_tracebacks_as_fields():
    stream = io.StringIO()
    set_up_logs("info", as_json=True, stream=stream)
    log = structlog.get_logger("palestra.test")
    log.debug("not shown")
    log.info("step", model_id="m:train:0", seq_id=7)
    try:
        raise_with("it")
    except ValueError:
        log.exception("failed")
    step, failed = map(json.loads, stream.getvalue().splitlines())
    assert step.items() >= {"event": "step", "level": "info", "model_id": "m:train:0", "seq_id": 7}.items()
    assert step["timestamp"].endswith("Z")
    assert "ValueError: could not use it" in failed["exception"]


def test_setting_up_again_replaces_the_first():
    first, second = io.StringIO(), io.StringIO()
    set_up_logs("info", stream=first)
    set_up_logs("warning", stream=second)
    structlog.get_logger("palestra.test").info("quiet")
    structlog.get_logger("palestra.test").warning("loud")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_each_request_is_one_line_with_template_and_id():
    stream, observed = io.StringIO(), []
    set_up_logs("debug", as_json=True, stream=stream)
    app, router = FastAPI(), APIRouter()

    @router.get("/models/{model_id}")
    async def model(model_id: str) -> dict:
        structlog.get_logger("palestra.test").info("inside")
        if model_id == "broken":
            raise_with(KEY)
        return {}

    app.include_router(router, prefix="/v1")
    app.add_middleware(RequestLog, observe=lambda *seen: observed.append(seen))
    logging.getLogger("httpx2").disabled = True  # the client is in this process too, and logs what it asks for
    client = TestClient(app, raise_server_exceptions=False)
    client.get("/v1/models/secret-id?sig=swordfish")
    client.get("/v1/models/broken")
    client.get("/nowhere/secret-id")
    text = stream.getvalue()
    assert not any(secret in text for secret in (KEY, "secret-id", "swordfish"))
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    shown = [(line["level"], line["path"], line["status"]) for line in requests]
    template = "/v1/models/{model_id}"
    assert shown == [("debug", template, 200), ("info", template, 500), ("info", "unknown", 404)]
    assert [line["method"] for line in requests] == ["GET"] * 3
    assert len({line["request_id"] for line in requests}) == 3
    inside = next(line for line in lines if line["event"] == "inside")
    assert inside["request_id"] == requests[0]["request_id"]
    assert [(route, status) for route, status, _ in observed] == [(template, 200), (template, 500), ("unknown", 404)]
    assert all(seconds >= 0 for *_, seconds in observed)


def test_libraries_are_quiet_until_something_is_wrong():
    stream = io.StringIO()
    set_up_logs("info", stream=stream)
    logging.getLogger("alembic").info("hum")
    logging.getLogger("alembic").warning("ouch")
    assert "hum" not in stream.getvalue()
    assert "ouch" in stream.getvalue()


def test_uvicorn_writes_no_access_lines():
    stream = io.StringIO()
    set_up_logs("debug", stream=stream)
    assert not HttpServer(FastAPI(), log_config=None).config.access_log
    logging.getLogger("uvicorn.access").info("GET /?key=swordfish")
    assert stream.getvalue() == ""
