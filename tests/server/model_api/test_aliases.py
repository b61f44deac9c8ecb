"""Aliases: one name for weights that change, in every route, for their owner alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.config.bundled import bundled_model
from palestra.server.core.errors import ApiError
from palestra.server.model_api.aliases import MAX_ALIASES, Aliases
from palestra.store import Store
from tests.server.conftest import KEY, created
from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.standstill import standstill

MakeEphebe = Callable[..., Ephebe]
HI: list[Any] = [{"role": "user", "content": "Hi"}]
IDS = {"return_token_ids": True}
QUEUE = 'palestra_queue_depth{base_model="ephebe",kind="sample"} '


def put(server: Ephebe, name: str, model: Any, **options: Any) -> httpx.Response:
    return server.http(**options).put(f"/v1/aliases/{name}", json={"model": model})


def ask(client: openai.OpenAI, model: str, messages: list[Any] = HI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": model, "messages": messages, "max_tokens": 4, "extra_body": IDS} | options
    )


def last_turn(server: Ephebe, answer: Any, key: str = KEY) -> dict[str, Any]:
    return server.http(key=key).get(f"/v1/traces/{answer.trace_id}").json()["turns"][-1]


def session_id(sampler: Any) -> str:
    return created(sampler)._sampling_session_id


@pytest.fixture(scope="module")
def trained(ephebe: Ephebe) -> Iterator[Any]:
    """A model in training."""
    service = ephebe.client()
    yield service.create_lora_training_client(base_model=MODEL, rank=4)
    service.close("success").result()


@pytest.fixture(autouse=True)
def no_aliases_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ephebe" in request.fixturenames:
        http = request.getfixturevalue("ephebe").http()
        for alias in http.get("/v1/aliases").json()["data"]:
            http.delete(f"/v1/aliases/{alias['id']}")


def test_an_alias_is_made_moved_and_dropped(ephebe: Ephebe, trained: Any) -> None:
    made = put(ephebe, "policy", MODEL).json()
    assert made == {"id": "policy", "object": "alias", "model": MODEL, "version": 1, "updated_at": made["updated_at"]}
    assert put(ephebe, "policy", MODEL).json() == made  # a repeated request is no move
    sampler = session_id(trained.save_weights_and_get_sampling_client())
    moved = put(ephebe, "policy", sampler).json()
    assert (moved["model"], moved["version"]) == (sampler, 2)
    assert moved["updated_at"] > made["updated_at"]
    http = ephebe.http()
    assert http.get("/v1/aliases/policy").json() == moved
    assert http.get("/oai/api/v1/aliases").json() == {"object": "list", "data": [moved]}
    assert http.delete("/v1/aliases/policy").json() == {"id": "policy", "object": "alias", "deleted": True}
    for answer in (http.get("/v1/aliases/policy"), http.delete("/v1/aliases/policy")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "alias_not_found")
    assert http.get("/v1/aliases").json()["data"] == []
    assert put(ephebe, "policy", MODEL).json()["version"] == 1


def test_a_conversation_goes_on_token_for_token_while_the_weights_change(
    ephebe: Ephebe, client: openai.OpenAI, trained: Any
) -> None:
    path = trained.save_weights_for_sampler("kept").result().path
    targets = [MODEL, *(session_id(trained.save_weights_and_get_sampling_client()) for _ in range(2)), path]
    messages, before, weights, traces = HI, [], [], set()
    for target in targets:
        put(ephebe, "moving", target)
        answer = ask(client, "moving", messages)
        assert answer.model == "moving"
        assert answer.prompt_token_ids[: len(before)] == before
        turn = last_turn(ephebe, answer)
        assert turn["match"] == ("continued" if before else "new")
        weights.append(turn["weights"])
        traces.add(answer.trace_id)
        before = answer.prompt_token_ids + answer.choices[0].token_ids
        messages = [*messages, answer.choices[0].message.model_dump(), *HI]
    assert len(traces) == 1
    assert weights[0] == MODEL
    assert len(set(weights)) == 4
    assert [last_turn(ephebe, ask(client, one))["weights"] for one in targets] == weights


def test_a_call_that_is_under_way_finishes_on_the_weights_it_began_with(
    ephebe: Ephebe, client: openai.OpenAI, trained: Any
) -> None:
    old, new = (session_id(trained.save_weights_and_get_sampling_client()) for _ in range(2))
    old_weights, new_weights = (last_turn(ephebe, ask(client, one))["weights"] for one in (old, new))
    put(ephebe, "busy", old)
    with ThreadPoolExecutor(1) as thread:
        with standstill(ephebe):
            long = thread.submit(ask, client, "busy", max_tokens=60, extra_body={"ignore_eos": True})
            ephebe.until(lambda: f"{QUEUE}1.0" in ephebe.metrics())
            put(ephebe, "busy", new)
        assert last_turn(ephebe, ask(client, "busy"))["weights"] == new_weights
        assert last_turn(ephebe, long.result())["weights"] == old_weights
    assert long.result().usage.completion_tokens == 60


def test_a_run_that_ends_under_a_call_costs_a_retry(ephebe: Ephebe) -> None:
    """Its weights go with its session: the SDK asks again, and the alias leads elsewhere."""
    service = ephebe.client()
    model = service.create_lora_training_client(base_model=MODEL, rank=4)
    sampler = session_id(model.save_weights_and_get_sampling_client())
    put(ephebe, "ending", sampler)
    endless = {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(2) as threads, ephebe.openai() as once, once.with_options(max_retries=1) as twice:
        failing, going_on = (threads.submit(ask, client, "ending", **endless) for client in (once, twice))
        ephebe.until(lambda: f"{QUEUE}2.0" in ephebe.metrics() or failing.done())
        put(ephebe, "ending", MODEL)
        service.close("success").result()
        with pytest.raises(openai.InternalServerError, match="ending was moved to other weights") as moved:
            failing.result()
        assert (moved.value.status_code, moved.value.response.headers["retry-after"]) == (503, "1")
        assert last_turn(ephebe, going_on.result())["weights"] == MODEL


def test_every_route_knows_it(ephebe: Ephebe, client: openai.OpenAI, trained: Any) -> None:
    sampler = session_id(trained.save_weights_and_get_sampling_client())
    put(ephebe, "policy", sampler)
    listed = {one.id: one.model_dump() for one in client.models.list()}
    assert listed["policy"] == client.models.retrieve("policy").model_dump()
    assert (listed["policy"]["owned_by"], listed["policy"]["root"]) == ("palestra", sampler)
    assert (listed[MODEL]["root"], listed[MODEL]["max_model_len"]) == (MODEL, listed["policy"]["max_model_len"])
    text = client.completions.create(model="policy", prompt=["a", "b"], max_tokens=2)
    assert (text.model, len(text.choices)) == ("policy", 2)
    http = ephebe.http()
    tokens = http.post("/tokenize", json={"model": "policy", "prompt": "Hello"}).json()["tokens"]
    assert http.post("/detokenize", json={"model": "policy", "tokens": tokens}).json() == {"prompt": "Hello"}


def test_what_it_pointed_at_is_gone(ephebe: Ephebe, client: openai.OpenAI) -> None:
    service = ephebe.client()
    model = service.create_lora_training_client(base_model=MODEL, rank=4)
    sampler = session_id(model.save_weights_and_get_sampling_client())
    path = model.save_weights_for_sampler("short-lived").result().path
    put(ephebe, "session", sampler)
    put(ephebe, "saved", path)
    assert {"session", "saved"} <= {one.id for one in client.models.list()}
    service.close("success").result()
    assert ask(client, "saved").model == "saved"  # checkpoints outlive the session that made them
    ephebe.rest().delete_checkpoint_from_tinker_path(path).result()
    for alias, target in (("session", sampler), ("saved", path)):
        with pytest.raises(
            openai.NotFoundError, match=f"alias '{alias}' points at '{target}', which no longer exists"
        ) as gone:
            ask(client, alias)
        assert (gone.value.code, gone.value.param) == ("model_not_found", "model")
    assert [one.id for one in client.models.list()] == [MODEL]
    put(ephebe, "session", MODEL)
    assert ask(client, "session").model == "session"


@pytest.mark.parametrize(
    ("name", "model", "status", "param", "words"),
    [
        (MODEL, MODEL, 400, "name", "base model that is served here"),
        ("a b", MODEL, 400, "name", "1 to 64 of"),
        ("a:sample:0", MODEL, 400, "name", "1 to 64 of"),
        ("ä", MODEL, 400, "name", "1 to 64 of"),
        ("a" * 65, MODEL, 400, "name", "1 to 64 of"),
        ("a", "no-such", 404, "model", "base model (ephebe), a tinker://"),
        ("a", "a:sample:0", 404, "model", "an open sampling session"),
        ("a", "tinker://a:train:0/sampler_weights/x", 404, "model", "does not exist"),
        ("a", "tinker://a", 404, "model", "does not exist"),
        ("a", "other", 404, "model", "not at another alias"),
        ("a", "", 400, "model", "at least 1"),
        ("a", None, 400, "model", "string"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    ephebe: Ephebe, name: str, model: Any, status: int, param: str, words: str
) -> None:
    put(ephebe, "other", MODEL)
    answer = put(ephebe, name, model)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert [one["id"] for one in ephebe.http().get("/v1/aliases").json()["data"]] == ["other"]


def test_they_are_their_owners_and_are_there_after_a_restart(mortal_keyed: Ephebe) -> None:
    server = mortal_keyed
    alice, bob = (server.make_key(name) for name in ("alice-of-aliases", "bob-of-aliases"))
    worker = server.make_key("worker", owner="alice-of-aliases", right="worker")
    model = server.client(key=alice).create_lora_training_client(base_model=MODEL, rank=4)
    sampler = session_id(model.save_weights_and_get_sampling_client())
    path = model.save_weights_for_sampler("kept").result().path
    for name, target in (("session", sampler), ("saved", path), ("base", MODEL)):
        assert put(server, name, target, key=alice).status_code == 200
    assert put(server, "hers", sampler, key=bob).status_code == 404
    assert put(server, "session", MODEL, key=bob).json()["version"] == 1  # the same name, but his
    assert put(server, "session", MODEL, key=worker).status_code == 403
    assert put(server, "session", MODEL, key="tml-wrong").status_code == 401
    server.restart()
    hers = server.http(key=alice).get("/v1/aliases").json()["data"]
    assert [(one["id"], one["model"]) for one in hers] == [("base", MODEL), ("saved", path), ("session", sampler)]
    response = [last_turn(server, ask(server.openai(alice), name), alice) for name in ("session", "saved", "base")]
    assert len({turn["weights"] for turn in response}) == 3
    assert [one.id for one in server.openai(bob).models.list()] == [MODEL, "session"]
    with pytest.raises(openai.NotFoundError):
        ask(server.openai(bob), "saved")
    model.holder.close()


@pytest.mark.slow
def test_another_base_reads_nothing_that_was_held(make_ephebe: MakeEphebe) -> None:
    """Its tokens may be others."""
    server = make_ephebe(flags=("--model", f"twin={bundled_model(MODEL)}"))
    put(server, "moving", MODEL)
    said = ask(server.openai(), "moving").choices[0].message.model_dump()
    put(server, "moving", "twin")
    again = ask(server.openai(), "moving", [*HI, said, *HI])
    assert last_turn(server, again)["match"] == "unmatched"
    assert [one.id for one in server.openai().models.list()] == [MODEL, "twin", "moving"]


def test_an_owner_has_so_many_at_most(tmp_path: Path) -> None:
    async def fill(aliases: Aliases) -> None:
        for number in range(MAX_ALIASES):
            await aliases.put("me", f"a{number}", "m")
        with pytest.raises(ApiError, match=f"you already have {MAX_ALIASES}"):
            await aliases.put("me", "more", "m")
        assert (await aliases.put("me", "a0", "n")).version == 2
        assert (await aliases.put("you", "more", "m")).version == 1

    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        asyncio.run(fill(Aliases(store)))


def test_the_command_line_names_and_moves(ephebe: Ephebe, trained: Any) -> None:
    def alias(*args: str, url: str = ephebe.url) -> Result:
        return CliRunner().invoke(main, ["alias", *args, "--server", url])

    assert "no aliases; to make one: palestra alias set" in alias("list").stdout
    assert alias("set", "best", MODEL).stdout == f"best is {MODEL} now (version 1)\n"
    sampler = session_id(trained.save_weights_and_get_sampling_client())
    assert '"version": 2' in alias("set", "best", sampler, "--json").stdout
    assert ["best", sampler, "2"] == alias("list").stdout.splitlines()[1].split()[:3]
    assert alias("delete", "best").stdout == "the alias best is deleted\n"
    for args, code, words in (
        (("delete", "best"), 3, "error: you have no alias 'best'"),
        (("set", "a/b", MODEL), 1, "error: alias"),
        (("set", "a", "no-such"), 3, "error: the alias stays as it was: 'no-such' does not exist"),
    ):
        result = alias(*args)
        assert (result.exit_code, result.stderr.splitlines()[1:]) == (code, [])
        assert words in result.stderr
    away = alias("list", url="http://127.0.0.1:1")
    assert (away.exit_code, "does not answer" in away.stderr) == (4, True)
