"""Results pushed over ZeroMQ: to trainers outside, one by one, and to a run's own listener, in order.

Each is sent until it is acknowledged, whoever is killed on the way, and forgotten here only then.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.asyncio

from palestra.episodes import AsyncEpisodeClient, AsyncRun, EpisodeApiError, EpisodeClient, ListenError, Run
from palestra.server.agentjet.results import AT_ONCE
from palestra.server.broker.push_addresses import check_address
from palestra.server.broker.push_socket import PushSocket
from palestra.server.core.errors import Refusal
from tests.server.agentjet.conftest import Root, say
from tests.server.episodes.conftest import Api
from tests.server.model_api.conftest import Ephebe

RECEIVE_S = 30


class Ears:
    """AgentJet's trainer, for one episode: binds, takes, answers."""

    def __init__(self, context: zmq.Context[Any], address: str = "tcp://127.0.0.1:*"):
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def is_told(self) -> bool:
        return bool(self._socket.poll(0))

    def hear(self) -> Any:
        assert self._socket.poll(RECEIVE_S * 1000), "nothing was pushed"
        return json.loads(self._socket.recv())

    def say(self, answer: str = "ack") -> None:
        self._socket.send_string(answer)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ears() -> Iterator[Callable[..., Ears]]:
    made: list[Ears] = []
    with zmq.Context() as context:

        def make(*address: str) -> Ears:
            made.append(Ears(context, *address))
            return made[-1]

        yield make
        for one in made:
            one.close()


@pytest.fixture
def outside(plain: Ephebe) -> Iterator[Api]:
    """The run of trainers outside; gone afterwards."""
    api = Api(plain, run="tinkerscript")
    yield api
    api.send("DELETE", "runs/tinkerscript")


@pytest.fixture
def run(plain: Ephebe, trainer: Api) -> Iterator[Run]:
    with EpisodeClient(plain.url, "tml-test") as client:
        yield client.run(trainer.run)


def play(trainer: Api, *names: str, reward: float = 1.0) -> None:
    """Groups of one."""
    for name in names:
        trainer.register(name)
        assert trainer.end(trainer.claim_one(), reward)["status"] == "accepted"


def committed(api: Api, number: int) -> None:
    api.server.until(lambda: api.info()["committed"] == number)


# Episodes of trainers outside


def test_a_result_goes_to_the_trainer_that_registered_it_with_its_tokens(
    outside: Api, root: Root, ears: Callable[..., Ears]
) -> None:
    listener = ears()
    request = {"episode_uuid": "ab12", "zmq_listen_result_addr": listener.address, "openai_api_key": "sk-theirs"}
    response = root.post("register_episode", **request)
    assert (response["success"], "a key for that attempt" in response["note"]) == (True, True)
    assert root.post("register_episode", **request)["success"]
    assert outside.info()["queued"] == 1
    other = root.post("register_episode", episode_uuid="ab12")
    assert (other["success"], "registered differently" in other["failure_reason"]) == (False, True)
    claimed = root.claim()
    assert claimed["episode_uuid"] == "ab12"
    assert claimed["openai_api_key"].startswith("ep-")
    answer = say(claimed)
    output = {"reward": [0.5, 0.25], "is_success": True, "log_metrics": {"time": {"s": 1}, "note": "x"}}
    assert root.end_with("ab12", **output, metadata={"n": 1}).json()["success"]
    heard = listener.hear()
    assert outside.info()["committed"] == 0  # nothing is forgotten before it is acknowledged
    (line,) = heard["metadata"].pop("trajectories")
    assert line["tokens"] == [*answer.prompt_token_ids, *answer.choices[0].token_ids]
    assert heard == {
        "reward": 0.75,
        "is_success": True,
        "metadata": {"n": 1, "step_rewards": [0.5, 0.25]},
        "log_metrics": output["log_metrics"],
    }
    listener.say()
    committed(outside, 1)
    again = {"client_uuid": "c", "episode_uuid": "ab12", "workflow_output": {**output, "metadata": {"n": 1}}}
    assert root.post("end_episode", **again) == {"success": True, "failure_reason": ""}  # known by its name alone
    assert "another result" in root.end("ab12", [0.5, 0.25])["failure_reason"]  # it had metadata too
    assert "another result" in root.end("ab12", [0.5, 0.25], lease_id=claimed["lease_id"])["failure_reason"]
    assert root.end_with("ab13", reward=1.0).status_code == 400  # nobody's


