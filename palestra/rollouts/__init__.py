"""Plays rollouts, for training and evaluation. Begin at `sources`, the interface: `local/` plays in this
process, `gym/` by a gym's servers, `episodes/` by any player of a server, `agents/` by command-line agents, `endpoint/`
with a model behind an API."""
