"""Quotas hold for every API and after a restart; what is used is counted once, also by servers that are killed."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from palestra.cli import main
from tests.server.conftest import created
from tests.server.episodes.conftest import group
from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.raw import Model, Raw, datum, ok, refused, text
from tests.server.test_limits import standstill, told_to_wait
from tests.waiting import until

_names = (f"owner{n}" for n in itertools.count())
Sampled = dict[str, Any]


class Owner(Raw):
    """An owner of the test's own, with a key and these limits."""

    def __init__(self, server: Ephebe, *limits: str):
        self.server, self.name = server, next(_names)
        self.key = server.make_key(self.name, *(f"--quota={limit}" for limit in limits))
        super().__init__(server, self.key)
        self.numbers = itertools.count()
        self.sampler = ""
        if limits:
            until(lambda: any(value for name, value in self.quota()["own"].items() if name != "owner"))

    def quota(self) -> dict[str, Any]:
        (mine,) = ok(self.get("quotas"))["owners"]
        return mine

    def create_here(self) -> httpx.Response:
        return self.create(self.session(), base_model=MODEL)

    def a_model(self) -> Model:
        created = ok(self.create_here())
        assert "error" not in self.result(created)
        return Model(self, created["model_id"])

    def send_sample(self, seq_id: int | None = None, **body: Any) -> httpx.Response:
        if not self.sampler:
            wanted = {"session_id": self.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
            self.sampler = ok(self.post("create_sampling_session", **wanted))["sampling_session_id"]
        return self.sample(self.sampler, next(self.numbers) if seq_id is None else seq_id, **body)

    def tokens_of(self, submitted: httpx.Response) -> int:
        return sum(len(one["tokens"]) for one in self.result(submitted)["sequences"])

    def usage(self, *by: str) -> list[dict[str, Any]]:
        return ok(self.http.get("/api/v1/usage", params={"by": by}))["usage"]

    def use_up(self) -> int:
        """Samples until the day's tokens are used; returns how many they were."""
        used = 0
        while (answer := self.send_sample()).status_code == 200:
            used += 3 + self.tokens_of(answer)
        assert answer.status_code == 402, answer.text
        return used


def command(server: Ephebe, *args: str) -> Any:
    said = CliRunner().invoke(main, [*args, "--state", str(server.state), "--json"])
    assert said.exit_code == 0, said.output
    return json.loads(said.stdout)


@pytest.fixture
def owner(mortal_keyed: Ephebe) -> Callable[..., Owner]:
    return lambda *limits: Owner(mortal_keyed, *limits)


def test_models_beyond_the_quota_are_refused_for_good_until_one_ends(owner: Callable[..., Owner]) -> None:
    import tinker

    ann = owner("models=1")
    model = ann.a_model()
    assert "quota allows 1" in refused(ann.create_here(), 403)
    with pytest.raises(tinker.PermissionDeniedError, match="palestra quota set"):
        created(ann.server.client(key=ann.key).create_lora_training_client(MODEL, rank=4))
    assert ok(ann.create(model.session_id, base_model=MODEL))["model_id"] == model.model_id  # it is known already
    ann.result(ann.post("unload_model", model_id=model.model_id))
    ann.a_model()


SMALL_SWEEP = ("seed=0..3", "steps=1", "eval.every=0", "rollout.groups_per_step=2", "rollout.group_size=4")


def sweep(owner: Owner, runs: Path, *options: str) -> Any:
    where = ("--server", owner.server.url, f"runs={runs}", "model.name=ephebe")
    arguments = ["sweep", "arithmetic", *SMALL_SWEEP, *where, *options, "--json"]
    done = CliRunner().invoke(main, arguments, env={"TINKER_API_KEY": owner.key})
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_sweep_trains_as_many_models_at_a_time_as_its_owner_may(owner: Callable[..., Owner], tmp_path: Path) -> None:
    ann = owner("models=3")
    ann.a_model()
    assert sweep(ann, tmp_path, "--dry-run")["at_once"] == 2
    assert sweep(owner(), tmp_path, "--dry-run")["at_once"] == 4


@pytest.mark.slow
def test_a_sweep_that_is_larger_than_the_quota_trains_all_of_its_runs(
    owner: Callable[..., Owner], tmp_path: Path
) -> None:
    found = sweep(owner("models=2"), tmp_path)
    assert [one["status"] for one in found["members"]] == ["done"] * 4


def test_samples_and_training_data_that_wait_are_limited_by_owner(owner: Callable[..., Owner]) -> None:
    ann, bob = owner("pending_samples=2", "pending_bytes=1"), owner()
    model = ann.a_model()
    ann.tokens_of(ann.send_sample())
    with standstill(ann.server):
        waiting = [ok(ann.send_sample(n)) for n in (100, 101)]
        told_to_wait(ann.send_sample(102))
        assert ok(ann.send_sample(100)) == waiting[0]
        parts = [ok(model.send_pass(seq_id=n)) for n in (2, 1)]  # of one call, whose first comes last
        told_to_wait(model.send_pass(seq_id=3))
        others = ok(bob.send_sample())
    assert all(ann.result(one)["sequences"] for one in waiting)
    assert bob.result(others)["sequences"]
    for one in parts:
        ann.result(one)
    ann.result(model.send_pass(seq_id=3))


def test_the_tokens_of_a_day_are_limited_for_every_api(owner: Callable[..., Owner]) -> None:
    from tinker import types

    ann = owner("tokens_per_day=20")
    model = ann.a_model()
    ok(ann.http.put("/episodes/v1/runs/r", json={"model": MODEL}))
    ok(ann.http.post("/episodes/v1/runs/r/groups", json={"groups": [group("g", 2)]}))
    claim = {"client_id": "c", "claim_id": "1", "run": "r"}
    (lease,) = ok(ann.http.post("/episodes/v1/claim", json=claim))["leases"]
    early = ok(model.send_pass(seq_id=3))
    used = ann.use_up()
    assert 20 <= used < 40
    tomorrow = datetime.now(UTC).date().toordinal() + 1
    said = refused(ann.send_sample(), 402)
    assert f"{datetime.fromordinal(tomorrow).date()}T00:00:00Z" in said
    assert f"{used} tokens" in said
    assert refused(model.send_pass(seq_id=1), 402)  # although a later one waits for it, as it does for others
    openly = ann.server.openai(ann.key)
    with pytest.raises(openai.APIStatusError) as error:
        openly.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert (error.value.status_code, error.value.code) == (402, "insufficient_quota")
    message = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    answer = ann.http.post("/v1/messages", json=message)
    assert (answer.status_code, "T00:00:00Z" in answer.json()["error"]["message"]) == (402, True)
    assert refused(ann.http.post("/episodes/v1/claim", json=claim | {"claim_id": "2"}), 402)
    played = httpx.post(
        f"{lease['base_url']}/chat/completions",
        json={"model": lease["model"], "messages": [{"role": "user", "content": "x"}]},
        headers={"Authorization": f"Bearer {lease['api_key']}"},
    )
    assert played.status_code == 402
    # What was trained may be applied and saved, and the same request passes when there is room again: Tinker's own
    # client waits for that.
    ann.result(model.step(seq_id=4))  # the gap before it is given up
    ann.result(early)
    client = ann.server.client(key=ann.key)
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=2)
    waiting = client.create_sampling_client(base_model=MODEL).sample(prompt, 1, params)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=1)
    command(ann.server, "quota", "set", ann.name, "tokens_per_day=1M")
    until(lambda: ann.send_sample().status_code == 200)
    ann.result(model.send_pass(seq_id=5))
    assert waiting.result(timeout=60).sequences
    client.close("success").result()


