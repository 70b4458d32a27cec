"""Many requests of many kinds at once: each must give what it gives alone."""
