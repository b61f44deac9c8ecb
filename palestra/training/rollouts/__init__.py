"""Where rollouts come from. Begin at `sources`, the seam; `player` plays one in this process, `episode_*` play at a
server, `gym_*` in a gym."""
