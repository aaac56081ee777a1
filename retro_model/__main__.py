"""`python -m retro_model COMMAND` is `retro-model COMMAND`."""

from retro_model.commands.__main__ import command

if __name__ == "__main__":
    command()
