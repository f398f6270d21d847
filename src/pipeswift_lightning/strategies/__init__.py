"""Lightning hooks turned into runtime calls."""