def test_checkpoints_are_limited_by_their_bytes(owner: Callable[..., Owner]) -> None:
    ann = owner("checkpoint_bytes=1")
    model = ann.a_model()
    path = model.save("first")  # nobody knows its size before
    assert "delete some of them" in refused(model.send("save_weights", path="second"), 403)
    model.works()  # the number was used
    assert refused(ann.post("copy_weights", source_path=path, destination_project_id="p"), 403)
    size = ann.usage("run")[0]["checkpoint_bytes"]
    command(ann.server, "quota", "set", ann.name, f"checkpoint_bytes={size * 2}")
    until(lambda: model.send("save_weights", path=f"n{next(ann.numbers)}").status_code == 200)
    assert refused(model.send("save_weights", path="third"), 403)  # two of the same size are there


def test_usage_is_exact_after_the_server_and_its_engine_were_killed(owner: Callable[..., Owner]) -> None:
    ann = owner()
    server, model = ann.server, ann.a_model()
    sampled = trained = 0
    for kill in (server.kill, server.kill_both):
        sampled += ann.tokens_of(ann.send_sample(num_samples=2))
        ann.result(model.send_pass(datum(length=9), datum(length=20)))
        ann.result(model.step())
        trained += 29
        path = model.save(kill.__name__)
        direct = ann.post("asample", model_path=path, prompt=text(5, 6, 7), sampling_params={"max_tokens": 2})
        sampled += ann.tokens_of(direct)
        if kill == server.kill_both:
            command(server, "quota", "set", ann.name, f"tokens_per_day={sampled + trained + 12}")
        kill()  # whatever of it is in the database by now
        server.start()
        ann.sampler = ""
    assert refused(ann.send_sample(), 402)  # what was used today counts after a restart, too
    assert ann.quota()["used"]["tokens_per_day"] == sampled + trained + 12
    by_run = {one["run"]: one for one in ann.usage("run", "day")}
    assert {one["day"] for one in by_run.values()} == {datetime.now(UTC).date().isoformat()}
    base, own = by_run[""], by_run[model.model_id]
    assert base["sampled_tokens"] + own["sampled_tokens"] == sampled
    assert [(one["prompts"], one["prompt_tokens"]) for one in (base, own)] == [(2, 6), (2, 6)]
    assert (base["trained_tokens"], own["trained_tokens"]) == (0, trained)
    assert own["engine_s"] > 0
    assert own["checkpoint_bytes"] == ann.quota()["used"]["checkpoint_bytes"] > 0


