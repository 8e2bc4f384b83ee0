"""The engine: from parsed rows to a dataset, in bounded memory."""
