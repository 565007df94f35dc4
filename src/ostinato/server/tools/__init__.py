"""Tool calls: how they are written in a model's text, which are allowed, and how they are found again."""
