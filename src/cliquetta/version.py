"""Versions of installed packages, our own first, and where ours is developed."""

from importlib.metadata import PackageNotFoundError, version

REPOSITORY = "https://github.com/cliquetta/cliquetta"


def installed_version(package: str = "cliquetta") -> str:
    """The version of an installed package; of one that is not, ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:  # ours may run from a source tree
        return "0+source" if package == "cliquetta" else "not installed"
