"""One copy of the package under both of its names: in a plug-in, `import retro_bench` gives the running `bench`."""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder

INSTALLED = "retro_bench"


class Alias(MetaPathFinder, Loader):
    """Imports `retro_bench.x` as the module `x` of the package `name`."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname.startswith(f"{INSTALLED}.") else None

    def create_module(self, spec):
        module = importlib.import_module(self.name + spec.name.removeprefix(INSTALLED))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Restore the module's own specification, which the import system has just replaced."""
        module.__spec__ = module.__spec__.loader_state


def alias(name: str) -> None:
    sys.modules[INSTALLED] = sys.modules[name]
    sys.meta_path.insert(0, Alias(name))
