"""Files of other software: sharded safetensors, Hugging Face model folders, ONNX."""
