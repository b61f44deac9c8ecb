"""With the real skyrl-gym, where it is installed: `fleet_task` is one of its environments."""

from __future__ import annotations

import pytest

from tests.environments.fleet.conftest import PUT, put_call

skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs skyrl-gym: pip install skyrl-gym==0.4.0")


def test_skyrl_makes_plays_and_counts_it():
    from skyrl_gym.metrics import aggregate_for_environment

    from palestra.environments.fleet.skyrl import register

    register()
    register()
    config, extras = {"tasks_file": "platform:keys"}, {"task_key": PUT, "max_turns": 4}
    env = skyrl_gym.make("fleet_task", env_config=config, extras=extras)
    assert isinstance(env, skyrl_gym.Env)
    with env:
        history, facts = env.init([{"role": "user", "content": "x"}])
        assert (len(history), facts["env_key"], env.max_turns) == (2, "keys", 4)
        step = env.step(put_call() + "<done>")
        assert (step["reward"], step["done"]) == (1.0, True)
        metrics = env.get_metrics()
    assert aggregate_for_environment("fleet_task", [metrics])["keys/num_episodes"] == 1
