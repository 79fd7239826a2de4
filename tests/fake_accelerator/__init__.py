"""Accelerators made of host memory, for tests on machines that have none; see driver.cpp."""
