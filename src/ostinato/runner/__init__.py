"""Carries plans out: fixed buffers, device-resident request state, recordings, launch and collect."""
