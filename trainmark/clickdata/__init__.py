"""What a click-log dataset is on disk, and the planted log, whose best possible AUC is known."""
