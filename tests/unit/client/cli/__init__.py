"""Tests of the `tritonstream` command."""
