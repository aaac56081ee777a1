"""The commands, a module each: `add_arguments(parser)`, `execute(arguments)`. The docstring is the help text."""
