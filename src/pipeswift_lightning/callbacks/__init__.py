"""Lightning callbacks that observe a run."""
