"""TinkerScript: AgentJet's endpoints at the root of the server, on the same broker as /episodes/v1."""
