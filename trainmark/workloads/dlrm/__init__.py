"""DLRM: a click-through recommender with large embedding tables, trained from click logs."""
