"""What the tests of training have."""

from tests.training.conftest import ephebe_url

__all__ = ["ephebe_url"]
