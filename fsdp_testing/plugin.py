"""Entry-point module of the pytest plugin: stays import-light; the work is in fsdp_testing.pytest_plugin."""
