"""What surrounds the served model: its environment, configuration, launch and checks. Run as `python -m tools.NAME`."""
