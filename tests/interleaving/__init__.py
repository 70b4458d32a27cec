"""Tests of the interleaving layer on a toy model."""
