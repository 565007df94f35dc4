"""The command line: `main` parses and reports errors, each command is one module. No torch until a command runs."""
