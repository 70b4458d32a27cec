"""Tests of the server, and of its client against it."""