def test_a_listener_that_is_gone_holds_up_nobody_and_a_killed_server_sends_again(
    outside: Api, root: Root, ears: Callable[..., Ears]
) -> None:
    gone, there, later = ears(), ears(), ears()
    for name, listener in (("first", gone), ("second", there), ("third", later)):
        root.post("register_episode", episode_uuid=name, zmq_listen_result_addr=listener.address)
    assert [root.claim()["episode_uuid"] for _ in range(3)] == ["first", "second", "third"]
    gone.close()
    assert root.end("first", 0.25)["success"]
    assert root.end("second", 0.5)["success"]
    assert there.hear()["reward"] == 0.5
    there.say()
    outside.server.until(lambda: len(outside.played(tokens=False)) == 1)
    assert outside.info()["committed"] == 0  # the first is still to be sent
    outside.server.kill()
    back = ears(gone.address)
    outside.server.start()
    assert back.hear()["reward"] == 0.25
    back.say("what?")  # no acknowledgement
    assert back.hear()["reward"] == 0.25
    back.say()
    committed(outside, 2)
    assert root.end("third", 0.75)["success"]  # its name is known still
    assert later.hear()["reward"] == 0.75
    later.say()
    committed(outside, 3)


def test_listeners_that_take_and_never_answer_or_are_gone_hold_up_nobody(
    outside: Api, root: Root, ears: Callable[..., Ears]
) -> None:
    there, gone, many = ears(), ears(), 2 * AT_ONCE + 2
    gone.close()
    with zmq.Context() as context:
        silent = context.socket(zmq.ROUTER)
        silent.bind("tcp://127.0.0.1:*")
        addresses = [silent.getsockopt_string(zmq.LAST_ENDPOINT), gone.address]
        for number in range(many):
            address = addresses[number % 2]
            root.post("register_episode", episode_uuid=f"n{number}", zmq_listen_result_addr=address)
        root.post("register_episode", episode_uuid="last", zmq_listen_result_addr=there.address)
        for number in range(many):
            assert root.end(root.claim()["episode_uuid"], float(number))["success"]
        assert root.end(root.claim()["episode_uuid"], 0.5)["success"]
        assert there.hear()["reward"] == 0.5
        there.say()
        outside.server.until(lambda: len(outside.played(limit=256, tokens=False)) == many)
        silent.close(linger=0)


def test_lines_that_were_given_up_leave_nothing_open() -> None:
    async def knock(context: zmq.asyncio.Context, address: str) -> None:
        line = PushSocket(context, address)
        try:
            await line.send(b"x")
            assert await line.answer(0.01) is None
        finally:
            line.close()

    async def knock_often(address: str) -> None:
        process, context = psutil.Process(), zmq.asyncio.Context()
        await knock(context, address)
        await asyncio.sleep(0.5)  # its thread closes what we have closed
        before = process.num_fds()
        for _ in range(20):
            await knock(context, address)
        for _ in range(200):
            if process.num_fds() <= before:
                break
            await asyncio.sleep(0.05)
        assert process.num_fds() <= before
        context.term()

    with zmq.Context() as theirs, theirs.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        silent.bind("tcp://127.0.0.1:*")
        asyncio.run(knock_often(silent.getsockopt_string(zmq.LAST_ENDPOINT)))


def test_a_listener_at_an_address_of_ipv6_is_reached(outside: Api, root: Root, ears: Callable[..., Ears]) -> None:
    listener = ears("tcp://[::1]:*")
    root.post("register_episode", episode_uuid="v6", zmq_listen_result_addr=listener.address)
    assert root.end(root.claim()["episode_uuid"], 0.25)["success"]
    assert listener.hear()["reward"] == 0.25
    listener.say()
    committed(outside, 1)


def test_a_result_that_could_not_be_saved_is_not_sent(outside: Api, root: Root, ears: Callable[..., Ears]) -> None:
    listener = ears()
    root.post("register_episode", episode_uuid="ab", zmq_listen_result_addr=listener.address)
    name = root.claim()["episode_uuid"]
    process = psutil.Process(outside.server.pid)
    process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        assert root.end_with(name, reward=0.25).status_code == 503
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    outside.server.until(lambda: outside.send("GET", "runs").status_code == 200)
    assert not listener.is_told()
    assert root.end(name, 0.5)["success"]
    assert listener.hear()["reward"] == 0.5
    listener.say()
    committed(outside, 1)


