"""What a trained model is for: how long it takes to predict."""
