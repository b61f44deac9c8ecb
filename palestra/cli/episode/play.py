"""`palestra episode play`: a player for any machine that has the environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich_click as click

from palestra.cli.episode.commands import player_options, print_progress, server_and_key
from palestra.cli.output import NOT_FOUND, USAGE, fail, needs_extra, one_line_errors

if TYPE_CHECKING:
    from palestra.config.train import GrpoConfig


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False)
@click.option("--run", metavar="RUN", help="Only episodes of this run. [all runs that the key may play for]")
@click.option("--env", "names", multiple=True, metavar="NAME", help="An environment to play; may be repeated.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Number of episodes played at a time."
)
@click.option(
    "--lease", "lease_s", type=click.FloatRange(1), metavar="SECONDS", help="Length of a lease. [the run's setting]"
)
@player_options
@server_and_key
def play(config_file: str | None, names: tuple[str, ...], server: str, key: str | None, **options: Any) -> None:
    """Play episodes of a training run with environments of this machine, until Ctrl-C.

    CONFIG is the config of the run; it is needed if its environments have settings that are not part of the tasks.
    Without it, and without --env, all registered environments are played (palestra env list).
    """
    from palestra.config import ConfigError

    if config_file and names:
        raise fail("give either a CONFIG, or environments with --env", USAGE)
    with one_line_errors(ConfigError, FileNotFoundError, ValueError, code=USAGE):
        config = load(config_file, names)
    with needs_extra("train"):
        from palestra.rollouts.episodes.player import EnvironmentPlayer
        from palestra.rollouts.rollout_loop import RolloutSettings
        from palestra.training.loops.grpo_setup import open_environments

    from palestra.episodes import EpisodeClient, EpisodeClientError, NotPlayedHere
    from palestra.episodes import play as play_episodes

    with one_line_errors(EpisodeClientError, ValueError), open_environments(config) as environments:
        player = EnvironmentPlayer(environments, RolloutSettings.of(config.rollout))
        with EpisodeClient(server, key) as client:
            click.echo(f"playing {', '.join(entry.name for entry in config.environments)} for {server}")
            try:
                counts = play_episodes(client, player, stops_at_unplayed=True, on_progress=print_progress, **options)
            except NotPlayedHere as error:
                raise fail(f"{error}; name the environment with --env, or give the run's CONFIG", NOT_FOUND) from error
    click.echo(f"{counts}; stopped ({counts.reason})")


def load(config_file: str | None, names: tuple[str, ...]) -> GrpoConfig:
    from palestra.config.bundled import find_config_file
    from palestra.config.train import GrpoConfig, load_train_config
    from palestra.environments import registry

    if config_file is None:
        return GrpoConfig.model_validate({"environments": [{"name": name} for name in names or sorted(registry)]})
    config = load_train_config([find_config_file(config_file)], [])
    if not isinstance(config, GrpoConfig):
        raise ValueError(
            f"{config_file} is a config of kind {config.__class__.__name__}, but only runs of kind grpo have episodes"
        )
    return config
