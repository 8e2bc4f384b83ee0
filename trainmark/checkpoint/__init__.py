"""Checkpoints: folders of safetensors with a manifest, atomic, checksummed and reshardable."""
