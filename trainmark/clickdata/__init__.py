"""What a click-log dataset is on disk (`feature_spec.yaml`), and the planted log whose best AUC is known."""
