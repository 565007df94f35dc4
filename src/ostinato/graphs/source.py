"""Finds the line of a caller's code to name in an error. No torch."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

__all__ = ["calling_line", "line_of"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def calling_line() -> str:
    """`file:line in function` of the nearest frame that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_callers(frame.f_code.co_filename):
            return _name(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return "an unknown line"


def line_of(error: BaseException) -> str:
    """The same for the place that raised `error`."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_callers(frame.f_code.co_filename):
            return _name(frame.f_code.co_filename, line, frame.f_code.co_name)
    return "an unknown line"


def _is_callers(filename: str) -> bool:
    return not filename.startswith((_HERE, *_torch_folders())) and not filename.startswith("<frozen ")


def _torch_folders() -> tuple[str, ...]:
    torch = sys.modules.get("torch")  # not imported for this
    return tuple(folder + os.sep for folder in torch.__path__) if torch else ()


def _name(filename: str, line: int | None, function: str) -> str:
    return f"{os.path.relpath(filename) if filename.startswith(os.getcwd()) else filename}:{line} in {function}"
