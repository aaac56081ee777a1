"""The entry point for pytest. It loads the plug-in by the name that `-p ptx_emulator.plugin` uses, and so only once."""


def pytest_addoption(pluginmanager) -> None:
    pluginmanager.import_plugin("ptx_emulator.plugin")
