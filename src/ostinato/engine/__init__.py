"""Puts the parts together and drives them: build (the only place that wires), engine (the step loop), llm (the front)."""
