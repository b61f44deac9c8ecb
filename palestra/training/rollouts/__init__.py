"""Sources of rollouts. Begin at `sources`, the interface; `player` plays a rollout in this process, `episode_*` at a
server, `gym_*` in a gym."""
