"""Puts the parts together and drives them: `build` wires, `engine` holds the step loop, `llm` is the front."""
