"""Tests of the test support: an oracle that is wrong would hide every other error."""