def test_an_episode_that_is_lost_for_good_is_told_to_its_trainer(
    outside: Api, root: Root, ears: Callable[..., Ears]
) -> None:
    listener = ears()
    root.post("register_episode", episode_uuid="poison", zmq_listen_result_addr=listener.address)
    episode_id = root.claim()["lease_id"].partition("#")[0]
    outside.post("cancel", run=outside.run, episode_ids=[episode_id], reason="nobody can play it")
    heard = listener.hear()
    assert (heard["reward"], heard["is_success"], heard["metadata"]["error"]["type"]) == (None, False, "dropped")
    listener.say()
    committed(outside, 1)


@pytest.mark.slow
def test_a_flood_of_results_reaches_those_who_listen(outside: Api, root: Root, ears: Callable[..., Ears]) -> None:
    """Every tenth listener is gone; the server is killed in the middle."""
    listeners = [ears() for _ in range(300)]
    for number, listener in enumerate(listeners):
        root.post("register_episode", episode_uuid=f"n{number}", zmq_listen_result_addr=listener.address)
        if number % 10 == 0:
            listener.close()
    names = [root.claim()["episode_uuid"] for _ in listeners]
    for number, name in enumerate(names):
        assert root.end(name, float(number))["success"]
        if number == 150:
            outside.server.restart()
    for_nobody = len(listeners[::10])
    heard: set[int] = set()

    def is_done() -> bool:
        for number, listener in enumerate(listeners):
            if number % 10 and listener.is_told():  # again, perhaps: the first answer went to a server that is gone
                assert listener.hear()["reward"] == float(number)
                listener.say()
                heard.add(number)
        return len(outside.played(limit=256, tokens=False)) == for_nobody

    outside.server.until(is_done)
    assert len(heard) == len(listeners) - for_nobody
    assert outside.of_run("commit", cursor=len(listeners))["committed"] == len(listeners)  # given up by hand


# The listener of a run


def test_groups_come_in_order_and_are_committed_by_their_acknowledgement(trainer: Api, run: Run) -> None:
    play(trainer, "a", "b")
    trainer.register("c")
    trainer.post("cancel", run=trainer.run, group_ids=["c"])
    with run.listen("tcp://127.0.0.1:*", wait_s=RECEIVE_S) as groups:
        heard: list[Any] = []
        for pushed in groups:
            assert trainer.info()["committed"] == len(heard)
            heard.append((pushed.number, pushed.group.group_id, pushed.group.state))
            pushed.ack()
            committed(trainer, len(heard))
            if len(heard) == 3:
                play(trainer, "d")  # while it listens
            if len(heard) == 4:
                break
    assert heard == [(1, "a", "ready"), (2, "b", "ready"), (3, "c", "dropped"), (4, "d", "ready")]
    assert trainer.info()["settings"]["push_to"] == ""
    assert trainer.info()["settings"]["backoff_s"] == 0  # what else was set stays


def test_a_group_that_was_not_acknowledged_comes_again_to_whoever_listens_next(trainer: Api, run: Run) -> None:
    play(trainer, "a", "b")
    with run.listen("tcp://127.0.0.1:*") as groups:
        taken = iter(groups)
        assert next(taken).number == 1
        with pytest.raises(ListenError, match="group 1 was not acknowledged"):
            next(taken)
    play(trainer, "c")
    with run.listen("tcp://127.0.0.1:*", after=1) as groups:  # 1 was safe, only nobody said so
        with pytest.raises(ListenError, match="cannot be listened on"), run.listen(groups.address):
            pass
        taken = iter(groups)
        pushed = next(taken)
        assert (pushed.number, trainer.info()["committed"]) == (2, 1)
        with run.listen("tcp://127.0.0.1:*", wait_s=RECEIVE_S) as others:  # instead of the first
            again = next(iter(others))
            assert again.number == 2
            pushed.ack()  # too late: it is not asked any more
            again.ack()
            committed(trainer, 2)
            later = next(iter(others))
            assert later.number == 3
            later.ack()
    committed(trainer, 3)


