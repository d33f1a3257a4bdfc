"""What goes says so first: it works for two more minor versions, and warns (see RELEASING.md)."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def deprecated(
    instead: str, *, until: str
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make a public function warn, once per place that calls it, that it will go.

    >>> @deprecated("cliquetta.predict", until="0.4")
    ... def classify() -> int:
    ...     return 1
    >>> print(classify.__doc__)
    Deprecated: use cliquetta.predict; it goes in version 0.4.

    Args:
        instead: What to use in its place.
        until: The version that no longer has it.

    Returns:
        A decorator. Readers see a :class:`FutureWarning`, because Python hides the
        usual ``DeprecationWarning`` from them.

    """
    remedy = f"use {instead}; it goes in version {until}"

    def decorate(
        function: Callable[Parameters, Result],
    ) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def warned(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            name = f"{function.__module__}.{function.__qualname__}"
            warnings.warn(
                f"{name} is deprecated: {remedy}", FutureWarning, stacklevel=2
            )
            return function(*args, **options)

        note = f"Deprecated: {remedy}."
        warned.__doc__ = f"{function.__doc__}\n\n{note}" if function.__doc__ else note
        return warned

    return decorate
