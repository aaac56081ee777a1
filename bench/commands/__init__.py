"""The commands, a module each: `add_arguments(parser)` and `execute(arguments) -> exit code`; the first docstring line
is the help.
"""
