"""Tests of the client, and what they share."""
