"""AgentJet's endpoints (TinkerScript) at the root of the server, on the same broker as /episodes/v1.

Begin at `routes`; `trainer` starts and watches the training process that AgentJet's clients ask for.
"""
