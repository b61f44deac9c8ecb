"""The page of owners: an admin sees all and sets limits, others see themselves."""

from __future__ import annotations

import itertools

import pytest

_numbers = itertools.count()


@pytest.fixture
def owner(keyed) -> str:
    """One with a key that has sampled."""
    name = f"<i>erin {next(_numbers)}"
    http = keyed.http(key=keyed.make_key(name))
    chat = {"model": "ephebe", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    return name


def test_an_admin_sees_all_owners_and_limits_one(open_browser, owner):
    carol = open_browser("carol")
    page = carol.get("/owners").text
    assert "<i>erin" not in page
    assert owner.replace("<i>", "&lt;i&gt;") in page
    assert "all other owners" in page
    page = carol.post("/owners", data={"owner": owner, "limit": "tokens_per_day", "amount": "2M"})
    assert "of 2,000,000" in page.text
    (state,) = [one for one in carol.get("/api/v1/owners").json() if one["owner"] == owner]
    assert state["limits"]["tokens_per_day"] == state["own"]["tokens_per_day"] == 2_000_000
    assert state["used"]["tokens_per_day"] > 2
    (state,) = carol.post("/api/v1/owners", json={"owner": owner, "limits": {"tokens_per_day": None}}).json()
    assert state["limits"]["tokens_per_day"] is None
    for by, days in (("run", 1), ("day", 7), ("owner", 365)):
        assert f">by {by}</a>" in carol.get("/owners", params={"by": by, "days": days}).text
    assert "base models" in carol.get("/owners?by=run").text


@pytest.mark.parametrize(
    ("limit", "amount", "said"),
    [
        ("tokens_per_day", "much", "is not an amount"),
        ("pending_samples", "0", "the least is 1"),
        ("token_per_day", "1", "tokens_per_day"),
    ],
)
def test_a_bad_limit_is_refused_in_words(open_browser, limit, amount, said):
    answer = open_browser("carol").post("/owners", data={"owner": "x", "limit": limit, "amount": amount})
    assert (answer.status_code, said in answer.text) == (400, True)


def test_others_see_themselves_and_set_nothing(open_browser, owner):
    alice = open_browser("alice")
    assert [one["owner"] for one in alice.get("/api/v1/owners").json()] == ["alice of pages"]
    page = alice.get("/owners").text
    assert "alice of pages" in page
    assert "erin" not in page
    assert alice.post("/owners", data={"owner": "alice of pages", "limit": "models", "amount": "9"}).status_code == 403
    assert alice.post("/api/v1/owners", json={"owner": "x", "limits": {}}).status_code == 403
