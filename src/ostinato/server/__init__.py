"""An OpenAI-compatible HTTP server over an `AsyncEngine`: `app` puts it together, `run` listens and shuts down."""
