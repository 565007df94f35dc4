"""Arguments and results of operators: values, and lists and tuples of them. A quicker, smaller pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["leaves", "map_leaves"]


def map_leaves(kind: type, fn: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `fn` applied to every leaf of type `kind`. Keeps lists, tuples and dictionaries."""
    if isinstance(value, kind):
        return fn(value)
    if type(value) is tuple:
        return tuple([map_leaves(kind, fn, item) for item in value])
    if type(value) is list:
        return [map_leaves(kind, fn, item) for item in value]
    if type(value) is dict:
        return {name: map_leaves(kind, fn, item) for name, item in value.items()}
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Everything in it that is not a list, tuple or dictionary, in the order of `map_leaves`."""
    if type(value) is tuple or type(value) is list:
        for item in value:
            yield from leaves(item)
    elif type(value) is dict:
        yield from leaves(list(value.values()))
    else:
        yield value
