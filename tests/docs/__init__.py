"""The documentation: every code block of README and guides is run, and the reference holds what is public."""