def test_the_command_shows_everybody_to_admins_and_others_themselves(owner: Callable[..., Owner]) -> None:
    ann, bob = owner(), owner()
    used = {one.name: one.tokens_of(one.send_sample()) for one in (ann, bob)}
    admin = ann.server.make_key(f"admin-{ann.name}", right="admin")

    def shown(key: str, *args: str) -> str:
        said = CliRunner().invoke(main, ["usage", "--server", ann.server.url, "--key", key, *args])
        assert said.exit_code == 0, said.output
        return said.stdout

    (mine,) = json.loads(shown(ann.key, "--json"))
    assert (mine["owner"], mine["sampled_tokens"]) == (ann.name, used[ann.name])
    rows = {row["owner"]: row for row in csv.DictReader(io.StringIO(shown(admin, "--csv", "--since", "1d")))}
    assert {name: int(rows[name]["sampled_tokens"]) for name in used} == used
    assert bob.name in shown(admin, "--by", "owner", "--by", "day")
    assert bob.name not in shown(ann.key)
    assert shown(admin, "--owner", ann.name, "--since", "2020-01-01", "--until", "2020-02-01") == "nothing was used\n"
    refusal = CliRunner().invoke(main, ["usage", "--server", ann.server.url, "--key", ann.key, "--owner", bob.name])
    assert (refusal.exit_code, "needs admin" in refusal.stderr) == (1, True)


def test_a_rotated_key_works_under_both_texts_for_a_while(owner: Callable[..., Owner]) -> None:
    ann = owner()
    server = ann.server

    def is_good(key: str) -> bool:
        return server.http(key=key).get("/api/v1/usage").status_code == 200

    second = command(server, "key", "rotate", ann.name, "--grace", "1h")["key"]
    assert is_good(ann.key)
    assert is_good(second)
    third = command(server, "key", "rotate", ann.name)["key"]
    assert is_good(third)
    until(lambda: not is_good(ann.key) and not is_good(second))
    short = server.make_key(f"short-{ann.name}", "--expires", "2s")
    until(lambda: not is_good(short))


def test_a_revoked_players_episodes_go_to_others(owner: Callable[..., Owner]) -> None:
    ann = owner()
    server = ann.server
    worker = server.make_key(f"w-{ann.name}", owner=ann.name, right="worker")
    ok(ann.http.put("/episodes/v1/runs/r", json={"model": MODEL}))
    ok(ann.http.post("/episodes/v1/runs/r/groups", json={"groups": [group("g", 1)]}))
    claim = {"client_id": "c", "claim_id": "1", "run": "r"}
    (lease,) = ok(server.http(key=worker).post("/episodes/v1/claim", json=claim))["leases"]
    beat = {"client_id": "c", "leases": [{"episode_id": lease["episode_id"], "attempt": lease["attempt"]}]}

    def goes_on() -> bool:
        answer = httpx.post(f"{server.url}/episodes/v1/heartbeat", json=beat, headers={"X-API-Key": lease["api_key"]})
        return ok(answer)["beats"][0]["can_continue"]

    assert goes_on()
    command(server, "key", "revoke", f"w-{ann.name}")
    until(lambda: not goes_on())
