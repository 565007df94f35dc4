"""A trace, made ready to run: flat lists, no look-up by name, each intermediate tensor dropped after its last use."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ostinato.graphs.nest import leaves, map_leaves
from ostinato.graphs.tape_trace import Kind, Node, Register, Trace, typed

__all__ = ["Program"]

_Call = Callable[..., Any]
_Instruction = tuple[_Call, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The call, the registers it takes, those of its results (-1: unwanted; empty: none wanted), those to drop then."""


class Program:
    """Runs a closed trace. Its `memories` stay where they are and are written at every run; all others are made anew.

    Views of memory that stays are taken once, here.
    """

    def __init__(self, trace: Trace) -> None:
        self._initial = list(trace.constants)
        staged: list[tuple[_Call, tuple[int, ...], tuple[int, ...]]] = []
        for node in trace.nodes:
            stays = [index >= 0 and trace.homes[index] in trace.memories for index in node.outputs]
            if node.kind is Kind.VIEW and any(stays):
                self._take_views(node)
                continue
            if any(stays):
                for index in itertools.compress(node.outputs, stays):
                    self._initial[index] = typed(trace.memories[trace.homes[index]])
                if node.kind is Kind.ALLOCATION:
                    continue
            call, takes = self._compile(node)
            if any(stays):
                targets = [self._initial[i] if stay else None for i, stay in zip(node.outputs, stays, strict=True)]
                call = functools.partial(_call_into, call, targets)
            elif len(node.func._schema.returns) > 1 and len(node.func._schema.returns) != len(node.outputs):
                call = functools.partial(_call_flat, call)
            outputs = tuple(-1 if stay else index for index, stay in zip(node.outputs, stays, strict=True))
            staged.append((call, takes, outputs))
        self._code = _with_last_uses(staged)
        self._initial.append(None)  # register -1, for results that nobody wants

    def run(self) -> None:
        registers: list[Any] = self._initial.copy()
        for call, takes, outputs, dead in self._code:
            result = call(*[registers[index] for index in takes])
            if outputs:
                if len(outputs) == 1 and isinstance(result, torch.Tensor):
                    registers[outputs[0]] = result
                else:
                    for index, value in zip(outputs, result, strict=True):
                        registers[index] = value
            for index in dead:
                registers[index] = None

    def _take_views(self, node: Node) -> None:
        args, kwargs = map_leaves(
            Register, lambda register: self._initial[register.index], (node.args, dict(node.kwargs))
        )
        results = node.func(*args, **kwargs)
        for index, view in zip(node.outputs, leaves(results), strict=True):
            if index >= 0:
                self._initial[index] = view

    def _compile(self, node: Node) -> tuple[_Call, tuple[int, ...]]:
        """A callable, and the registers that it takes as positional arguments."""

        def settle(register: Register) -> Any:
            constant = self._initial[register.index]
            return register if constant is None else constant

        args, kwargs = map_leaves(Register, settle, (tuple(node.args), dict(node.kwargs)))
        takes = tuple(leaf.index for leaf in leaves((args, kwargs)) if isinstance(leaf, Register))
        if not takes:
            return functools.partial(node.func, *args, **kwargs), ()
        leading = len(takes)
        if len(args) >= leading and all(isinstance(arg, Register) for arg in args[:leading]):
            # Registers first, the rest fixed: the common case needs no argument list to be rebuilt.
            rest = args[leading:]
            if not rest:
                return functools.partial(node.func, **kwargs) if kwargs else node.func, takes
            return functools.partial(_call_with_rest, node.func, rest, kwargs), takes
        return functools.partial(_call_filled, node.func, args, kwargs), takes


def _call_with_rest(func: _Call, rest: tuple[Any, ...], kwargs: dict[str, Any], /, *values: Any) -> Any:
    return func(*values, *rest, **kwargs)


def _call_filled(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], /, *values: Any) -> Any:
    """Puts the values, in order, where the registers stand."""
    pending = iter(values)
    filled = [_fill(arg, pending) for arg in args]
    return func(*filled, **{name: _fill(arg, pending) for name, arg in kwargs.items()})


def _fill(template: Any, pending: Iterator[Any]) -> Any:
    if isinstance(template, Register):
        return next(pending)
    if isinstance(template, (list, tuple)):
        return [_fill(item, pending) for item in template]
    return template


def _call_into(func: _Call, targets: list[torch.Tensor | None], /, *values: Any) -> Any:
    """Calls, and copies results to where the graph's outputs live."""
    result = func(*values)
    values_out = list(leaves(result))
    for target, value in zip(targets, values_out, strict=True):
        if target is not None:
            target.copy_(value)
    return values_out


def _call_flat(func: _Call, /, *values: Any) -> Any:
    """For operators that return lists among other things."""
    return list(leaves(func(*values)))


def _with_last_uses(staged: list[tuple[_Call, tuple[int, ...], tuple[int, ...]]]) -> list[_Instruction]:
    live: set[int] = set()
    code: list[_Instruction] = []
    for call, takes, outputs in reversed(staged):
        wanted = tuple(index if index in live else -1 for index in outputs)
        dead = tuple(set(takes) - live)
        live.update(takes)
        code.append((call, takes, wanted if any(index >= 0 for index in wanted) else (), dead))
    code.reverse()
    return code
