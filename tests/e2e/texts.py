"""Twenty beginnings, and how many of them run at a time."""

from __future__ import annotations

TEXTS = (
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "def add(a, b):",
    "The sun rises in the",
    "Two plus two is",
    "My favourite colour is",
    "In the beginning",
    "A short poem about rain:",
    "The largest planet is",
    "To bake bread, you need",
    "She opened the door and",
    "Python is a language that",
    "The opposite of hot is",
    "The first president was",
    "Music makes people",
    "A triangle has three",
    "The ocean is",
    "Yesterday I",
    "Robots can",
)
GROUPS = (1, 3, 8, 13)
"""So many of the texts at a time."""