LISTENER = """
    import os, signal, sys
    from palestra.episodes import EpisodeClient
    url, run, file, die_at, after = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    with EpisodeClient(url, "tml-test").run(run).listen("tcp://127.0.0.1:*", after=after) as groups:
        for pushed in groups:
            with open(file, "a") as out:
                print(pushed.number, pushed.group.group_id, file=out, flush=True)
            if pushed.number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            pushed.ack()
            if pushed.group.group_id == "last":
                break
"""


def test_a_trainer_killed_before_it_acknowledged_and_a_killed_server_lose_and_double_nothing(
    trainer: Api, tmp_path: Path
) -> None:
    file = tmp_path / "kept"

    def listen(die_at: int, after: int) -> subprocess.Popen[bytes]:
        args = [trainer.server.url, trainer.run, str(file), str(die_at), str(after)]
        return subprocess.Popen([sys.executable, "-c", textwrap.dedent(LISTENER), *args])

    play(trainer, "a", "b", "c")
    with listen(die_at=2, after=0) as first:
        assert first.wait(RECEIVE_S) == -signal.SIGKILL
    assert trainer.info()["committed"] == 1
    play(trainer, "d")
    kept = [int(line.split()[0]) for line in file.read_text().splitlines()]
    with listen(die_at=0, after=kept[-1]) as second:
        committed(trainer, 4)
        trainer.server.restart()
        play(trainer, "last")
        assert second.wait(RECEIVE_S) == 0
    assert file.read_text().split() == ["1", "a", "2", "b", "3", "c", "4", "d", "5", "last"]
    committed(trainer, 5)


def test_a_coroutine_listens_the_same_way_and_can_be_cancelled(plain: Ephebe, trainer: Api) -> None:
    play(trainer, "a", "b", "c")
    has_all = asyncio.Event()

    async def take(run: AsyncRun, heard: list[int], **options: Any) -> None:
        async with run.listen("tcp://127.0.0.1:*", **options) as groups:
            async for pushed in groups:
                heard.append(pushed.number)
                if pushed.number == 2 and len(heard) == 2:
                    raise KeyError("before it was safe")
                await pushed.ack()
                if len(heard) == 4:
                    has_all.set()

    async def work() -> None:
        async with AsyncEpisodeClient(plain.url, "tml-test") as client:
            run = await client.run(trainer.run)
            heard: list[int] = []
            with pytest.raises(KeyError):
                await take(run, heard)
            assert (heard, (await run.refresh()).committed, run.info.settings.push_to) == ([1, 2], 1, "")
            again = asyncio.create_task(take(run, heard, after=1))
            await asyncio.wait_for(has_all.wait(), RECEIVE_S)
            again.cancel()  # while it waits for the next
            with pytest.raises(asyncio.CancelledError):
                await again
            assert (heard, (await run.refresh()).committed, run.info.settings.push_to) == ([1, 2, 2, 3], 3, "")
            async with run.listen("tcp://127.0.0.1:*", wait_s=0.1) as groups:
                assert [pushed.number async for pushed in groups] == []
            with pytest.raises(ListenError, match="is it the cursor of another run"):
                await take(run, heard, after=9)
            with pytest.raises(ListenError, match="the listener is not open"):
                await anext(aiter(run.listen("tcp://127.0.0.1:*")))

    asyncio.run(work())


def test_what_a_run_pushed_is_never_taken_for_its_successors(trainer: Api, run: Run, ears: Callable[..., Ears]) -> None:
    listener = ears()
    trainer.put_run(push_to=listener.address)
    play(trainer, "old")
    assert listener.hear()["group"]["group_id"] == "old"
    trainer.send("DELETE", f"runs/{trainer.run}")
    trainer.put_run()
    play(trainer, "new")
    listener.say("ack 1")
    assert trainer.played()[0]["group_id"] == "new"
    trainer.put_run(push_to=listener.address)
    assert listener.hear()["group"]["group_id"] == "new"
    assert trainer.of_run("commit", cursor=1)["committed"] == 1  # by other means
    play(trainer, "newer")
    listener.say("ack 1")
    assert listener.hear()["group"]["number"] == 2
    listener.say("ack 2")
    committed(trainer, 2)


