"""One run: the training loop, its clocks, its folder, its result."""
