"""The server: HTTP, order and durability of requests, supervision of workers.

Begin at `app` (routes put together) and `services` (parts put together). `core/` knows no protocol; above it stands the
episode `broker/`, and above both the protocols, which do not import each other: `tinker/`, `model_api/`, `episodes/`,
`agentjet/`. `http/` has what their routes share, `replicas/` the samplers beside the worker that trains, and `vllm/`
those of another engine.
"""
