"""What the training steps of several workloads share: optimisers, copies, batches, seeds."""
