"""Tests of the asynchronous engine, all on one."""
