"""Models that are spread over several workers."""
