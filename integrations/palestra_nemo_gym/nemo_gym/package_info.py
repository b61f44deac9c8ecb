"""The version of NeMo Gym that this stands in for."""

from nemo_gym import __version__

__package_name__ = "nemo_gym"
__shortversion__ = __version__.partition("+")[0]
__all__ = ["__package_name__", "__shortversion__", "__version__"]
