"""The commands, a module each: `add_arguments(parser)` and `execute(arguments) -> exit code`. The docstring is the help
text.
"""
