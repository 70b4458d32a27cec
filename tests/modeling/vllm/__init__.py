"""Tests on the real engine, in process on the CPU, and of the client half around it."""
