"""What a trained model is for: how long it takes to predict, and predictions over HTTP."""
