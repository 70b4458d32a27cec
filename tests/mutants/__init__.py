"""Small mistakes in the library, each of which the test of a statement must catch."""
