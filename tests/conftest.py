"""Choose the machine before torch is imported, and offer its fixtures; see machines.py."""

import machines
import pytest

machines.install()


def pytest_configure(config: pytest.Config) -> None:
    """Register the hooks and fixtures of machines.py."""
    config.pluginmanager.register(machines, "machines")
