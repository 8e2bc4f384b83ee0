"""Raw click logs -> train-ready datasets. Owns bytes on disk; training never imports it."""
