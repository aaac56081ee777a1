"""x"""


def add_arguments(parser):
    pass


def execute(arguments):
    return 0
