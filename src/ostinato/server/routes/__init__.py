"""One module per group of paths, each with `add(app, serving)`."""
