"""An agent's evaluation whose episodes somebody else ends at the server."""

from __future__ import annotations

import asyncio

from palestra.episodes import AsyncEpisodeClient
from palestra.rollouts.agents.evaluation_player import AgentEvaluationPlayer
from palestra.rollouts.sources import blank_rollout
from palestra.types.rollouts import CODING, GroupRequest, Rollout, RolloutStop, Task


async def play_and_cancel(url: str) -> Rollout:
    task = Task(id="t", environment=CODING, prompt=[{"role": "user", "content": "Go."}])
    request = GroupRequest(id="g", task=task, step=0, seeds=(1,))
    playing = asyncio.Event()

    async def dawdle(_episode: object) -> None:
        playing.set()
        await asyncio.Event().wait()

    async with AsyncEpisodeClient(url, "tml-me") as client:
        run = await client.run("dropped-evaluation", model="ephebe")
        player = AgentEvaluationPlayer(run, client, dawdle)
        working = asyncio.create_task(player.work(1))
        waiting = asyncio.create_task(player.play(request, blank_rollout(request, 0, 1)))
        await asyncio.wait_for(playing.wait(), 60)
        (episode,) = (await run.episodes()).episodes
        await run.cancel(group_ids=[episode.group_id], reason="by hand")
        try:
            return await asyncio.wait_for(waiting, 60)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def test_an_evaluation_does_not_wait_for_episodes_that_were_cancelled(shared_ephebe) -> None:
    rollout = asyncio.run(play_and_cancel(shared_ephebe().url))
    assert rollout.stop is RolloutStop.LOST
    assert "by hand" in (rollout.error or "")