def test_a_listener_takes_nothing_that_is_not_for_it(run: Run, ears: Callable[..., Ears]) -> None:
    with zmq.Context() as context, run.listen("tcp://127.0.0.1:*", wait_s=0.5) as groups:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(groups.address)
        for said, answered in ((b"nonsense", "this is not a group"), (_group("another"), "this is the trainer of run")):
            socket.send(said)
            assert list(groups) == []
            assert answered in socket.recv_string()
        socket.close()


def _group(run: str) -> bytes:
    task = {"id": "t", "environment": "e", "prompt": []}
    group = {
        "number": 1,
        "group_id": "g",
        "task": task,
        "kind": "train",
        "state": "ready",
        "reason": "",
        "episodes": [],
    }
    return json.dumps({"run": run, "group": group}).encode()


def test_a_cursor_of_another_run_is_not_listened_with(run: Run) -> None:
    with pytest.raises(ListenError, match="is it the cursor of another run"):
        run.listen("tcp://127.0.0.1:*", after=1)


def test_a_core_install_can_be_imported_and_says_what_listening_needs(plain: Ephebe, trainer: Api) -> None:
    code = f"""
        import sys
        sys.modules["zmq"] = None
        from palestra.episodes import EpisodeClient
        try:
            EpisodeClient({plain.url!r}, "tml-test").run({trainer.run!r}).listen("tcp://127.0.0.1:*").__enter__()
        except Exception as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "pip install pyzmq" in done.stdout


# Addresses


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://10.0.0.1:5555", "episodes.push_hosts=[10.0.0.1] allows it"),
        ("tcp://example.com:80", "to this machine only"),
        ("tcp://169.254.169.254:80", "to this machine only"),
        ("tcp://[2001:db8::1]:80", "to this machine only"),
        ("tcp://127.0.0.1", "the trainer's address"),
        ("tcp://127.0.0.1:0", "the trainer's address"),
        ("tcp://127.0.0.1:70000", "the trainer's address"),
        ("tcp://*:5555", "the trainer's address"),
        ("tcp://127.0.0.1:1;10.0.0.1:5555", "the trainer's address"),
        ("inproc://x", "the trainer's address"),
        ("udp://127.0.0.1:1", "the trainer's address"),
        ("ipc://@abstract", "an absolute path"),
        ("ipc:///tmp/../x", "an absolute path"),
        ("ipc:///tmp/x.sock", "is not private"),
        ("ipc:///no/such/folder/x", "there is no folder"),
        ("tcp://" + "a" * 300 + ":1", "at most 256 characters"),
    ],
)
def test_an_address_elsewhere_is_not_knocked_at(address: str, said: str) -> None:
    with pytest.raises(Refusal) as refused:
        check_address("push_to", address, ["10.0.0.2"])
    assert (refused.value.status, said in refused.value.detail) == (400, True), refused.value.detail


def test_addresses_of_this_machine_and_those_that_are_allowed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for address in ("tcp://127.0.0.1:1", "tcp://localhost:65535", "tcp://[::1]:9", "tcp://10.0.0.2:5555"):
        check_address("push_to", address, ["10.0.0.2"])
    check_address("push_to", f"ipc://{tmp_path}/x", [])


def test_routes_refuse_such_addresses(trainer: Api, root: Root, run: Run) -> None:
    # Within a 200: AgentJet's trainer would ask again for ever.
    refused = root.post("register_episode", episode_uuid="x", zmq_listen_result_addr="tcp://10.0.0.1:1")
    assert (refused["success"], "push_hosts" in refused["failure_reason"]) == (False, True)
    for name in ("x#2", "", "a b"):
        response = root.post("register_episode", episode_uuid=name)
        assert (response["success"], bool(response["failure_reason"])) == (False, True)
    with pytest.raises(EpisodeApiError, match="this machine only"), run.listen("tcp://127.0.0.1:*", told="tcp://a:1"):
        pass
    assert trainer.info()["settings"]["push_to"] == ""


def test_a_result_goes_through_a_file_of_a_private_folder_too(
    outside: Api, root: Root, ears: Callable[..., Ears], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    listener = ears(f"ipc://{tmp_path}/r")
    root.post("register_episode", episode_uuid="by-file", zmq_listen_result_addr=listener.address)
    assert root.end(root.claim()["episode_uuid"], 0.5)["success"]
    assert listener.hear()["reward"] == 0.5
    listener.say()
    committed(outside, 1)
