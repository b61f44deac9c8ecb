"""Recording the tokens of agents that do not pass them on. Palestra's own model servers do that; stock ones do not."""


def current_capture_context() -> object:
    """Nothing is recorded here."""
    return None
