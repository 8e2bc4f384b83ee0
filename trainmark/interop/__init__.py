"""Owns the files of other software.

model_folder.py   Hugging Face's model folders: config.json, sharded safetensors
onnx_files.py     ONNX models
programs.py       programs of torch.export
"""
